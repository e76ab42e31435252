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

from cute_kernels._runtime.extension import _C, CODEC_IDS, ROLE_IDS, SCALED_CODECS, TILE_FORMATS, TILE_TOKENS
from cute_kernels._storage.storage import TWO_OF_FOUR, TWO_OF_FOUR_BITMAP, Storage

_CHUNK_ELEMENTS = 1 << 22  # bounds the memory of a chunk's temporaries, some 100 bytes an element
_HALF_BITS = 16  # of a word: what each of its streams has with a codec of 16 bits


def tiles_per_head(tokens: int) -> int:
    return -(-tokens // TILE_TOKENS)


@dataclass(frozen=True)
class TileLayout:
    """E elements a lane, L lanes, of tiles of one role and padded head dim."""

    word: Tensor  # (E,) bitmap word of an element
    bit: Tensor  # (E, 1) its bit in that word
    token: Tensor  # (E, L) token position of a lane's element
    channel: Tensor  # (E, L) channel position of a lane's element
    bitmap_rows: int
    scale_rows: int

    @property
    def first_value_row(self) -> int:
        return self.bitmap_rows + self.scale_rows


@lru_cache(maxsize=64)
@_disable_current_modes()  # tables that stay: they must not be a FakeTensorMode's
def tile_layout(role: str, padded_head_dim: int, codec: str, device: torch.device) -> TileLayout:
    lanes, codec_id = _C.format.LANES, CODEC_IDS[codec]
    position = torch.tensor(_C.format.element_table(ROLE_IDS[role], padded_head_dim), device="cpu").view(lanes, -1).t()
    elements = position.shape[0]
    return TileLayout(
        word=torch.arange(elements, device=device) // _C.format.WORD_ELEMENTS,
        bit=torch.tensor(
            [[_C.format.bitmap_bit(e, codec_id)] for e in range(elements)], dtype=torch.int32, device=device
        ),
        token=(position // padded_head_dim).to(device),
        channel=(position % padded_head_dim).to(device),
        bitmap_rows=_C.format.bitmap_rows(padded_head_dim),
        scale_rows=_C.format.scale_rows(codec_id),
    )


@dataclass(frozen=True)
class ValueLayout:
    """Where a codec stores the values of streams in the value rows of a block.

    With 16 bits every stream has half of the word in every row; with fewer, streams take turns with whole words.
    """

    bits: int  # of a value
    streams: int  # of a lane
    numbers: Tensor | None  # [code] -> float32; None: a codec without scales
    codes: Tensor | None  # [code] -> whether it may be stored
    scale_index: Tensor | None  # token position -> entry of a tile's scales

    @property
    def word_values(self) -> int:
        """Of a stream in a word."""
        return max(1, 32 // self.bits if self.bits < _HALF_BITS else 1)

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    def capacity(self, value_rows: Tensor) -> Tensor:
        """How many values a stream may have in so many rows."""
        if self.bits == _HALF_BITS:
            return value_rows
        return value_rows.div(self.streams, rounding_mode="floor") * self.word_values

    def place(self, stream: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        """The value row, counted from the first, and the first bit of the value of a rank in its stream."""
        if self.bits == _HALF_BITS:
            return rank, _HALF_BITS * stream
        word = rank.div(self.word_values, rounding_mode="floor")
        return word * self.streams + stream, self.bits * rank.remainder(self.word_values)

    def of_row(self, value_row: Tensor) -> tuple[Tensor, Tensor]:
        """(rows,) -> streams and ranks of the values in these rows, (rows, V) each, from the lowest bits up."""
        if self.bits == _HALF_BITS:
            stream = torch.arange(self.streams, device=value_row.device).expand(len(value_row), -1)
            return stream, value_row[:, None].expand_as(stream)
        place = torch.arange(self.word_values, device=value_row.device)
        rank = value_row[:, None].div(self.streams, rounding_mode="floor") * self.word_values + place
        return value_row[:, None].remainder(self.streams).expand_as(rank), rank


@lru_cache(maxsize=64)
@_disable_current_modes()
def value_layout(codec: str, tile_format: str, device: torch.device) -> ValueLayout:
    codec_id = CODEC_IDS[codec]
    streams = _C.format.value_streams(codec_id, TILE_FORMATS[tile_format])
    if codec not in SCALED_CODECS:
        return ValueLayout(_C.format.value_bits(codec_id), streams, None, None, None)
    index = [_C.format.scale_index(p) for p in range(TILE_TOKENS)]
    return ValueLayout(
        _C.format.value_bits(codec_id),
        streams,
        torch.tensor(_C.format.number_table(codec_id), dtype=torch.float32, device=device),
        torch.tensor(_C.format.codes(codec_id), dtype=torch.bool, device=device),
        torch.tensor(index, device=device),
    )


def layout_of(storage: Storage) -> TileLayout:
    return tile_layout(storage.role, storage.padded_head_dim, storage.codec, storage.device)


def values_of(storage: Storage) -> ValueLayout:
    return value_layout(storage.codec, storage.tile_format, storage.device)


def chunks(storage: Storage) -> Iterator[tuple[int, int]]:
    tiles = storage.row_offsets.numel() - 1
    step = max(1, _CHUNK_ELEMENTS // (TILE_TOKENS * storage.padded_head_dim))
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
    """Bits of all bitmaps, or stored values that are not zero. Waits for the device."""
    if storage.tile_format == TWO_OF_FOUR_BITMAP:
        return sum(int(slot_bits(storage, *chunk).sum()) for chunk in chunks(storage))
    if storage.tile_format == TWO_OF_FOUR:
        return sum(int(is_nonzero(storage, stored_pairs(storage, *chunk)[0]).sum()) for chunk in chunks(storage))
    return sum(int(element_bits(storage, *chunk).sum()) for chunk in chunks(storage))


def by_stream(elements: Tensor) -> Tensor:
    """(tiles, E, L) -> (tiles, E / streams, streams, L): the elements of each value stream, in order."""
    tiles, _, lanes = elements.shape
    return elements.view(tiles, -1, _C.format.VALUE_STREAMS, lanes)


def element_codes(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, E, L) int64: the stored bits of every element, zero where nothing is stored."""
    bits, layout, values = element_bits(storage, first, last), layout_of(storage), values_of(storage)
    # An element without a bit may have rank -1: it reads rows above the values and is masked below.
    rank = by_stream(bits).cumsum(dim=1) - 1
    lane = torch.arange(_C.format.LANES, device=storage.device)
    stream = torch.arange(_C.format.VALUE_STREAMS, device=storage.device)[:, None]
    row, shift = values.place(stream, rank)
    begin = storage.row_offsets[first:last].long()[:, None, None, None] + layout.first_value_row
    stored = (storage.blocks[(begin + row).clamp(max=len(storage.blocks) - 1), lane].long() >> shift) & values.mask
    return torch.where(bits, stored.view(bits.shape), 0)


# ---- Exactly two of four ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupLayout:
    """G groups of all lanes, lane by lane, of tiles of one role and padded head dim. Words are counted in a block."""

    position: Tensor  # (G, 4) token_position * padded head dim + channel_position
    metadata_word: Tensor  # (G,)
    metadata_bit: Tensor  # (G,)

    def chosen(self, metadata: Tensor) -> Tensor:
        """(tiles, G) of two bits each -> (tiles, G, 2): positions of a group's two."""
        kept = torch.stack([metadata & 3, metadata >> 2], dim=-1)
        return self.position.expand(len(metadata), -1, -1).gather(2, kept)


@lru_cache(maxsize=64)
@_disable_current_modes()
def group_layout(role: str, padded_head_dim: int, device: torch.device) -> GroupLayout:
    table = torch.tensor(_C.format.two_of_four_groups(ROLE_IDS[role], padded_head_dim), device="cpu")
    return GroupLayout(table[:, :4].to(device), table[:, 4].to(device), table[:, 5].to(device))


def groups_of(storage: Storage) -> GroupLayout:
    return group_layout(storage.role, storage.padded_head_dim, storage.device)


@dataclass(frozen=True)
class PairLayout:
    """The values of these groups in a codec."""

    value_word: Tensor  # (G, 2)
    value_bit: Tensor  # (G, 2)
    rows: int  # of a block


@lru_cache(maxsize=64)
@_disable_current_modes()
def pair_layout(role: str, padded_head_dim: int, codec: str, device: torch.device) -> PairLayout:
    lanes, codec_id = _C.format.LANES, CODEC_IDS[codec]
    of_lane = len(group_layout(role, padded_head_dim, device).position) // lanes
    places = [[_C.format.two_of_four_place(group, i, codec_id) for i in range(2)] for group in range(of_lane)]
    row, bit = torch.tensor(places, device="cpu").repeat(lanes, 1, 1).unbind(-1)
    first = _C.format.scale_row(padded_head_dim, TILE_FORMATS[TWO_OF_FOUR]) + _C.format.scale_rows(codec_id)
    lane = torch.arange(lanes, device="cpu").repeat_interleave(of_lane)
    return PairLayout(
        value_word=((first + row) * lanes + lane[:, None]).to(device),
        value_bit=bit.to(device),
        rows=_C.format.two_of_four_rows(padded_head_dim, codec_id),
    )


def pairs_of(storage: Storage) -> PairLayout:
    return pair_layout(storage.role, storage.padded_head_dim, storage.codec, storage.device)


def pair_blocks(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, words of a block) int64."""
    rows = pairs_of(storage).rows
    return storage.blocks[first * rows : last * rows].long().view(last - first, -1)


def pair_metadata(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, G): which two of a group's four, two bits each."""
    layout = groups_of(storage)
    return pair_blocks(storage, first, last)[:, layout.metadata_word] >> layout.metadata_bit & 15


def stored_pairs(storage: Storage, first: int, last: int) -> tuple[Tensor, Tensor]:
    """(tiles, 2 G) int64 each: the stored bits of all values, and their positions."""
    layout, position = pairs_of(storage), groups_of(storage).chosen(pair_metadata(storage, first, last))
    words = pair_blocks(storage, first, last)[:, layout.value_word]
    codes = words >> layout.value_bit & values_of(storage).mask
    return codes.flatten(1), position.flatten(1)


def is_nonzero(storage: Storage, codes: Tensor) -> Tensor:
    values = values_of(storage)
    return codes & values.mask >> 1 != 0 if values.numbers is None else values.numbers[codes] != 0


# ---- At most two of four ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotLayout:
    """S slots a lane, register by register, of tiles of one padded head dim and codec. Words are counted in a block."""

    stream: Tensor  # (S,)
    word: Tensor  # (L, S)
    bit: Tensor  # (S,)
    first_value_row: int


@lru_cache(maxsize=64)
@_disable_current_modes()
def slot_layout(padded_head_dim: int, codec: str, device: torch.device) -> SlotLayout:
    lanes, codec_id = _C.format.LANES, CODEC_IDS[codec]
    groups = TILE_TOKENS * padded_head_dim // lanes // 4
    places = [_C.format.slot_place(group, i, codec_id) for group in range(groups) for i in range(2)]
    stream, row, bit = torch.tensor(places, device="cpu").unbind(-1)
    before = _C.format.scale_row(padded_head_dim, TILE_FORMATS[TWO_OF_FOUR_BITMAP])
    metadata_rows = before - (int(row.max()) + 1)
    word = (metadata_rows + row) * lanes + torch.arange(lanes, device="cpu")[:, None]
    return SlotLayout(stream.to(device), word.to(device), bit.to(device), before + _C.format.scale_rows(codec_id))


def slots_of(storage: Storage) -> SlotLayout:
    return slot_layout(storage.padded_head_dim, storage.codec, storage.device)


def _words_of_tiles(storage: Storage, first: int, last: int, word: Tensor) -> Tensor:
    """(tiles, ...) int64: the words with these numbers in every block."""
    begin = storage.row_offsets[first:last].long() * _C.format.LANES
    return storage.blocks.view(-1)[begin.view(-1, *(1 for _ in word.shape)) + word].long()


def slot_metadata(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, G): which two of a group's four are its slots, two bits each."""
    layout = groups_of(storage)
    return _words_of_tiles(storage, first, last, layout.metadata_word) >> layout.metadata_bit & 15


def slot_positions(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, L, S): token_position * padded head dim + channel_position."""
    return groups_of(storage).chosen(slot_metadata(storage, first, last)).view(last - first, _C.format.LANES, -1)


def slot_bits(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, L, S) bool: which slots are stored."""
    layout = slots_of(storage)
    return (_words_of_tiles(storage, first, last, layout.word) >> layout.bit & 1).bool()


def slot_codes(storage: Storage, first: int, last: int, bits: Tensor) -> Tensor:
    """(tiles, L, S) int64: the stored bits of every slot, zero where nothing is stored. bits: as `slot_bits`."""
    layout, values = slots_of(storage), values_of(storage)
    rank = torch.zeros(bits.shape, dtype=torch.int64, device=storage.device)
    for stream in range(values.streams):
        of_stream = layout.stream == stream
        rank += torch.where(of_stream, (bits & of_stream).cumsum(dim=2) - 1, 0)
    row, shift = values.place(layout.stream, rank.clamp(min=0))
    row += storage.row_offsets[first:last].long()[:, None, None] + layout.first_value_row
    lane = torch.arange(_C.format.LANES, device=storage.device)[:, None]
    stored = (storage.blocks[row.clamp(max=len(storage.blocks) - 1), lane].long() >> shift) & values.mask
    return torch.where(bits, stored, 0)


# ---- All tile formats ------------------------------------------------------------------------------------------------


def scale_row(storage: Storage) -> int:
    """Rows of a block before its scales and values: metadata, bitmap."""
    return _C.format.scale_row(storage.padded_head_dim, TILE_FORMATS[storage.tile_format])


def token_scales(storage: Storage, first: int, last: int) -> Tensor:
    """(tiles, 64) float32, by token position: of a codec with scales."""
    row = storage.row_offsets[first:last].long() + scale_row(storage)
    return storage.blocks[row].view(torch.bfloat16)[:, values_of(storage).scale_index].float()


def row_values(storage: Storage, rows: Tensor, value_row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of these rows, which have these numbers among the value rows of their tiles: the stored bits (rows, V, L) int64,
    and the streams and ranks (rows, V) that they are of."""
    values = values_of(storage)
    stream, rank = values.of_row(value_row)
    _, shift = values.place(stream, rank)
    return (storage.blocks[rows][:, None].long() >> shift[..., None]) & values.mask, stream, rank


def orders(storage: Storage, first: int, last: int) -> tuple[Tensor, Tensor]:
    """token_order (tiles, 64) and channel_order (tiles, padded head dim) of a chunk's tiles, int64."""
    token_order = storage.token_order.view(-1, TILE_TOKENS)[first:last].long()
    return token_order, _of_heads(storage, storage.channel_order, first, last).long()


def _of_heads(storage: Storage, by_head: Tensor | None, first: int, last: int) -> Tensor:
    """(B, Hkv, Dp) -> (tiles, Dp), that of the head of each of a chunk's tiles."""
    assert by_head is not None
    tile = torch.arange(first, last, device=storage.device)
    return by_head.view(-1, storage.padded_head_dim)[tile // storage.token_order.shape[2]]


def _stored(storage: Storage, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the tiles [first, last) may store, (tiles, N) each: stored bits, whether there is a value, positions of its
    token and of its channel."""
    padded = storage.padded_head_dim
    if storage.tile_format == TWO_OF_FOUR:
        codes, position = stored_pairs(storage, first, last)
        return codes, torch.ones_like(codes, dtype=torch.bool), position // padded, position % padded
    if storage.tile_format == TWO_OF_FOUR_BITMAP:
        bits, position = slot_bits(storage, first, last), slot_positions(storage, first, last).flatten(1)
        codes = slot_codes(storage, first, last, bits)
        return codes.flatten(1), bits.flatten(1), position // padded, position % padded
    layout, tiles = layout_of(storage), last - first
    codes, bits = element_codes(storage, first, last), element_bits(storage, first, last)
    token, channel = (of.flatten().expand(tiles, -1) for of in (layout.token, layout.channel))
    return codes.flatten(1), bits.flatten(1), token, channel


@torch.no_grad()
def operand(storage: Storage) -> Tensor:
    """(B, Hkv, T, D): what products multiply. Float32 of a codec with scales, exactly number * scales; else of the
    cache's dtype, bit for bit what is stored."""
    batch, kv_heads, tokens, head_dim = storage.shape
    padded = storage.padded_head_dim
    tiles = tiles_per_head(tokens)
    numbers = values_of(storage).numbers
    dtype = torch.int16 if numbers is None else torch.float32
    dense = torch.zeros(batch * kv_heads * tiles, TILE_TOKENS * padded, dtype=dtype, device=storage.device)
    for first, last in chunks(storage):
        token_order, channel_order = orders(storage, first, last)
        codes, is_stored, token, channel = _stored(storage, first, last)
        index = token_order.gather(1, token) * padded + channel_order.gather(1, channel)
        if numbers is None:
            elements = codes.to(torch.int16)
        else:
            of_channel = _of_heads(storage, storage.channel_scale, first, last).float().gather(1, channel)
            of_token = token_scales(storage, first, last).gather(1, token)
            # Twice: an element without a value has a code of 0, which may be no code.
            elements = torch.where(is_stored, numbers[codes] * of_token * of_channel, 0.0)
        dense[first:last].scatter_(1, index, elements)
    dense = dense.view(batch, kv_heads, tiles * TILE_TOKENS, padded)[:, :, :tokens, :head_dim].contiguous()
    return dense if numbers is not None else dense.view(storage.dtype)


def decompress(storage: Storage) -> Tensor:
    """(B, Hkv, T, D) of the cache's dtype: `operand`, rounded to it once, but not beyond its largest number."""
    dense = operand(storage)
    if storage.channel_scale is None:
        return dense
    largest = torch.finfo(storage.dtype).max
    return dense.clamp(-largest, largest).to(storage.dtype)
