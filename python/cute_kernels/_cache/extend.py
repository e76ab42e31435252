"""Any number of new tokens at once, for sequences whose lengths the host knows.

Whole tiles are compressed straight from the new tokens, the rest goes to the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels._cache import page_pool
from cute_kernels._cache.pool import Pool, Windows
from cute_kernels._cache.sequences import Row
from cute_kernels._runtime.extension import TILE_TOKENS


@dataclass(frozen=True)
class Run:
    """Neighbouring rows in one state that take as many new tokens each."""

    first: int  # in the call's tensors
    count: int
    row: int  # in the cache
    compressed: int
    window: int
    tokens: int  # new ones


@dataclass(frozen=True)
class Tiles:
    """What a run's new tokens change: `stored` tiles from number `first` on, `leaving` ones that leave the window."""

    first: int
    stored: int
    leaving: int

    @classmethod
    def of(cls, run: Run, windows: Windows) -> Tiles:
        total = run.window + run.tokens
        leaving = max(0, (total - windows.recent) // TILE_TOKENS)
        if not windows.stores_full:
            return cls(run.compressed // TILE_TOKENS, leaving, leaving)
        first = (run.compressed + run.window) // TILE_TOKENS
        return cls(first, (run.compressed + total) // TILE_TOKENS - first, leaving)


def runs(rows: Sequence[int], states: Sequence[Row], tokens: Sequence[int]) -> Iterator[Run]:
    """Rows of a call, cut into as few runs as their order allows; those without new tokens are left out."""
    begin = 0
    for i in range(1, len(rows) + 1):
        same = i < len(rows) and rows[i] == rows[begin] + i - begin and tokens[i] == tokens[begin]
        if same:
            old, new = states[rows[begin]], states[rows[i]]
            same = (old.compressed, old.window) == (new.compressed, new.window)
        if not same:
            state = states[rows[begin]]
            if tokens[begin]:
                yield Run(begin, i - begin, rows[begin], state.compressed, state.window, tokens[begin])
            begin = i


def parts(windows: Windows, k: Tensor, v: Tensor, run: Run) -> tuple[list[Tensor], list[Tensor]]:
    """A run's windows, and its new tokens, the last ones of k and v (B, Hkv, T, D): keys and values."""
    rows = slice(run.row, run.row + run.count)
    old = [x[rows, :, : run.window] for x in (windows.keys, windows.values)]
    new = [x[run.first : run.first + run.count, :, x.shape[2] - run.tokens :] for x in (k, v)]
    return old, new


def store_run(
    pool: Pool,
    windows: Windows,
    k: Tensor,
    v: Tensor,
    run: Run,
    tiles: Tiles,
    numbers: Tensor,
    prune: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    constrained: Tensor | None = None,
) -> None:
    """Stores the tiles of a run. Writes over nothing that the sequences hold: `settle_run` makes the tiles theirs.

    numbers: the run's rows, int32 on the device. prune: of whole tiles k and v, before the kernels' own pruning.
    constrained: as for `page_pool.store`.
    Tiles of new tokens alone are compressed from k and v, without a copy.
    """
    if tiles.stored == 0:
        return

    def store(k: Tensor, v: Tensor, first: int, choose: bool) -> None:
        k, v = (k, v) if prune is None else prune(k, v)
        page_pool.store(pool, k, v, numbers, torch.full_like(numbers, first), choose, constrained=constrained)

    old, new = parts(windows, k, v, run)
    skipped = tiles.first * TILE_TOKENS - run.compressed  # tokens of the window whose tiles are stored
    old = [x[:, :, skipped:] for x in old]
    held = run.window - skipped
    mixed = min(tiles.stored, -(-held // TILE_TOKENS))  # tiles that have tokens of the window
    begin = mixed * TILE_TOKENS - held
    choose = tiles.first == 0 and not pool.shares_orders

    def store_new(choose: bool) -> None:
        if tiles.stored > mixed:
            keys, values = (x[:, :, begin : begin + (tiles.stored - mixed) * TILE_TOKENS] for x in new)
            store(keys, values, tiles.first + mixed, choose)

    def store_mixed(choose: bool) -> None:
        if mixed:
            pairs = zip(old, new)
            keys, values = (
                torch.cat([held, x[:, :, : max(begin, 0)]], dim=2)[:, :, : mixed * TILE_TOKENS] for held, x in pairs
            )
            store(keys, values, tiles.first, choose)

    if pool.key_scales is None and pool.value_scales is None:
        store_new(choose)  # channel orders from the larger of the two parts
        store_mixed(choose and tiles.stored == mixed)
    else:
        store_mixed(choose)  # scales from the first tile, in whichever chunks tokens come
        store_new(choose and mixed == 0)


def settle_run(windows: Windows, lengths: Tensor | None, k: Tensor, v: Tensor, run: Run, tiles: Tiles) -> None:
    """Windows and, unless None, lengths of both after `store_run` of the same."""
    rows = slice(run.row, run.row + run.count)
    gone = tiles.leaving * TILE_TOKENS
    left = run.window + run.tokens - gone
    begin = gone - run.window  # of what stays dense, in the new tokens
    for window, old, x in zip((windows.keys, windows.values), *parts(windows, k, v, run)):
        if tiles.leaving == 0:
            window[rows, :, run.window : left].copy_(x)
        else:
            window[rows, :, :left].copy_(x[:, :, begin:] if begin >= 0 else torch.cat([old[:, :, begin:], x], dim=2))
    windows.prepare_anew(rows)
    if lengths is not None:
        lengths[rows].fill_(run.compressed + gone)
        windows.lengths[rows].fill_(left)
