"""Pages and sequences on the host: reference counts, copies on write, all or nothing."""

from __future__ import annotations

import pytest

from cute_kernels._cache.page_allocator import PageAllocator
from cute_kernels._cache.sequences import SequenceTable, Target


def table(
    pages: int, *, rows: int = 4, page_tokens: int = 128, recent: int = 0, capacity: int = 10_000
) -> SequenceTable:
    return SequenceTable(
        rows, pages=pages, page_tokens=page_tokens, recent=recent, capacity=capacity, pool_argument="pool_tokens"
    )


def grow(sequences: SequenceTable, rows: list[int], tokens: list[int]):
    changes = sequences.provide(rows, tokens)
    sequences.advance(rows, tokens)
    sequences.check()
    return changes


def test_random_takes_shares_and_releases_lose_no_page(rng):
    allocator, holders = PageAllocator(17), [[] for _ in range(5)]
    for _ in range(2000):
        one, other = rng.sample(range(5), 2)
        kind = rng.randrange(3)
        if kind == 0 and allocator.free:
            holders[one] += allocator.take(rng.randint(1, allocator.free))
        elif kind == 1:
            new = [page for page in holders[one] if page not in holders[other]]
            allocator.share(new)
            holders[other] += new
        else:
            allocator.release(holders[one])
            holders[one] = []
        allocator.check(holders)
        held = {page for pages in holders for page in pages}
        assert allocator.free == allocator.pages - len(held)
        assert allocator.shared == sum(sum(page in pages for pages in holders) > 1 for page in held)


def test_a_page_is_not_released_or_shared_once_free():
    allocator = PageAllocator(2)
    (page,) = allocator.take(1)
    allocator.release([page])
    with pytest.raises(AssertionError, match="free"):
        allocator.release([page])
    with pytest.raises(AssertionError, match="free"):
        allocator.share([page])


@pytest.mark.parametrize("recent", [0, 32, 100])
def test_what_is_compressed_does_not_depend_on_portions(rng, recent):
    for _ in range(100):
        total = rng.randrange(1000)
        at_once, portions = table(20, recent=recent), table(20, recent=recent)
        grow(at_once, [0], [total])
        left = total
        while left:
            n = rng.randint(1, left)
            grow(portions, [0], [n])
            left -= n
        want, got = at_once.rows[0], portions.rows[0]
        assert (want.compressed, want.window) == (got.compressed, got.window)
        assert want.tokens == total and (want.window >= min(recent, total)) and want.window < recent + 64


def test_steps_into_windows_are_counted_as_others_are(rng):
    """Groups of rows that change, with other operations and looks at the rows between their steps."""
    for recent in (0, 32):
        plain, stepping = (table(40, rows=6, recent=recent, capacity=600) for _ in range(2))
        dense = 0
        for _ in range(600):
            rows, tokens = rng.choice([[0, 1, 2, 3], [4, 5], [2, 5, 0], []]), rng.choice([1, 1, 1, 2, 7])
            for _ in range(rng.randint(1, 9)):
                if any(plain.rows[row].tokens + tokens > plain.capacity for row in rows):
                    plain.assign([Target(row, [], 0, 0) for row in rows], private=False)
                    stepping.assign([Target(row, [], 0, 0) for row in rows], private=False)
                states = [plain.rows[row] for row in rows]
                wanted = all(row.used and row.window + tokens < recent + 64 for row in states)
                if stepping.stays_dense(rows, tokens):
                    assert wanted
                    stepping.advance_dense(tokens)
                    dense += 1
                else:
                    assert not wanted or not rows
                    stepping.provide(rows, [tokens] * len(rows))
                    stepping.advance(rows, [tokens] * len(rows))
                plain.provide(rows, [tokens] * len(rows))
                plain.advance(rows, [tokens] * len(rows))
            if rng.random() < 0.3:
                assert stepping.rows == plain.rows
                stepping.check()
            assert stepping.batch == plain.batch
            assert [stepping.reaches(count) for count in range(8)] == [count <= plain.batch for count in range(8)]
        assert stepping.rows == plain.rows and dense


def test_pages_are_taken_when_the_first_tile_in_them_is_full():
    sequences = table(3)
    assert grow(sequences, [0], [63]).entries == {}
    assert grow(sequences, [0], [1]).entries == {(0, 0): 0}
    assert grow(sequences, [0], [127]).entries == {}
    assert grow(sequences, [0], [1]).entries == {(0, 1): 1}


