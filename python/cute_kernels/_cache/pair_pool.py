"""A pool of pages whose keys and values are in the tile format of exactly two of four.

Tiles are written as for a contiguous storage, then copied to their slots. Channel orders and scales of channels are
chosen with a sequence's first tiles and stay. Slots have one size, so nothing is trimmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels._cache.page_config import TILE_TOKENS
from cute_kernels._cache.pool import Pool
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C
from cute_kernels._runtime.launching import address, compression_kernels
from cute_kernels._storage import two_of_four
from cute_kernels._storage.compressor import Cache
from cute_kernels._storage.storage import TWO_OF_FOUR, Storage
from cute_kernels._storage.two_of_four import Channels
from cute_kernels.rules.two_of_four import TwoOfFour, two_of_four_mask


@dataclass(frozen=True)
class Part:
    """The keys or the values of a pool."""

    role: str
    codec: str
    channels: Tensor
    scales: Tensor | None
    first_row: int  # in a slot
    rows: int

    def of(self, sequences: Tensor) -> Channels:
        scales = None if self.scales is None else self.scales[sequences]
        return Channels(self.channels[sequences], scales)


def parts_of(pool: Pool) -> Iterator[Part]:
    keys, values = pool.slot_rows.keys, pool.slot_rows.values
    yield Part("key", pool.key_codec, pool.key_channels, pool.key_scales, 0, keys)
    yield Part("value", pool.value_codec, pool.value_channels, pool.value_scales, keys, values)


def slots_of(pool: Pool, sequences: Tensor, first_tiles: Tensor, tiles: int) -> Tensor:
    """(n, Hkv, tiles) int64: those of the sequences' tiles, all of which have pages."""
    tile = first_tiles.long()[:, None] + torch.arange(tiles, device=pool.device)  # (n, tiles)
    pages = pool.page_table[sequences.long()[:, None], tile // pool.tiles_per_page].long()
    heads = torch.arange(pool.kv_heads, device=pool.device)[:, None]
    return (pages[:, None] * pool.kv_heads + heads) * pool.tiles_per_page + (tile % pool.tiles_per_page)[:, None]


def store(
    pool: Pool,
    k: Tensor,
    v: Tensor,
    sequences: Tensor,
    first_tiles: Tensor,
    new_order: bool,
    constrained: Tensor | None,
) -> None:
    """As `page_pool.store`, of sequences that all have pages for their tiles.

    constrained: int64 (2,), of keys and values: what `Rule.constrained` says is added.
    """
    kernels = compression_kernels(pool.device)
    index, slots = sequences.long(), slots_of(pool, sequences, first_tiles, k.shape[2] // TILE_TOKENS).flatten()
    for i, (part, x) in enumerate(zip(parts_of(pool), (k, v))):
        cache = Cache(checks.plain(x), part.role, 0, part.codec, None, TWO_OF_FOUR)
        totals = torch.zeros(2, dtype=torch.int64, device=pool.device)
        with kernels.launch() as stream:
            if new_order:
                chosen = two_of_four.choose_channels(kernels, cache, False, TILE_TOKENS, stream)
                part.channels[index] = chosen.order
                if part.scales is not None and chosen.scale is not None:
                    part.scales[index] = chosen.scale
            channels = part.of(index)
            storage = two_of_four.write(kernels, cache, channels, False, totals, stream)
        blocks = pool.blocks[:, part.first_row : part.first_row + part.rows]
        blocks.index_copy_(0, slots, storage.blocks.view(-1, part.rows, _C.format.LANES))
        pool.refused[i] += totals[0]
        if constrained is not None:
            constrained[i] += _lost(x, channels, part.role)


def _lost(x: Tensor, channels: Channels, role: str) -> Tensor:
    """What rule "2of4" loses to magnitude with these channel orders."""
    lost = torch.zeros((), dtype=torch.int64, device=x.device)
    rule = TwoOfFour()
    for row, order in zip(x, channels.order):  # row by row: masks and sorted indices take many times the memory of x
        dense = row[None]
        mask = two_of_four_mask(dense, order[None, :, : x.shape[3]].long(), role)
        of_row = rule.constrained(dense, torch.where(mask, dense, 0), x.shape[3] // 2)
        assert of_row is not None
        lost += of_row
    return lost


def load(pool: Pool, sequence: int, first_tile: int, tiles: int) -> tuple[Tensor, Tensor]:
    """As `page_pool.load`, of tiles that have pages."""
    kernels = compression_kernels(pool.device)
    of_sequence = torch.tensor([sequence], dtype=torch.int32, device=pool.device)
    slots = slots_of(pool, of_sequence, torch.full_like(of_sequence, first_tile), tiles).flatten()
    results = []
    for part in parts_of(pool):
        channels = part.of(of_sequence.long())
        storage = Storage(
            blocks=pool.blocks[slots, part.first_row : part.first_row + part.rows].flatten(0, 1),
            row_offsets=torch.arange(len(slots) + 1, device=pool.device).mul_(part.rows).to(torch.int32),
            token_order=pool.token_order[slots].view(1, pool.kv_heads, tiles, TILE_TOKENS),
            channel_order=channels.order,
            channel_scale=channels.scale,
            role=part.role,
            dtype=pool.dtype,
            codec=part.codec,
            tile_format=TWO_OF_FOUR,
            shape=torch.Size((1, pool.kv_heads, tiles * TILE_TOKENS, pool.head_dim)),
            max_tile_rows=part.rows,
        )
        out = torch.empty(storage.shape[1:], dtype=pool.dtype, device=pool.device)
        with kernels.launch() as stream:
            kernels.module.decompress(storage.view(), address(out), stream)
        results.append(out)
    keys, values = results
    return keys, values
