"""What a KVCache is made for, and checks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels import _checks, _pages, _tile_rules
from cute_kernels._backends import compression_kernels
from cute_kernels._extension import _C
from cute_kernels._sequences import TILE, SequenceTable
from cute_kernels._slot_rows import SlotRows
from cute_kernels._tile_rules import TileRule

_MAX_ROWS = 2**31 - 1  # of all slots, as kernels count them


@dataclass(frozen=True)
class CacheConfig:
    """Arguments of a KVCache, checked, and the sizes that follow from them."""

    max_batch: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    capacity: int
    keys: TileRule
    values: TileRule
    window: int
    page_tokens: int
    max_append: int
    device: torch.device
    slot_rows: SlotRows
    page_bytes: int
    pages: int
    pages_per_sequence: int
    pool_argument: str  # which argument decided on the number of pages

    def table(self) -> SequenceTable:
        return SequenceTable(
            self.max_batch,
            pages=self.pages,
            page_tokens=self.page_tokens,
            recent=self.window,
            capacity=self.capacity,
            pool_argument=self.pool_argument,
        )


def config(
    *,
    max_batch: Any,
    kv_heads: Any,
    head_dim: Any,
    dtype: Any,
    capacity: Any,
    pool_tokens: Any,
    pool_bytes: Any,
    sparsity: Any,
    keep: Any,
    key_keep: Any,
    value_keep: Any,
    key_rule: Any,
    value_rule: Any,
    window: Any,
    page_tokens: Any,
    max_append: Any,
    device: Any,
) -> CacheConfig:
    """Checks the arguments of KVCache."""
    batch, heads = at_least(max_batch, "max_batch", 1), at_least(kv_heads, "kv_heads", 1)
    channels = _checks.integer(head_dim, "head_dim")
    padded = _C.format.padded_head_dim(channels) if abs(channels) < 2**31 else 0
    if not padded:
        raise ValueError(f"head_dim must be a multiple of 8, from 8 to {max(_C.format.HEAD_DIMS)}, got {channels}")
    if dtype not in _checks.CACHE_DTYPES:
        raise TypeError(f"dtype must be float16 or bfloat16, got {_checks.dtype_name(dtype)}")
    most = at_least(capacity, "capacity", 1)
    both = _checks.kept_elements(channels, sparsity, keep)
    kept_k = both if key_keep is None else _checks.kept_elements(channels, None, key_keep, "key_keep")
    kept_v = both if value_keep is None else _checks.kept_elements(channels, None, value_keep, "value_keep")
    rules = _tile_rules.resolve_pair(key_rule, value_rule)
    keys, values = TileRule(rules[0], "key", kept_k), TileRule(rules[1], "value", kept_v)
    recent = at_least(window, "window", 0)
    page = at_least(page_tokens, "page_tokens", TILE)
    if page % TILE:
        raise ValueError(f"page_tokens must be a multiple of {TILE}, got {page}")
    at_once = at_least(max_append, "max_append", 1)
    if at_once > _pages.MAX_APPEND:
        raise ValueError(f"max_append must be at most {_pages.MAX_APPEND}, got {at_once}")
    pages_per_sequence = _pages_per_sequence(most, recent, page)
    slot_rows = SlotRows.holding(padded, keys.mean_kept(channels), values.mean_kept(channels))
    page_bytes = heads * (page // TILE) * _tile_bytes(slot_rows.both)
    if pool_tokens is not None and pool_bytes is not None:
        raise ValueError(
            f"pool_tokens and pool_bytes say the same thing: pass one of them, got pool_tokens={pool_tokens!r} and "
            f"pool_bytes={pool_bytes!r}"
        )
    if pool_bytes is not None:
        argument, pages = "pool_bytes", at_least(pool_bytes, "pool_bytes", page_bytes) // page_bytes
    elif pool_tokens is not None:
        argument, pages = "pool_tokens", -(-at_least(pool_tokens, "pool_tokens", 1) // page)
    else:
        argument, pages = "max_batch or capacity", batch * pages_per_sequence
    _check_tiles(max(pages, batch * pages_per_sequence) * heads * (page // TILE), slot_rows, argument)
    target = _checks.kernel_device(device)
    if target.type == "cuda" and target.index is None:
        target = torch.device("cuda", torch.cuda.current_device())
    compression_kernels(target)  # raises if there are none
    return CacheConfig(
        max_batch=batch,
        kv_heads=heads,
        head_dim=channels,
        dtype=dtype,
        capacity=most,
        keys=keys,
        values=values,
        window=recent,
        page_tokens=page,
        max_append=at_once,
        device=target,
        slot_rows=slot_rows,
        page_bytes=page_bytes,
        pages=pages,
        pages_per_sequence=pages_per_sequence,
        pool_argument=argument,
    )


def grown(made_for: CacheConfig, capacity: Any, max_batch: Any) -> CacheConfig:
    """The same with more capacity or rows, and at least enough pages for them."""
    most = made_for.capacity if capacity is None else at_least(capacity, "capacity", made_for.capacity)
    batch = made_for.max_batch if max_batch is None else at_least(max_batch, "max_batch", made_for.max_batch)
    pages_per_sequence = _pages_per_sequence(most, made_for.window, made_for.page_tokens)
    pages = max(made_for.pages, batch * pages_per_sequence)
    tiles = pages * made_for.kv_heads * (made_for.page_tokens // TILE)
    _check_tiles(tiles, made_for.slot_rows, made_for.pool_argument)
    return replace(made_for, capacity=most, max_batch=batch, pages_per_sequence=pages_per_sequence, pages=pages)


def _pages_per_sequence(capacity: int, window: int, page_tokens: int) -> int:
    # A sequence's compressed tokens stop where the window alone holds the rest of its capacity.
    return max(1, -(-(max(0, capacity - window) // TILE * TILE) // page_tokens))


def _check_tiles(tiles: int, slot_rows: SlotRows, argument: str) -> None:
    most = _MAX_ROWS // slot_rows.both
    if tiles > most:
        raise ValueError(
            f"max_batch, kv_heads, capacity and {argument} together must not ask for more than {most} tiles"
        )


def _tile_bytes(rows: int) -> int:
    """Of one head's K and V, so many rows: blocks, their numbers of rows, and the token order."""
    row_bytes: int = _C.format.ROW_BYTES
    return rows * row_bytes + 2 * torch.int32.itemsize + TILE


