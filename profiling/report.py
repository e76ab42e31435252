"""A sweep's rows and how they leave it: CSV, JSON, a markdown table, and the same table for the terminal."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

NAME = "sweep"


@dataclass(frozen=True)
class Row:
    """One measured case against one peer. None is an empty CSV field."""

    op: str
    backend: str
    device: str
    B: int
    Hq: int
    Hkv: int
    Sq: int
    T: int
    D: int
    keep: int
    dtype: str
    data: str
    median_us: float
    iqr_us: float
    tb_per_s: float                    # bytes of the compressed cache and of the dense operands / time, 1e12 bytes/s
    peer: str
    peer_form: str                     # the fastest of the ways to compute it
    peer_us: float
    peer_iqr_us: float
    ratio: float                       # peer_us / median_us
    rel_err: float                     # relative Frobenius error
    tolerance: float                   # of rel_err
    status: str                        # "ok", or "inaccurate" when rel_err exceeds the tolerance
    check: str                         # what the result was compared with
    bits_per_element: float            # of the compressed cache
    elements_per_clk_sm: float | None  # cached elements per SM clock and SM; None on a CPU
    sm_clock_mhz: float | None         # the fastest SM clock, which elements_per_clk_sm assumes
    multiprocessors: int | None
    threads: int | None                # CPU only
    repeats: int
    seed: int
    torch: str
    driver: str
    commit: str
    timestamp: str
    command: str                       # measures this row again

    @property
    def accurate(self) -> bool:
        return self.status == "ok"

    @property
    def noisy(self) -> bool:
        """Whether the calls differed so much that the ratio says little: something else was running."""
        return self.iqr_us > 0.5 * self.median_us or self.peer_iqr_us > 0.5 * self.peer_us


FIELDS = tuple(f.name for f in fields(Row))


def rounded(value: float, digits: int = 6) -> float:
    """To significant digits: more would be noise in every diff."""
    return float(f"{value:.{digits}g}")


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Writes sweep.csv, sweep.json (a list of objects) and sweep.md; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{NAME}.{suffix}" for suffix in ("csv", "json", "md")]
    with paths[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    paths[1].write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    paths[2].write_text(markdown(rows), encoding="utf-8")
    return paths


# ---- Tables ----------------------------------------------------------------------------------------------------------

HEADER = ("op", "backend", "B,Hq,Hkv,Sq,T,D", "keep", "dtype", "data", "us", "IQR", "TB/s", "el/clk/SM", "bits/el",
          "peer", "peer us", "ratio", "rel err")


def _cells(row: Row) -> tuple[str, ...]:
    shape = ",".join(str(size) for size in (row.B, row.Hq, row.Hkv, row.Sq, row.T, row.D))
    rate = "" if row.elements_per_clk_sm is None else f"{row.elements_per_clk_sm:.1f}"
    error = f"{row.rel_err:.1e}" + ("" if row.accurate else " !")
    return (row.op, row.backend, shape, str(row.keep), row.dtype, row.data, f"{row.median_us:.1f}", f"{row.iqr_us:.1f}",
            f"{row.tb_per_s:.3g}", rate, f"{row.bits_per_element:.2f}", f"{row.peer} ({row.peer_form})",
            f"{row.peer_us:.1f}", f"{row.ratio:.2f}" + (" ~" if row.noisy else ""), error)


def markdown(rows: Sequence[Row]) -> str:
    """The table, under a line for each device and software that rows were measured with."""
    settings = dict.fromkeys(
        f"{r.device}, torch {r.torch}, " + (f"driver {r.driver}, " if r.driver else "")
        + (f"{r.threads} threads, " if r.threads else "") + f"commit {r.commit}, {r.timestamp}" for r in rows)
    lines = ["# Sweep", "", *(f"{setting}." for setting in settings), "",
             "Medians of single calls, cold cache. ratio = peer us / us.",
             "`~` marks a ratio of widely scattered times, `!` a result beyond its tolerance.", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "| " + " | ".join("---" for _ in HEADER) + " |"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def terminal(rows: Iterable[Row]) -> str:
    table = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table)


def one_line(row: Row) -> str:
    """For the progress of a run."""
    mark = "" if row.accurate else f"  INACCURATE: rel err {row.rel_err:.1e} > {row.tolerance:.0e}"
    return f"{row.median_us:.1f} us, {row.ratio:.2f}x {row.peer}, {row.bits_per_element:.2f} bits/element{mark}"
