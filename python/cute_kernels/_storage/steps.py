"""The steps of compression between pruning and a finished storage, for one device: CPU or GPU.

Callers pass the tensors that a step writes. None of the steps waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime.extension import (
    _C,
    CODEC_IDS,
    DTYPE_IDS,
    ROLE_IDS,
    SCALED_CODECS,
    TILE_FORMATS,
    TILE_TOKENS,
)
from cute_kernels._runtime.launching import Kernels, address
from cute_kernels._storage.channel_order import counted_tokens, dealt_apart
from cute_kernels._storage.storage import BITMAP
from cute_kernels._storage.tile_reader import tiles_per_head
from cute_kernels._storage.validation import MAX_ROWS, check_size

NO_NONZEROS = _C.format.NO_NONZEROS_SCALE << 16 | _C.format.NO_NONZEROS_SCALE  # scales of two tokens without nonzeros
TOTALS = 4  # rows in all, rows of the longest tile, nonzeros, values that the codec cannot store


def rows_of_tile(padded_head_dim: int, kept: int, codec: str) -> int:
    """The most rows that a tile can need with `kept` nonzeros a token; 0: any number."""
    longest = min(kept * _C.format.CLASSES, padded_head_dim) if kept else padded_head_dim
    return rows_before_values(padded_head_dim, codec) + _C.format.value_rows(longest, CODEC_IDS[codec])


def rows_before_values(padded_head_dim: int, codec: str, tile_format: str = BITMAP) -> int:
    """Rows of a tile's metadata, bitmap and scales: under a bitmap those of a tile without a nonzero."""
    before = _C.format.scale_row(padded_head_dim, TILE_FORMATS[tile_format])
    return before + _C.format.scale_rows(CODEC_IDS[codec])


def likely_rows_of_tile(padded_head_dim: int, kept: int, codec: str) -> int:
    """What tiles need on average, or some per cent more, if channels are independent of each other."""
    longest = kept + 3 + padded_head_dim // min(_C.format.HEAD_DIMS)
    likely = rows_before_values(padded_head_dim, codec) + _C.format.value_rows(longest, CODEC_IDS[codec])
    return min(rows_of_tile(padded_head_dim, kept, codec), likely)


def empty_tensors(shape: Sequence[int], kept: int, codec: str, device: torch.device) -> dict[str, Any]:
    """The storage of a cache of zeros, large enough for any that has `kept` nonzeros a token; 0: any number.

    Raises ValueError if so many rows or elements cannot be addressed.
    """
    check_size(shape)
    batch, kv_heads, tokens, head_dim = shape
    padded = _C.format.padded_head_dim(head_dim)
    tiles = batch * kv_heads * tiles_per_head(tokens)
    rows = tiles * rows_of_tile(padded, kept, codec)
    if rows > MAX_ROWS:
        raise ValueError(
            f"shape {tuple(shape)} could take {rows} rows of 128 bytes, at most {MAX_ROWS} can be addressed: "
            f"preallocate it in parts"
        )

    def in_order(count: int, *sizes: int) -> Tensor:
        return torch.arange(count, device=device).to(torch.uint8).expand(*sizes, count).contiguous()

    tensors = {
        "blocks": torch.zeros(rows, _C.format.LANES, dtype=torch.int32, device=device),
        "row_offsets": torch.arange(tiles + 1, dtype=torch.int32, device=device) * rows_before_values(padded, codec),
        "token_order": in_order(TILE_TOKENS, batch, kv_heads, tiles_per_head(tokens)),
        "channel_order": in_order(padded, batch, kv_heads),
    }
    if codec in SCALED_CODECS:
        tensors["channel_scale"] = torch.ones(batch, kv_heads, padded, dtype=torch.bfloat16, device=device)
        bitmap, shortest = _C.format.bitmap_rows(padded), rows_before_values(padded, codec)
        scales = tensors["blocks"][: tiles * shortest].view(tiles, shortest, _C.format.LANES)[:, bitmap:]
        scales.fill_(NO_NONZEROS)
    return tensors


def pruned(kernels: Kernels, x: Tensor, kept: int, stream: int) -> Tensor:
    """A contiguous copy of x with the `kept` largest elements of every token; 0: every nonzero. The rest is +0."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_IDS[x.dtype]
    kernels.module.select(*operand, kept, 0, 0, address(out), *_no_scales(kernels), stream)
    return out


def _no_scales(kernels: Kernels) -> tuple[int, ...]:
    """What a GPU's `select` takes for a codec without scales."""
    return (0, 0, 0, 0) if kernels.device.type == "cuda" else ()