def at_least(value: Any, name: str, least: int) -> int:
    number: int = _checks.integer(value, name)
    if not least <= number < 2**63:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def new_tokens(made_for: CacheConfig, k: Any, v: Any) -> None:
    """K and V of new tokens, (B, Hkv, n, D) both."""
    for x, name in ((k, "k"), (v, "v")):
        _like_cache(x, name, made_for)
        sizes = x.shape
        if len(sizes) != 4 or sizes[1] != made_for.kv_heads or sizes[3] != made_for.head_dim:
            raise ValueError(
                f"{name} must have shape (B, Hkv, n, D) with Hkv = {made_for.kv_heads} and D = {made_for.head_dim}, "
                f"got {tuple(x.shape)}"
            )
        _checks.unit_stride(x, name)
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")


def appended_tokens(made_for: CacheConfig, k: Any, v: Any) -> None:
    """`new_tokens`, at least one."""
    new_tokens(made_for, k, v)
    if k.shape[2] < 1:
        raise ValueError(f"k must have at least 1 token to append, got shape {tuple(k.shape)}")


def queries(made_for: CacheConfig, q: Any) -> None:
    """(B, Hq, Sq, D)."""
    _like_cache(q, "q", made_for)
    sizes = q.shape
    if len(sizes) != 4 or sizes[3] != made_for.head_dim:
        raise ValueError(f"q must have shape (B, Hq, Sq, D) with D = {made_for.head_dim}, got {tuple(sizes)}")
    if sizes[1] % made_for.kv_heads:
        raise ValueError(
            f"q must have a number of heads Hq that is a multiple of kv_heads = {made_for.kv_heads}, got {sizes[1]}"
        )
    _checks.unit_stride(q, "q")


def _like_cache(x: Any, name: str, made_for: CacheConfig) -> None:
    # What passes is asked for here, without calls: a model's step comes by three times a layer.
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        _checks.tensor(x, name)
    if x.dtype is not made_for.dtype:
        _checks.dtype(x, name, (made_for.dtype,), " like the cache")
    if x.device != made_for.device:
        _checks.device(x, name, made_for.device, "the cache")


def integers(value: Any, name: str, count: int | None) -> list[int]:
    """A list of integers from such a list, or a 1-D tensor of integers; with `count` so many, or one for all."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{name} must hold integers, got a tensor of {_checks.dtype_name(value.dtype)}")
        if value.dim() > 1 or (value.dim() == 0 and count is None):
            raise ValueError(f"{name} must have 1 dimension, got shape {tuple(value.shape)}")
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        numbers = [_checks.integer(item, f"every element of {name}") for item in value]
    elif count is None:
        raise TypeError(f"{name} must be a sequence of integers or a tensor of them, got {type(value).__name__}")
    else:
        return [_checks.integer(value, name)] * count
    if count is not None and len(numbers) != count:
        raise ValueError(f"{name} must have one integer for each of {count} sequences, got {len(numbers)}")
    return numbers


def rows(value: Any, name: str, end: int, end_name: str) -> list[int]:
    """Row numbers below `end`."""
    numbers = integers(value, name, None)
    for number in numbers:
        if not 0 <= number < end:
            raise ValueError(f"{name} must be from 0 to {end_name} - 1 = {end - 1}, got {number}")
    return numbers


def counts(value: Any, name: str, count: int, most: int) -> list[int]:
    """How many of `most` tokens count, for each of `count` rows; None: all."""
    if value is None:
        return [most] * count
    if not isinstance(value, (Tensor, Sequence)) or isinstance(value, Tensor) and value.dim() != 1:
        raise TypeError(f"{name} must be a sequence of integers or a 1-D tensor of them, got {type(value).__name__}")
    numbers = integers(value, name, count)
    for number in numbers:
        if not 0 <= number <= most:
            raise ValueError(f"{name} must be from 0 to T = {most}, got {number}")
    return numbers
