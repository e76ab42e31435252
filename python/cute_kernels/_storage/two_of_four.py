"""Dense caches become storage of the tile format of exactly two of four, whose size is known beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_CODES, DTYPE_CODES, ROLE_CODES, SCALED_CODECS
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.compressor import Cache, check_refused, name_of
from cute_kernels._storage.storage import TWO_OF_FOUR, Storage
from cute_kernels._storage.validation import MAX_ROWS, check_size


def dealt_apart(counts: Tensor) -> Tensor:
    """Channels (..., D) by position, int64: densest first, ties to the lower channel, dealt to D / 4 groups back and
    forth. counts: of every channel.

    Within a group the densest has a place that rotates from group to group, so that every position modulo 8 has dense
    and empty channels alike.
    """
    head_dim = counts.shape[-1]
    rank = torch.arange(head_dim, device=counts.device)
    groups = head_dim // 4
    turn, place = rank // groups, rank % groups
    group = torch.where(turn % 2 == 0, place, groups - 1 - place)
    position = 4 * group + (turn + group // 2) % 4
    rank_at = torch.empty_like(position).scatter_(0, position, rank)
    return counts.sort(dim=-1, descending=True, stable=True).indices[..., rank_at]


def compress_cache(cache: Cache, promised: bool, token_order: Tensor | None = None) -> Storage:
    """promised: x has two of four already, channels and tokens as they lie in memory. ValueError if it has not. Else
    the two largest of every four are taken, channels of keys in the order of rule "2of4".

    token_order: that of a cache alike, to be shared; it is that of memory.
    """
    x, role, codec = cache.x, cache.role, cache.codec
    check_size(x.shape)
    kernels = compression_kernels(x.device)
    if kernels.device.type == "cuda":
        raise RuntimeError(
            "the tile format 'two_of_four' has no kernels for a CUDA device yet: pass tile_format='bitmap'"
        )
    batch, kv_heads, tokens, _ = x.shape
    padded, tiles = cache.padded, cache.tiles
    tiles_of_head, rows = tile_reader.tiles_per_head(tokens), _C.format.two_of_four_rows(padded, CODEC_CODES[codec])
    if tiles * rows > MAX_ROWS:
        raise ValueError(
            f"{name_of(cache)} of shape {tuple(x.shape)} would take {tiles * rows} rows of 128 bytes, at most "
            f"{MAX_ROWS} can be addressed: compress it in parts"
        )
    with kernels.launch() as stream:
        # Values that the codec cannot store, and nonzeros beyond two of four.
        totals = torch.zeros(2, dtype=torch.int64, device=x.device)
        scales = steps.channel_scales(kernels, x, totals[:1], stream) if codec in SCALED_CODECS and tiles else None
        order = _channel_order(kernels, cache, promised, stream)
        if token_order is None:
            token_order = torch.arange(_C.format.TILE_TOKENS, device=x.device).to(torch.uint8)
            token_order = token_order.expand(batch, kv_heads, tiles_of_head, -1).contiguous()
        storage = Storage(
            blocks=torch.empty(tiles * rows, _C.format.LANES, dtype=torch.int32, device=x.device),
            row_offsets=torch.arange(tiles + 1, device=x.device).mul_(rows).to(torch.int32),
            token_order=token_order,
            channel_order=order,
            channel_scale=_channel_scale(scales, order, codec),
            role=role,
            dtype=x.dtype,
            codec=codec,
            tile_format=TWO_OF_FOUR,
            shape=x.shape,
            max_tile_rows=rows if tiles else 0,
        )
        if tiles:
            _pack(kernels, cache, storage, scales, totals, stream)
    if promised or codec in SCALED_CODECS:  # waits for the device
        refused, lost = totals.tolist()
        check_refused(cache, refused)
        if promised and lost:
            raise ValueError(
                f"{name_of(cache)} must have at most two nonzeros in every four neighbouring "
                f"{'channels' if role == 'key' else 'tokens'} for tile_format 'two_of_four', got {lost} more"
            )
    return storage


def _channel_order(kernels: Kernels, cache: Cache, promised: bool, stream: int) -> Tensor:
    batch, kv_heads, _, head_dim = cache.x.shape
    order = torch.arange(cache.padded, device=cache.x.device).to(torch.uint8).repeat(batch, kv_heads, 1)
    if cache.role == "key" and not promised and cache.tiles:
        _, counts = steps.select(kernels, cache.x, head_dim // 2, stream)
        order[..., :head_dim] = dealt_apart(counts.view(order.shape)[..., :head_dim])
    return order


def _channel_scale(scales: steps.Scales | None, order: Tensor, codec: str) -> Tensor | None:
    if scales is not None:
        return scales.by_channel.view(order.shape).gather(-1, order.long())
    return torch.ones(order.shape, dtype=torch.bfloat16, device=order.device) if codec in SCALED_CODECS else None


def _pack(
    kernels: Kernels, cache: Cache, storage: Storage, scales: steps.Scales | None, totals: Tensor, stream: int
) -> None:
    x, order = cache.x, storage.channel_order
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_CODES[x.dtype]
    masks = torch.empty(x.shape[0] * x.shape[1] * x.shape[2] * cache.padded // 32, dtype=torch.int32)
    totals[1] = kernels.module.select_two_of_four(
        *operand, ROLE_CODES[cache.role], address(order), address(masks), stream
    )
    by_token = 0
    if scales is not None:
        by_token = address(scales.by_token)
        totals[0] = kernels.module.token_scales(
            *operand, address(masks), CODEC_CODES[cache.codec], address(scales.by_channel), by_token, stream
        )
    kernels.module.pack(address(x), x.stride()[:3], address(masks), by_token, storage.view(), stream)
