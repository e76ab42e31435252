"""The sequences of a cache as the host knows them: lengths and pages, and how every operation changes them.

Plain Python, no tensors. An operation is planned whole, raises before anything changes if it cannot be done, and
returns what the device has to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cute_kernels._cache.page_allocator import PageAllocator
from cute_kernels._runtime.extension import TILE_TOKENS


@dataclass
class Row:
    """One sequence: `compressed` tokens in `pages`, followed by `window` dense ones. Pages beyond are reserved."""

    used: bool = False
    compressed: int = 0
    window: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.compressed + self.window


@dataclass(frozen=True)
class Target:
    """The state that a row is given."""

    row: int
    pages: list[int]
    compressed: int
    window: int
    used: bool = True


@dataclass(frozen=True)
class Changes:
    """What the device has to do after a change."""

    entries: dict[tuple[int, int], int] = field(default_factory=dict)  # of the page table: (row, index) -> page
    copies: list[tuple[int, int]] = field(default_factory=list)  # pages: from, to


class SequenceTable:
    """`max_batch` rows over one pool.

    recent: tokens that stay dense at least; where a window holds `recent` + 64 of them, the oldest 64 become a tile.
    capacity: tokens that a row can have.
    """

    def __init__(
        self, max_batch: int, *, pages: int, page_tokens: int, recent: int, capacity: int, pool_argument: str
    ) -> None:
        self._rows = [Row() for _ in range(max_batch)]
        self._group: Sequence[int] = ()  # rows that take new tokens together
        self._left = 0  # new tokens that fit into the window of each of them
        self._owed = 0  # tokens that each of them took and `_rows` does not count yet
        self._due: list[tuple[Row, int]] = []  # rows, and the windows that they are being given for that
        self._expected: tuple[Sequence[int], tuple[int, int]] | None = None  # rows, and what is expected of them
        self.allocator = PageAllocator(pages)
        self.page_tokens, self.recent, self.capacity = page_tokens, recent, capacity
        self._pool_argument = pool_argument  # what the caller would have to raise

    @property
    def rows(self) -> list[Row]:
        """All rows as they are now, to read or to change."""
        if self._owed:
            due = [(self._rows[row], self._rows[row].window + self._owed) for row in self._group]
            self._due, self._owed = (
                due,
                0,
            )  # at once: an interrupt leaves windows to be set again, not to be counted twice
        for row, window in self._due:
            row.window = window
        self._due, self._group, self._expected = [], (), None
        return self._rows

    def restore(self, states: Mapping[int, Row]) -> None:
        """Rows get these states, others keep theirs. Pages are counted anew from all of them: what was interrupted may
        have left the counts of pages between two states."""
        rows = self.rows
        rows = [
            replace(states[i], pages=list(states[i].pages)) if i in states else state for i, state in enumerate(rows)
        ]
        allocator = PageAllocator(self.allocator.pages, [row.pages for row in rows])
        self._rows, self.allocator = rows, allocator

    def is_used(self, row: int) -> bool:
        return self._rows[row].used

    @property
    def batch(self) -> int:
        """Rows up to the last that is in use."""
        count = len(self._rows)
        while count and not self._rows[count - 1].used:
            count -= 1
        return count

    def reaches(self, count: int) -> bool:
        """Whether `batch` is at least `count`."""
        return count <= len(self._rows) and (count == 0 or self._rows[count - 1].used or count <= self.batch)

    def unused(self) -> int:
        """The first row that is not in use."""
        for i, row in enumerate(self.rows):
            if not row.used:
                return i
        raise RuntimeError(f"all max_batch = {len(self.rows)} sequences are in use: free one first")

    def after(self, row: int, tokens: int) -> tuple[int, int]:
        """(compressed, window) once so many tokens have been appended, in chunks of any size."""
        state = self.rows[row]
        tiles = max(0, (state.window + tokens - self.recent) // TILE_TOKENS)
        return state.compressed + tiles * TILE_TOKENS, state.window + tokens - tiles * TILE_TOKENS

    def provide(self, rows: Sequence[int], tokens: Sequence[int], *, private: bool = False) -> Changes:
        """Takes rows into use, with pages of their own for what so many more tokens will write. `advance` changes their
        lengths.

        private: a page that is filled in part is copied where it is shared, be it written now or not.

        Raises RuntimeError if a row would exceed the capacity or there are too few free pages.
        """
        fresh: list[int] = []
        copied: list[bool] = []
        released: dict[int, int] = {}
        for row, more in zip(rows, tokens):
            state = self.rows[row]
            if state.tokens + more > self.capacity:
                raise RuntimeError(
                    f"sequence {row} holds {state.tokens} tokens, {more} more exceed capacity = {self.capacity}"
                )
            compressed, _ = self.after(row, more)
            fresh.append(max(0, self._pages_for(compressed) - len(state.pages)))
            writes = private or compressed > state.compressed
            tail = self._tail(state.compressed, state.pages) if writes else None
            copied.append(tail is not None and self.allocator.references(tail) - released.get(tail, 0) > 1)
            if tail is not None and copied[-1]:
                released[tail] = released.get(tail, 0) + 1
        self._check_free(sum(fresh) + sum(copied), 0)
        changes = Changes()
        for row, count, copy in zip(rows, fresh, copied):
            self.rows[row].used = True
            if copy:
                self._copy_tail(row, changes)
            if count:
                pages = self.rows[row].pages
                new = self.allocator.take(count)
                changes.entries.update(((row, len(pages) + i), page) for i, page in enumerate(new))
                pages += new
        return changes

    def stays_dense(self, rows: Sequence[int], tokens: int) -> bool:
        """Whether rows in use take so many more tokens into their windows: no tile gets full, `provide` need not be
        called. Decoding asks it at every step, for the same rows; all of them are looked at once a tile. Keeps `rows`,
        which must not change afterwards."""
        if rows != self._group:
            table = self.rows
            states = [table[row] for row in rows]
            windows = (self.recent + TILE_TOKENS - 1 - state.window for state in states)
            ends = (self.capacity - state.tokens for state in states)
            self._left = min(*windows, *ends) if states and all(state.used for state in states) else 0
            self._group = rows
        return tokens <= self._left

    def advance_dense(self, tokens: int) -> None:
        """So many tokens were appended to the rows for which `stays_dense` just returned True."""
        self._left -= tokens
        self._owed += tokens

    def advance(self, rows: Iterable[int], tokens: Iterable[int]) -> None:
        """So many tokens were appended."""
        for row, more in zip(rows, tokens):
            state = self.rows[row]
            state.compressed, state.window = self.after(row, more)

    def expected(self, rows: Sequence[int], *, reserved: bool = False) -> tuple[int, int]:
        """Compressed tokens of the longest of these rows, and of all of them together; reserved: tokens that they have
        pages for. Decoding asks at every step, for the same rows; all of them are looked at once a tile. Keeps `rows`,
        which must not change afterwards."""
        if reserved:
            lengths = [len(self._rows[row].pages) * self.page_tokens for row in rows]
            return max(lengths, default=0), sum(lengths)
        if self._expected is None or rows != self._expected[0]:
            lengths = [self._rows[row].compressed for row in rows]
            self._expected = rows, (max(lengths, default=0), sum(lengths))
        return self._expected[1]

    def is_private(self, row: int) -> bool:
        """Whether the next tile would not meet a page that others hold too."""
        tail = self._tail(self.rows[row].compressed, self.rows[row].pages)
        return tail is None or self.allocator.references(tail) == 1

    def has_pages(self, row: int, tokens: int) -> bool:
        return self._pages_for(self.after(row, tokens)[0]) <= len(self.rows[row].pages)

    def copied(self, row: int, source: int) -> Target:
        """`row` as a copy of `source`: shares its pages except reserved ones."""
        state = self.rows[source]
        pages = state.pages if row == source else state.pages[: self._pages_for(state.compressed)]
        return Target(row, list(pages), state.compressed, state.window)

    def cropped(self, row: int, tokens: int) -> Target:
        """`row` with its first `tokens` only; of a tile that is cut, the first tokens are in the window again."""
        state = self.rows[row]
        if tokens >= state.compressed:
            return Target(row, list(state.pages), state.compressed, tokens - state.compressed)
        compressed = tokens // TILE_TOKENS * TILE_TOKENS
        return Target(row, state.pages[: self._pages_for(compressed)], compressed, tokens - compressed)

    def assign(self, targets: Sequence[Target], *, private: bool) -> Changes:
        """Rows become their targets. private: pages that are filled in part are copied at once where they are shared.

        Raises RuntimeError if there are too few free pages for that.
        """
        change: dict[int, int] = {}  # page -> references more
        common: list[int] = []
        for target in targets:
            old, new = self.rows[target.row].pages, target.pages
            same = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
            common.append(same)
            for page in new[same:]:
                change[page] = change.get(page, 0) + 1
            for page in old[same:]:
                change[page] = change.get(page, 0) - 1
        freed = sum(self.allocator.references(page) + more == 0 for page, more in change.items())
        if private:
            self._check_free(self._shared_tails(targets, change), freed)
        for target, same in zip(targets, common):
            self.allocator.share(target.pages[same:])
        changes = Changes()
        for target, same in zip(targets, common):
            state = self.rows[target.row]
            old = state.pages
            self.allocator.release(old[same:])
            changes.entries.update(((target.row, i), target.pages[i]) for i in range(same, len(target.pages)))
            changes.entries.update(((target.row, i), -1) for i in range(len(target.pages), len(old)))
            state.pages, state.compressed, state.window = target.pages, target.compressed, target.window
            state.used = target.used
        if private:
            for target in targets:
                if not self.is_private(target.row):
                    self._copy_tail(target.row, changes)
        return changes

    def set_lengths(self, compressed: Sequence[int], window: Sequence[int]) -> None:
        """What the device says, of all rows."""
        for state, tiles, dense in zip(self.rows, compressed, window):
            state.compressed, state.window = tiles, dense

    def check(self) -> None:
        """AssertionError unless everything fits together; for tests."""
        self.allocator.check(row.pages for row in self.rows)
        for row in self.rows:
            assert (
                row.compressed % TILE_TOKENS == 0
                and 0 <= row.window < self.recent + TILE_TOKENS
                and row.tokens <= self.capacity
            )
            assert row.compressed <= len(row.pages) * self.page_tokens, "tokens without a page"
            assert len(set(row.pages)) == len(row.pages), "a page twice in one sequence"
            assert row.used or not (row.tokens or row.pages), "a sequence not in use holds something"

    def _pages_for(self, compressed: int) -> int:
        return -(-compressed // self.page_tokens)

    def _tail(self, compressed: int, pages: Sequence[int]) -> int | None:
        """The page that is filled in part."""
        return pages[compressed // self.page_tokens] if compressed % self.page_tokens else None

    def _shared_tails(self, targets: Sequence[Target], change: dict[int, int]) -> int:
        """How many targets need a copy of their last page."""
        change, count = dict(change), 0
        for target in targets:
            tail = self._tail(target.compressed, target.pages)
            if tail is not None and self.allocator.references(tail) + change.get(tail, 0) > 1:
                change[tail] = change.get(tail, 0) - 1
                count += 1
        return count

    def _copy_tail(self, row: int, changes: Changes) -> None:
        state = self.rows[row]
        index = state.compressed // self.page_tokens
        old = state.pages[index]
        (new,) = self.allocator.take(1)
        self.allocator.release([old])
        state.pages[index] = new
        changes.entries[row, index] = new
        changes.copies.append((old, new))

    def _check_free(self, needed: int, freed: int) -> None:
        free = self.allocator.free + freed
        if needed > free:
            raise RuntimeError(
                f"out of pages: {needed} more of {self.page_tokens} tokens are needed, {free} of "
                f"{self.allocator.pages} are free; free or crop sequences, or make the cache with more "
                f"{self._pool_argument}"
            )
