"""One KVCache driven at random beside its model, every operation checked; `soak` runs it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels._cache.rows import core_of
from profiling.check import TOLERANCES
from profiling.soak_model import DenseCache, DenseSequence, attention

_ATTENDED = {torch.float16: TOLERANCES[torch.float16], torch.bfloat16: TOLERANCES[torch.bfloat16]}


@dataclass(frozen=True)
class Shape:
    """A cache to be driven, small enough for a few thousand operations a second."""

    max_batch: int
    kv_heads: int
    group: int  # query heads a KV head
    head_dim: int
    dtype: torch.dtype
    key_keep: int | None
    value_keep: int | None
    window: int
    page_tokens: int
    capacity: int
    pool_tokens: int  # less than all sequences could ask for


SHAPES = (
    Shape(6, 2, 2, 64, torch.float16, 19, 19, 32, 64, 700, 1600),
    Shape(5, 1, 3, 32, torch.bfloat16, 10, 20, 0, 128, 600, 1300),
    Shape(4, 2, 1, 128, torch.float16, 38, 64, 16, 256, 900, 1800),
    Shape(6, 1, 5, 40, torch.float16, None, None, 100, 192, 640, 1600),
)


class Mismatch(AssertionError):
    """The cache differs from the model."""


def _differs(got: Tensor, want: Tensor) -> Tensor:
    """Where; any NaN is like another."""
    return ~((got == want) | (got.isnan() & want.isnan()))


class Soak:
    """One cache and its model."""

    def __init__(self, shape: Shape, rng: random.Random, device: str, backend: str = "auto") -> None:
        self.shape, self.rng, self.device, self.backend = shape, rng, device, backend
        self.cache = self._new_cache()
        keeps = (shape.key_keep or 0, shape.value_keep or 0)
        self.model = DenseCache(shape.max_batch, shape.kv_heads, shape.head_dim, shape.dtype, keeps, shape.window)
        self.counts: Counter[str] = Counter()
        self.last = ""
        self._ops: dict[str, tuple[int, Callable[[], None]]] = {
            "append": (40, self._append),
            "attend": (20, self._attend),
            "prefill": (8, self._prefill),
            "crop": (8, self._crop),
            "fork": (6, self._fork),
            "free": (6, self._free),
            "add": (3, self._add),
            "reorder": (4, self._reorder),
            "select": (2, self._select),
            "repeat_interleave": (2, self._repeat),
            "reserve": (2, self._reserve),
            "grow": (1, self._grow),
            "reset": (1, self._reset),
        }

    def _new_cache(self) -> ck.KVCache:
        return ck.KVCache(
            max_batch=self.shape.max_batch,
            kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.shape.dtype,
            capacity=self.shape.capacity,
            pool_tokens=self.shape.pool_tokens,
            key_keep=self.shape.key_keep,
            value_keep=self.shape.value_keep,
            window=self.shape.window,
            page_tokens=self.shape.page_tokens,
            device=self.device,
        )

    def step(self) -> None:
        """One operation, checked."""
        name = self.rng.choices(list(self._ops), [weight for weight, _ in self._ops.values()])[0]
        self.counts[name] += 1
        self._ops[name][1]()
        self._check_lengths()
        if self.model.in_use:
            self.check_content(self.rng.choice(self.model.in_use))
        if self.rng.random() < 0.02:
            self.check_everything()

    def check_everything(self) -> None:
        """Content of all sequences, reference counts, the device's tables and lengths against the host's."""
        for row in self.model.in_use:
            self.check_content(row)
        table, storage = core_of(self.cache).table, core_of(self.cache).storage
        table.check()
        for i, state in enumerate(table.rows):
            entries, held = storage.pool.page_table[i].tolist(), len(state.pages)
            self._require(entries[:held] == state.pages, f"page table of row {i} differs from the host's")
            self._require(set(entries[held:]) <= {-1}, f"page table of row {i} has pages too many")
        compressed, window, failed = storage.read()
        self._require(
            compressed == [state.compressed for state in table.rows], "compressed lengths differ from the host's"
        )
        self._require(window == [state.window for state in table.rows], "lengths of windows differ from the host's")
        self._require(not failed, "an append left tokens out")

    def check_content(self, row: int) -> None:
        for name, got, want in self._content(row):
            if torch.equal(got.view(torch.int16), want.view(torch.int16)):  # the usual case, in less time
                continue
            count = int(_differs(got, want).sum())
            self._require(not count, f"{name} of row {row} differs in {count} elements")

    def _content(self, row: int) -> list[tuple[str, Tensor, Tensor]]:
        """What the cache holds and what it should hold, of K and V."""
        sequence, result = self.model.take(row), []
        for name, got, want in zip("kv", self.cache.dense(row), (sequence.keys, sequence.values)):
            self._require(got.shape == want.shape, f"{name} of row {row}: {tuple(got.shape)}, not {tuple(want.shape)}")
            result.append((name, got.cpu(), want))
        return result

    def _accept_dropped(self, rows: list[int], before: dict[str, int]) -> None:
        """Tiles that exceeded their slots lost values: as many as the cache counts, and only set to zero."""
        after, lost = self.cache.statistics(), [0, 0]
        names = ("key_values_dropped", "value_values_dropped")
        if all(after[name] == before[name] for name in names):
            return
        for row in rows:
            (_, keys, want_k), (_, values, want_v) = self._content(row)
            differs_k, differs_v = _differs(keys, want_k), _differs(values, want_v)
            dropped = not (keys[differs_k].any() or values[differs_v].any())
            self._require(dropped, f"row {row} differs in more than dropped values")
            lost = [lost[0] + int(differs_k.sum()), lost[1] + int(differs_v.sum())]
            done = self.model.take(row).compressed
            self._require(not (differs_k[:, done:].any() or differs_v[:, done:].any()), f"window of row {row} differs")
            self.model.rows[row] = DenseSequence(keys, values, done)
        counted = [after[name] - before[name] for name in names]
        self._require(lost == counted, f"{lost} values of K and V were dropped, {counted} counted")
        self.counts["values dropped"] += sum(lost)

    def _check_lengths(self) -> None:
        want = [self.model.tokens(row) for row in range(self.model.batch)]
        self._require(self.cache.lengths.tolist() == want, f"lengths {self.cache.lengths.tolist()}, not {want}")

    def _require(self, holds: bool | Tensor, what: str) -> None:
        if not holds:
            raise Mismatch(f"{what}; last operation: {self.last}")

    # ---- Operations --------------------------------------------------------------------------------------------------

    def _change(self, what: str, call: Callable[[], object], change: Callable[[], object]) -> None:
        """The cache's operation, then the model's, unless the cache is out of pages or over its capacity."""
        self.last = what
        before = (self.cache.statistics(), self.cache.lengths.tolist())
        try:
            call()
        except RuntimeError as error:
            self._require("out of pages" in str(error) or "exceed capacity" in str(error), f"it raised {error!r}")
            self.counts["refused"] += 1
            after = (self.cache.statistics(), self.cache.lengths.tolist())
            self._require(after == before, f"a refused operation changed {before} to {after}")
            if self.model.in_use:
                self.check_content(self.rng.choice(self.model.in_use))
            if "out of pages" in str(error):
                self._free()
            return
        change()

    def _tokens(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """New K and V, on the CPU; sometimes with what is hard: NaN, infinities, zeros, equal magnitudes."""
        shape, kind = (rows, self.shape.kv_heads, tokens, self.shape.head_dim), self.rng.random()
        pair = [torch.randn(shape), torch.randn(shape)]
        if kind < 0.1:
            pair = [x.masked_fill(torch.rand(shape) < 0.7, 0.0) for x in pair]
        elif kind < 0.2:
            pair = [x.round() for x in pair]
        elif kind < 0.23 and rows:
            pair[self.rng.randrange(2)][self.rng.randrange(rows)].view(-1)[::7] = float("nan")
        elif kind < 0.26 and rows:
            pair[self.rng.randrange(2)][self.rng.randrange(rows)].view(-1)[::5] = float("-inf")
        k, v = (x.to(self.shape.dtype) for x in pair)
        return k, v

    def _to_device(self, x: Tensor) -> Tensor:
        """A copy there, laid out in one way or another."""
        if self.rng.random() < 0.3:
            return x.transpose(1, 2).contiguous().to(self.device).transpose(1, 2)
        return x.to(self.device)

    def _some_rows(self, choices: list[int]) -> list[int]:
        return self.rng.sample(choices, self.rng.randint(1, len(choices)))

    def _targets(self) -> tuple[list[int], list[int] | None]:
        """Rows for new tokens and how to name them."""
        if self.model.in_use and self.rng.random() < 0.5:
            rows = self._some_rows(self.model.in_use)
            return rows, rows
        return list(range(self.rng.randint(max(1, self.model.batch - 1), self.cache.max_batch))), None

    def _append(self) -> None:
        rows, sequences = self._targets()
        n = self.rng.choice([1, 1, 1, self.rng.randint(2, 64), self.rng.randint(65, 300)])
        k, v = self._tokens(len(rows), n)
        before = self.cache.statistics()

        def change() -> None:
            for row, one_k, one_v in zip(rows, k, v):
                self.model.append(row, one_k, one_v)
            self._accept_dropped(rows, before)

        self._change(
            f"append {n} to {rows}, sequences={sequences}",
            lambda: self.cache.append(self._to_device(k), self._to_device(v), sequences=sequences),
            change,
        )

    def _prefill(self) -> None:
        if self.rng.random() < 0.5:
            sequences = [row for row in self.model.in_use if not self.model.tokens(row)] or None
            rows = sequences or []
        else:
            rows, sequences = list(range(self.rng.randint(1, self.cache.max_batch))), None
        if not rows or any(self.model.tokens(row) for row in rows):
            return
        t = self.rng.choice([self.rng.randint(0, 70), self.rng.randint(71, 400)])
        lengths = [self.rng.randint(0, t) for _ in rows] if self.rng.random() < 0.5 else None
        k, v = self._tokens(len(rows), t)
        before = self.cache.statistics()

        def change() -> None:
            for i, row in enumerate(rows):
                first = 0 if lengths is None else t - lengths[i]
                self.model.append(row, k[i, :, first:], v[i, :, first:])
            self._accept_dropped(rows, before)

        self._change(
            f"prefill {t} into {rows}, lengths={lengths}, sequences={sequences}",
            lambda: self.cache.prefill(self._to_device(k), self._to_device(v), lengths=lengths, sequences=sequences),
            change,
        )

    def _attend(self) -> None:
        if not self.model.batch:
            return
        sequences = self._some_rows(self.model.in_use) if self.rng.random() < 0.5 else None
        rows = sequences or list(range(self.rng.randint(1, self.model.batch)))
        q = torch.randn(
            len(rows), self.shape.kv_heads * self.shape.group, self.rng.choice([1, 1, 2, 7]), self.shape.head_dim
        )
        q, causal = q.to(self.shape.dtype), self.rng.random() < 0.8
        self.last = f"attend, {q.shape[2]} queries, rows {rows}, sequences={sequences}, causal={causal}"
        out, lse = self.cache.attend(
            self._to_device(q), causal=causal, return_lse=True, sequences=sequences, backend=self.backend
        )
        for i, row in enumerate(rows):
            sequence = self.model.rows[row]
            keys, values = (sequence.keys, sequence.values) if sequence is not None else (q[i][:1, :0], q[i][:1, :0])
            if sequence is None:
                keys = values = keys.expand(self.shape.kv_heads, -1, -1)
            if not (keys.isfinite().all() and values.isfinite().all()):
                continue
            want, want_lse = attention(q[i], keys, values, self.shape.head_dim**-0.5, causal)
            got = out[i].cpu().double()
            error = ((got - want).norm() / want.norm()).item() if want.norm() > 0 else got.norm().item()
            self._require(error <= _ATTENDED[self.shape.dtype], f"row {row}: relative error {error}")
            close = torch.allclose(lse[i].cpu().double(), want_lse, rtol=1e-3, atol=1e-3)
            self._require(close, f"row {row}: lse differs")

    def _crop(self) -> None:
        if not self.model.batch:
            return
        sequences = self._some_rows(self.model.in_use) if self.rng.random() < 0.7 else None
        rows = sequences or list(range(self.model.batch))
        held = [self.model.tokens(row) for row in rows]
        kind = self.rng.random()
        if kind < 0.4:
            lengths = [-self.rng.randint(0, min(n, 150)) for n in held]
        elif kind < 0.7:
            lengths = [self.rng.randint(0, n + 10) for n in held]
        else:
            lengths = [-self.rng.randint(0, min(held))] * len(rows)
        length = lengths[0] if len(set(lengths)) == 1 and self.rng.random() < 0.8 else lengths

        # 0 drops nothing as "so many newest", but keeps nothing as a length
        def change() -> None:
            for row, keep in zip(rows, lengths):
                if self.model.rows[row] is not None:
                    self.model.crop(row, keep)

        self._change(
            f"crop {length} of {rows}, sequences={sequences}",
            lambda: self.cache.crop(length, sequences=sequences),
            change,
        )

    def _fork(self) -> None:
        if not self.model.in_use or len(self.model.in_use) == self.cache.max_batch:
            return
        row = self.rng.choice(self.model.in_use)
        taken: list[int] = []

        def change() -> None:
            want = self.model.fork(row)
            self._require(taken == [want], f"row {taken[0]}, not {want}")

        # after a capture a page that is filled in part is copied at once, for which there may be none
        self._change(f"fork {row}", lambda: taken.append(self.cache.fork(row)), change)

    def _add(self) -> None:
        if len(self.model.in_use) == self.cache.max_batch:
            return
        self.last = "add"
        row = self.cache.add()
        self._require(row == self.model.rows.index(None), f"row {row}")
        self.model.take(row)

    def _free(self) -> None:
        if not self.model.in_use:
            return
        row = self.rng.choice(self.model.in_use)
        self.last = f"free {row}"
        self.cache.free(row)
        self.model.rows[row] = None

    def _reorder(self) -> None:
        batch = self.model.batch
        sources = [self.rng.randrange(batch) for _ in range(batch)]
        beam_idx = torch.tensor(sources, dtype=torch.int64, device=self.device) if self.rng.random() < 0.5 else sources
        self._change(f"reorder {sources}", lambda: self.cache.reorder(beam_idx), lambda: self.model.gather(sources))

    def _select(self) -> None:
        batch = self.model.batch
        if not batch:
            return
        sources = [self.rng.randrange(batch) for _ in range(self.rng.randint(1, self.cache.max_batch))]
        self._change(f"select {sources}", lambda: self.cache.select(sources), lambda: self.model.gather(sources))

    def _repeat(self) -> None:
        batch = self.model.batch
        if not batch:
            return
        repeats = self.rng.randint(1, self.cache.max_batch // batch)
        sources = [row for row in range(batch) for _ in range(repeats)]
        self._change(
            f"repeat_interleave {repeats}",
            lambda: self.cache.repeat_interleave(repeats),
            lambda: self.model.gather(sources),
        )

    def _reserve(self) -> None:
        tokens = self.rng.randint(0, 200)
        self._change(f"reserve {tokens}", lambda: self.cache.reserve(tokens), lambda: None)

    def _grow(self) -> None:
        """Pages for all of it come with that, so not often: else none would ever be short of them."""
        if self.rng.random() < 0.8 or core_of(self.cache).captured:
            return
        rows = min(self.cache.max_batch + self.rng.randint(0, 1), 2 * self.shape.max_batch)
        capacity = min(self.cache.capacity + self.rng.randint(0, 100), 2 * self.shape.capacity)
        self.last = f"grow to {rows} rows of {capacity} tokens"
        self.cache.grow(capacity=capacity, max_batch=rows)
        self.model.rows += [None] * (rows - len(self.model.rows))

    def _reset(self) -> None:
        if self.rng.random() < 0.2:
            self.last = "reset"
            self.cache.reset()
            if self.cache.capacity > self.shape.capacity:  # has grown
                self.cache = self._new_cache()
            self.model.rows = [None] * self.cache.max_batch