@dataclass(frozen=True)
class Scales:
    """Of a narrow codec, bf16, in natural order: by_channel (B * Hkv, Dp), by_token (tiles * 64,)."""

    by_channel: Tensor
    by_token: Tensor


def _empty_scales(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=x.device)


def _empty_token_scales(x: Tensor) -> Tensor:
    """Those of `Scales.by_token`."""
    return _empty_scales(x, x.shape[0] * x.shape[1] * tiles_per_head(x.shape[2]) * TILE_TOKENS)


def _empty_selection(x: Tensor) -> tuple[Tensor, Tensor]:
    """Masks and counts, as `select` returns them."""
    batch, kv_heads, tokens, head_dim = x.shape
    heads, padded = batch * kv_heads, _C.format.padded_head_dim(head_dim)
    words = heads * tiles_per_head(tokens) * TILE_TOKENS * padded // 32
    masks = torch.empty(words, dtype=torch.int32, device=x.device)
    return masks, torch.empty(heads, padded, dtype=torch.int32, device=x.device)


def channel_scales(kernels: Kernels, x: Tensor, stream: int) -> Tensor:
    """Those of `Scales.by_channel`."""
    batch, kv_heads, _, head_dim = x.shape
    by_channel = _empty_scales(x, batch * kv_heads, _C.format.padded_head_dim(head_dim))
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_IDS[x.dtype]
    kernels.module.channel_scales(*operand, address(by_channel), stream)
    return by_channel


def memory_order(x: Tensor) -> Tensor:
    """Of the channels of a cache: (B, Hkv, Dp) uint8."""
    batch, kv_heads, _, head_dim = x.shape
    channels = torch.arange(_C.format.padded_head_dim(head_dim), dtype=torch.uint8, device=x.device)
    return channels.expand(batch, kv_heads, -1).contiguous()


