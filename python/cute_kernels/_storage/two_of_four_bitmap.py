"""Dense caches become storage of the tile format of at most two of four: metadata, and a bitmap over what it names."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_CODES, DTYPE_CODES, ROLE_CODES, SCALED_CODECS
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.compressor import Cache, check_refused, name_of
from cute_kernels._storage.storage import TWO_OF_FOUR_BITMAP, Storage
from cute_kernels._storage.two_of_four import Channels, check_pattern, choose_channels
from cute_kernels._storage.validation import MAX_ROWS, check_size


def compress_cache(cache: Cache, token_order: Tensor | None = None) -> Storage:
    """The two largest of every four, of which `cache.kept` of a token, channels of keys in the order of rule
    "magnitude-2of4". kept 0: x has the pattern already, channels and tokens as they lie in memory. ValueError if it has
    not.

    token_order: that of a cache alike, to be shared; it is that of memory.
    """
    check_size(cache.x.shape)
    kernels = compression_kernels(cache.x.device)
    if kernels.device.type == "cuda":
        raise RuntimeError(
            f"there are no CUDA kernels that compress into tile_format {TWO_OF_FOUR_BITMAP!r}: compress on the CPU, and "
            f"move the result by `to`"
        )
    x = cache.x
    batch, kv_heads, tokens, _ = x.shape
    if token_order is None:
        token_order = torch.arange(_C.format.TILE_TOKENS, dtype=torch.uint8, device=x.device)
        token_order = token_order.expand(batch, kv_heads, tile_reader.tiles_per_head(tokens), -1).contiguous()
    with kernels.launch() as stream:
        channels = choose_channels(kernels, cache, cache.kept == 0, None, stream)
        if not cache.tiles:
            row_offsets = torch.zeros(1, dtype=torch.int32, device=x.device)
            return _storage(cache, channels, token_order, row_offsets, [0, 0, 0])
        masks, scales = _select(kernels, cache, channels, stream)
        row_offsets, totals = _offsets(kernels, cache, masks, channels, token_order, stream)
        storage = _storage(cache, channels, token_order, row_offsets, totals.tolist()[:3])
        steps.pack(kernels, x, masks, scales, 0, totals, storage.blocks.shape[0], storage.view(), stream)
    return storage


def _select(
    kernels: Kernels, cache: Cache, channels: Channels, stream: int
) -> tuple[Tensor, steps.Scales | None]:
    """Masks of what is kept, and the scales. ValueError for what the codec or the tile format cannot store."""
    x, kept = cache.x, cache.kept
    masks = torch.empty(x.shape[0] * x.shape[1] * x.shape[2] * cache.padded // 32, dtype=torch.int32, device=x.device)
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_CODES[x.dtype]
    lost = kernels.module.select_two_of_four(
        *operand,
        ROLE_CODES[cache.role],
        address(channels.order),
        kept if kept < x.shape[3] else 0,
        address(masks),
        stream,
    )
    if kept == 0:
        check_pattern(cache, lost)
    scales = channels.scales(cache.tiles)
    if scales is not None:
        refused = kernels.module.token_scales(
            *operand,
            address(masks),
            CODEC_CODES[cache.codec],
            address(scales.by_channel),
            address(scales.by_token),
            stream,
        )
        check_refused(cache, refused)
    return masks, scales


def _offsets(
    kernels: Kernels, cache: Cache, masks: Tensor, channels: Channels, token_order: Tensor, stream: int
) -> tuple[Tensor, Tensor]:
    """Where tiles begin; rows in all, rows of the longest tile, nonzeros."""
    x = cache.x
    longest = torch.empty(cache.tiles, dtype=torch.int32, device=x.device)
    row_offsets = torch.empty(cache.tiles + 1, dtype=torch.int32, device=x.device)
    totals = torch.zeros(steps.TOTALS, dtype=torch.int64, device=x.device)
    stored = kernels.module.longest_slots(
        address(masks),
        ROLE_CODES[cache.role],
        CODEC_CODES[cache.codec],
        address(channels.order),
        address(token_order),
        x.shape[0] * x.shape[1],
        x.shape[2],
        x.shape[3],
        address(longest),
        stream,
    )
    counts = torch.zeros(1, cache.padded, dtype=torch.int32, device=x.device)
    steps.offsets(kernels, longest, counts, x.shape[3], cache.codec, row_offsets, totals, stream, TWO_OF_FOUR_BITMAP)
    totals[2] = stored
    return row_offsets, totals


def _storage(
    cache: Cache, channels: Channels, token_order: Tensor, row_offsets: Tensor, totals: list[int]
) -> Storage:
    rows, max_tile_rows, nnz = totals
    if rows > MAX_ROWS:
        raise ValueError(
            f"{name_of(cache)} of shape {tuple(cache.x.shape)} would take {rows} rows of 128 bytes, at most {MAX_ROWS} "
            f"can be addressed: compress it in parts"
        )
    return Storage(
        blocks=torch.empty(rows, _C.format.LANES, dtype=torch.int32, device=cache.x.device),
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
