"""The rows of a KVCache: which are in use, which pages they share, and how they move, shrink and grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels._cache import checks as cache_checks
from cute_kernels._cache.config import CacheConfig, grown
from cute_kernels._cache.core import CacheCore
from cute_kernels._cache.exclusive import Change, Exclusive
from cute_kernels._cache.sequences import Row, Target
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import TILE_TOKENS


def core_of(cache: CacheRows) -> CacheCore:
    """What works inside a KVCache. For the package's own use."""
    return cache._core


exclusive = Exclusive(core_of)


class CacheRows:
    """What KVCache does with whole sequences."""

    def __init__(self, made_for: CacheConfig) -> None:
        self._core = CacheCore(made_for)

    @property
    def max_batch(self) -> int:
        return self._core.config.max_batch

    @property
    def capacity(self) -> int:
        return self._core.config.capacity

    @property
    def batch(self) -> int:
        """Rows up to the last one in use."""
        return self._core.table.batch

    @exclusive
    @torch.no_grad()
    def reserve(self, tokens: int) -> None:
        """Takes pages for so many more tokens of every sequence in use, and copies shared pages that they write to.

        After this, graphs captured from append and attend can be replayed for that many tokens. Eager appends use
        reserved pages too. A sequence that is freed, cut back to fewer tiles or replaced gives its reserved pages back.

        Raises TypeError or ValueError for a wrong number, RuntimeError, before anything changes, where a sequence would
        exceed the capacity or all together the pages.
        """
        core = self._core
        more = checks.integer(tokens, "tokens")
        if more < 0:
            raise ValueError(f"tokens must be at least 0, got {more}")
        core.refresh("reserve")
        rows = [i for i, row in enumerate(core.table.rows) if row.used]
        core.begin("reserve", rows)
        core.storage.apply(core.table.provide(rows, [more] * len(rows), private=True))

    @exclusive
    @torch.no_grad()
    def grow(self, *, capacity: int | None = None, max_batch: int | None = None) -> None:
        """Raises the tokens that a sequence can have to `capacity` and the sequences to `max_batch` (None: as before);
        the pool gets at least the pages for all of that.

        The content is copied into new memory. Raises TypeError or ValueError for a wrong number or one
        below the present one, RuntimeError once an append was captured in a CUDA graph, which would still use the old
        memory.
        """
        core = self._core
        core.outside_capture("grow")
        if core.captured:
            raise RuntimeError("grow takes new memory, but an append of this cache was captured in a CUDA graph")
        made_for = grown(core.config, capacity, max_batch)
        with torch.inference_mode(False):
            storage = core.storage.grown(made_for)
        table = made_for.table()
        table.restore(dict(enumerate(core.table.rows)))
        # At once: no interrupt comes between.
        core.config, core.table, core.storage, core.known_step = made_for, table, storage, None

    @exclusive
    @torch.no_grad()
    def crop(self, length: int | Sequence[int] | Tensor, *, sequences: Sequence[int] | Tensor | None = None) -> None:
        """Drops the newest tokens.

        length: how many tokens to keep, from the first, for every sequence or as one integer for each; more than there
            are: all. Negative: how many to drop, at most all.
        sequences: None: all rows of the batch.

        Tokens of a tile that is cut return to the window, pruned as they are.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError, before anything changes, if a cut
        page is shared, a graph was captured, and no page is free for a copy.
        """
        core = self._core
        rows = range(self.batch) if sequences is None else core.rows(sequences, None, "length")
        keeps = cache_checks.integers(length, "length", len(rows))
        core.refresh("crop")
        targets: list[Target] = []
        for row, keep in zip(rows, keeps):
            held = core.table.rows[row].tokens
            if -keep > held:
                raise ValueError(f"length {keep} drops more tokens than sequence {row} holds, {held}")
            if (keep if keep >= 0 else held + keep) < held:
                targets.append(core.table.cropped(row, keep if keep >= 0 else held + keep))
        before = {target.row: core.table.rows[target.row].compressed for target in targets}
        core.begin("crop", before)
        changes = core.table.assign(targets, private=core.captured)
        for target in targets:
            if target.compressed < before[target.row]:
                core.destroy()
                core.storage.cut(target.row, target.compressed // TILE_TOKENS, target.window)
        core.apply_assigned(changes)
        core.storage.set_lengths(
            [target.row for target in targets],
            [target.compressed for target in targets],
            [target.window for target in targets],
        )

    @exclusive
    def reorder(self, beam_idx: Sequence[int] | Tensor) -> None:
        """Row i of the batch becomes a copy of row beam_idx[i]; beam_idx: one row number for each of the batch.

        Copies share pages; windows are copied. A tensor on a GPU takes a synchronisation. Raises TypeError or
        ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        indices = cache_checks.rows(beam_idx, "beam_idx", self.batch, "batch", self.max_batch)
        if len(indices) != self.batch:
            raise ValueError(f"beam_idx must name one row for each of batch = {self.batch}, got {len(indices)}")
        self._gather(indices)

    @exclusive
    def repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch becomes `repeats` neighbouring ones, as torch.repeat_interleave does it.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        core = self._core
        count = checks.integer(repeats, "repeats")
        if count < 1 or count * self.batch > core.config.max_batch:
            raise ValueError(
                f"repeats must be from 1 to max_batch / batch = {core.config.max_batch} / {self.batch}, got {count}"
            )
        self._gather([row for row in range(self.batch) for _ in range(count)])

    @exclusive
    def select(self, indices: Sequence[int] | Tensor) -> None:
        """The batch becomes its rows `indices`, in that order, each as often as it is named.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        self._gather(cache_checks.rows(indices, "indices", self.batch, "batch", self.max_batch))

    @exclusive
    def reset(self) -> None:
        """No row is in use any more, all pages are free. Statistics of what was dropped stay."""
        core = self._core
        core.outside_capture("reset")
        core.change = Change(
            "reset", dict.fromkeys(range(core.config.max_batch), Row())
        )  # what is interrupted is completed
        core.table = core.config.table()
        core.storage.clear()

    @exclusive
    def add(self) -> int:
        """Takes a row into use and returns its number; it holds no tokens yet. RuntimeError if all rows are in use."""
        core = self._core
        row = core.table.unused()
        core.table.rows[row].used = True
        return row

    @exclusive
    @torch.no_grad()
    def free(self, sequence: int) -> None:
        """Gives a row and its pages back. Raises TypeError or ValueError if it is not in use."""
        core = self._core
        row = core.row(sequence)
        core.outside_capture("free")
        core.begin("free", [row])
        core.apply_assigned(core.table.assign([Target(row, [], 0, 0, used=False)], private=False))
        core.storage.set_lengths([row], [0], [0])

    @exclusive
    @torch.no_grad()
    def fork(self, sequence: int) -> int:
        """Takes a row into use as a copy of `sequence`, sharing its pages, and returns its number.

        Raises TypeError or ValueError if `sequence` is not in use; RuntimeError if all rows are in use, and as `crop`
        does.
        """
        core = self._core
        source = core.row(sequence)
        core.refresh("fork")
        row = core.table.unused()
        core.begin("fork", [row])
        core.apply_assigned(core.table.assign([core.table.copied(row, source)], private=core.captured))
        core.storage.move([row], [source])
        return row

    @torch.no_grad()
    def _gather(self, sources: list[int]) -> None:
        """The batch becomes these of its rows."""
        core = self._core
        core.refresh("moving sequences")
        moved = [(row, source) for row, source in enumerate(sources) if row != source]
        targets = [core.table.copied(row, source) for row, source in moved]
        left = range(len(sources), self.batch)
        targets += [Target(row, [], 0, 0, used=False) for row in left]
        core.begin("reorder, repeat_interleave or select", [target.row for target in targets])
        core.apply_assigned(core.table.assign(targets, private=core.captured))
        core.destroy()
        core.storage.move([row for row, _ in moved], [source for _, source in moved])
        core.storage.set_lengths(left, [0] * len(left), [0] * len(left))
        for row in range(len(sources)):
            core.table.rows[row].used = True
