"""A sweep's rows, and the files they are kept in: CSV, JSON and a markdown table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from profiling.cases import Case, Load, Shape
from profiling.counters.fields import Counters

NAME = "sweep"


@dataclass(frozen=True)
class Measured:
    """One measured case against one peer. None is an empty CSV field. us: microseconds; tb: 1e12 bytes."""

    op: str
    backend: str                       # of a dense operation: the peer that computed it
    device: str
    B: int
    Hq: int
    Hkv: int
    Sq: int
    T: int
    D: int
    keep: int                          # of D; D for a dense operation
    dtype: str
    data: str
    median_us: float
    iqr_us: float
    tb_per_s: float                    # bytes of the cache as stored and of the dense operands / time
    peer: str                          # "": none, as for dense operations
    peer_form: str                     # the fastest of the ways to compute it
    peer_us: float | None
    peer_iqr_us: float | None
    ratio: float | None                # peer_us / median_us
    rel_err: float                     # relative Frobenius error
    tolerance: float                   # of rel_err
    status: str                        # "ok", or "inaccurate" when rel_err exceeds the tolerance
    check: str                         # what the result was compared with
    bits_per_element: float            # of the cache as stored
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
    # Since the second version of the files; older rows have these defaults.
    scores: str = ""                   # dtype of sparse_qk's result and sparse_av's p, if not dtype
    cache: str = "cold"                # last-level cache at each call
    timing: str = "events"             # "events": single calls; "graph": many calls in a CUDA graph, divided
    cache_tb_per_s: float | None = None  # bytes of the cache alone, as stored / time
    peer_rel_err: float | None = None  # relative Frobenius error of the peer
    stages_ahead: int = 0              # depth of the kernel's pipeline, if it was set; 0: as dispatch chooses


@dataclass(frozen=True)
class Row(Counters, Measured):  # in this order the counters' fields come last
    """A measurement and, where Nsight Compute ran, its counters."""

    @property
    def shape(self) -> Shape:
        return Shape(self.B, self.Hq, self.Hkv, self.Sq, self.T, self.D)

    @property
    def case(self) -> Case:
        return Case(self.op, self.backend, Load(self.shape, self.keep, self.dtype, self.data), self.seed, self.repeats,
                    self.scores, self.cache, self.timing, self.stages_ahead)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a row is of: rows of one key measure the same thing."""
        return (self.device, *case_key(self.case), self.peer)

    @property
    def sparsity(self) -> float:
        return 1 - self.keep / self.D

    @property
    def accurate(self) -> bool:
        return self.status == "ok"

    @property
    def noisy(self) -> bool:
        """Whether the calls differed so much that the ratio says little: something else was running."""
        peer_noisy = self.peer_us is not None and (self.peer_iqr_us or 0) > 0.5 * self.peer_us
        return self.iqr_us > 0.5 * self.median_us or peer_noisy


FIELDS = tuple(f.name for f in fields(Row))
COUNTERS = tuple(f.name for f in fields(Counters))
_REQUIRED = tuple(f.name for f in fields(Measured))[:FIELDS.index("scores")]


def case_key(case: Case) -> tuple[Any, ...]:
    """What a case is of, whatever its seed and repeats."""
    return *untimed_key(case), case.timing


def untimed_key(case: Case) -> tuple[Any, ...]:
    """Likewise, whatever it is timed with."""
    return case.op, case.backend, case.load, case.scores, case.cache, case.stages_ahead


def rounded(value: float, digits: int = 6) -> float:
    """To significant digits: more would be noise in every diff."""
    return float(f"{value:.{digits}g}")


# ---- Files -----------------------------------------------------------------------------------------------------------


def write(rows: Sequence[Row], folder: Path, name: str = NAME) -> list[Path]:
    """Writes NAME.csv, NAME.json (a list of objects) and NAME.md; returns their paths.

    The counters' columns are there if any row has counters.
    """
    from profiling.tables import markdown

    names = [field for field in FIELDS if field not in COUNTERS or any(getattr(row, field) is not None for row in rows)]
    objects = [{field: value for field, value in asdict(row).items() if field in names} for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("csv", "json", "md")]
    with paths[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(objects)
    _replace(paths[1], json.dumps(objects, indent=1) + "\n")
    paths[2].write_text(markdown(rows), encoding="utf-8")
    return paths


def read(path: Path) -> list[Row]:
    """The rows of a JSON file, of this version or an older one; ValueError says what is wrong with it."""
    try:
        objects = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(objects, list):
        raise ValueError(f"{path}: expected a list of rows")
    return [from_object(fields_of_row, f"{path}: row {i}") for i, fields_of_row in enumerate(objects)]


def from_object(values: Mapping[str, Any], where: str = "row") -> Row:
    if not isinstance(values, Mapping) or (missing := [name for name in _REQUIRED if name not in values]):
        raise ValueError(f"{where}: " + (f"lacks {', '.join(missing)}" if isinstance(values, Mapping) else "no object"))
    row = Row(**{name: value for name, value in values.items() if name in FIELDS})
    if row.cache_tb_per_s is None and row.op != "copy":
        nbytes = row.bits_per_element / 8 * row.shape.elements
        row = replace(row, cache_tb_per_s=rounded(nbytes / row.median_us / 1e6))
    return row


def newest(rows: Iterable[Row]) -> list[Row]:
    """One row of each key, the one measured last; in the order of first appearance."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row.key not in found or row.timestamp >= found[row.key].timestamp:
            found[row.key] = row
    return list(found.values())


def _replace(path: Path, text: str) -> None:
    """Writes a file such that it is never seen half written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
