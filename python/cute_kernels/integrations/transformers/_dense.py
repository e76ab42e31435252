"""What Transformers' dense caches hold, checked before a `SparseKVCache` takes it over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, QuantizedLayer

from cute_kernels._runtime import checks
from cute_kernels.integrations.transformers import _support

# Where kvpress writes down which tokens of which heads attention has to leave out, though the cache still has them.
_MASKED_BY_HEAD = "masked_key_indices"


@dataclass(frozen=True)
class DenseTokens:
    """Of all layers alike.

    seen: columns that the model has read, padding and evicted tokens included. valid: (B, seen) bool, which columns are
    tokens; None: all are.
    """

    seen: int
    valid: Tensor | None


def read(
    cache: Any,
    model: Any,
    *,
    layers: int,
    head_dim: int,
    dtype: torch.dtype | None,
    capacity: int | None,
    attention_mask: Any,
    seq_length: Any,
) -> DenseTokens:
    """Checks a cache and what is said of it; changes nothing.

    layers, head_dim, dtype, capacity: of the SparseKVCache. model: what that was made of.

    Raises TypeError for what is no cache or of a wrong class, ValueError for a cache that cannot be taken over.
    """
    if not isinstance(cache, Cache) or not isinstance(getattr(cache, "layers", None), list):
        raise TypeError(f"cache must be a Transformers DynamicCache, got {type(cache).__name__}")
    if getattr(cache, "offloading", False):
        raise ValueError("cache is offloaded to the CPU, which SparseKVCache does not serve")
    for number, layer in enumerate(cache.layers):
        _check_kind(number, layer)
    if len(cache.layers) != layers:
        raise ValueError(f"cache has {len(cache.layers)} layers, the model has {layers}")
    for number, layer in enumerate(cache.layers):
        _check_tensors(number, layer, head_dim, dtype)
    batch, lengths = cache.layers[0].keys.shape[0], [layer.keys.shape[2] for layer in cache.layers]
    for number, layer in enumerate(cache.layers):
        if layer.keys.shape[0] != batch:
            raise ValueError(
                f"layers must hold the same sequences: layer 0 has {batch}, layer {number} {layer.keys.shape[0]}"
            )
    _check_heads(model)
    longest = max(lengths)
    if capacity is not None and longest > capacity:
        raise ValueError(f"{longest} tokens exceed capacity = {capacity} of the SparseKVCache")
    seen = _seen(lengths, seq_length)
    valid = _valid(attention_mask, batch, seen)
    if valid is not None and min(lengths) < seen:
        raise ValueError(
            f"attention_mask has padding and tokens were evicted (layers hold {min(lengths)} to {longest} of {seen} "
            "columns): which of the columns left are padding is not known; convert sequences of one length"
        )
    return DenseTokens(seen, valid)


def release(layer: Any) -> None:
    """Gives the memory of a dense layer back; the layer is as new."""
    layer.keys, layer.values, layer.is_initialized = None, None, False


def _check_kind(number: int, layer: Any) -> None:
    if type(layer) is DynamicLayer:
        return
    if isinstance(layer, QuantizedLayer):
        what = "is quantized"
    elif getattr(layer, "is_sliding", False):
        what = "has a sliding window"
    else:
        what = "is of another kind"
    raise ValueError(
        f"from_cache takes layers of a DynamicCache that attend to every token; layer {number} {what} "
        f"({type(layer).__name__})"
    )


def _check_tensors(number: int, layer: Any, head_dim: int, dtype: torch.dtype | None) -> None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    for name, x in (("keys", keys), ("values", values)):
        if x is None or (isinstance(x, Tensor) and x.numel() == 0):
            raise ValueError(f"layer {number} of the cache holds no tokens: run the prompt with it first")
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ValueError(
                f"{name} of layer {number} must be one tensor (B, Hkv, T, D), got {checks.described(x)}: heads of "
                "different lengths are not served"
            )
    if keys.shape != values.shape or keys.dtype != values.dtype or keys.device != values.device:
        raise ValueError(
            f"keys and values of layer {number} must be alike, got {checks.described(keys)} and "
            f"{checks.described(values)}"
        )
    if keys.shape[3] != head_dim:
        raise ValueError(f"the model has head_dim {head_dim}, layer {number} of the cache {keys.shape[3]}")
    _support.storage_dtype(dtype, keys.dtype)  # raises


def _check_heads(model: Any) -> None:
    """Of a model alone: a config does not know its modules."""
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if getattr(module, _MASKED_BY_HEAD, None) is not None:
            raise ValueError(
                f"{name}.{_MASKED_BY_HEAD} masks tokens head by head (AdaKV and its like): heads of different lengths "
                "are not served; take a press that evicts as many tokens from every head of a layer"
            )


def _seen(lengths: list[int], seq_length: Any) -> int:
    longest = max(lengths)
    if seq_length is None:
        if min(lengths) != longest:
            raise ValueError(
                f"layers hold {min(lengths)} to {longest} tokens, so some were evicted: pass seq_length, the tokens "
                "that the model has read, after which positions go on"
            )
        return longest
    seen = checks.integer(seq_length, "seq_length")
    if seen < longest:
        raise ValueError(f"seq_length must be at least the {longest} tokens that the cache holds, got {seen}")
    return seen


def _valid(mask: Any, batch: int, seen: int) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype.is_floating_point or mask.dtype.is_complex:
        raise TypeError(f"attention_mask must be a tensor of bool or integers, got {checks.described(mask)}")
    if mask.shape != (batch, seen):
        raise ValueError(
            f"attention_mask must have shape (B, columns) = {(batch, seen)}, as the cache has them, got "
            f"{tuple(mask.shape)}"
        )
    valid = mask != 0
    return None if bool(valid.all()) else valid
