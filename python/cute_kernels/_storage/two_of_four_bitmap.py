"""Dense caches become storage of the tile format of at most two of four: metadata, and a bitmap over what it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_IDS, DTYPE_IDS, ROLE_IDS, TILE_FORMATS, TILE_TOKENS
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.allocation import Unsized, allocate
from cute_kernels._storage.compressor import Cache, check_refused, name_of
from cute_kernels._storage.storage import TWO_OF_FOUR_BITMAP, Storage
from cute_kernels._storage.two_of_four import Channels, check_pattern, choose_channels
from cute_kernels._storage.validation import check_size

# Of a cache: those of `steps.offsets`, then values stored, values refused, nonzeros beyond two of four.
TOTALS = steps.TOTALS + 3


@dataclass(frozen=True)
class Selection:
    """What is kept of a cache, and what else writes its blocks."""

    channels: Channels
    masks: Tensor
    scales: steps.Scales | None  # on a CPU
    counts: Tensor | None  # of what is kept, on a GPU
    longest: Tensor  # stream of each tile


def compress_caches(caches: list[Cache]) -> list[Storage]:
    """One cache, or a K/V pair that shares its token order, alike in shape, dtype and device: the two largest of every
    four, of which `kept` of a token, channels of keys in the order of rule "magnitude-2of4". kept 0: x has the pattern
    already, channels and tokens as they lie in memory. ValueError if it has not."""
    x = caches[0].x
    check_size(x.shape)
    kernels = compression_kernels(x.device)
    order_shape = (*x.shape[:2], tile_reader.tiles_per_head(x.shape[2]), TILE_TOKENS)
    token_order = torch.empty(order_shape, dtype=torch.uint8, device=x.device)
    with kernels.launch() as stream:
        if not caches[0].tiles:
            return [
                _without_tiles(cache, choose_channels(kernels, cache, True, None, stream), token_order)
                for cache in caches
            ]
        totals = torch.zeros(len(caches), TOTALS, dtype=torch.int64, device=x.device)
        parts = [
            select(kernels, cache, choose_channels(kernels, cache, cache.kept == 0, None, stream), of_cache, stream)
            for cache, of_cache in zip(caches, totals)
        ]
        choose_orders(kernels, caches, parts, token_order, totals, stream)
        no_counts = torch.zeros(1, caches[0].padded, dtype=torch.int32, device=x.device)  # nonzeros are known already
        row_offsets: list[Tensor] = []
        for cache, part, of_cache in zip(caches, parts, totals):
            row_offsets.append(torch.empty(cache.tiles + 1, dtype=torch.int32, device=x.device))
            steps.offsets(
                kernels,
                part.longest,
                no_counts,
                x.shape[3],
                cache.codec,
                row_offsets[-1],
                of_cache[: steps.TOTALS],
                stream,
                TWO_OF_FOUR_BITMAP,
            )
        unsized = [
            _unsized(
                kernels, cache, part, partial(_storage, cache, part.channels, token_order, offsets), of_cache, stream
            )
            for cache, part, offsets, of_cache in zip(caches, parts, row_offsets, totals)
        ]
        return allocate(unsized, totals)


def select(
    kernels: Kernels,
    cache: Cache,
    channels: Channels,
    totals: Tensor,
    stream: int,
    constrained: Tensor | None = None,
) -> Selection:
    """totals: int64 (TOTALS,), of which the last three are written. constrained: int64, to which a GPU adds what
    magnitude alone would keep and is not kept."""
    x, kept = cache.x, cache.kept
    batch, kv_heads, tokens, head_dim = x.shape
    totals = totals[-3:]
    longest = torch.empty(cache.tiles, dtype=torch.int32, device=x.device)
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_IDS[x.dtype]
    role, codec, keep = ROLE_IDS[cache.role], CODEC_IDS[cache.codec], kept if kept < head_dim else 0
    if kernels.device.type == "cuda":
        words, count_bytes = kernels.module.slot_scratch(role, head_dim)
        masks = torch.empty(cache.tiles * words, dtype=torch.int32, device=x.device)
        counts = torch.empty(cache.tiles * count_bytes, dtype=torch.uint8, device=x.device)
        kernels.module.select_slots(
            *operand,
            role,
            codec,
            keep,
            address(channels.order),
            address(masks),
            address(counts),
            address(totals),
            0 if constrained is None else address(constrained),
            stream,
        )
        return Selection(channels, masks, None, counts, longest)
    scales = channels.scales(cache.tiles)
    masks = torch.empty(batch * kv_heads * tokens * cache.padded // 32, dtype=torch.int32, device=x.device)
    totals[2] = kernels.module.select_two_of_four(*operand, role, address(channels.order), keep, address(masks), stream)
    if scales is not None:
        of_scales = address(scales.by_channel), address(scales.by_token)
        totals[1] = kernels.module.token_scales(*operand, address(masks), codec, *of_scales, stream)
    return Selection(channels, masks, scales, None, longest)


def choose_orders(
    kernels: Kernels, caches: list[Cache], parts: list[Selection], token_order: Tensor, totals: Tensor, stream: int
) -> None:
    """Writes token_order, the longest stream of every tile and, on a CPU, how many values are stored."""
    cache = caches[0]
    batch, kv_heads, tokens, head_dim = cache.x.shape
    on_gpu = kernels.device.type == "cuda"
    operands = {"key": (0, 0, 0) if on_gpu else (0, 0, 0, 0)}
    operands["value"] = operands["key"]
    for cache, part in zip(caches, parts):
        codec_id, longest = CODEC_IDS[cache.codec], address(part.longest)
        if part.counts is not None:
            operands[cache.role] = address(part.counts), codec_id, longest
        else:
            operands[cache.role] = address(part.masks), codec_id, address(part.channels.order), longest
    if on_gpu:
        kernels.module.order_slots(*operands["key"], *operands["value"], cache.tiles, address(token_order), stream)
        return
    stored = kernels.module.order_slots(
        *operands["key"],
        *operands["value"],
        batch * kv_heads,
        tokens,
        head_dim,
        address(token_order),
        stream,
    )
    for cache, of_cache in zip(caches, totals):
        of_cache[-3] = stored[ROLE_IDS[cache.role]]


def _unsized(
    kernels: Kernels,
    cache: Cache,
    part: Selection,
    storage_of: Callable[[Tensor, int, int], Storage],
    totals: Tensor,
    stream: int,
) -> Unsized:
    def read(totals: list[int]) -> tuple[int, int, int]:
        rows, max_tile_rows, _, _, nnz, refused, beyond = totals
        check_refused(cache, refused)
        if cache.kept == 0:
            check_pattern(cache, beyond)
        return rows, max_tile_rows, nnz

    def pack(storage: Storage) -> None:
        rows, view = storage.blocks.shape[0], storage.view()
        if part.counts is None:
            steps.pack(kernels, cache.x, part.masks, part.scales, 0, totals, rows, view, stream)
        else:
            operand = address(cache.x), cache.x.stride()[:3], address(part.masks)
            kernels.module.pack_slots(*operand, address(totals), rows, view, 0, 0, stream)

    likely = cache.tiles * _likely_rows_of_tile(cache) if cache.kept else 0
    return Unsized(name_of(cache), cache.x.shape, likely, read, storage_of, pack)


def _likely_rows_of_tile(cache: Cache) -> int:
    """What tiles need on average, or some per cent more, if lanes have about as many values."""
    mean = min(cache.kept, cache.padded // 2) * TILE_TOKENS // _C.format.LANES
    longest = min(mean + 10, cache.padded)
    before = steps.rows_before_values(cache.padded, cache.codec, TWO_OF_FOUR_BITMAP)
    return before + _C.format.value_rows(longest, CODEC_IDS[cache.codec], TILE_FORMATS[TWO_OF_FOUR_BITMAP])


def pack_anywhere(
    kernels: Kernels, cache: Cache, part: Selection, storage: Storage, rows: Tensor, dropped: Tensor, stream: int
) -> None:
    """Writes tiles to blocks that lie anywhere: `row_offsets` of the storage has their first rows. They are trimmed to
    `rows`, int32 (tiles,). dropped: int64 (2,), tiles that lost values, and those values, are added."""
    operand = address(cache.x), cache.x.stride()[:3], address(part.masks)
    of_tiles = storage.view(), address(rows), address(dropped), stream
    if part.counts is None:
        kernels.module.pack_slots(*operand, 0 if part.scales is None else address(part.scales.by_token), *of_tiles)
    else:
        kernels.module.pack_slots(*operand, 0, 0, *of_tiles)


def _storage(
    cache: Cache,
    channels: Channels,
    token_order: Tensor,
    row_offsets: Tensor,
    blocks: Tensor,
    max_tile_rows: int,
    nnz: int,
) -> Storage:
    return Storage(
        blocks=blocks,
        row_offsets=row_offsets,
        token_order=token_order,
        channel_order=channels.order,
        channel_scale=channels.scale,
        role=cache.role,
        dtype=cache.x.dtype,
        codec=cache.codec,
        tile_format=TWO_OF_FOUR_BITMAP,
        shape=cache.x.shape,
        max_tile_rows=max_tile_rows,
        nnz=nnz,
    )


def _without_tiles(cache: Cache, channels: Channels, token_order: Tensor) -> Storage:
    device = cache.x.device
    blocks = torch.empty(0, _C.format.LANES, dtype=torch.int32, device=device)
    row_offsets = torch.zeros(1, dtype=torch.int32, device=device)
    return _storage(cache, channels, token_order, row_offsets, blocks, 0, 0)
