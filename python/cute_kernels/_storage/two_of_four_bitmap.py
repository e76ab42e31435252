"""Dense caches become storage of the tile format of at most two of four: metadata, and a bitmap over what it names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_CODES, DTYPE_CODES, ROLE_CODES
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.compressor import Cache, check_refused, name_of
from cute_kernels._storage.storage import TWO_OF_FOUR_BITMAP, Storage
from cute_kernels._storage.two_of_four import Channels, check_pattern, choose_channels
from cute_kernels._storage.validation import MAX_ROWS, check_size


@dataclass(frozen=True)
class _Parts:
    """What a storage consists of besides its blocks, and what `pack` needs to write those."""

    channels: Channels
    masks: Tensor
    scales: steps.Scales | None
    longest: Tensor  # stream of each tile

    def operand(self, codec: str) -> tuple[int, ...]:
        return address(self.masks), CODEC_CODES[codec], address(self.channels.order), address(self.longest)


def compress_caches(caches: list[Cache]) -> list[Storage]:
    """One cache, or a K/V pair that shares its token order, alike in shape, dtype and device: the two largest of every
    four, of which `kept` of a token, channels of keys in the order of rule "magnitude-2of4". kept 0: x has the pattern
    already, channels and tokens as they lie in memory. ValueError if it has not."""
    x = caches[0].x
    check_size(x.shape)
    kernels = compression_kernels(x.device)
    if kernels.device.type == "cuda":
        raise RuntimeError(
            f"there are no CUDA kernels that compress into tile_format {TWO_OF_FOUR_BITMAP!r}: compress on the CPU, and "
            f"move the result by `to`"
        )
    batch, kv_heads, tokens, head_dim = x.shape
    order_shape = (batch, kv_heads, tile_reader.tiles_per_head(tokens), _C.format.TILE_TOKENS)
    token_order = torch.empty(order_shape, dtype=torch.uint8, device=x.device)
    with kernels.launch() as stream:
        if not caches[0].tiles:
            return [
                _storage(cache, choose_channels(kernels, cache, True, None, stream), token_order, None)
                for cache in caches
            ]
        parts = [_select(kernels, cache, stream) for cache in caches]
        none = 0, 0, 0, 0
        operands = {cache.role: part.operand(cache.codec) for cache, part in zip(caches, parts)}
        stored = kernels.module.order_slots(
            *operands.get("key", none),
            *operands.get("value", none),
            batch * kv_heads,
            tokens,
            head_dim,
            address(token_order),
            stream,
        )
        results: list[Storage] = []
        for cache, part in zip(caches, parts):
            totals = torch.zeros(steps.TOTALS, dtype=torch.int64, device=x.device)
            row_offsets = torch.empty(cache.tiles + 1, dtype=torch.int32, device=x.device)
            counts = torch.zeros(1, cache.padded, dtype=torch.int32, device=x.device)
            steps.offsets(
                kernels, part.longest, counts, head_dim, cache.codec, row_offsets, totals, stream, TWO_OF_FOUR_BITMAP
            )
            totals[2] = stored[0 if cache.role == "key" else 1]
            storage = _storage(cache, part.channels, token_order, row_offsets, *totals.tolist()[:3])
            rows = storage.blocks.shape[0]
            steps.pack(kernels, cache.x, part.masks, part.scales, 0, totals, rows, storage.view(), stream)
            results.append(storage)
    return results


def _select(kernels: Kernels, cache: Cache, stream: int) -> _Parts:
    """ValueError for what the codec or the tile format cannot store."""
    x, kept = cache.x, cache.kept
    channels = choose_channels(kernels, cache, kept == 0, None, stream)
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
    return _Parts(channels, masks, scales, torch.empty(cache.tiles, dtype=torch.int32, device=x.device))


def _storage(
    cache: Cache,
    channels: Channels,
    token_order: Tensor,
    row_offsets: Tensor | None,
    rows: int = 0,
    max_tile_rows: int = 0,
    nnz: int = 0,
) -> Storage:
    if rows > MAX_ROWS:
        raise ValueError(
            f"{name_of(cache)} of shape {tuple(cache.x.shape)} would take {rows} rows of 128 bytes, at most {MAX_ROWS} "
            f"can be addressed: compress it in parts"
        )
    device = cache.x.device
    return Storage(
        blocks=torch.empty(rows, _C.format.LANES, dtype=torch.int32, device=device),
        row_offsets=torch.zeros(1, dtype=torch.int32, device=device) if row_offsets is None else row_offsets,
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
