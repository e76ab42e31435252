"""Dense caches become storage of the tile format of at most two of four: metadata, and a bitmap over what it names."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_CODES, DTYPE_CODES, ROLE_CODES, SCALED_CODECS
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.compressor import Cache, check_refused, name_of
from cute_kernels._storage.storage import TWO_OF_FOUR_BITMAP, Storage
from cute_kernels._storage.two_of_four import check_pattern
from cute_kernels._storage.validation import MAX_ROWS, check_size


def compress_cache(cache: Cache, key_order: Tensor | None, token_order: Tensor | None = None) -> Storage:
    """x has the pattern already. ValueError if it has not.

    key_order: (B, Hkv, D) int64, the channels of keys whose fours are neighbours; None: as they lie in memory.
    token_order: that of a cache alike, to be shared; it is that of memory.
    """
    check_size(cache.x.shape)
    kernels = compression_kernels(cache.x.device)
    if kernels.device.type == "cuda":
        raise RuntimeError(
            f"there are no CUDA kernels that compress into tile_format {TWO_OF_FOUR_BITMAP!r}: compress on the CPU, and "
            f"move the result by `to`"
        )
    x, codec = cache.x, cache.codec
    batch, kv_heads, tokens, _ = x.shape
    tiles_per_head = tile_reader.tiles_per_head(tokens)
    if token_order is None:
        token_order = torch.arange(_C.format.TILE_TOKENS, dtype=torch.uint8, device=x.device)
        token_order = token_order.expand(batch, kv_heads, tiles_per_head, -1).contiguous()
    order = torch.arange(cache.padded, dtype=torch.uint8, device=x.device).repeat(batch, kv_heads, 1)
    channel_scale = torch.ones_like(order, dtype=torch.bfloat16) if codec in SCALED_CODECS else None
    row_offsets = torch.zeros(cache.tiles + 1, dtype=torch.int32, device=x.device)
    rows = max_tile_rows = nnz = 0
    with kernels.launch() as stream:
        if cache.tiles:
            totals = torch.zeros(steps.TOTALS, dtype=torch.int64, device=x.device)
            masks, counts, scales = steps.select(
                kernels, x, 0, stream, codec, totals if codec in SCALED_CODECS else None
            )
            by_channel = None if scales is None else scales.by_channel
            if cache.role == "value":
                steps.deal(kernels, counts, x.shape[3], order, stream, by_channel, channel_scale)
            elif key_order is not None:
                order[..., : x.shape[3]] = key_order
            if by_channel is not None and channel_scale is not None and cache.role == "key":
                torch.gather(by_channel.view(order.shape), -1, order.long(), out=channel_scale)
            check_refused(cache, int(totals[-1]))
            check_pattern(cache, _beyond_two(kernels, cache, order, stream))
            longest = torch.empty(cache.tiles, dtype=torch.int32, device=x.device)
            kernels.module.longest_slots(
                address(masks),
                ROLE_CODES[cache.role],
                CODEC_CODES[codec],
                address(order),
                address(token_order),
                batch * kv_heads,
                tokens,
                x.shape[3],
                address(longest),
                stream,
            )
            steps.offsets(
                kernels, longest, counts, x.shape[3], codec, row_offsets, totals, stream, TWO_OF_FOUR_BITMAP
            )
            rows, max_tile_rows, nnz, _ = totals.tolist()
        if rows > MAX_ROWS:
            raise ValueError(
                f"{name_of(cache)} of shape {tuple(x.shape)} would take {rows} rows of 128 bytes, at most {MAX_ROWS} "
                f"can be addressed: compress it in parts"
            )
        storage = Storage(
            blocks=torch.empty(rows, _C.format.LANES, dtype=torch.int32, device=x.device),
            row_offsets=row_offsets,
            token_order=token_order,
            channel_order=order,
            channel_scale=channel_scale,
            role=cache.role,
            dtype=x.dtype,
            codec=codec,
            tile_format=TWO_OF_FOUR_BITMAP,
            shape=x.shape,
            max_tile_rows=max_tile_rows,
            nnz=nnz,
        )
        if cache.tiles:
            steps.pack(kernels, x, masks, scales, 0, totals, rows, storage.view(), stream)
    return storage


def _beyond_two(kernels: Kernels, cache: Cache, order: Tensor, stream: int) -> int:
    """How many nonzeros there are beyond two of every four."""
    x = cache.x
    masks = torch.empty(x.shape[0] * x.shape[1] * x.shape[2] * cache.padded // 32, dtype=torch.int32, device=x.device)
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_CODES[x.dtype]
    return kernels.module.select_two_of_four(
        *operand, ROLE_CODES[cache.role], address(order), address(masks), stream
    )
