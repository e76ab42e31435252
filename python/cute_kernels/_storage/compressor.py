"""Dense caches become storage: the steps in turn, and the memory that they write."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, SCALED_CODECS, TILE_TOKENS
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.allocation import Unsized, allocate
from cute_kernels._storage.storage import BITMAP, Storage, refusal


@dataclass(frozen=True)
class Cache:
    """What to compress."""

    x: Tensor
    role: str
    kept: int  # elements of a token that the kernels keep; 0: all nonzeros
    codec: str
    out: Storage | None
    tile_format: str = BITMAP
    two_of_four: bool = False  # in tile format "bitmap": `kept` of two of every four neighbours; 0: all of these

    @property
    def tiles(self) -> int:
        return self.x.shape[0] * self.x.shape[1] * tile_reader.tiles_per_head(self.x.shape[2])

    @property
    def padded(self) -> int:
        return _C.format.padded_head_dim(self.x.shape[3])


@dataclass(frozen=True)
class _Parts:
    """What a storage consists of besides its blocks, and what `pack` needs to write those."""

    masks: Tensor
    scales: steps.Scales | None
    row_offsets: Tensor
    token_order: Tensor
    channel_order: Tensor
    channel_scale: Tensor | None
    totals: Tensor  # (steps.TOTALS,) int64, on the device


def compress_caches(caches: list[Cache]) -> list[Storage]:
    """One cache, or a K/V pair that shares its token order, alike in shape, dtype and device."""
    kernels = compression_kernels(caches[0].x.device)
    if not caches[0].tiles:
        return [cache.out or _without_tiles(cache) for cache in caches]
    with kernels.launch() as stream:
        totals = torch.empty(len(caches), steps.TOTALS, dtype=torch.int64, device=kernels.device)
        parts = _plan(kernels, caches, totals, stream)
        if caches[0].out is not None:
            return [_fill(kernels, cache, part, stream) for cache, part in zip(caches, parts)]
        return allocate([_unsized(kernels, cache, part, stream) for cache, part in zip(caches, parts)], totals)


def _plan(kernels: Kernels, caches: list[Cache], totals: Tensor, stream: int) -> list[_Parts]:
    """Everything but the blocks."""
    batch, kv_heads, tokens, head_dim = caches[0].x.shape
    device = caches[0].x.device
    tiles, padded = caches[0].tiles, caches[0].padded
    order_shape = (batch, kv_heads, tile_reader.tiles_per_head(tokens), TILE_TOKENS)
    token_order = (
        torch.empty(order_shape, dtype=torch.uint8, device=device)
        if caches[0].out is None
        else caches[0].out.token_order
    )
    parts: list[_Parts] = []
    longest = torch.empty(len(caches), tiles, dtype=torch.int32, device=device)
    selections = _select(kernels, caches, totals, stream)
    for cache, cache_totals, (masks, count, scales) in zip(caches, totals, selections):
        out = cache.out
        if out is None:
            channel_order = torch.empty(batch, kv_heads, padded, dtype=torch.uint8, device=device)
            row_offsets = torch.empty(tiles + 1, dtype=torch.int32, device=device)
        else:
            assert out.totals is not None
            channel_order, row_offsets, cache_totals = out.channel_order, out.row_offsets, out.totals
        channel_scale = by_channel = None
        if scales is not None:
            by_channel = scales.by_channel
            channel_scale = torch.empty_like(channel_order, dtype=torch.bfloat16) if out is None else out.channel_scale
        steps.deal(kernels, count, head_dim, channel_order, stream, by_channel, channel_scale)
        parts.append(_Parts(masks, scales, row_offsets, token_order, channel_order, channel_scale, cache_totals))
    first, second = parts[0], parts[1] if len(parts) > 1 else None
    kernels.module.balance(
        address(first.masks),
        address(first.channel_order),
        address(second.masks) if second else 0,
        address(second.channel_order) if second else 0,
        batch,
        kv_heads,
        tokens,
        head_dim,
        address(token_order),
        address(longest[0]),
        address(longest[1]) if second else 0,
        stream,
    )
    for cache, part, streams, (_, count, _) in zip(caches, parts, longest, selections):
        steps.offsets(kernels, streams, count, head_dim, cache.codec, part.row_offsets, part.totals, stream)
    return parts


def _select(
    kernels: Kernels, caches: list[Cache], totals: Tensor, stream: int
) -> list[tuple[Tensor, Tensor, steps.Scales | None]]:
    """As `steps.select` of every cache. On a CPU what a codec cannot store raises before any `out` is written."""
    selections: list[tuple[Tensor, Tensor, steps.Scales | None]] = []
    on_cpu = kernels.device.type == "cpu"
    for cache, of_cache in zip(caches, totals):
        if cache.out is not None and not on_cpu:
            assert cache.out.totals is not None
            of_cache = cache.out.totals
        written = of_cache if cache.codec in SCALED_CODECS else None
        of_scales = cache.codec, written
        if cache.two_of_four:
            selection = steps.select_two_of_four(kernels, cache.x, cache.role, cache.kept, stream, *of_scales)
        else:
            selection = steps.select(kernels, cache.x, cache.kept, stream, *of_scales)
        selections.append(selection)
    if on_cpu:
        for cache, of_cache in zip(caches, totals):
            if cache.codec in SCALED_CODECS:
                check_refused(cache, int(of_cache[-1]))
        for cache in caches:
            if cache.out is not None and cache.out.totals is not None:
                cache.out.totals[-1] = 0
    return selections


def _fill(kernels: Kernels, cache: Cache, parts: _Parts, stream: int) -> Storage:
    out = cache.out
    assert out is not None
    if out.token_order is not parts.token_order:  # values of a pair
        out.token_order.copy_(parts.token_order)
    rows = out.blocks.shape[0]
    steps.pack(kernels, cache.x, parts.masks, parts.scales, cache.kept, parts.totals, rows, out.view(), stream)
    return out


def check_refused(cache: Cache, refused: int) -> None:
    if refused:
        raise ValueError(refusal(name_of(cache), refused, cache.codec))


def name_of(cache: Cache) -> str:
    return "k" if cache.role == "key" else "v"


def _unsized(kernels: Kernels, cache: Cache, parts: _Parts, stream: int) -> Unsized:
    def read(totals: list[int]) -> tuple[int, int, int]:
        rows, max_tile_rows, nnz, refused = totals
        if cache.codec in SCALED_CODECS:
            check_refused(cache, refused)
        return rows, max_tile_rows, nnz

    def pack(storage: Storage) -> None:
        rows = storage.blocks.shape[0]
        steps.pack(kernels, cache.x, parts.masks, parts.scales, cache.kept, parts.totals, rows, storage.view(), stream)

    likely = cache.tiles * steps.likely_rows_of_tile(cache.padded, cache.kept, cache.codec) if cache.kept else 0
    return Unsized(name_of(cache), cache.x.shape, likely, read, partial(_storage, cache, parts), pack)


def _storage(cache: Cache, parts: _Parts, blocks: Tensor, max_tile_rows: int, nnz: int) -> Storage:
    return Storage(
        blocks=blocks,
        row_offsets=parts.row_offsets,
        token_order=parts.token_order,
        channel_order=parts.channel_order,
        channel_scale=parts.channel_scale,
        role=cache.role,
        dtype=cache.x.dtype,
        codec=cache.codec,
        shape=cache.x.shape,
        max_tile_rows=max_tile_rows,
        nnz=nnz,
    )


def _without_tiles(cache: Cache) -> Storage:
    return Storage(
        **steps.empty_tensors(cache.x.shape, 0, cache.codec, cache.x.device),
        role=cache.role,
        dtype=cache.x.dtype,
        codec=cache.codec,
        shape=cache.x.shape,
        max_tile_rows=0,
        nnz=0,
    )
