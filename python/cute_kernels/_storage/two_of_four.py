"""Dense caches become storage of the tile format of exactly two of four, whose size is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cute_kernels._runtime.extension import _C, CODEC_CODES, DTYPE_CODES, ROLE_CODES, SCALED_CODECS
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.compressor import Cache, check_refused, name_of
from cute_kernels._storage.storage import TWO_OF_FOUR, TWO_OF_FOUR_BITMAP, Storage
from cute_kernels._storage.validation import MAX_ROWS, check_size


def dealt_apart(counts: Tensor) -> Tensor:
    """Channels (..., D) by position, int64: densest first, ties to the lower channel, dealt to D / 4 groups back and
    forth. counts: of every channel.

    Within a group the densest has a place that rotates from group to group, so that every position modulo 8 has dense
    and empty channels alike.
    """
    densest_first = counts.sort(dim=-1, descending=True, stable=True).indices
    return densest_first[..., _rank_at(counts.shape[-1], counts.device)]


@lru_cache(maxsize=64)
@_disable_current_modes()  # a table that stays: it must not be a FakeTensorMode's
def _rank_at(head_dim: int, device: torch.device) -> Tensor:
    """Position -> rank of the channel that is dealt to it."""
    rank = torch.arange(head_dim, device="cpu")
    groups = head_dim // 4
    turn, place = rank // groups, rank % groups
    group = torch.where(turn % 2 == 0, place, groups - 1 - place)
    position = 4 * group + (turn + group // 2) % 4
    return torch.empty_like(position).scatter_(0, position, rank).to(device)


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
        by_token = torch.empty(tiles * _C.format.TILE_TOKENS, dtype=torch.bfloat16, device=self.order.device)
        return steps.Scales(by_channel.flatten(0, 1), by_token)


def choose_channels(kernels: Kernels, cache: Cache, promised: bool, scale_tokens: int | None, stream: int) -> Channels:
    """The order of rule "2of4", or, of values and where x has the pattern already (promised), that of memory; scales by
    the first scale_tokens tokens of x, as many as usual if None."""
    x, codec = cache.x, cache.codec
    batch, kv_heads, _, head_dim = x.shape
    order = torch.arange(cache.padded, dtype=torch.uint8, device=x.device).repeat(batch, kv_heads, 1)
    if not cache.tiles:
        return Channels(order, torch.ones_like(order, dtype=torch.bfloat16) if codec in SCALED_CODECS else None)
    has_bitmap = cache.tile_format == TWO_OF_FOUR_BITMAP
    most = min(cache.kept, head_dim // 2) if has_bitmap else head_dim // 2
    if cache.role == "key" and not promised:
        _, counts, _ = steps.select(kernels, x, most, stream)
        order[..., :head_dim] = dealt_apart(counts.view(order.shape)[..., :head_dim])
    elif cache.role == "value" and has_bitmap:  # whose classes decide how long streams are
        _, counts, _ = steps.select(kernels, x, most, stream)
        steps.deal(kernels, counts, head_dim, order, stream)
    if codec not in SCALED_CODECS:
        return Channels(order, None)
    by_channel = steps.channel_scales(kernels, x[:, :, :scale_tokens], stream)
    return Channels(order, by_channel.view(order.shape).gather(-1, order.long()))


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
    rows = _C.format.two_of_four_rows(cache.padded, CODEC_CODES[cache.codec])
    if tiles * rows > MAX_ROWS:
        raise ValueError(
            f"{name_of(cache)} of shape {tuple(x.shape)} would take {tiles * rows} rows of 128 bytes, at most "
            f"{MAX_ROWS} can be addressed: compress it in parts"
        )
    if token_order is None:
        token_order = torch.arange(_C.format.TILE_TOKENS, dtype=torch.uint8, device=x.device)
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
        _pack(kernels, cache, storage, channels.scales(tiles), promised, totals, stream)
    return storage


def compress_cache(cache: Cache, promised: bool, token_order: Tensor | None = None) -> Storage:
    """promised: x has two of four already, channels and tokens as they lie in memory. ValueError if it has not. Else
    the two largest of every four are taken, channels of keys in the order of rule "2of4".

    token_order: that of a cache alike, to be shared; it is that of memory.
    """
    check_size(cache.x.shape)
    kernels = compression_kernels(cache.x.device)
    with kernels.launch() as stream:
        totals = torch.zeros(2, dtype=torch.int64, device=cache.x.device)
        channels = choose_channels(kernels, cache, promised, None, stream)
        storage = write(kernels, cache, channels, promised, totals, stream, token_order)
    if promised or cache.codec in SCALED_CODECS:  # waits for the device
        refused, lost = totals.tolist()
        check_refused(cache, refused)
        if promised:
            check_pattern(cache, lost)
    return storage


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
    scales: steps.Scales | None,
    promised: bool,
    totals: Tensor,
    stream: int,
) -> None:
    x, order = cache.x, storage.channel_order
    if kernels.device.type == "cuda":
        kernels.module.pack_two_of_four(address(x), x.stride()[:3], address(totals), promised, storage.view(), stream)
        return
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_CODES[x.dtype]
    masks = torch.empty(x.shape[0] * x.shape[1] * x.shape[2] * cache.padded // 32, dtype=torch.int32, device=x.device)
    totals[1] = kernels.module.select_two_of_four(
        *operand, ROLE_CODES[cache.role], address(order), 0, address(masks), stream
    )
    by_token = 0
    if scales is not None:
        by_token = address(scales.by_token)
        totals[0] = kernels.module.token_scales(
            *operand, address(masks), CODEC_CODES[cache.codec], address(scales.by_channel), by_token, stream
        )
    kernels.module.pack(address(x), x.stride()[:3], address(masks), by_token, storage.view(), stream)
