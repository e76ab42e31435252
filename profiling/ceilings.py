"""What a device allows: copy bandwidth from a sweep's rows, decoding rates from decode.json beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from profiling import records
from profiling.rows import Row

DECODE_FILE = "decode.json"  # of python -m profiling.decode_microbench --out
MIN_BYTES = 64e6  # a smaller copy tells more about its launch than about bandwidth


@dataclass(frozen=True)
class Ceilings:
    """None or empty: not measured."""

    copy_tb_per_s: float | None = None  # bytes read and written
    decode: dict[str, float] = field(default_factory=dict)  # scheme -> most elements a clock and SM


def ceilings(rows: Iterable[Row], folder: Path) -> Ceilings:
    return Ceilings(copy_bandwidth(rows), decode_rates(folder / DECODE_FILE))


def copy_bandwidth(rows: Iterable[Row]) -> float | None:
    """The fastest large copy, in TB/s: of a row of its own, or beside compress."""
    found = []
    for row in rows:
        if row.cache != "cold":
            continue
        if row.op == "copy":
            rate, nbytes = row.tb_per_s, row.tb_per_s * row.median_us * 1e6
        elif row.peer == "copy" and row.peer_us:
            nbytes = row.tb_per_s * row.median_us * 1e6
            rate = nbytes / row.peer_us / 1e6
        else:
            continue
        if nbytes >= MIN_BYTES:
            found.append(rate)
    return max(found, default=None)


def decode_rates(path: Path) -> dict[str, float]:
    """The best rate of each scheme in a file of the decode micro-benchmark; nothing without the file."""
    rates: dict[str, float] = {}
    if path.is_file():
        for row in records.read(path):
            rates[row["scheme"]] = max(rates.get(row["scheme"], 0.0), row["elements_per_clk_sm"])
    return rates
