"""Random operations of an engine on pages of its own, `cute_kernels.paged`, beside tokens kept densely."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import paged
from tests.fuzz import inputs
from tests.fuzz.attention import compare
from tests.fuzz.case import Case
from tests.support import oracle
from tests.support.paged_engine import TILE, Engine

_OPERATIONS = 20


def run(case: Case) -> None:
    driver = Driver(case)
    with case.backend() as driver.backend:
        for i in range(_OPERATIONS):
            case.note("operation", i)
            operations, weights = zip(*driver.operations.items())
            (operation,) = case.rng.choices(operations, weights)
            case.note("last operation", operation.__name__.removeprefix("_"))
            operation()
            driver.check()


class Driver:
    def __init__(self, case: Case) -> None:
        rng = case.rng
        head_dim = rng.choice([8, 40, 64, 64, 72, 128, 256])
        sizes = {
            "kv_heads": rng.choice([1, 1, 2, 3]),
            "head_dim": head_dim,
            "dtype": rng.choice(inputs.DTYPES),
            "window": rng.choice([0, 1, 16, 32, 64, rng.randint(0, 150)]),
            "page_tokens": TILE * rng.choice([1, 1, 1, 2, 3]),
            "max_append": rng.choice([1, 1, 7, 64]),
            **inputs.amount(case, head_dim),
        }
        self.config = paged.configure(**case.note("config", sizes))
        memory = {"sequences": rng.randint(1, 5), "pages": rng.randint(1, 16), "pages_per_sequence": rng.randint(1, 7)}
        self.case, self.rng, self.device = case, rng, torch.device(case.device)
        self.engine = Engine(self.config, self.device, **case.note("memory", memory))
        self.backend = ""
        self._lost = [0, 0]  # nonzeros that tiles of keys and of values had no room for
        self._checked = [0] * memory["sequences"]  # tiles of each sequence that were compared
        self.operations = {
            self._extend: 5,
            self._append: 8,
            self._append_without_a_page: 1,
            self._share: 2,
            self._free: 2,
            self._attend: 6,
        }
        if case.often(0.6):
            k, v = self._tokens(rng.randint(1, 100))[:, None]
            paged.choose_orders(self.engine.pool, k.to(self.device), v.to(self.device))

    # ---- Operations --------------------------------------------------------------------------------------------------

    def _extend(self) -> None:
        sequence = self._any()
        room = self._room(sequence)
        if room:
            self.engine.extend(sequence, self._tokens(min(room, inputs.tokens(self.case, 250) or 1)))

    def _append(self) -> None:
        """More than max_append, too, where windows have room."""
        most = TILE if self.case.often(0.3) else self.config.max_append
        new = self.rng.randint(1, most)
        taken, rows = 0, []
        for sequence in self._some():
            pages = self._pages(sequence, new)
            fits = self.engine.split(sequence)[1] + new <= self.config.window_capacity
            if fits and self._room(sequence) >= new and taken + pages <= len(self.engine.free):
                taken, rows = taken + pages, [*rows, sequence]
        if rows:
            new_tokens = [self._tokens(new) for _ in rows]
            self.engine.append(rows, torch.stack(new_tokens, dim=1))

    def _append_without_a_page(self) -> None:
        """A tile that gets full and has no page: nothing of its sequence changes, and `pool.error` says so."""
        engine = self.engine
        whole = [s for s in range(len(engine.tokens)) if not self._held(s) % self.config.page_tokens]
        if self.config.max_append < TILE or not whole:
            return
        sequence = self.rng.choice(whole)
        k, v = self._tokens(TILE)[:, None].to(self.device)
        paged.append(engine.pool, engine.windows, engine.lengths, k, v, engine.index([sequence]))
        self.case.require(int(engine.pool.error) != 0, "append without a page: pool.error is not set")
        engine.pool.error.zero_()

    def _share(self) -> None:
        """A sequence that is empty begins with full pages of another."""
        engine, page = self.engine, self.config.page_tokens
        empty = [s for s, tokens in enumerate(engine.tokens) if not tokens.shape[2]]
        full = [s for s, tokens in enumerate(engine.tokens) if tokens.shape[2] >= page]
        if empty and full:
            sequence, other = self.rng.choice(empty), self.rng.choice(full)
            engine.share(sequence, other, page * self.rng.randint(1, self._held(other) // page))
            self._checked[sequence] = self._held(sequence) // TILE

    def _free(self) -> None:
        """A sequence ends; pages go back that no other one has."""
        engine, sequence = self.engine, self._any()
        table = engine.pool.page_table
        had = {page for page in table[sequence].tolist() if page >= 0}
        table[sequence] = -1
        engine.free += sorted(had - set(table.flatten().tolist()))
        engine.lengths[sequence] = engine.windows.lengths[sequence] = 0
        engine.tokens[sequence], engine.starts[sequence] = engine.tokens[sequence][:, :, :0], 0
        self._checked[sequence] = 0

    def _attend(self) -> None:
        case, engine, rng = self.case, self.engine, self.rng
        rows = [self._any() for _ in range(rng.randint(1, 5))]
        groups, queries = rng.choice([(1, 1), (4, 1), (8, 1), (rng.randint(1, 5), rng.randint(1, 70))])
        windows = case.choose("windows", [True, True, True, False])
        causal, scale = case.choose("causal", [True, False]), case.choose("scale", [None, 1.0, -0.3])
        heads, head_dim = self.config.kv_heads * groups, self.config.head_dim
        q = torch.randn(len(rows), heads, queries, head_dim).to(self.config.dtype)
        compressed = [engine.split(row)[0] for row in rows]
        expected = case.choose("expected", [None, (max(compressed), sum(compressed)), (64, 64), (10**6, 10**6)])
        out, lse = paged.attend(
            q.to(self.device),
            engine.pool,
            engine.windows if windows else None,
            engine.lengths,
            engine.index(rows),
            scale=scale,
            causal=causal,
            return_lse=True,
            expected=expected,
            backend=self.backend,
        )
        factor = head_dim**-0.5 if scale is None else scale
        for i, row in enumerate(rows):
            tiles = tuple(x[None].cpu() for x in paged.export(engine.pool, row, 0, compressed[i] // TILE))
            k, v = engine.tokens[row][:, None, :, compressed[i] :]
            dense = (k, v) if windows else None
            compare(case, out[i : i + 1], lse[i : i + 1], q[i : i + 1], tiles, factor, dense, None, causal)

    # ---- What must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Lengths, nothing outside of the memory, and every new tile as pruning gives it; where a slot had no room for
        all of one, nonzeros are missing, as many as the pool counts."""
        engine, require = self.engine, self.case.require
        require(int(engine.pool.error) == 0 and not engine.windows.arrivals.any(), "pool.error or arrivals is set")
        for sequence, tokens in enumerate(engine.tokens):
            found = int(engine.lengths[sequence]), int(engine.windows.lengths[sequence])
            require(found == engine.split(sequence), f"sequence {sequence} has {found}, not {engine.split(sequence)}")
            first, last = self._checked[sequence], tokens.shape[2] // TILE
            stored = paged.export(engine.pool, sequence, first, last - first)
            self._checked[sequence] = last
            for i, (x, keep) in enumerate(zip(tokens, (self.config.key_keep, self.config.value_keep))):
                want, got = oracle.prune(x[:, first * TILE : last * TILE], keep or None), stored[i].cpu()
                differs = oracle.bits(want) != oracle.bits(got)
                require(not got[differs].any(), f"tiles {first} to {last} of sequence {sequence} differ")
                self._lost[i] += int(differs.sum())
        counted = engine.pool.dropped[:, 1].tolist()
        require(self._lost == counted, f"{self._lost} values of K and V are missing, {counted} counted")
        engine.check_memory()

    # ---- What is drawn -----------------------------------------------------------------------------------------------

    def _values(self, shape: tuple[int, ...]) -> Tensor:
        return inputs.values(self.case, shape, self.config.dtype, finite=True)

    def _tokens(self, count: int) -> Tensor:
        """(2, Hkv, count, D) on the CPU."""
        shape = 1, self.config.kv_heads, count, self.config.head_dim
        return torch.cat([self._values(shape) for _ in range(2)])

    def _any(self) -> int:
        return self.rng.randrange(len(self.engine.tokens))

    def _some(self) -> list[int]:
        count = len(self.engine.tokens)
        return self.rng.sample(range(count), self.rng.randint(1, count))

    def _held(self, sequence: int) -> int:
        return self.engine.tokens[sequence].shape[2]

    def _pages(self, sequence: int, new: int) -> int:
        """That so many tokens more take."""
        page, held = self.config.page_tokens, self._held(sequence)
        return -(-(held + new) // page) - -(-held // page)

    def _room(self, sequence: int) -> int:
        """Tokens that the sequence can have more, by its table and the pages that are free."""
        page, held = self.config.page_tokens, self._held(sequence)
        free = -held % page + len(self.engine.free) * page
        return min(free, self.engine.pool.tokens_per_sequence - held)