def test_a_shared_page_is_copied_by_the_first_who_writes_to_it():
    sequences = table(10)
    grow(sequences, [0], [3 * 64])  # pages 0 and half of 1
    sequences.assign([sequences.copied(1, 0), sequences.copied(2, 0)], private=False)
    sequences.check()
    assert sequences.allocator.shared == 2 and sequences.allocator.free == 8
    assert grow(sequences, [1], [63]).copies == []  # stays in the window
    changes = grow(sequences, [1], [1])
    assert changes.copies == [(1, 2)] and changes.entries == {(1, 1): 2}
    changes = grow(sequences, [0, 2], [64, 64])  # the last holder need not copy
    assert changes.copies == [(1, 3)] and changes.entries == {(0, 1): 3}
    assert sequences.rows[2].pages == [0, 1] and sequences.allocator.references(0) == 3


def test_full_shared_pages_are_never_copied():
    sequences = table(10)
    grow(sequences, [0], [256])
    sequences.assign([sequences.copied(1, 0)], private=True)
    changes = grow(sequences, [0, 1], [64, 64])
    assert changes.copies == [] and sequences.allocator.shared == 2


def test_private_copies_are_made_at_once():
    sequences = table(10)
    grow(sequences, [0], [192])
    changes = sequences.assign([sequences.copied(1, 0), sequences.copied(2, 0)], private=True)
    sequences.check()
    assert len(changes.copies) == 2 and all(sequences.is_private(row) for row in range(3))
    assert {changes.entries[1, 0], changes.entries[2, 0]} == {0}  # full ones are shared


@pytest.mark.parametrize("free", [0, 1, 2])
def test_out_of_pages_changes_nothing(free):
    sequences = table(3 + free)
    grow(sequences, [0, 1], [128, 256])
    before = [(row.compressed, row.window, list(row.pages)) for row in sequences.rows]
    with pytest.raises(RuntimeError, match=rf"out of pages: 3 more of 128 .* {free} of {3 + free} .* pool_tokens"):
        sequences.provide([0, 1], [256, 64])
    assert before == [(row.compressed, row.window, list(row.pages)) for row in sequences.rows]
    sequences.check()


def test_copies_count_as_needed_pages():
    sequences = table(3)
    grow(sequences, [0], [192])
    sequences.assign([sequences.copied(1, 0)], private=False)
    small = table(2)
    grow(small, [0], [192])
    copies = [small.copied(1, 0)]
    with pytest.raises(RuntimeError, match=r"1 more .* 0 of 2"):
        small.assign(copies, private=True)
    grow(sequences, [0, 1], [64, 64])  # one copies, the other keeps
    assert sequences.allocator.free == 0


def test_pages_freed_by_a_change_serve_its_copies():
    sequences = table(4)
    grow(sequences, [0, 1], [192, 192])
    changes = sequences.assign([sequences.copied(1, 0)], private=True)
    sequences.check()
    assert len(changes.copies) == 1 and sequences.allocator.free == 1


def test_over_capacity():
    sequences = table(10, capacity=200)
    grow(sequences, [0], [150])
    with pytest.raises(RuntimeError, match="sequence 0 holds 150 tokens, 51 more exceed capacity = 200"):
        sequences.provide([0], [51])
    grow(sequences, [0], [50])


def test_reserved_pages_are_used_first_and_not_shared():
    sequences = table(10)
    grow(sequences, [0], [128])
    assert len(sequences.provide([0], [256]).entries) == 2
    assert grow(sequences, [0], [256]).entries == {}
    sequences.provide([0], [128])
    assert len(sequences.copied(1, 0).pages) == 3 and len(sequences.copied(0, 0).pages) == 4


def test_random_changes_keep_everything_consistent(rng):
    sequences = table(24, rows=5, page_tokens=192, recent=16)
    for _ in range(3000):
        rows = rng.sample(range(5), rng.randint(1, 5))
        private, kind = rng.random() < 0.5, rng.randrange(5)
        try:
            if kind == 0:
                grow(sequences, rows, [rng.randint(0, 300) for _ in rows])
            elif kind == 1:
                sequences.provide(rows, [rng.randint(0, 300) for _ in rows], private=private)
            elif kind == 2:
                sequences.assign([sequences.copied(row, rng.randrange(5)) for row in rows], private=private)
            elif kind == 3:
                targets = [sequences.cropped(row, rng.randint(0, sequences.rows[row].tokens)) for row in rows]
                sequences.assign(targets, private=private)
            else:
                sequences.assign([Target(row, [], 0, 0, used=False) for row in rows], private=private)
        except RuntimeError as error:
            if "out of pages" not in str(error) and "exceed capacity" not in str(error):
                raise
        sequences.check()
