"""Units chosen by magnitude, one for all values of a column."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """name: for a column's head. size: of the value that is 1 in it."""

    name: str
    size: float

    def of(self, value: float, form: str) -> str:
        return f"{value / self.size:{form}}"


RATES = (Unit("TB/s", 1.0), Unit("GB/s", 1e-3))  # of rates in TB/s, as rows have them
SIZES = (Unit("GiB", 2**30), Unit("MiB", 2**20), Unit("KiB", 2**10))  # of bytes


def rate(values: Iterable[float | None]) -> Unit:
    return _largest_that_fits(RATES, values)


def size(values: Iterable[float | None]) -> Unit:
    return _largest_that_fits(SIZES, values)


def _largest_that_fits(units: Sequence[Unit], values: Iterable[float | None]) -> Unit:
    """The largest unit that the largest value reaches, or the smallest one."""
    largest = max((value for value in values if value is not None), default=units[0].size)
    return next((unit for unit in units if largest >= unit.size), units[-1])
