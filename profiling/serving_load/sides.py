"""The managers of continuous batching that are compared, with as many bytes of cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from cute_kernels.integrations.transformers import batching
from profiling.serving_load.rows import DENSE

BLOCK_TOKENS = 64
GRAPHS, SDPA, NO_CUDNN, FLASH = "sparse", "sdpa", "sdpa-no-cudnn", "flash"
_ATTENTION = {SDPA: "paged|sdpa", NO_CUDNN: "paged|sdpa", FLASH: "paged|flash_attention_2"}


def missing(side: str, on_gpu: bool) -> str:
    """Why a side cannot run here; "" if it can."""
    if side == FLASH and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if side in (GRAPHS, FLASH) and not on_gpu:
        return "it needs a GPU"
    if side in (SDPA, NO_CUDNN) and not on_gpu and importlib.util.find_spec("psutil") is None:
        return "psutil is not installed, with which Transformers looks for memory"
    return ""


@contextmanager
def attention(side: str) -> Iterator[None]:
    """What torch's attention may use while a side runs."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and side != NO_CUDNN)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@dataclass(frozen=True)
class Sizes:
    """memory: bytes of cache. under_way: requests at most. step_tokens: new ones of a step, at most."""

    memory: int
    under_way: int
    step_tokens: int
    sparsity: float


@dataclass(frozen=True)
class Made:
    """A manager that is not started. fixed: bytes that do not depend on tokens. block: bytes of 64 tokens."""

    manager: Any
    fixed: int
    block: int

    def used(self) -> int:
        """Bytes in use."""
        cache = self.manager.batch_processor.cache
        return self.fixed + (cache.num_blocks - cache.get_num_free_blocks()) * self.block


def make(model: Any, side: str, sizes: Sizes) -> Made:
    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    text = model.config.get_text_config()
    layers = text.num_hidden_layers
    if side not in DENSE:
        made = batching.SparseKVBatching(
            model,
            sparsity=sizes.sparsity,
            requests=sizes.under_way,
            memory=sizes.memory,
            generation_config=greedy,
            batching=ContinuousBatchingConfig(
                max_batch_tokens=sizes.step_tokens, use_cuda_graph=None if side == GRAPHS else False
            ),
        )
        return Made(made, *batching.memory_parts(made.page_config, layers, sizes.under_way))
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    block = 2 * layers * text.num_key_value_heads * head_dim * model.dtype.itemsize * BLOCK_TOKENS
    # CUDA graphs and asynchronous batching as Transformers chooses them for the attention.
    options = ContinuousBatchingConfig(
        block_size=BLOCK_TOKENS,
        num_blocks=sizes.memory // block,
        max_batch_tokens=sizes.step_tokens,
        max_requests_per_batch=sizes.under_way,
    )
    model.set_attn_implementation(_ATTENTION[side])
    made = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=options)
    return Made(made, 0, block)
