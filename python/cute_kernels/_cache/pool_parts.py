"""What pools of either format of two of four have in common: keys and values apart, slots, what the rules lose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels._cache.pool import Pool
from cute_kernels._runtime.extension import TILE_TOKENS
from cute_kernels._runtime.launching import Kernels, address, compression_kernels
from cute_kernels._storage import two_of_four
from cute_kernels._storage.compressor import Cache
from cute_kernels._storage.storage import Storage
from cute_kernels._storage.two_of_four import Channels
from cute_kernels.rules.two_of_four import MagnitudeTwoOfFour, TwoOfFour


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

    def choose(self, kernels: Kernels, cache: Cache, sequences: Tensor, stream: int) -> None:
        """Orders of the sequences' channels by these tokens, 1024 of a head at most, or as in memory for values of
        exactly two of four; scales by the first tile."""
        chosen = two_of_four.choose_channels(kernels, cache, False, TILE_TOKENS, stream)
        self.channels[sequences] = chosen.order
        if self.scales is not None and chosen.scale is not None:
            self.scales[sequences] = chosen.scale


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


def lost_by(rule: TwoOfFour | MagnitudeTwoOfFour, cache: Cache, channels: Channels) -> Tensor:
    """What the rule loses to magnitude with these channel orders."""
    lost = torch.zeros((), dtype=torch.int64, device=cache.x.device)
    kept = cache.kept or cache.x.shape[3] // 2
    for row, order in zip(cache.x, channels.order):  # row by row: masks and sorted indices take many times the memory
        dense = row[None]
        mask = rule.mask_in(dense, order[None, :, : dense.shape[3]].long(), kept, cache.role)
        of_row = rule.constrained(dense, torch.where(mask, dense, 0), kept)
        assert of_row is not None
        lost += of_row
    return lost


def decompressed(pool: Pool, storage: Storage) -> Tensor:
    """The dense tokens of one sequence's tiles, (Hkv, T, D)."""
    kernels = compression_kernels(pool.device)
    out = torch.empty(storage.shape[1:], dtype=pool.dtype, device=pool.device)
    with kernels.launch() as stream:
        kernels.module.decompress(storage.view(), address(out), stream)
    return out