def order_channels(
    kernels: Kernels, x: Tensor, kept: int, grouped: bool, stream: int, by_channel: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """As `deal`, by how often each channel is among the `kept` largest of its token and not zero, in a part of the
    tokens; kept 0: not zero. The order, (B, Hkv, Dp) uint8, and the scales `by_channel` in that order."""
    batch, kv_heads, _, head_dim = x.shape
    order = torch.empty(batch, kv_heads, _C.format.padded_head_dim(head_dim), dtype=torch.uint8, device=x.device)
    scale = None if by_channel is None else torch.empty_like(order, dtype=torch.bfloat16)
    counts = _count_kept(kernels, counted_tokens(x), kept, stream)
    deal(kernels, counts, head_dim, order, stream, by_channel, scale, grouped)
    return order, scale


def _count_kept(kernels: Kernels, x: Tensor, kept: int, stream: int) -> Tensor:
    """Those of `select`."""
    if kernels.device.type == "cpu":
        return select(kernels, x, kept, stream)[1]
    batch, kv_heads, _, head_dim = x.shape
    counts = torch.empty(batch * kv_heads, _C.format.padded_head_dim(head_dim), dtype=torch.int32, device=x.device)
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_IDS[x.dtype]
    kernels.module.select(*operand, kept, 0, address(counts), 0, *_no_scales(kernels), stream)
    return counts


def _of_selection(codec: str, scales: Scales | None, totals: Tensor | None) -> tuple[int, int, int, int]:
    """What a selection on a GPU takes of a codec: its scales and the last of the totals, which it writes."""
    if scales is None or totals is None:
        return 0, 0, 0, 0
    return CODEC_IDS[codec], address(scales.by_channel), address(scales.by_token), address(totals[-1:])


def select(
    kernels: Kernels, x: Tensor, kept: int, stream: int, codec: str = "", totals: Tensor | None = None
) -> tuple[Tensor, Tensor, Scales | None]:
    """What is kept and nonzero: masks, scratch for `balance` and `pack`; counts (B * Hkv, Dp) of every channel.

    totals: for a codec with scales, which are the third result. The last of the totals is written.
    """
    masks, counts = _empty_selection(x)
    scales = None if totals is None else Scales(_empty_scales(x, *counts.shape), _empty_token_scales(x))
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_IDS[x.dtype]
    if kernels.device.type == "cuda":
        of_codec = _of_selection(codec, scales, totals)
        kernels.module.select(*operand, kept, address(masks), address(counts), 0, *of_codec, stream)
        return masks, counts, scales
    kernels.module.select(*operand, kept, address(masks), address(counts), 0, stream)
    if scales is not None and totals is not None:
        by_channel, by_token = address(scales.by_channel), address(scales.by_token)
        kernels.module.channel_scales(*operand, by_channel, stream)
        scaling = CODEC_IDS[codec], by_channel, by_token
        totals[-1] = kernels.module.token_scales(*operand, address(masks), *scaling, stream)
    return masks, counts, scales


def select_two_of_four(
    kernels: Kernels, x: Tensor, role: str, kept: int, stream: int, codec: str = "", totals: Tensor | None = None
) -> tuple[Tensor, Tensor, Scales | None]:
    """As `select`, on a GPU, by rule "magnitude-2of4", or, kept 0, by "2of4"."""
    masks, counts = _empty_selection(x)
    scales = None if totals is None else Scales(_empty_scales(x, *counts.shape), _empty_token_scales(x))
    of_codec = _of_selection(codec, scales, totals)
    if role == "key":
        half = x.shape[3] // 2
        order, _ = order_channels(kernels, x, min(kept or half, half), True, stream)
    else:
        order = memory_order(x)
    operand = address(x), x.stride()[:3], *x.shape, DTYPE_IDS[x.dtype]
    kernels.module.select_two_of_four(
        *operand, ROLE_IDS[role], address(order), kept, address(masks), address(counts), *of_codec, stream
    )
    return masks, counts, scales


def deal(
    kernels: Kernels,
    counts: Tensor,
    head_dim: int,
    channel_order: Tensor,
    stream: int,
    by_channel: Tensor | None = None,
    channel_scale: Tensor | None = None,
    grouped: bool = False,
) -> None:
    """Channel order: channels, densest first, dealt to the classes (position mod 8), back and forth.

    A channel's class decides which value streams it adds to: dealing by density makes the streams about equally long.
    grouped: they are dealt to groups of four neighbours instead, see `dealt_apart`.
    channel_scale: takes the scales `by_channel` in that order.
    """
    heads, channels = counts.shape
    if kernels.device.type == "cuda":
        from_scale = 0 if by_channel is None else address(by_channel)
        to_scale = 0 if channel_scale is None else address(channel_scale)
        scales = from_scale, to_scale
        kernels.module.deal(address(counts), heads, head_dim, grouped, address(channel_order), *scales, stream)
        return
    if grouped:
        by_position = torch.arange(channels, device=counts.device).repeat(heads, 1)
        by_position[:, :head_dim] = dealt_apart(counts[:, :head_dim])
        channel_order.copy_(by_position.view(channel_order.shape))
    else:
        classes = _C.format.CLASSES
        densest_first = counts.argsort(dim=1, descending=True, stable=True).to(torch.uint8)
        rounds = densest_first.view(heads, channels // (2 * classes), 2, classes)
        back_and_forth = torch.stack([rounds[:, :, 0], rounds[:, :, 1].flip(-1)], dim=2)
        channel_order.copy_(back_and_forth.view(channel_order.shape))
    if by_channel is not None and channel_scale is not None:
        torch.gather(by_channel.view(channel_order.shape), -1, channel_order.long(), out=channel_scale)


def offsets(
    kernels: Kernels,
    longest: Tensor,
    counts: Tensor,
    head_dim: int,
    codec: str,
    row_offsets: Tensor,
    totals: Tensor,
    stream: int,
    tile_format: str = BITMAP,
) -> None:
    """Where tiles begin, and TOTALS but the last, from the longest value stream of every tile."""
    if kernels.device.type == "cuda":
        kernels.module.offsets(
            address(longest),
            longest.numel(),
            address(counts),
            counts.shape[0],
            head_dim,
            CODEC_IDS[codec],
            TILE_FORMATS[tile_format],
            address(row_offsets),
            address(totals),
            stream,
        )
        return
    codec_id, padded, form = CODEC_IDS[codec], counts.shape[1], TILE_FORMATS[tile_format]
    rows_of = torch.tensor([_C.format.value_rows(n, codec_id, form) for n in range(padded + 1)], device="cpu")
    rows = rows_of[longest.long()] + rows_before_values(padded, codec, tile_format)
    ends = rows.cumsum(dim=0)
    row_offsets[0] = 0
    row_offsets[1:] = ends  # may wrap around: callers refuse such totals
    totals[:-1] = torch.stack([ends[-1], rows.max(), counts.sum()])


def pack(
    kernels: Kernels,
    x: Tensor,
    masks: Tensor,
    scales: Scales | None,
    kept: int,
    totals: Tensor,
    capacity: int,
    view: _C.SparseView,
    stream: int,
) -> None:
    """Writes the blocks; on a GPU, where the total is not known here, only if they fit into `capacity` rows."""
    operand = address(x), x.stride()[:3], address(masks), 0 if scales is None else address(scales.by_token)
    if kernels.device.type == "cuda":
        kernels.module.pack(*operand, kept, address(totals), capacity, view, stream)
    else:
        kernels.module.pack(*operand, view, stream)
