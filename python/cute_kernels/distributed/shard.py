"""What one rank holds of a sharded cache: its own tiles, and the dense window of the newest tokens."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cute_kernels._attention.problem import pack_problem
from cute_kernels._cache import extend, page_pool
from cute_kernels._cache.config import CacheConfig
from cute_kernels._cache.extend import Run
from cute_kernels._cache.pool import Share
from cute_kernels._cache.storage import CacheStorage
from cute_kernels._runtime.extension import _C, TILE_TOKENS


class Shard(CacheStorage):
    """Tile i of every sequence belongs to rank i % ranks, as its own tile i // ranks.

    `lengths` counts the tokens of all ranks' tiles, `share` those of this rank's. Two tables lead to the same pages,
    and neither ever changes: that of `pool` has an entry for every tile, where those of other ranks meet in one page a
    sequence that nothing reads; that of `_own` has this rank's tiles alone, and attention reads it. So every rank runs
    the same kernels on the same tokens, with lengths on the device, and a step can be captured in a CUDA graph.

    made_for: of the whole cache, with pages of one tile.
    """

    def __init__(self, made_for: CacheConfig, rank: int, ranks: int) -> None:
        assert made_for.page_tokens == TILE_TOKENS
        sequences, tiles = made_for.max_batch, made_for.pages_per_sequence
        share = -(-tiles // ranks)
        super().__init__(replace(made_for, pages=sequences * (share + 1)))
        self.rank, self.ranks = rank, ranks
        row = torch.arange(sequences, dtype=torch.int32, device=self.device)[:, None]
        own = row * share + torch.arange(share, dtype=torch.int32, device=self.device)
        tile = torch.arange(tiles, dtype=torch.int32, device=self.device)
        mine = tile % ranks == rank
        self.pool.page_table.copy_(torch.where(mine, row * share + tile // ranks, sequences * share + row))
        self._own = replace(self.pool, page_table=own)
        self.share = Share(torch.zeros_like(self.lengths), rank, ranks)
        self._share = self.share

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._own.page_table.nbytes + self.share.lengths.nbytes

    @property
    def has_window(self) -> bool:
        """Whether this rank attends to the dense window."""
        return self.rank == 0

    def own_problem(self, q: Tensor, scale: float, causal: bool, *, expected: tuple[int, int]) -> _C.AttentionProblem:
        """Attention of queries like q over this rank's tokens, `share.lengths`; expected: see pack_problem."""
        wanted = q.shape, q.stride(), scale, causal, expected
        known, problem = self._problem
        if problem is None or known != wanted:
            window = self.windows.attention_window if self.has_window else None
            views = self._own.key_view, self._own.value_view
            problem = pack_problem(*views, window, q, scale=scale, causal=causal, expected=expected)
            self._problem = wanted, problem
        return problem

    def store(self, k: Tensor, v: Tensor, run: Run, tiles: int) -> None:
        """As CacheStorage.store: of the tiles that get full, this rank's."""
        if tiles == 0:
            return
        first = run.compressed // TILE_TOKENS
        mine = range((self.rank - first) % self.ranks, tiles, self.ranks)
        rows = self._numbers[run.row : run.row + run.count]
        old, new = extend.parts(self.windows, k, v, run)
        # Channel orders are chosen with a sequence's first tile. A rank that gets none of the first tiles takes its
        # order from another's, which goes where nothing reads it.
        pool, wanted, before = (self._own, mine, self.share.tiles(first)) if mine else (self.pool, range(1), 0)
        if not mine and first:
            return
        keys, values = self._prune(*(_tiles(held, x, wanted) for held, x in zip(old, new)))
        first_tiles = torch.full_like(rows, before)
        page_pool.store(pool, keys, values, rows, first_tiles, new_order=first == 0, constrained=self.constrained)

    def settle(self, k: Tensor, v: Tensor, run: Run, tiles: int) -> None:
        super().settle(k, v, run, tiles)
        if tiles:
            self.share.count(self.lengths)

    def load_own(self, row: int, tiles: int) -> tuple[Tensor, Tensor]:
        """This rank's of the first `tiles` tiles of a sequence, decompressed: (k, v), each (Hkv, tokens, D)."""
        return page_pool.load(self._own, row, 0, self.share.tiles(tiles))

    def window(self, row: int, tokens: int) -> tuple[Tensor, Tensor]:
        """The dense tokens of a sequence, (k, v), each (Hkv, tokens, D)."""
        return self.windows.keys[row, :, :tokens], self.windows.values[row, :, :tokens]

    def clear(self) -> None:
        """No row has tokens any more."""
        for tensor in (self.pool.error, self.lengths, self.windows.lengths, self.share.lengths):
            tensor.zero_()


def _tiles(old: Tensor, new: Tensor, wanted: range) -> Tensor:
    """Of the tiles that tokens old and new behind them make, (n, Hkv, tokens, D), those that are wanted."""
    held = old.shape[2]
    mixed = [tile for tile in wanted if tile * TILE_TOKENS < held]  # with tokens of both
    parts = []
    for tile in mixed:
        begin, end = tile * TILE_TOKENS, (tile + 1) * TILE_TOKENS
        parts.append(old[:, :, begin:end])
        if end > held:
            parts.append(new[:, :, : end - held])
    if len(wanted) > len(mixed):
        begin = wanted[len(mixed)] * TILE_TOKENS - held
        whole = new[:, :, begin : (wanted[-1] + 1) * TILE_TOKENS - held]
        if wanted.step > 1:
            # The last one may have no others behind it, so the stride is over what is there.
            whole = whole.unflatten(2, (-1, TILE_TOKENS))[:, :, :: wanted.step].flatten(2, 3)
        parts.append(whole)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
