"""Which pages of a pool are free, and how many sequences hold each of the others. Host only."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Reference counts of `pages` pages. holders: the pages of every sequence; all others are free."""

    def __init__(self, pages: int, holders: Iterable[Iterable[int]] = ()) -> None:
        self._references = [0] * pages
        for held in holders:
            for page in held:
                self._references[page] += 1
        # A stack: the first page goes first.
        self._free = [page for page in range(pages - 1, -1, -1) if not self._references[page]]

    @property
    def pages(self) -> int:
        return len(self._references)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def shared(self) -> int:
        """Pages that more than one sequence holds."""
        return sum(count > 1 for count in self._references)

    def references(self, page: int) -> int:
        return self._references[page]

    def take(self, count: int) -> list[int]:
        """`count` free pages, each now held once. Callers check first that `free` is enough."""
        if count > len(self._free):
            raise AssertionError(f"{count} pages taken of {len(self._free)}")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Every page is held once more."""
        for page in pages:
            if self._references[page] < 1:
                raise AssertionError(f"page {page} is shared, but free")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Every page is held once less; pages that no sequence holds become free."""
        for page in pages:
            if self._references[page] < 1:
                raise AssertionError(f"page {page} is released, but free")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """AssertionError unless `holders`, the pages of every sequence, are what the counts say; for tests."""
        counts = [0] * self.pages
        for held in holders:
            for page in held:
                counts[page] += 1
        assert counts == self._references, "reference counts differ from the pages that sequences hold"
        assert sorted(self._free) == [page for page, count in enumerate(counts) if not count], (
            "pages lost or free twice"
        )
