"""Checks of arguments that caches take: a layer's sizes, tensors of tokens and queries, row numbers, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cute_kernels._cache.page_config import MAX_APPEND
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C, HEAD_DIMS, LARGEST_HEAD_DIM, TILE_TOKENS

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)


class Sizes(Protocol):
    """What tensors of a cache have in common: a `config.CacheConfig`."""

    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


def at_least(value: Any, name: str, least: int) -> int:
    number: int = checks.integer(value, name)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


class LayerSizes(NamedTuple):
    """What the arguments of a layer's cache come to, checked."""

    kv_heads: int
    head_dim: int
    padded_head_dim: int
    key_keep: int  # elements that a token keeps, 0: the arguments do not say
    value_keep: int
    page_tokens: int
    max_append: int


def layer_sizes(
    kv_heads: Any,
    head_dim: Any,
    dtype: Any,
    sparsity: Any,
    keep: Any,
    key_keep: Any,
    value_keep: Any,
    page_tokens: Any,
    max_append: Any,
) -> LayerSizes:
    """Raises TypeError for a wrong class or dtype, ValueError for a wrong range."""
    heads = at_least(kv_heads, "kv_heads", 1)
    channels = checks.integer(head_dim, "head_dim")
    if channels not in HEAD_DIMS:
        raise ValueError(f"head_dim must be a multiple of 8, from 8 to {LARGEST_HEAD_DIM}, got {channels}")
    checks.chosen_dtype(dtype, "dtype", checks.CACHE_DTYPES)
    both = checks.kept_elements(channels, sparsity, keep)
    kept_k = both if key_keep is None else checks.kept_elements(channels, None, key_keep, "key_keep")
    kept_v = both if value_keep is None else checks.kept_elements(channels, None, value_keep, "value_keep")
    page = at_least(page_tokens, "page_tokens", TILE_TOKENS)
    if page % TILE_TOKENS:
        raise ValueError(f"page_tokens must be a multiple of {TILE_TOKENS}, got {page}")
    at_once = at_least(max_append, "max_append", 1)
    if at_once > MAX_APPEND:
        raise ValueError(f"max_append must be at most {MAX_APPEND}, got {at_once}")
    return LayerSizes(heads, channels, _C.format.padded_head_dim(channels), kept_k, kept_v, page, at_once)


def new_tokens(made_for: Sizes, k: Any, v: Any) -> None:
    """K and V of new tokens, (B, Hkv, n, D) both."""
    for x, name in ((k, "k"), (v, "v")):
        _like_cache(x, name, made_for)
        sizes = x.shape
        if len(sizes) != 4 or sizes[1] != made_for.kv_heads or sizes[3] != made_for.head_dim:
            raise ValueError(
                f"{name} must have shape (B, Hkv, n, D) with Hkv = {made_for.kv_heads} and D = {made_for.head_dim}, "
                f"got {tuple(x.shape)}"
            )
        checks.unit_stride(x, name)
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")


def appended_tokens(made_for: Sizes, k: Any, v: Any) -> None:
    """`new_tokens`, at least one."""
    new_tokens(made_for, k, v)
    if k.shape[2] < 1:
        raise ValueError(f"k must have at least 1 token to append, got shape {tuple(k.shape)}")


def step(made_for: Sizes, k: Any, v: Any, q: Any) -> None:
    """k, v and q of new tokens that attend, too: alike in B and n."""
    appended_tokens(made_for, k, v)
    queries(made_for, q)
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q must have shape (B, Hq, n, D) with B = {k.shape[0]} and n = {k.shape[2]} as in k, got {tuple(q.shape)}"
        )


def queries(made_for: Sizes, q: Any) -> None:
    """(B, Hq, Sq, D)."""
    _like_cache(q, "q", made_for)
    sizes = q.shape
    if len(sizes) != 4 or sizes[3] != made_for.head_dim:
        raise ValueError(f"q must have shape (B, Hq, Sq, D) with D = {made_for.head_dim}, got {tuple(sizes)}")
    if sizes[1] % made_for.kv_heads:
        raise ValueError(
            f"q must have a number of heads Hq that is a multiple of kv_heads = {made_for.kv_heads}, got {sizes[1]}"
        )
    checks.unit_stride(q, "q")


def _like_cache(x: Any, name: str, made_for: Sizes) -> None:
    # The conditions are inline, and the calls only raise: a model's step comes here three times a layer.
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_nested:
        checks.tensor(x, name)
    if x.dtype is not made_for.dtype:
        checks.dtype(x, name, (made_for.dtype,), " like the cache")
    if x.device != made_for.device:
        checks.device(x.device, name, made_for.device, "the cache")


def integers(value: Any, name: str, count: int) -> list[int]:
    """`count` integers from such a list, a 1-D tensor of integers, or one for all."""
    if (length := _length(value, name)) is None:
        return [checks.integer(value, name)] * count
    if length != count:
        raise ValueError(f"{name} must have one integer for each of {count} sequences, got {length}")
    return _listed(value, name)


def rows(value: Any, name: str, end: int, end_name: str, max_batch: int) -> list[int]:
    """At most max_batch row numbers below `end`."""
    numbers = row_numbers(value, name, max_batch)
    for number in numbers:
        if not 0 <= number < end:
            raise ValueError(f"{name} must be from 0 to {end_name} - 1 = {end - 1}, got {number}")
    return numbers


def row_numbers(value: Any, name: str, max_batch: int) -> list[int]:
    """At most max_batch integers."""
    if (length := _length(value, name)) is None:
        raise TypeError(f"{name} must be a sequence of integers or a 1-D tensor of them, got {type(value).__name__}")
    if length > max_batch:
        raise ValueError(f"{name} must name at most max_batch = {max_batch} rows, got {length}")
    return _listed(value, name)


def _length(value: Any, name: str) -> int | None:
    """How many integers a list or a 1-D tensor has; None: it is none, but maybe one integer. Reads none of them: a
    range or an expanded tensor can have more than memory holds."""
    if isinstance(value, Tensor):
        checks.tensor(value, name)
        if value.dtype not in _INTEGERS:
            raise TypeError(f"{name} must hold integers, got a tensor of {checks.dtype_name(value.dtype)}")
        if value.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} must be on a cpu or cuda device, got {value.device}")
        if value.dim() > 1:
            raise ValueError(f"{name} must have 1 dimension, got shape {tuple(value.shape)}")
        return value.shape[0] if value.dim() else None
    return len(value) if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else None


def _listed(value: Sequence[Any] | Tensor, name: str) -> list[int]:
    items = value.tolist() if isinstance(value, Tensor) else value
    return [checks.integer(item, f"every element of {name}") for item in items]


def counts(value: Any, name: str, count: int, most: int) -> list[int]:
    """How many of `most` tokens count, for each of `count` rows; None: all."""
    if value is None:
        return [most] * count
    if not isinstance(value, (Tensor, Sequence)) or (isinstance(value, Tensor) and value.dim() != 1):
        raise TypeError(f"{name} must be a sequence of integers or a 1-D tensor of them, got {type(value).__name__}")
    numbers = integers(value, name, count)
    for number in numbers:
        if not 0 <= number <= most:
            raise ValueError(f"{name} must be from 0 to T = {most}, got {number}")
    return numbers
