"""Options of the backend, and what of vLLM's configuration it cannot serve: refused when the engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cute_kernels import paged
from cute_kernels.integrations._serving.step import BLOCK_TOKENS

NAME = "cute_kernels"  # of the options in --additional-config
_OPTIONS = ("sparsity", "keep", "key_keep", "value_keep", "codec", "window")
_DEFAULT_SPARSITY = 0.7
_CACHE_DTYPES = ("auto", "float16", "bfloat16")


def options_of(vllm_config: Any) -> dict[str, Any]:
    """The backend's options as the user gave them, checked for their names."""
    additional = vllm_config.additional_config
    given = additional.get(NAME, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(given, Mapping):
        raise ValueError(f"--additional-config: {NAME} must be an object of options, got {given!r}")
    unknown = sorted(set(given) - set(_OPTIONS))
    if unknown:
        raise ValueError(f"--additional-config: {NAME} has no option {unknown[0]!r}; it has {', '.join(_OPTIONS)}")
    return dict(given)


def page_config(vllm_config: Any, kv_heads: int, head_dim: int, dtype: torch.dtype) -> paged.PageConfig:
    """Sizes of a layer's pages and windows by the options. ValueError names what does not fit."""
    chosen = options_of(vllm_config)
    if not any(chosen.get(name) is not None for name in ("sparsity", "keep", "key_keep", "value_keep")):
        chosen["sparsity"] = _DEFAULT_SPARSITY
    try:
        sizes = {"kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype, "page_tokens": BLOCK_TOKENS}
        return paged.configure(**sizes, max_append=1, **chosen)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--additional-config: {NAME}: {error}") from error


def check_engine(vllm_config: Any) -> None:
    """Raises ValueError, naming the option, for a configuration that the backend cannot serve."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if cache.block_size is not None and cache.block_size != BLOCK_TOKENS:
        raise ValueError(f"--block-size must be {BLOCK_TOKENS}, the tokens of a tile, got {cache.block_size}")
    if cache.cache_dtype not in _CACHE_DTYPES:
        raise ValueError(f"--kv-cache-dtype must be one of {', '.join(_CACHE_DTYPES)}, got {cache.cache_dtype}")
    if vllm_config.speculative_config is not None:
        raise ValueError("--speculative-config is not served: rejected tokens cannot leave a compressed page")
    if vllm_config.kv_transfer_config is not None:
        raise ValueError("--kv-transfer-config is not served: a block's orders of tokens are not part of its bytes")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1, got {getattr(parallel, name)}")
    if getattr(parallel, "enable_dbo", False):
        raise ValueError("--enable-dbo is not served: windows belong to one batch at a time")
    if vllm_config.device_config.device_type != "cpu" and not vllm_config.use_v2_model_runner:
        raise ValueError(
            "VLLM_USE_V2_MODEL_RUNNER must be 1 (and Triton installed): only the second model runner says which "
            "request a row is of, whose dense window is beside the pages"
        )


def check_layer(
    *,
    alibi_slopes: Any,
    sliding_window: int | None,
    logits_soft_cap: float | None,
    attn_type: str,
    kv_sharing_target_layer_name: str | None,
    others: Mapping[str, Any],
) -> None:
    """Raises ValueError for a layer of the model that the backend cannot serve."""
    if attn_type != "decoder":
        raise ValueError(f"attention of type {attn_type!r} is not served, only decoders'")
    if sliding_window is not None:
        raise ValueError(f"a sliding window ({sliding_window} tokens) is not served")
    if alibi_slopes is not None:
        raise ValueError("alibi_slopes are not served")
    if logits_soft_cap:
        raise ValueError(f"a logits_soft_cap ({logits_soft_cap}) is not served")
    if kv_sharing_target_layer_name is not None:
        raise ValueError(f"layers that share the cache of another ({kv_sharing_target_layer_name}) are not served")
    for name, value in others.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} is not served")
