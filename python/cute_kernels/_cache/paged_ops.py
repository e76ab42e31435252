"""What is done with a pool and its windows in torch.ops.cute_kernels, so that code with caller-owned pages compiles.

An operation takes all tensors that it reads or writes, in lists, and the sizes that go with them; it packs what kernels
take of them anew. Eager calls with a `Pool` and `Windows` keep that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._attention import packed as packed_queries
from cute_kernels._attention.packed import PackedQueries
from cute_kernels._attention.problem import launch_problem, pack_problem
from cute_kernels._cache import page_pool
from cute_kernels._cache.page_config import scale_names
from cute_kernels._cache.pool import Pool, Windows
from cute_kernels._cache.reference import attend_reference
from cute_kernels._cache.slot_rows import SlotRows
from cute_kernels._runtime import checks, ops
from cute_kernels._runtime.backends import resolve
from cute_kernels._runtime.extension import CODEC_IDS, CODEC_NAMES, TILE_TOKENS

_POOL = (
    *("blocks", "key_rows", "value_rows", "token_order"),
    *("key_channels", "value_channels", "page_table", "dropped", "refused", "error"),
)
_WINDOWS = ("keys", "values", "lengths", "arrivals")


def pool_tensors(pool: Pool) -> list[Tensor]:
    return [getattr(pool, name) for name in (*_POOL, *scale_names(pool.key_codec, pool.value_codec))]


def pool_sizes(pool: Pool) -> list[int]:
    rows, codecs = pool.slot_rows, (CODEC_IDS[pool.key_codec], CODEC_IDS[pool.value_codec])
    keeps = pool.key_keep, pool.value_keep
    return [pool.head_dim, pool.tiles_per_page, *keeps, *codecs, rows.keys, rows.values, rows.both]


def window_tensors(windows: Windows | None) -> list[Tensor]:
    return [] if windows is None else [getattr(windows, name) for name in _WINDOWS]


def window_sizes(windows: Windows | None) -> list[int]:
    return [] if windows is None else [windows.recent, int(windows.stores_full)]


def make_pool(tensors: list[Tensor], sizes: list[int], dtype: torch.dtype) -> Pool:
    head_dim, tiles_per_page, key_keep, value_keep, *codes_and_rows = sizes
    key_codec, value_codec = (CODEC_NAMES[code] for code in codes_and_rows[:2])
    names = *_POOL, *scale_names(key_codec, value_codec)
    named: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return Pool(
        **named,
        dtype=dtype,
        head_dim=head_dim,
        tiles_per_page=tiles_per_page,
        key_keep=key_keep,
        value_keep=value_keep,
        slot_rows=SlotRows(*codes_and_rows[2:]),
        key_codec=key_codec,
        value_codec=value_codec,
    )


def make_windows(tensors: list[Tensor], sizes: list[int]) -> Windows | None:
    if not tensors:
        return None
    recent, stores_full = sizes
    named: dict[str, Any] = dict(zip(_WINDOWS, tensors, strict=True))
    return Windows(**named, recent=recent, stores_full=bool(stores_full))


def attend(
    q: Tensor,
    pool: Pool,
    windows: Windows | None,
    lengths: Tensor,
    sequences: Tensor | None,
    packed: PackedQueries | None,
    scale: float,
    causal: bool,
    expected: tuple[int, int],
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Behind the checks; writes out and lse."""
    cu_seqlens_q = None if packed is None else packed.starts
    checks.apart(out, q=q, lengths=lengths, sequences=sequences, cu_seqlens_q=cu_seqlens_q)
    for tensors in (pool, windows):
        if tensors is not None:
            checks.apart_from(out, tensors.memory)
    name = resolve(backend, pool.device)
    rows = q.shape[0] if packed is None else packed.rows
    checks_held = packed is not None and pool.device.type == "cpu"
    indices: Sequence[int] = range(rows)
    if sequences is not None and (checks_held or name == "reference"):
        indices = sequences.tolist()
    if packed is not None and checks_held:
        in_windows = [0] * pool.sequences if windows is None else windows.lengths.tolist()
        packed.check_held([int(lengths[index]) + in_windows[index] for index in indices])
    if not out.numel() or not rows:
        return
    if name == "reference":
        caches = [_tokens(pool, windows, lengths, index) for index in indices]
        attend_reference(q, caches, scale, causal, out, lse, packed)
        return
    q = checks.plain(q)
    window = None if windows is None else windows.attention_window
    starts = None if packed is None else packed.on_device(q.device)
    options: dict[str, Any] = {"scale": scale, "causal": causal, "expected": expected, "packed": packed}
    problem = pack_problem(pool.key_view, pool.value_view, window, q, **options)
    launch_problem(problem, q, out, lse, name, sequences=sequences, lengths=lengths, query_starts=starts)


