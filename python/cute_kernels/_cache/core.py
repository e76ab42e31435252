"""What a KVCache does once its arguments are checked: the host's table and the device's storage change together."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels._attention.packed import PackedQueries
from cute_kernels._attention.problem import launch_problem
from cute_kernels._cache import checks as cache_checks
from cute_kernels._cache import ops as cache_ops
from cute_kernels._cache.config import CacheConfig
from cute_kernels._cache.exclusive import IN_USE, Change, Exclusive, not_recorded
from cute_kernels._cache.extend import runs
from cute_kernels._cache.ops import Sequences
from cute_kernels._cache.reference import attend_reference
from cute_kernels._cache.sequences import Changes, Row
from cute_kernels._cache.step import DecodingStep
from cute_kernels._cache.storage import CacheStorage
from cute_kernels._runtime import checks, gradients, ops
from cute_kernels._runtime.backends import check_name, resolve
from cute_kernels._runtime.extension import TILE_TOKENS

_alone = Exclusive(lambda core: core)
_TAKES_DENSE_TOKENS = Change("append", {})  # the host counts the tokens last


class CacheCore:
    """Arguments `sequences`: rows in use, each for one row of the tensors; None: 0, 1, ...

    Methods that KVCache calls in its own name run alone (see exclusive); for all others it claims the cache.
    """

    def __init__(self, made_for: CacheConfig) -> None:
        if ops.recorded():
            raise RuntimeError(
                "a KVCache holds memory: make it outside of compiled and traced functions, FakeTensorMode and "
                "torch.func.functionalize"
            )
        self.config = made_for
        with torch.inference_mode(False):  # tensors made in it could not be written to outside of it
            self.storage = CacheStorage(made_for)  # first: where memory is short for it, the host's record is not made
        self.table = made_for.table()
        self.captured = False  # an append is in a graph: lengths here may be behind those on the device
        self.known_step: DecodingStep | None = None  # the last one, as long as the storage stays where it is
        self.claims: dict[None, object] = {}
        self.change: Change | None = None
        self.number = cache_ops.register(self)
        self._on_gpu = made_for.device.type == "cuda"

    def __getstate__(self) -> dict[str, Any]:  # for copies, which have memory of their own
        if self.claims:
            raise RuntimeError(IN_USE)
        if self.change is not None:
            self.recover()
        return self.__dict__ | {"known_step": None, "claims": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.number = cache_ops.register(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheCore:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        with torch.inference_mode(False):  # as in __init__
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    @property
    def content(self) -> Tensor:
        return self.storage.content

    # ---- Rows --------------------------------------------------------------------------------------------------------

    def rows(self, sequences: Sequences, count: int | None, of: str, take: bool = False) -> Sequence[int]:
        """Row numbers that `sequences` names; take: rows that None names may still be unused."""
        if sequences is None:
            assert count is not None
            if take and count > self.config.max_batch:
                raise ValueError(f"{of} must have at most max_batch = {self.config.max_batch} rows, got {count}")
            if not take and not self.table.reaches(count):
                raise ValueError(f"{of} must have at most batch = {self.table.batch} rows, got {count}")
            return range(count)
        rows = cache_checks.rows(sequences, "sequences", self.config.max_batch, "max_batch", self.config.max_batch)
        if count is not None and len(rows) != count:
            raise ValueError(f"sequences must name one row for each of {of}'s {count}, got {len(rows)}")
        if len(set(rows)) != len(rows):
            raise ValueError(f"sequences must be distinct, got {rows}")
        self._require_use(rows, "sequences")
        return rows

    def row(self, sequence: Any) -> int:
        """The number of one row in use."""
        row = checks.integer(sequence, "sequence")
        cache_checks.rows([row], "sequence", self.config.max_batch, "max_batch", self.config.max_batch)
        self._require_use([row], "sequence")
        return row

    def _require_use(self, rows: Sequence[int], name: str) -> None:
        for row in rows:
            if not self.table.is_used(row):
                raise ValueError(f"{name} must be in use, {row} is not: take it by add or fork")

    # ---- CUDA graphs -------------------------------------------------------------------------------------------------

    def capturing(self) -> bool:
        return self._on_gpu and torch.cuda.is_current_stream_capturing()

    def outside_capture(self, what: str) -> None:
        """RuntimeError in a capture, and where calls are recorded otherwise or run without data."""
        if self.capturing():
            raise RuntimeError(f"{what} cannot be captured in a CUDA graph")
        if ops.recorded():
            raise not_recorded(what)

    def refresh(self, what: str) -> None:
        """Reads the lengths from the device, where graphs may have changed them. RuntimeError in a capture or another
        recording, and for tokens that replays left out."""
        self.outside_capture(what)
        if not self.captured:
            return
        compressed, window, failed = self.storage.read()
        self.table.set_lengths(compressed, window)
        if failed:
            raise RuntimeError(
                "replays of a captured append left tokens out, as no pages were reserved for them: call "
                "reserve(tokens) before replaying; `lengths` says what the sequences hold"
            )

    def forget_graphs(self) -> None:
        """No graph of an append will be replayed any more: lengths are the host's again."""
        self.refresh("forget_graphs")
        self.captured = False

    # ---- Changes -----------------------------------------------------------------------------------------------------

    def begin(self, what: str, rows: Iterable[int]) -> None:
        """`what` changes these rows until the end of the call; an exception takes them back to what they are now."""
        states = self.table.rows
        self.change = Change(what, {row: replace(states[row], pages=list(states[row].pages)) for row in rows})

    def destroy(self) -> None:
        """From here on what the rows of the change hold is written over: an exception empties them."""
        assert self.change is not None
        self.change.destroys = True

    def apply_assigned(self, changes: Changes) -> None:
        """On the device. Pages that rows gave back may serve for copies of others."""
        if changes.copies:
            self.destroy()
        self.storage.apply(changes)

    @torch.no_grad()
    def recover(self) -> None:
        """Takes an interrupted change back, on host and device, and warns of rows that it had to empty. May itself be
        interrupted, and is then called again."""
        change = self.change
        assert change is not None
        states, lost = change.rows, []
        if change.destroys:
            lost = [row for row, state in states.items() if state.tokens]
            states = {row: Row(used=state.used) for row, state in states.items()}
        self.table.restore(states)
        self.storage.follow(self.table.rows)
        self.change = None
        if lost:
            warnings.warn(
                f"KVCache.{change.what} was interrupted while it moved tokens: sequences {lost} are empty now, and "
                "what they held is lost; prefill them again",
                RuntimeWarning,
                stacklevel=4,
            )

    # ---- Tokens ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def extend(self, what: str, k: Tensor, v: Tensor, rows: Sequence[int], tokens: list[int]) -> None:
        """The last tokens[i] of row i of k and v follow the tokens of row rows[i]."""
        self.begin(what, rows)
        self.storage.apply(self.table.provide(rows, tokens))
        parts = []
        for run in runs(rows, self.table.rows, tokens):
            compressed, _ = self.table.after(run.row, run.tokens)
            parts.append((run, (compressed - run.compressed) // TILE_TOKENS))
        for run, tiles in parts:  # rules of the user's own may raise here
            self.storage.store(k, v, run, tiles)
        self.destroy()
        for run, tiles in parts:
            self.storage.settle(k, v, run, tiles)
        self.table.advance(rows, tokens)

    @_alone
    def append(self, k: Tensor, v: Tensor, sequences: Sequences) -> None:
        self._append(k, v, sequences)

    def _append(self, k: Tensor, v: Tensor, sequences: Sequences) -> None:
        k, v = checks.plain(k), checks.plain(v)
        rows = self.rows(sequences, k.shape[0], "k", take=True)
        if self.capturing():
            self._append_captured(k, v, rows)
            return
        if self.captured:
            self.refresh("append")
        new, named = k.shape[2], None if sequences is None else rows
        if new <= self.config.max_append and self.table.stays_dense(rows, new):
            self.change = _TAKES_DENSE_TOKENS
            self.storage.append(k, v, named)
            self.table.advance_dense(new)
        elif new > self.config.max_append or not self.config.prunes_in_kernels:
            self.extend("append", k, v, rows, [new] * len(rows))
        else:
            self.begin("append", rows)
            self.storage.apply(self.table.provide(rows, [new] * len(rows)))
            self.destroy()
            self.storage.append(k, v, named)
            self.table.advance(rows, [new] * len(rows))
        self.change = None  # also where a step goes on to attend

    def _append_captured(self, k: Tensor, v: Tensor, rows: Sequence[int]) -> None:
        made_for = self.config
        if not made_for.prunes_in_kernels:
            raise RuntimeError(
                f"only rule 'magnitude' prunes in a CUDA graph, this cache has {made_for.keys.rule.name!r} for keys "
                f"and {made_for.values.rule.name!r} for values"
            )
        for row in rows:
            if not self.table.has_pages(row, k.shape[2]) or not self.table.is_private(row):
                raise RuntimeError(
                    f"sequence {row} has no pages for appends in a graph: call reserve before the capture"
                )
            self.table.rows[row].used = True
        self.captured = True
        for first in range(0, k.shape[2], made_for.max_append):
            chunk = slice(first, first + made_for.max_append)
            self.storage.append(k[:, :, chunk], v[:, :, chunk], rows, capturing=True)

    @_alone
    def attend(
        self,
        q: Tensor,
        scale: float,
        causal: bool,
        return_lse: bool,
        out: Tensor | None,
        sequences: Sequences,
        backend: str,
        lse: Tensor | None = None,
        packed: PackedQueries | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (out, lse or None)."""
        return self._attend(q, scale, causal, return_lse, out, sequences, backend, lse, packed)

    def _attend(
        self,
        q: Tensor,
        scale: float,
        causal: bool,
        return_lse: bool,
        out: Tensor | None,
        sequences: Sequences,
        backend: str,
        lse: Tensor | None = None,
        packed: PackedQueries | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if packed is None:
            rows = self.rows(sequences, q.shape[0], "q")
        else:
            rows = self.rows(sequences, packed.rows, "cu_seqlens_q")
            if not self.captured:
                packed.check_held([self.table.rows[row].tokens for row in rows])
        if out is not None:
            checks.apart(out, q=q)
        name = resolve(backend, self.config.device)
        if name == "reference":
            self.refresh("attend with backend 'reference'")
            out, lse = attend_reference(q, [self.dense(row) for row in rows], scale, causal, out, lse, packed)
            return out, lse if return_lse else None
        storage = self.storage
        if out is None:
            out = q.new_empty(*q.shape)
        if lse is None and return_lse:
            lse = q.new_empty(*q.shape[:3], dtype=torch.float32)
        if out.numel() and rows:
            q = checks.plain(q)
            named = None if sequences is None else storage.numbers(rows, capturing=self.capturing())
            starts = None if packed is None else packed.on_device(q.device)
            expected = self.table.expected(rows, reserved=self.capturing())
            problem = storage.problem(q, scale, causal, expected=expected, packed=packed)
            launch_problem(problem, q, out, lse, name, sequences=named, lengths=storage.lengths, query_starts=starts)
        return out, lse

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: str, *, tokens_first: bool = False
    ) -> Tensor:
        """append of k and v, then attend of q; checks its arguments, as a step like the one before needs no checks.

        Returns (B, Hq, n, D); tokens_first: (B, n, Hq, D), contiguous for n = 1.
        """
        if gradients.wanted(q, k, v):

            def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return self.step(q, k, v, scale, backend, tokens_first=tokens_first)

            return gradients.without_gradient("KVCache.step", call, q, k, v)
        if ops.eager(q, k, v):
            return self._step(q, k, v, scale, backend, tokens_first)
        cache_checks.step(self.config, k, v, q)
        factor = self.scale(scale)
        cache_ops.append(self, k, v, None, check_name(backend))
        out, _ = cache_ops.attend(self, q, factor, True, False, None, None, backend)
        return out.transpose(1, 2) if tokens_first else out

    @_alone
    def _step(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None, backend: str, tokens_first: bool) -> Tensor:
        known = self.known_step
        if (
            known is not None
            and known.fits(k, v, q, scale, backend)
            and not self.captured
            and not self.capturing()
            and self.table.stays_dense(known.rows, known.tokens)
            and self.table.expected(known.rows) == known.expected
        ):
            batch, heads, tokens, head_dim = q.shape
            swapped = tokens_first and tokens == 1  # (B, 1, Hq, D) is the same memory as (B, Hq, 1, D)
            sizes = (batch, tokens, heads, head_dim) if swapped else (batch, heads, tokens, head_dim)
            out = q.new_empty(*sizes)
            self.change = _TAKES_DENSE_TOKENS
            known.run(self.storage, k, v, q, out)
            self.table.advance_dense(known.tokens)
            return out.transpose(1, 2) if tokens_first and not swapped else out
        cache_checks.step(self.config, k, v, q)
        factor = self.scale(scale)
        name = resolve(check_name(backend), self.config.device)
        self._append(k, v, None)
        out, _ = self._attend(q, factor, True, False, None, None, backend)
        if k.shape[2] <= self.config.max_append and q.numel() and name != "reference":
            self.known_step = DecodingStep(
                self.storage,
                k,
                v,
                q,
                scale=scale,
                factor=factor,
                backend=backend,
                name=name,
                expected=self.table.expected(range(k.shape[0])),
            )
        return out.transpose(1, 2) if tokens_first else out

    def scale(self, scale: Any) -> float:
        return 1 / math.sqrt(self.config.head_dim) if scale is None else checks.scale(scale)

    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        """K and V of one row, (Hkv, tokens, D) each."""
        state = self.table.rows[row]
        return self.storage.dense(row, state.compressed, state.window)
