"""Reads packed tiles with plain torch, on any device: what the reference, `validate` and `nnz` need.

Where an element lies comes from the extension's format headers; see cute_kernels/format/FORMAT.md for the format
itself. A chunk is a run of tiles [first, last), counted over (B, Hkv, tiles of a head).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels._extension import _C, ROLE_CODES

if TYPE_CHECKING:
    from cute_kernels.sparse_kv import SparseKV

MAGNITUDE_BITS = 0x7FFF  # of float16 and bfloat16 alike: all but the sign

_CHUNK_ELEMENTS = 1 << 22  # bounds the memory of a chunk's temporaries, some 100 bytes an element


def tiles_per_head(tokens: int) -> int:
    return -(-tokens // _C.format.TILE_TOKENS)


@dataclass(frozen=True)
class TileLayout:
    """E elements a lane, L lanes, of tiles of one role and padded head dim."""

    word: Tensor  # (E,) bitmap word of an element
    bit: Tensor  # (E, 1) its bit in that word
    token: Tensor  # (E, L) token position of a lane's element
    channel: Tensor  # (E, L) channel position of a lane's element
    bitmap_rows: int


@lru_cache(maxsize=64)
def tile_layout(role: str, padded_head_dim: int, device: torch.device) -> TileLayout:
    lanes = _C.format.LANES
    position = torch.tensor(_C.format.element_table(ROLE_CODES[role], padded_head_dim)).view(lanes, -1).t()
    elements = position.shape[0]
    return TileLayout(
        word=torch.arange(elements, device=device) // _C.format.WORD_ELEMENTS,
        bit=torch.tensor([[_C.format.bitmap_bit(e)] for e in range(elements)], dtype=torch.int32, device=device),
        token=(position // padded_head_dim).to(device),
        channel=(position % padded_head_dim).to(device),
        bitmap_rows=_C.format.bitmap_rows(padded_head_dim),
    )


def layout_of(kv: SparseKV) -> TileLayout:
    return tile_layout(kv.role, kv.channel_order.shape[-1], kv.device)


def chunks(kv: SparseKV) -> Iterator[tuple[int, int]]:
    tiles = kv.row_offsets.numel() - 1
    step = max(1, _CHUNK_ELEMENTS // (_C.format.TILE_TOKENS * kv.channel_order.shape[-1]))
    for first in range(0, tiles, step):
        yield first, min(first + step, tiles)


def bitmap_words(kv: SparseKV, first: int, last: int) -> Tensor:
    """(tiles, words, L) int32."""
    starts = kv.row_offsets[first:last].long()
    return kv.blocks[starts[:, None] + torch.arange(layout_of(kv).bitmap_rows, device=kv.device)]


def element_bits(kv: SparseKV, first: int, last: int) -> Tensor:
    """(tiles, E, L) bool: which elements of a lane are stored."""
    layout = layout_of(kv)
    return ((bitmap_words(kv, first, last)[:, layout.word] >> layout.bit) & 1).bool()


def by_stream(elements: Tensor) -> Tensor:
    """(tiles, E, L) -> (tiles, E / streams, streams, L): the elements of each value stream, in order."""
    tiles, _, lanes = elements.shape
    return elements.view(tiles, -1, _C.format.VALUE_STREAMS, lanes)


def element_values(kv: SparseKV, first: int, last: int) -> Tensor:
    """(tiles, E, L) int16: the bits of every element, zero where nothing is stored."""
    bits = element_bits(kv, first, last)
    rank = (
        by_stream(bits).cumsum(dim=1) - 1
    )  # before the first nonzero: the row above the values, which is a bitmap row
    row = kv.row_offsets[first:last].long()[:, None, None, None] + layout_of(kv).bitmap_rows + rank
    lane = torch.arange(_C.format.LANES, device=kv.device)
    stream = torch.arange(_C.format.VALUE_STREAMS, device=kv.device)[:, None]
    values = halves(kv)[row, lane, stream].view(bits.shape)
    return torch.where(bits, values, 0)


def halves(kv: SparseKV) -> Tensor:
    """(rows, L, streams) int16: the words of the blocks, low half first."""
    return kv.blocks.view(torch.int16).view(-1, _C.format.LANES, _C.format.VALUE_STREAMS)


def orders(kv: SparseKV, first: int, last: int) -> tuple[Tensor, Tensor]:
    """token_order (tiles, 64) and channel_order (tiles, padded head dim) of a chunk's tiles, int64."""
    tile = torch.arange(first, last, device=kv.device)
    token_order = kv.token_order.view(-1, _C.format.TILE_TOKENS)[first:last].long()
    channel_order = kv.channel_order.view(-1, kv.channel_order.shape[-1])[tile // kv.token_order.shape[2]].long()
    return token_order, channel_order
