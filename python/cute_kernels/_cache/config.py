"""The checked arguments of a KVCache, and the sizes that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_kernels._cache import tile_rules
from cute_kernels._cache.checks import at_least, layer_sizes
from cute_kernels._cache.sequences import SequenceTable
from cute_kernels._cache.slot_rows import SlotRows
from cute_kernels._cache.tile_rules import TileRule
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C, TILE_TOKENS
from cute_kernels._runtime.launching import compression_kernels
from cute_kernels._storage.checks import chosen_codec
from cute_kernels._storage.storage import BITMAP, TWO_OF_FOUR, TWO_OF_FOUR_BITMAP
from cute_kernels.rules import Rule, TwoOfFour
from cute_kernels.rules.two_of_four import is_stored_as_slots

_MAX_ROWS = 2**31 - 1  # of all slots, as kernels count them
# Kernels count a sequence's tokens in int32, those of a full window among them.
_MAX_CAPACITY = 2**31 - 1 - 2 * TILE_TOKENS
_MAX_BYTES = 2**63 - 1  # of one tensor


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
    key_codec: str
    value_codec: str
    slot_rows: SlotRows
    tile_format: str
    page_bytes: int
    pages: int
    pages_per_sequence: int
    pool_argument: str  # which argument decided on the number of pages

    @property
    def prunes_in_kernels(self) -> bool:
        return self.keys.in_kernels and self.values.in_kernels

    def pool_keep(self, rule: TileRule) -> int:
        """Elements of a token that what stores tiles keeps; 0: every nonzero."""
        return rule.kept if self.tile_format == TWO_OF_FOUR_BITMAP else rule.kernel_keep

    @property
    def recent(self) -> int:
        """Tokens of a sequence that are always dense: no more than it can have."""
        return min(self.window, self.capacity)

    def table(self) -> SequenceTable:
        return SequenceTable(
            self.max_batch,
            pages=self.pages,
            page_tokens=self.page_tokens,
            recent=self.recent,
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
    codec: Any,
    key_codec: Any,
    value_codec: Any,
    window: Any,
    page_tokens: Any,
    max_append: Any,
    device: Any,
) -> CacheConfig:
    """Checks the arguments of KVCache."""
    batch = at_least(max_batch, "max_batch", 1)
    sizes = layer_sizes(kv_heads, head_dim, dtype, sparsity, keep, key_keep, value_keep, page_tokens, max_append)
    heads, channels, padded, page = sizes.kv_heads, sizes.head_dim, sizes.padded_head_dim, sizes.page_tokens
    of_both = chosen_codec(codec, "codec", dtype)
    codec_k = of_both if key_codec is None else chosen_codec(key_codec, "key_codec", dtype)
    codec_v = of_both if value_codec is None else chosen_codec(value_codec, "value_codec", dtype)
    most = _capacity(capacity, 1)
    for_both = "keep" if sparsity is None else "sparsity"
    rules = tile_rules.resolve_pair(key_rule, value_rule)
    kept_k = rules[0].checked_kept(sizes.key_keep, channels, for_both if key_keep is None else "key_keep")
    kept_v = rules[1].checked_kept(sizes.value_keep, channels, for_both if value_keep is None else "value_keep")
    keys, values = TileRule(rules[0], "key", kept_k), TileRule(rules[1], "value", kept_v)
    recent = at_least(window, "window", 0)
    pages_per_sequence = _pages_per_sequence(most, recent, page)
    tile_format = _tile_format(rules, (kept_k, kept_v), (codec_k, codec_v), channels)
    if tile_format == TWO_OF_FOUR:
        slot_rows = SlotRows.of_pairs(padded, codec_k, codec_v)
    elif tile_format == TWO_OF_FOUR_BITMAP:
        slot_rows = SlotRows.of_slots(padded, kept_k, kept_v, codec_k, codec_v)
    else:
        slot_rows = SlotRows.holding(padded, keys.mean_kept(channels), values.mean_kept(channels), codec_k, codec_v)
    page_bytes = heads * (page // TILE_TOKENS) * _tile_bytes(slot_rows.both)
    if pool_tokens is not None and pool_bytes is not None:
        raise ValueError(
            "pool_tokens and pool_bytes say the same thing: pass one of them, got "
            f"pool_tokens={checks.shown(pool_tokens)} and pool_bytes={checks.shown(pool_bytes)}"
        )
    if pool_bytes is not None:
        argument, pages = "pool_bytes", at_least(pool_bytes, "pool_bytes", page_bytes) // page_bytes
    elif pool_tokens is not None:
        argument, pages = "pool_tokens", -(-at_least(pool_tokens, "pool_tokens", 1) // page)
    else:
        argument, pages = "max_batch or capacity", batch * pages_per_sequence
    tiles_per_page = heads * (page // TILE_TOKENS)
    _check_tiles(slot_rows, argument, pages * tiles_per_page)
    _check_tiles(slot_rows, "max_batch or capacity", batch * pages_per_sequence * tiles_per_page)
    _check_windows(batch * heads * (min(recent, most) + TILE_TOKENS - 1 + sizes.max_append) * channels * dtype.itemsize)
    target = checks.kernel_device(device)
    compression_kernels(target)  # raises where the device has none
    if target.type == "cuda" and codec_k != codec_v:
        raise RuntimeError(
            f"key_codec '{codec_k}' and value_codec '{codec_v}': GPU kernels read keys and values in one codec; caches "
            "on the CPU may have two"
        )
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
        max_append=sizes.max_append,
        device=target,
        key_codec=codec_k,
        value_codec=codec_v,
        slot_rows=slot_rows,
        tile_format=tile_format,
        page_bytes=page_bytes,
        pages=pages,
        pages_per_sequence=pages_per_sequence,
        pool_argument=argument,
    )


def _tile_format(rules: Sequence[Rule], kept: Sequence[int], codecs: Sequence[str], head_dim: int) -> str:
    """Of both caches, which the kernels of attention read in one format."""
    if all(isinstance(rule, TwoOfFour) for rule in rules):
        return TWO_OF_FOUR
    if all(is_stored_as_slots(*of_cache, head_dim) for of_cache in zip(rules, kept, codecs)):
        return TWO_OF_FOUR_BITMAP
    return BITMAP


def grown(made_for: CacheConfig, capacity: Any, max_batch: Any) -> CacheConfig:
    """The same with more capacity or more sequences, and at least the pages for them."""
    most = made_for.capacity if capacity is None else _capacity(capacity, made_for.capacity)
    batch = made_for.max_batch if max_batch is None else at_least(max_batch, "max_batch", made_for.max_batch)
    pages_per_sequence = _pages_per_sequence(most, made_for.window, made_for.page_tokens)
    pages = max(made_for.pages, batch * pages_per_sequence)
    tiles_per_page = made_for.kv_heads * (made_for.page_tokens // TILE_TOKENS)
    _check_tiles(made_for.slot_rows, "max_batch or capacity", pages * tiles_per_page)
    larger = replace(made_for, capacity=most, max_batch=batch, pages_per_sequence=pages_per_sequence, pages=pages)
    tokens = larger.recent + TILE_TOKENS - 1 + made_for.max_append
    _check_windows(batch * made_for.kv_heads * tokens * made_for.head_dim * made_for.dtype.itemsize)
    return larger


def _capacity(value: Any, least: int) -> int:
    capacity = at_least(value, "capacity", least)
    if capacity > _MAX_CAPACITY:
        raise ValueError(f"capacity must be at most {_MAX_CAPACITY}, got {capacity}")
    return capacity


def _pages_per_sequence(capacity: int, window: int, page_tokens: int) -> int:
    # A sequence's compressed tokens stop where the window alone holds the rest of its capacity.
    return max(1, -(-(max(0, capacity - window) // TILE_TOKENS * TILE_TOKENS) // page_tokens))


def _check_tiles(slot_rows: SlotRows, argument: str, tiles: int) -> None:
    most = _MAX_ROWS // slot_rows.both
    if tiles > most:
        raise ValueError(
            f"a cache can have at most {most} tiles of this size ({TILE_TOKENS} tokens of one KV head), these "
            f"arguments ask for {tiles}: lower {argument}"
        )


def _check_windows(size: int) -> None:
    if size > _MAX_BYTES:
        raise ValueError(
            f"max_batch, kv_heads, head_dim, window and capacity ask for dense windows of {size} bytes: lower window "
            "or capacity"
        )


def _tile_bytes(rows: int) -> int:
    """Bytes of one head's tile of K and V: `rows` rows of blocks, two numbers of rows, and the token order."""
    row_bytes: int = _C.format.ROW_BYTES
    return rows * row_bytes + 2 * torch.int32.itemsize + TILE_TOKENS
