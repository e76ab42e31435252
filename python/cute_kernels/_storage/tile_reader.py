"""Reads packed tiles with plain torch, on any device: what the reference backend, `validate` and `nnz` need.

The extension's format headers say where an element lies; see docs/format.md for the format itself. A
chunk is a run of tiles [first, last), counted over (B, Hkv, tiles of a head).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cute_kernels._runtime.extension import _C, CODEC_CODES, DTYPE_CODES, ROLE_CODES
from cute_kernels._storage.storage import Storage

_CHUNK_ELEMENTS = 1 << 22  # bounds the memory of a chunk's temporaries, some 100 bytes an element
_HALF_BITS = 16  # of a word that one of its streams has


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
@_disable_current_modes()  # tables that stay: they must not be a FakeTensorMode's
def tile_layout(role: str, padded_head_dim: int, device: torch.device) -> TileLayout:
    lanes = _C.format.LANES
    position = (
        torch.tensor(_C.format.element_table(ROLE_CODES[role], padded_head_dim), device="cpu").view(lanes, -1).t()
    )
    elements = position.shape[0]
    return TileLayout(
        word=torch.arange(elements, device=device) // _C.format.WORD_ELEMENTS,
        bit=torch.tensor([[_C.format.bitmap_bit(e)] for e in range(elements)], dtype=torch.int32, device=device),
        token=(position // padded_head_dim).to(device),
        channel=(position % padded_head_dim).to(device),
        bitmap_rows=_C.format.bitmap_rows(padded_head_dim),
    )


@dataclass(frozen=True)
class ValueLayout:
    """How a codec stores the values of a stream in the stream's 16 bits of every row's word."""

    per_row: int
    bits: int  # of a value
    table: Tensor | None  # stored bits -> bits of the cache's dtype, int16; None: they are the same

    @property
    def magnitude_bits(self) -> int:
        """All bits of a stored value but its sign."""
        return (1 << (self.bits - 1)) - 1


@lru_cache(maxsize=64)
@_disable_current_modes()
def value_layout(codec: str, dtype: torch.dtype, device: torch.device) -> ValueLayout:
    code = CODEC_CODES[codec]
    per_row = _C.format.values_per_row(code)
    decoded = _C.format.decode_table(code, DTYPE_CODES[dtype])
    table = torch.tensor(decoded, dtype=torch.int32, device="cpu").to(torch.int16).to(device) if decoded else None
    return ValueLayout(per_row, _HALF_BITS // per_row, table)


def layout_of(storage: Storage) -> TileLayout:
    return tile_layout(storage.role, storage.padded_head_dim, storage.device)


def values_of(storage: Storage) -> ValueLayout:
    return value_layout(storage.codec, storage.dtype, storage.device)


def chunks(storage: Storage) -> Iterator[tuple[int, int]]:
    tiles = storage.row_offsets.numel() - 1
    step = max(1, _CHUNK_ELEMENTS // (_C.format.TILE_TOKENS * storage.padded_head_dim))
    for first in range(0, tiles, step):
        yield first, min(first + step, tiles)


def bitmap_words(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, words, L) int32."""
    starts = storage.row_offsets[first:last].long()
    return storage.blocks[starts[:, None] + torch.arange(layout_of(storage).bitmap_rows, device=storage.device)]


def element_bits(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, E, L) bool: which elements of a lane are stored."""
    layout = layout_of(storage)
    return ((bitmap_words(storage, first, last)[:, layout.word] >> layout.bit) & 1).bool()


def count_nonzeros(storage: Storage) -> int:
    """Bits of all bitmaps. Waits for the device."""
    return sum(int(element_bits(storage, *chunk).sum()) for chunk in chunks(storage))


def by_stream(elements: Tensor) -> Tensor:
    """(tiles, E, L) -> (tiles, E / streams, streams, L): the elements of each value stream, in order."""
    tiles, _, lanes = elements.shape
    return elements.view(tiles, -1, _C.format.VALUE_STREAMS, lanes)


def element_values(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, E, L) int16: every element in the bits of the cache's dtype, zero where nothing is stored."""
    bits, values = element_bits(storage, first, last), values_of(storage)
    # An element without a bit may have rank -1: it reads the row above the values, a bitmap row, and is masked below.
    rank = by_stream(bits).cumsum(dim=1) - 1
    begin = storage.row_offsets[first:last].long()[:, None, None, None] + layout_of(storage).bitmap_rows
    lane = torch.arange(_C.format.LANES, device=storage.device)
    stream = torch.arange(_C.format.VALUE_STREAMS, device=storage.device)[:, None]
    row = begin + rank.div(values.per_row, rounding_mode="floor")
    stored = halves(storage)[row, lane, stream]
    if values.table is not None:
        shift = rank.remainder(values.per_row) * values.bits
        stored = values.table[(stored.long() >> shift) & ((1 << values.bits) - 1)]
    return torch.where(bits, stored.view(bits.shape), 0)


def halves(storage: Storage) -> Tensor:
    """(rows, L, streams) int16: the words of the blocks, low half first."""
    return storage.blocks.view(torch.int16).view(-1, _C.format.LANES, _C.format.VALUE_STREAMS)


def stored_values(storage: Storage, rows: Tensor) -> Tensor:
    """(rows, values of a row, L, streams) int64: the bits of the values in these rows, first to last of a stream."""
    values = values_of(storage)
    shift = torch.arange(values.per_row, device=storage.device)[:, None, None] * values.bits
    return (halves(storage)[rows][:, None].long() >> shift) & ((1 << values.bits) - 1)


def orders(storage: Storage, first: int, last: int) -> tuple[Tensor, Tensor]:
    """token_order (tiles, 64) and channel_order (tiles, padded head dim) of a chunk's tiles, int64."""
    tile = torch.arange(first, last, device=storage.device)
    token_order = storage.token_order.view(-1, _C.format.TILE_TOKENS)[first:last].long()
    heads = storage.channel_order.view(-1, storage.padded_head_dim)
    return token_order, heads[tile // storage.token_order.shape[2]].long()


@torch.no_grad()
def decompress(storage: Storage) -> Tensor:
    """(B, Hkv, T, D) of the cache's dtype, bit for bit what is stored."""
    batch, kv_heads, tokens, head_dim = storage.shape
    padded, tile_tokens, layout = storage.padded_head_dim, _C.format.TILE_TOKENS, layout_of(storage)
    tiles = tiles_per_head(tokens)
    bits = torch.zeros(batch * kv_heads * tiles, tile_tokens * padded, dtype=torch.int16, device=storage.device)
    for first, last in chunks(storage):
        token_order, channel_order = orders(storage, first, last)
        index = token_order[:, layout.token] * padded + channel_order[:, layout.channel]  # (tiles, E, L)
        bits[first:last].scatter_(1, index.flatten(1), element_values(storage, first, last).flatten(1))
    dense = bits.view(batch, kv_heads, tiles * tile_tokens, padded)[:, :, :tokens, :head_dim]
    return dense.contiguous().view(storage.dtype)
