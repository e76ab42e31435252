"""The steps of compression between pruning and a finished storage, for one device: CPU or GPU.

Callers pass the tensors that a step writes. None of the steps waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_CODES, DTYPE_CODES
from cute_kernels._runtime.launching import Kernels, address
from cute_kernels._storage.tile_reader import tiles_per_head
from cute_kernels._storage.validation import MAX_ROWS, check_size

TOTALS = 3  # rows in all, rows of the longest tile, nonzeros


def rows_of_tile(padded_head_dim: int, kept: int, codec: str) -> int:
    """The most rows that a tile can need with `kept` nonzeros a token; 0: any number."""
    longest = min(kept * _C.format.CLASSES, padded_head_dim) if kept else padded_head_dim
    return _C.format.bitmap_rows(padded_head_dim) + _C.format.value_rows(longest, CODEC_CODES[codec])


def likely_rows_of_tile(padded_head_dim: int, kept: int, codec: str) -> int:
    """What tiles need on average, or some per cent more, if channels are independent of each other."""
    longest = kept + 3 + padded_head_dim // min(_C.format.HEAD_DIMS)
    likely = _C.format.bitmap_rows(padded_head_dim) + _C.format.value_rows(longest, CODEC_CODES[codec])
    return min(rows_of_tile(padded_head_dim, kept, codec), likely)


def empty_tensors(shape: Sequence[int], kept: int, codec: str, device: torch.device) -> dict[str, Any]:
    """The storage of a cache of zeros, large enough for any that has `kept` nonzeros a token; 0: any number.

    Raises ValueError if so many rows or elements cannot be addressed.
    """
    check_size(shape)
    batch, kv_heads, tokens, head_dim = shape
    padded, tile_tokens = _C.format.padded_head_dim(head_dim), _C.format.TILE_TOKENS
    tiles = batch * kv_heads * tiles_per_head(tokens)
    rows = tiles * rows_of_tile(padded, kept, codec)
    if rows > MAX_ROWS:
        raise ValueError(
            f"shape {tuple(shape)} could take {rows} rows of 128 bytes, at most {MAX_ROWS} can be addressed: "
            f"preallocate it in parts"
        )

    def in_order(count: int, *sizes: int) -> Tensor:
        return torch.arange(count, device=device).to(torch.uint8).expand(*sizes, count).contiguous()

    return {
        "blocks": torch.zeros(rows, _C.format.LANES, dtype=torch.int32, device=device),
        "row_offsets": torch.arange(tiles + 1, dtype=torch.int32, device=device) * _C.format.bitmap_rows(padded),
        "token_order": in_order(tile_tokens, batch, kv_heads, tiles_per_head(tokens)),
        "channel_order": in_order(padded, batch, kv_heads),
    }


def pruned(kernels: Kernels, x: Tensor, kept: int, stream: int) -> Tensor:
    """A contiguous copy of x with the `kept` largest elements of every token; 0: every nonzero. The rest is +0."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.module.select(address(x), x.stride()[:3], *x.shape, DTYPE_CODES[x.dtype], kept, 0, 0, address(out), stream)
    return out


def quantized(kernels: Kernels, x: Tensor, codec: str, stream: int) -> Tensor:
    """A contiguous copy of x with every element as the codec gives it back."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    codes = DTYPE_CODES[x.dtype], CODEC_CODES[codec]
    kernels.module.quantize(address(x), x.stride()[:3], *x.shape, *codes, address(out), stream)
    return out


def select(kernels: Kernels, x: Tensor, kept: int, stream: int) -> tuple[Tensor, Tensor]:
    """What is kept and nonzero: masks, scratch for `balance` and `pack`; counts (B * Hkv, Dp) of every channel."""
    batch, kv_heads, tokens, head_dim = x.shape
    padded = _C.format.padded_head_dim(head_dim)
    heads, tile_words = batch * kv_heads, _C.format.TILE_TOKENS * padded // 32
    masks = torch.empty(heads * tiles_per_head(tokens) * tile_words, dtype=torch.int32, device=x.device)
    counts = torch.empty(heads, padded, dtype=torch.int32, device=x.device)
    kernels.module.select(
        address(x),
        x.stride()[:3],
        *x.shape,
        DTYPE_CODES[x.dtype],
        kept,
        address(masks),
        address(counts),
        0,
        stream,
    )
    return masks, counts


def deal(kernels: Kernels, counts: Tensor, head_dim: int, channel_order: Tensor, stream: int) -> None:
    """Channel order: channels, densest first, dealt to the classes (position mod 8), back and forth.

    A channel's class decides which value streams it adds to: dealing by density makes the streams about equally long.
    """
    heads, channels = counts.shape
    if kernels.device.type == "cuda":
        kernels.module.deal(address(counts), heads, head_dim, address(channel_order), stream)
        return
    classes = _C.format.CLASSES
    densest_first = counts.argsort(dim=1, descending=True, stable=True).to(torch.uint8)
    rounds = densest_first.view(heads, channels // (2 * classes), 2, classes)
    back_and_forth = torch.stack([rounds[:, :, 0], rounds[:, :, 1].flip(-1)], dim=2)
    channel_order.copy_(back_and_forth.view(channel_order.shape))


def offsets(
    kernels: Kernels,
    longest: Tensor,
    counts: Tensor,
    head_dim: int,
    codec: str,
    row_offsets: Tensor,
    totals: Tensor,
    stream: int,
) -> None:
    """Where tiles begin, and TOTALS, from the longest value stream of every tile."""
    if kernels.device.type == "cuda":
        kernels.module.offsets(
            address(longest),
            longest.numel(),
            address(counts),
            counts.shape[0],
            head_dim,
            address(row_offsets),
            address(totals),
            stream,
        )
        return
    per_row = _C.format.values_per_row(CODEC_CODES[codec])
    rows = (longest.long() + per_row - 1) // per_row + _C.format.bitmap_rows(counts.shape[1])
    ends = rows.cumsum(dim=0)
    row_offsets[0] = 0
    row_offsets[1:] = ends  # may wrap around: callers refuse such totals
    totals.copy_(torch.stack([ends[-1], rows.max(), counts.sum()]))


def pack(
    kernels: Kernels,
    x: Tensor,
    masks: Tensor,
    kept: int,
    totals: Tensor,
    capacity: int,
    view: _C.SparseView,
    stream: int,
) -> None:
    """Writes the blocks; on a GPU, where the total is not known here, only if they fit into `capacity` rows."""
    if kernels.device.type == "cuda":
        kernels.module.pack(address(x), x.stride()[:3], address(masks), kept, address(totals), capacity, view, stream)
    else:
        kernels.module.pack(address(x), x.stride()[:3], address(masks), view, stream)
