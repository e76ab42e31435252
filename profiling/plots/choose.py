"""Which rows a curve is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

from profiling.cases import DECODE_OPS
from profiling.rows import Row


def plain(rows: Iterable[Row], ops: Collection[str] = DECODE_OPS) -> list[Row]:
    """Operations of the usual kind: fp16 all through, cold cache, single calls, gaussian data, nothing tuned."""
    return [
        row
        for row in rows
        if row.op in ops
        and (row.dtype, row.codec, row.method, row.scores) == ("float16", "", "", "")
        and (row.cache, row.timing, row.data, row.stages_ahead) == ("cold", "events", "gaussian", 0)
    ]


def longest_series(rows: Iterable[Row], group: Callable[[Row], Hashable], along: Callable[[Row], float]) -> list[Row]:
    """The rows of the group with the most values along the axis; of equal ones the first."""
    groups: dict[Hashable, list[Row]] = defaultdict(list)
    for row in rows:
        groups[group(row)].append(row)
    return max(groups.values(), key=lambda members: len({along(row) for row in members}), default=[])


def by_backend(rows: Iterable[Row], op: str, along: Callable[[Row], float]) -> dict[str, list[Row]]:
    """Backend -> its rows of an operation in order, one at each place: beside the fastest peer in the cache's dtype."""
    found: dict[str, dict[float, Row]] = defaultdict(dict)
    for row in rows:
        if row.op != op:
            continue
        place, best = along(row), found[row.backend].get(along(row))
        if best is None or peer_us(row) < peer_us(best):
            found[row.backend][place] = row
    return {backend: [row for _, row in sorted(places.items())] for backend, places in found.items()}


def peer_us(row: Row) -> float:
    """Of a peer in the cache's dtype; infinite for others, and without one."""
    return float("inf") if row.peer_us is None or "fp8" in row.peer else row.peer_us


def backends(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.backend for row in rows))


def device(rows: Sequence[Row]) -> str:
    """With the instruction set of a CPU's kernels."""
    return ", ".join(dict.fromkeys(f"{row.device}, {row.isa}" if row.isa else row.device for row in rows))


def shape_text(row: Row, tokens: bool = True) -> str:
    words = [f"B {row.B}", f"Hq {row.Hq}", f"Hkv {row.Hkv}", f"D {row.D}"]
    if row.Sq > 1:
        words.append(f"Sq {row.Sq}")
    return ", ".join([*words, f"T {size(row.T)}"] if tokens else words)


def size(tokens: int) -> str:
    """16384 -> "16 K"."""
    for factor, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens % factor == 0:
            return f"{tokens // factor} {unit}"
    return str(tokens)
