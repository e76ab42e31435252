"""Which rows moved since an older sweep: python -m profiling.compare OLD.json NEW.json [--all].

A time has moved if its medians differ by more than the noise: 3 % of the older one, or the sum of the interquartile
ranges if that is more. When the peer's time, measured in turn with it, moved by as much, the machine did, and not the
kernel.
Exit status: 0 nothing got slower or wrong, 1 something did, 2 the files cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiling import rows as rows_module
from profiling.rows import Row

FLOOR = 0.03  # of a median: what one run differs from the next by


@dataclass(frozen=True)
class Change:
    """One row then and now."""

    old: Row
    new: Row

    @property
    def factor(self) -> float:
        """New time / old time."""
        return self.new.median_us / self.old.median_us

    @property
    def peer_factor(self) -> float | None:
        return self.new.peer_us / self.old.peer_us if self.new.peer_us and self.old.peer_us else None

    @property
    def noise(self) -> float:
        """The share of the old time that a difference must exceed."""
        return max(FLOOR, (self.old.iqr_us + self.new.iqr_us) / self.old.median_us)

    @property
    def moved(self) -> bool:
        return abs(self.factor - 1) > self.noise

    @property
    def machine_moved(self) -> bool:
        """Whether the peer's time changed likewise."""
        return self.peer_factor is not None and abs(self.factor / self.peer_factor - 1) <= self.noise

    @property
    def worse(self) -> bool:
        return (self.old.accurate and not self.new.accurate) or (
            self.moved and self.factor > 1 and not self.machine_moved
        )

    def __str__(self) -> str:
        beside = f" beside {self.new.peer}" if self.new.peer else ""
        peer = "" if self.peer_factor is None else f"; {self.new.peer} {self.peer_factor - 1:+.1%}"
        notes = " (the machine moved)" if self.moved and self.machine_moved else ""
        if self.old.status != self.new.status:
            notes += f" {self.old.status} -> {self.new.status}"
        return (
            f"{self.new.case}{beside}: {self.old.median_us:.1f} -> {self.new.median_us:.1f} us "
            f"{self.factor - 1:+.1%} (noise {self.noise:.1%}){peer}{notes}"
        )


def changes(old: Sequence[Row], new: Sequence[Row]) -> list[Change]:
    """The rows that both have, the most slowed down first."""
    before = {row.key: row for row in rows_module.newest(old)}
    found = [Change(before[row.key], row) for row in rows_module.newest(new) if row.key in before]
    return sorted(found, key=lambda change: -change.factor)


def summary(old: Sequence[Row], new: Sequence[Row], everything: bool = False) -> str:
    """The rows that moved or became wrong, and how many did not."""
    found = changes(old, new)
    lines = [str(c) for c in found if everything or c.moved or c.old.status != c.new.status]
    moved = sum(c.moved for c in found)
    lines.append(
        f"{moved} of {len(found)} rows moved beyond noise, {sum(c.worse for c in found)} for the worse; "
        f"{len({r.key for r in new} - {r.key for r in old})} only in the new sweep, "
        f"{len({r.key for r in old} - {r.key for r in new})} only in the old one"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.compare",
        description=__doc__.split("\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("old", type=Path, metavar="OLD.json", help="rows of a sweep")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="those of a later one")
    parser.add_argument("--all", action="store_true", help="list every row")
    args = parser.parse_args(arguments)
    try:
        old, new = rows_module.read(args.old), rows_module.read(args.new)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print(summary(old, new, args.all))
    found = changes(old, new)
    if not found:
        print("compare: no row is in both", file=sys.stderr)
        return 2
    return 1 if any(change.worse for change in found) else 0


if __name__ == "__main__":
    sys.exit(main())
