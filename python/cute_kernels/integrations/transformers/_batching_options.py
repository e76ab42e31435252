"""Which Transformers `SparseKVBatching` serves, and what of its options."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers import ContinuousBatchingConfig
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from cute_kernels.integrations._serving.step import BLOCK_TOKENS

OLDEST, NEWEST = (5, 16), (5, 17)  # both are tested
_BATCH_TOKENS = 2048


def check_version() -> None:
    """ImportError for a Transformers whose continuous batching is another one."""
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= found <= NEWEST:
        served = " to ".join(".".join(map(str, version)) for version in (OLDEST, NEWEST))
        raise ImportError(
            f"continuous batching on compressed pages serves Transformers {served}, found {transformers.__version__}"
        )


# Of Transformers' options, those that this cache decides: what it sets, and what else may be passed.
_OWN = {
    "block_size": (BLOCK_TOKENS, ContinuousBatchingConfig().block_size),
    "num_blocks": (None, None),
    "max_memory_percent": (None, None),
    "max_requests_per_batch": (None, None),
    "max_blocks_per_request": (0, None),
    "use_async_batching": (False, None),
    "varlen_compile_config": (None, None),
    "decode_compile_config": (None, None),
    "default_compile_level": (0, 0),
    "cpu_offload_space": (0.0, ContinuousBatchingConfig().cpu_offload_space),
}


def resolved(given: Any, blocks: int, requests: int, device: torch.device) -> ContinuousBatchingConfig:
    """Transformers' options as this cache needs them; ValueError names one that it cannot serve."""
    if given is not None and not isinstance(given, ContinuousBatchingConfig):
        raise TypeError(f"batching must be a ContinuousBatchingConfig, got {type(given).__name__}")
    options = ContinuousBatchingConfig() if given is None else deepcopy(given)
    for name, (own, default) in _OWN.items():
        value = getattr(options, name)
        if value not in (own, default):
            raise ValueError(f"batching.{name} is not for compressed pages: leave it at {default}, got {value}")
        setattr(options, name, own)
    options.num_blocks, options.max_requests_per_batch = blocks, requests
    graphs = options.use_cuda_graph
    prompts, decoding = graphs if isinstance(graphs, tuple) else (False, graphs)
    if prompts:
        raise ValueError(f"batching.use_cuda_graph: steps with prompts are not captured, got {graphs}")
    if decoding and device.type != "cuda":
        raise ValueError(f"batching.use_cuda_graph needs a model on a GPU, this one is on {device}")
    options.use_cuda_graph = (False, device.type == "cuda" if decoding is None else decoding)
    if options.max_batch_tokens is None:
        options.max_batch_tokens = _BATCH_TOKENS
    if options.scheduler_type not in SCHEDULER_MAPPING:
        raise ValueError(
            f"batching.scheduler_type must be one of {', '.join(SCHEDULER_MAPPING)}, got {options.scheduler_type}"
        )
    return options
