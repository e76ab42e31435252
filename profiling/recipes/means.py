"""Which rows of a study can be averaged, and how."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

R = TypeVar("R", bound=Mapping[str, Any])


def of_full_length(rows: Iterable[R]) -> list[R]:
    """Of each size and task, the rows of the longest context. A model that learnt only shorter sequences is measured
    on these, which is another task: less of its context is older than the window. Rows without a context all stay."""
    rows = list(rows)
    longest: dict[tuple[Any, Any], int] = {}
    for row in rows:
        key = row["size"], row["task"]
        longest[key] = max(longest.get(key, 0), row.get("context") or 0)
    return [row for row in rows if (row.get("context") or 0) == longest[row["size"], row["task"]]]


def mean(values: Sequence[float]) -> tuple[float, float]:
    """(mean, its standard error, 0 of one value)"""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error