def _tokens(pool: Pool, windows: Windows | None, lengths: Tensor, sequence: int) -> tuple[Tensor, Tensor]:
    """K and V of one sequence, dense; reads lengths on the host."""
    k, v = page_pool.load(pool, sequence, 0, int(lengths[sequence]) // TILE_TOKENS)
    if windows is None:
        return k, v
    held = int(windows.lengths[sequence])
    return torch.cat([k, windows.keys[sequence, :, :held]], 1), torch.cat([v, windows.values[sequence, :, :held]], 1)


# ---- torch.ops.cute_kernels ------------------------------------------------------------------------------------------


def _store(pool: list[Tensor], sizes: list[int], k: Tensor, v: Tensor, sequences: Tensor, first_tiles: Tensor) -> None:
    page_pool.store(make_pool(pool, sizes, k.dtype), k, v, sequences, first_tiles, False)


def _choose_orders(pool: list[Tensor], sizes: list[int], k: Tensor, v: Tensor) -> None:
    page_pool.choose_orders(make_pool(pool, sizes, k.dtype), k, v)


def _append(
    pool: list[Tensor],
    windows: list[Tensor],
    lengths: Tensor,
    pool_sizes: list[int],
    window_sizes: list[int],
    k: Tensor,
    v: Tensor,
    sequences: Tensor | None,
) -> None:
    made = make_windows(windows, window_sizes)
    assert made is not None
    page_pool.append(make_pool(pool, pool_sizes, k.dtype), made, lengths, k, v, sequences)


def _attend(
    q: Tensor,
    pool: list[Tensor],
    windows: list[Tensor],
    lengths: Tensor,
    sequences: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    pool_sizes: list[int],
    window_sizes: list[int],
    scale: float,
    causal: bool,
    expected: list[int],
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    longest, total = expected
    views = make_pool(pool, pool_sizes, q.dtype), make_windows(windows, window_sizes)
    packed = packed_queries.check(cu_seqlens_q, max_seqlen_q, q)
    attend(q, *views, lengths, sequences, packed, scale, causal, (longest, total), backend, out, lse)


def _export(
    pool: list[Tensor], sizes: list[int], dtype: torch.dtype, sequence: int, first_tile: int, tiles: int
) -> tuple[Tensor, Tensor]:
    return page_pool.load(make_pool(pool, sizes, dtype), sequence, first_tile, tiles)


def _export_fake(
    pool: list[Tensor], sizes: list[int], dtype: torch.dtype, sequence: int, first_tile: int, tiles: int
) -> tuple[Tensor, Tensor]:
    blocks, kv_heads = pool[0], pool[_POOL.index("key_channels")].shape[-2]
    shape = kv_heads, tiles * TILE_TOKENS, sizes[0]
    return blocks.new_empty(shape, dtype=dtype), blocks.new_empty(shape, dtype=dtype)


STORE = ops.define(
    "paged_store(Tensor(a!)[] pool, int[] sizes, Tensor k, Tensor v, Tensor sequences, Tensor first_tiles) -> ()",
    _store,
    ops.no_results,
)
CHOOSE_ORDERS = ops.define(
    "paged_choose_orders(Tensor(a!)[] pool, int[] sizes, Tensor k, Tensor v) -> ()", _choose_orders, ops.no_results
)
APPEND = ops.define(
    "paged_append(Tensor(a!)[] pool, Tensor(b!)[] windows, Tensor(c!) lengths, int[] pool_sizes, int[] window_sizes, "
    "Tensor k, Tensor v, Tensor? sequences) -> ()",
    _append,
    ops.no_results,
)
ATTEND = ops.define(
    "paged_attend(Tensor q, Tensor[] pool, Tensor[] windows, Tensor lengths, Tensor? sequences, Tensor? cu_seqlens_q, "
    "SymInt? max_seqlen_q, int[] pool_sizes, int[] window_sizes, float scale, bool causal, SymInt[] expected, "
    "str backend, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _attend,
    ops.no_results,
)
EXPORT = ops.define(
    "paged_export(Tensor[] pool, int[] sizes, ScalarType dtype, SymInt sequence, SymInt first_tile, SymInt tiles) "
    "-> (Tensor, Tensor)",
    _export,
    _export_fake,
)
