"""The rows of a KVCache: who is in use, what they share, how they move and shrink."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels import _cache_checks, _checks
from cute_kernels._cache_storage import CacheStorage
from cute_kernels._decoding_step import DecodingStep
from cute_kernels._sequences import TILE, Target


class CacheRows:
    """What KVCache does with whole sequences. The host's table and the device's storage change together here."""

    def __init__(self, made_for: _cache_checks.CacheConfig) -> None:
        self._config = made_for
        self._on_gpu = made_for.device.type == "cuda"
        self._table = made_for.table()
        with torch.inference_mode(False):  # whose tensors could not be written to outside of it
            self._storage = CacheStorage(made_for)
        self._captured = False  # an append is in a graph: lengths here may be behind those on the device
        self._known_step: DecodingStep | None = None  # the last one, as long as the storage stays where it is

    @property
    def max_batch(self) -> int:
        return self._config.max_batch

    @property
    def capacity(self) -> int:
        return self._config.capacity

    @property
    def batch(self) -> int:
        """Rows up to the last one in use."""
        return self._table.batch

    @torch.no_grad()
    def reserve(self, tokens: int) -> None:
        """Takes pages for so many more tokens of every sequence in use, and copies what they share and would write to.

        After this, graphs captured from append and attend can be replayed for that many tokens. What was reserved is
        used by eager appends too; it is given up where a sequence is freed, cut back to fewer tiles or replaced.

        Raises TypeError or ValueError for a wrong number, RuntimeError, before anything changes, where a sequence would
        exceed the capacity or all together the pages.
        """
        more = _checks.integer(tokens, "tokens")
        if more < 0:
            raise ValueError(f"tokens must be at least 0, got {more}")
        self._refresh("reserve")
        rows = [i for i, row in enumerate(self._table.rows) if row.used]
        self._storage.apply(self._table.provide(rows, [more] * len(rows), private=True))

    @torch.no_grad()
    def grow(self, *, capacity: int | None = None, max_batch: int | None = None) -> None:
        """Gives every sequence room for `capacity` tokens and the cache rows for `max_batch` sequences (None: as many
        as before), and the pool at least the pages for all of that.

        What is cached stays; it is copied into new memory. Raises TypeError or ValueError for a wrong number or one
        below the present one, RuntimeError once an append was captured in a CUDA graph, which would go on with the old
        memory.
        """
        self._outside_capture("grow")
        if self._captured:
            raise RuntimeError("grow takes new memory, but an append of this cache was captured in a CUDA graph")
        made_for = _cache_checks.grown(self._config, capacity, max_batch)
        self._known_step = None
        with torch.inference_mode(False):
            self._storage.grow(made_for)
        self._table.grow(made_for.max_batch, made_for.capacity, made_for.pages)
        self._config = made_for

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
        rows = range(self.batch) if sequences is None else self._rows(sequences, None, "length")
        keeps = _cache_checks.integers(length, "length", len(rows))
        self._refresh("crop")
        targets: list[Target] = []
        for row, keep in zip(rows, keeps):
            held = self._table.rows[row].tokens
            if -keep > held:
                raise ValueError(f"length {keep} drops more tokens than sequence {row} holds, {held}")
            if (keep if keep >= 0 else held + keep) < held:
                targets.append(self._table.cropped(row, keep if keep >= 0 else held + keep))
        before = {target.row: self._table.rows[target.row].compressed for target in targets}
        changes = self._table.assign(targets, private=self._captured)
        for target in targets:
            if target.compressed < before[target.row]:
                self._storage.cut(target.row, target.compressed // TILE, target.window)
        self._storage.apply(changes)
        self._storage.set_lengths(
            [target.row for target in targets],
            [target.compressed for target in targets],
            [target.window for target in targets],
        )

    def reorder(self, beam_idx: Sequence[int] | Tensor) -> None:
        """Row i of the batch becomes a copy of what row beam_idx[i] is; beam_idx: one row number for each of the batch.

        Copies share pages; windows are copied. A tensor on a GPU takes a synchronisation. Raises TypeError or
        ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        indices = _cache_checks.rows(beam_idx, "beam_idx", self.batch, "batch")
        if len(indices) != self.batch:
            raise ValueError(f"beam_idx must name one row for each of batch = {self.batch}, got {len(indices)}")
        self._gather(indices)

    def repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch becomes `repeats` neighbouring ones, as torch.repeat_interleave does it.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        count = _checks.integer(repeats, "repeats")
        if count < 1 or count * self.batch > self._config.max_batch:
            raise ValueError(
                f"repeats must be from 1 to max_batch / batch = {self._config.max_batch} / {self.batch}, got {count}"
            )
        self._gather([row for row in range(self.batch) for _ in range(count)])

    def select(self, indices: Sequence[int] | Tensor) -> None:
        """The batch becomes its rows `indices`, in that order, each as often as it is named.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        chosen = _cache_checks.rows(indices, "indices", self.batch, "batch")
        if len(chosen) > self._config.max_batch:
            raise ValueError(f"indices must name at most max_batch = {self._config.max_batch} rows, got {len(chosen)}")
        self._gather(chosen)

    def reset(self) -> None:
        """No row is in use any more, all pages are free. Statistics of what was dropped stay."""
        self._outside_capture("reset")
        self._table = self._config.table()
        self._storage.clear()

    def add(self) -> int:
        """Takes a row into use and returns its number; it holds no tokens yet. RuntimeError if all rows are in use."""
        row = self._table.unused()
        self._table.rows[row].used = True
        return row

    @torch.no_grad()
    def free(self, sequence: int) -> None:
        """Gives a row and its pages back. Raises TypeError or ValueError if it is not in use."""
        row = self._row(sequence)
        self._outside_capture("free")
        self._storage.apply(self._table.assign([Target(row, [], 0, 0, used=False)], private=False))
        self._storage.set_lengths([row], [0], [0])

    @torch.no_grad()
    def fork(self, sequence: int) -> int:
        """Takes a row into use as a copy of `sequence`, sharing its pages, and returns its number.

        Raises TypeError or ValueError if `sequence` is not in use; RuntimeError if all rows are in use, and as `crop`
        does.
        """
        source = self._row(sequence)
        self._refresh("fork")
        row = self._table.unused()
        self._storage.apply(self._table.assign([self._table.copied(row, source)], private=self._captured))
        self._storage.move([row], [source])
        return row

    # ---- Inside ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _gather(self, sources: list[int]) -> None:
        """The batch becomes these of its rows."""
        self._refresh("moving sequences")
        moved = [(row, source) for row, source in enumerate(sources) if row != source]
        targets = [self._table.copied(row, source) for row, source in moved]
        left = range(len(sources), self.batch)
        targets += [Target(row, [], 0, 0, used=False) for row in left]
        self._storage.apply(self._table.assign(targets, private=self._captured))
        self._storage.move([row for row, _ in moved], [source for _, source in moved])
        self._storage.set_lengths(left, [0] * len(left), [0] * len(left))
        for row in range(len(sources)):
            self._table.rows[row].used = True

    def _rows(
        self, sequences: Sequence[int] | Tensor | None, count: int | None, of: str, take: bool = False
    ) -> Sequence[int]:
        """Row numbers that a call means; take: those of None need not be in use yet."""
        if sequences is None:
            assert count is not None
            if take and count > self.max_batch:
                raise ValueError(f"{of} must have at most max_batch = {self.max_batch} rows, got {count}")
            if not take and not self._table.reaches(count):
                raise ValueError(f"{of} must have at most batch = {self.batch} rows, got {count}")
            return range(count)
        rows = _cache_checks.rows(sequences, "sequences", self._config.max_batch, "max_batch")
        if count is not None and len(rows) != count:
            raise ValueError(f"sequences must name one row for each of {of}'s {count}, got {len(rows)}")
        if len(set(rows)) != len(rows):
            raise ValueError(f"sequences must be distinct, got {rows}")
        self._require_use(rows, "sequences")
        return rows

    def _row(self, sequence: int) -> int:
        """The number of one row in use."""
        row = _checks.integer(sequence, "sequence")
        _cache_checks.rows([row], "sequence", self._config.max_batch, "max_batch")
        self._require_use([row], "sequence")
        return row

    def _require_use(self, rows: Sequence[int], name: str) -> None:
        for row in rows:
            if not self._table.is_used(row):
                raise ValueError(f"{name} must be in use, {row} is not: take it by add or fork")

    def _capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def _outside_capture(self, what: str) -> None:
        if self._capturing():
            raise RuntimeError(f"{what} cannot be captured in a CUDA graph")

    def _refresh(self, what: str) -> None:
        """Lengths as they are on the device, where graphs may have changed them."""
        self._outside_capture(what)
        if not self._captured:
            return
        compressed, window, failed = self._storage.read()
        self._table.set_lengths(compressed, window)
        if failed:
            raise RuntimeError(
                "replays of a captured append left tokens out, as no pages were reserved for them: call "
                "reserve(tokens) before replaying; `lengths` says what the sequences hold"
            )
