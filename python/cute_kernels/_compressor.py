"""How caches become storage: the steps in turn, and the memory for what they write."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import _steps, _tiles
from cute_kernels._backends import Kernels, compression_kernels
from cute_kernels._extension import _C
from cute_kernels._validation import MAX_ROWS
from cute_kernels.sparse_kv import SparseKV


@dataclass(frozen=True)
class Cache:
    """What to compress."""

    x: Tensor
    role: str
    kept: int  # 0: all nonzeros
    out: SparseKV | None

    @property
    def tiles(self) -> int:
        return self.x.shape[0] * self.x.shape[1] * _tiles.tiles_per_head(self.x.shape[2])

    @property
    def padded(self) -> int:
        return _C.format.padded_head_dim(self.x.shape[3])


@dataclass(frozen=True)
class _Parts:
    """What a storage consists of, apart from its blocks, and what it takes to write those."""

    masks: Tensor
    row_offsets: Tensor
    token_order: Tensor
    channel_order: Tensor
    totals: Tensor  # (_steps.TOTALS,) int64, on the device


def compress_caches(caches: list[Cache]) -> list[SparseKV]:
    """One cache, or a K/V pair that shares its token order, alike in shape, dtype and device."""
    kernels = compression_kernels(caches[0].x.device)
    if not caches[0].tiles:
        return [cache.out or _without_tiles(cache) for cache in caches]
    with kernels.launch() as stream:
        totals = torch.empty(len(caches), _steps.TOTALS, dtype=torch.int64, device=kernels.device)
        parts = _plan(kernels, caches, totals, stream)
        if caches[0].out is not None:
            return [_fill(kernels, cache, part, stream) for cache, part in zip(caches, parts)]
        return _allocate(kernels, caches, parts, totals, stream)


def _plan(kernels: Kernels, caches: list[Cache], totals: Tensor, stream: int) -> list[_Parts]:
    """Everything but the blocks."""
    batch, kv_heads, tokens, head_dim = caches[0].x.shape
    device = caches[0].x.device
    tiles, padded = caches[0].tiles, caches[0].padded
    order_shape = (batch, kv_heads, _tiles.tiles_per_head(tokens), _C.format.TILE_TOKENS)
    token_order = (
        torch.empty(order_shape, dtype=torch.uint8, device=device)
        if caches[0].out is None
        else caches[0].out._token_order
    )
    parts: list[_Parts] = []
    longest = torch.empty(len(caches), tiles, dtype=torch.int32, device=device)
    counts: list[Tensor] = []
    for cache, cache_totals in zip(caches, totals):
        masks, count = _steps.select(kernels, cache.x, cache.kept, stream)
        counts.append(count)
        out = cache.out
        if out is None:
            channel_order = torch.empty(batch, kv_heads, padded, dtype=torch.uint8, device=device)
            row_offsets = torch.empty(tiles + 1, dtype=torch.int32, device=device)
        else:
            assert out._totals is not None
            channel_order, row_offsets, cache_totals = out._channel_order, out._row_offsets, out._totals
        _steps.deal(kernels, count, head_dim, channel_order, stream)
        parts.append(_Parts(masks, row_offsets, token_order, channel_order, cache_totals))
    first, second = parts[0], parts[1] if len(parts) > 1 else None
    kernels.module.balance(
        first.masks.data_ptr(),
        first.channel_order.data_ptr(),
        second.masks.data_ptr() if second else 0,
        second.channel_order.data_ptr() if second else 0,
        batch,
        kv_heads,
        tokens,
        head_dim,
        token_order.data_ptr(),
        longest[0].data_ptr(),
        longest[1].data_ptr() if second else 0,
        stream,
    )
    for i, part in enumerate(parts):
        _steps.offsets(kernels, longest[i], counts[i], head_dim, part.row_offsets, part.totals, stream)
    return parts


def _fill(kernels: Kernels, cache: Cache, parts: _Parts, stream: int) -> SparseKV:
    out = cache.out
    assert out is not None
    if out._token_order is not parts.token_order:  # of a pair's values
        out._token_order.copy_(parts.token_order)
    _steps.pack(
        kernels, cache.x, parts.masks, cache.kept, parts.totals, out._blocks.shape[0], out._kernel_view(), stream
    )
    return out


def _allocate(
    kernels: Kernels, caches: list[Cache], parts: list[_Parts], totals: Tensor, stream: int
) -> list[SparseKV]:
    """Storages of the size that the caches need.

    That size is on the device. While it comes here the device already packs into as much memory as is likely enough;
    what was left over is cut off, and where it was not enough, or nothing was likely, blocks are packed after that.
    """
    pending = _Totals(totals)
    guesses: list[Tensor | None] = []
    for cache, part in zip(caches, parts):
        likely = cache.tiles * _steps.likely_rows_of_tile(cache.padded, cache.kept) if cache.kept else MAX_ROWS + 1
        if kernels.device.type == "cpu" or likely > MAX_ROWS:
            guesses.append(None)
            continue
        guesses.append(_blocks(likely, cache.x.device))
        view = _storage(cache, part, guesses[-1], 0, 0)._kernel_view()
        _steps.pack(kernels, cache.x, part.masks, cache.kept, part.totals, likely, view, stream)
    results: list[SparseKV] = []
    for cache, part, guess, (rows, max_tile_rows, nnz) in zip(caches, parts, guesses, pending.read()):
        if rows > MAX_ROWS:
            raise ValueError(
                f"{'k' if cache.role == 'key' else 'v'} of shape {tuple(cache.x.shape)} would take {rows} rows of 128 "
                f"bytes, at most {MAX_ROWS} can be addressed: compress it in parts"
            )
        packed = guess is not None and rows <= guess.shape[0]
        blocks = guess[:rows] if guess is not None and packed else _blocks(rows, cache.x.device)
        if packed and rows < guess.shape[0] * 7 // 8:
            blocks = blocks.clone()  # rather than hold on to the rest
        kv = _storage(cache, part, blocks, max_tile_rows, nnz)
        if not packed:
            _steps.pack(kernels, cache.x, part.masks, cache.kept, part.totals, rows, kv._kernel_view(), stream)
        results.append(kv)
    return results


class _Totals:
    """Totals on their way to the host. Work that is queued after them goes on meanwhile."""

    def __init__(self, totals: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if totals.device.type == "cpu":
            self._values = totals
            return
        self._values = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
        self._values.copy_(totals, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(totals.device))

    def read(self) -> list[list[int]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def _blocks(rows: int, device: torch.device) -> Tensor:
    return torch.empty(rows, _C.format.LANES, dtype=torch.int32, device=device)


def _storage(cache: Cache, parts: _Parts, blocks: Tensor, max_tile_rows: int, nnz: int) -> SparseKV:
    return SparseKV._from_parts(
        blocks=blocks,
        row_offsets=parts.row_offsets,
        token_order=parts.token_order,
        channel_order=parts.channel_order,
        role=cache.role,
        dtype=cache.x.dtype,
        shape=cache.x.shape,
        max_tile_rows=max_tile_rows,
        nnz=nnz,
    )


def _without_tiles(cache: Cache) -> SparseKV:
    return SparseKV._from_parts(
        **_steps.empty_tensors(cache.x.shape, 0, cache.x.device),
        role=cache.role,
        dtype=cache.x.dtype,
        shape=cache.x.shape,
        max_tile_rows=0,
        nnz=0,
    )
