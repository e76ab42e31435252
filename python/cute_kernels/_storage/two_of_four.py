"""Dense caches become storage of the tile format of exactly two of four, whose size is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_IDS, DTYPE_IDS, ROLE_IDS, SCALED_CODECS, TILE_TOKENS
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.compressor import Cache, check_refused, name_of
from cute_kernels._storage.storage import TWO_OF_FOUR, TWO_OF_FOUR_BITMAP, Storage
from cute_kernels._storage.validation import MAX_ROWS, check_size


@dataclass(frozen=True)
class Channels:
    """Of the keys or values of heads, (B, Hkv, Dp) each: position -> channel, uint8, and position -> scale, bf16, of a
    codec with scales."""

    order: Tensor
    scale: Tensor | None

    def scales(self, tiles: int) -> steps.Scales | None:
        """Those by channel, and room for those of tokens."""
        if self.scale is None:
            return None
        by_channel = torch.empty_like(self.scale).scatter_(-1, self.order.long(), self.scale)
        by_token = torch.empty(tiles * TILE_TOKENS, dtype=torch.bfloat16, device=self.order.device)
        return steps.Scales(by_channel.flatten(0, 1), by_token)


def choose_channels(kernels: Kernels, cache: Cache, promised: bool, scale_tokens: int | None, stream: int) -> Channels:
    """The order of rule "2of4", or, of values and where x has the pattern already (promised), that of memory; scales by
    the first scale_tokens tokens of x, as many as usual if None."""
    x, head_dim, is_key = cache.x, cache.x.shape[3], cache.role == "key"
    has_scales = cache.codec in SCALED_CODECS
    if not cache.tiles:
        order = steps.memory_order(x)
        return Channels(order, torch.ones_like(order, dtype=torch.bfloat16) if has_scales else None)
    by_channel = steps.channel_scales(kernels, x[:, :, :scale_tokens], stream) if has_scales else None
    has_bitmap = cache.tile_format == TWO_OF_FOUR_BITMAP
    counted = not promised if is_key else has_bitmap  # classes of values decide how long streams under a bitmap are
    if counted:
        most = min(cache.kept, head_dim // 2) if has_bitmap else head_dim // 2
        return Channels(*steps.order_channels(kernels, x, most, is_key, stream, by_channel))
    order = steps.memory_order(x)
    return Channels(order, None if by_channel is None else by_channel.view(order.shape))


def write(
    kernels: Kernels,
    cache: Cache,
    channels: Channels,
    promised: bool,
    totals: Tensor,
    stream: int,
    token_order: Tensor | None = None,
) -> Storage:
    """The cache in this format. totals: int64 (2,) zeros, on the device, which count values that the codec cannot store
    and, if promised, nonzeros beyond two of four."""
    x, tiles = cache.x, cache.tiles
    batch, kv_heads, tokens, _ = x.shape
    rows = _C.format.two_of_four_rows(cache.padded, CODEC_IDS[cache.codec])
    if tiles * rows > MAX_ROWS:
        raise ValueError(
            f"{name_of(cache)} of shape {tuple(x.shape)} would take {tiles * rows} rows of 128 bytes, at most "
            f"{MAX_ROWS} can be addressed: compress it in parts"
        )
    if token_order is None:
        token_order = torch.arange(TILE_TOKENS, dtype=torch.uint8, device=x.device)
        token_order = token_order.expand(batch, kv_heads, tile_reader.tiles_per_head(tokens), -1).contiguous()
    storage = Storage(
        blocks=torch.empty(tiles * rows, _C.format.LANES, dtype=torch.int32, device=x.device),
        row_offsets=torch.arange(0, tiles * rows + 1, rows, dtype=torch.int32, device=x.device),
        token_order=token_order,
        channel_order=channels.order,
        channel_scale=channels.scale,
        role=cache.role,
        dtype=x.dtype,
        codec=cache.codec,
        tile_format=TWO_OF_FOUR,
        shape=x.shape,
        max_tile_rows=rows if tiles else 0,
    )
    if tiles:
        _pack(kernels, cache, storage, channels, promised, totals, stream)
    return storage


def compress_caches(caches: list[Cache]) -> list[Storage]:
    """One cache, or a K/V pair that shares its token order, alike in shape, dtype and device: the two largest of every
    four are taken, channels of keys in the order of rule "2of4". kept 0: x has the pattern already, channels and tokens
    as they lie in memory. ValueError if it has not."""
    x = caches[0].x
    check_size(x.shape)
    kernels = compression_kernels(x.device)
    results: list[Storage] = []
    with kernels.launch() as stream:
        totals = torch.zeros(len(caches), 2, dtype=torch.int64, device=x.device)
        for cache, of_cache in zip(caches, totals):
            channels = choose_channels(kernels, cache, cache.kept == 0, None, stream)
            token_order = results[0].token_order if results else None  # that of memory
            results.append(write(kernels, cache, channels, cache.kept == 0, of_cache, stream, token_order))
    if any(cache.kept == 0 or cache.codec in SCALED_CODECS for cache in caches):
        for cache, (refused, lost) in zip(caches, totals.tolist()):  # waits for the device
            check_refused(cache, refused)
            if cache.kept == 0:
                check_pattern(cache, lost)
    return results


def check_pattern(cache: Cache, beyond: int) -> None:
    """beyond: nonzeros beyond two of every four."""
    if beyond:
        neighbours = "channels" if cache.role == "key" else "tokens"
        raise ValueError(
            f"{name_of(cache)} must have at most two nonzeros in every four neighbouring {neighbours} for tile_format "
            f"{cache.tile_format!r}, got {beyond} more"
        )


def _pack(
    kernels: Kernels,
    cache: Cache,
    storage: Storage,
    channels: Channels,
    promised: bool,
    totals: Tensor,
    stream: int,
) -> None:
    x, order = cache.x, storage.channel_order
    if kernels.device.type == "cuda":
        kernels.module.pack_two_of_four(address(x), x.stride()[:3], address(totals), promised, storage.view(), stream)
        return
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_IDS[x.dtype]
    masks = torch.empty(x.shape[0] * x.shape[1] * x.shape[2] * cache.padded // 32, dtype=torch.int32, device=x.device)
    totals[1] = kernels.module.select_two_of_four(
        *operand, ROLE_IDS[cache.role], address(order), 0, address(masks), stream
    )
    by_token, scales = 0, channels.scales(cache.tiles)
    if scales is not None:
        by_token = address(scales.by_token)
        totals[0] = kernels.module.token_scales(
            *operand, address(masks), CODEC_IDS[cache.codec], address(scales.by_channel), by_token, stream
        )
    kernels.module.pack(address(x), x.stride()[:3], address(masks), by_token, storage.view(), stream)
