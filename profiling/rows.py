"""A sweep's rows, and the JSON files they are kept in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from profiling import records
from profiling.cases import Case, Load, Shape
from profiling.counters.fields import Counters
from profiling.counters.verdict import verdict

NAME = "sweep"
# What all rows of a run have in common.
OF_A_RUN = (
    "device",
    "sm_clock_mhz",
    "multiprocessors",
    "threads",
    "isa",
    "repeats",
    "seed",
    "check",
    "torch",
    "driver",
    "commit",
    "timestamp",
)
DERIVED = ("ratio", "status", "elements_per_clk_sm", "command", "ncu_verdict")  # from the other fields: in no file


@dataclass(frozen=True)
class Measured:
    """One measured case against one peer. us: microseconds; tb: 1e12 bytes."""

    op: str
    backend: str  # of a dense operation: the peer that computed it
    device: str
    B: int
    Hq: int
    Hkv: int
    Sq: int
    T: int
    D: int
    keep: int  # of D; D for a dense operation
    dtype: str
    data: str
    median_us: float
    iqr_us: float
    tb_per_s: float  # bytes of the cache as stored and of the dense operands / time
    peer: str  # "": none, as for dense operations
    peer_form: str  # the fastest of the ways to compute it
    peer_us: float | None
    peer_iqr_us: float | None
    rel_err: float  # relative Frobenius error
    tolerance: float  # of rel_err
    check: str  # what the result was compared with
    bits_per_element: float  # of the cache as stored
    sm_clock_mhz: float | None  # the fastest SM clock, which elements_per_clk_sm assumes
    multiprocessors: int | None
    threads: int | None  # CPU only
    repeats: int
    seed: int
    torch: str
    driver: str
    commit: str
    timestamp: str
    # Of products and attention, some of them; other rows have these defaults.
    codec: str = ""  # that the cache is stored in, if not that of dtype
    method: str = ""  # the rule by which the cache is pruned, if not "magnitude"
    scores: str = ""  # dtype of sparse_qk's result and sparse_av's p, if not dtype
    cache: str = "cold"  # last-level cache at each call
    timing: str = "events"  # "events": single calls; "graph": many calls in a CUDA graph, divided
    cache_tb_per_s: float | None = None  # bytes of the cache alone, as stored / time
    peer_rel_err: float | None = None  # relative Frobenius error of the peer
    stages_ahead: int = 0  # depth of the kernel's pipeline, if it was set; 0: as dispatch chooses
    isa: str = ""  # CPU only: the instruction set of the kernels, such as "avx512bf16"


@dataclass(frozen=True)
class Row(Counters, Measured):  # in this order the counters' fields come last
    """A measurement and, where Nsight Compute ran, its counters."""

    @property
    def shape(self) -> Shape:
        return Shape(self.B, self.Hq, self.Hkv, self.Sq, self.T, self.D)

    @property
    def case(self) -> Case:
        return Case(
            self.op,
            self.backend,
            Load(self.shape, self.keep, self.dtype, self.data, self.codec, self.method),
            self.seed,
            self.repeats,
            self.scores,
            self.cache,
            self.timing,
            self.stages_ahead,
        )

    @property
    def key(self) -> tuple[Any, ...]:
        """What a row is of: rows of one key measure the same thing."""
        return (self.device, self.isa, *case_key(self.case), self.peer)

    @property
    def command(self) -> str:
        """Measures this row again."""
        return self.case.command

    @property
    def sparsity(self) -> float:
        return 1 - self.keep / self.D

    @property
    def ratio(self) -> float | None:
        """The peer's time / ours."""
        return rounded(self.peer_us / self.median_us) if self.peer_us is not None else None

    @property
    def elements_per_clk_sm(self) -> float | None:
        """Cached elements per SM clock and SM; None on a CPU."""
        if not self.sm_clock_mhz or not self.multiprocessors:
            return None
        return rounded(self.case.elements / (self.median_us * self.sm_clock_mhz * self.multiprocessors))

    @property
    def accurate(self) -> bool:
        return self.rel_err <= self.tolerance  # NaN is inaccurate, too

    @property
    def status(self) -> str:
        return "ok" if self.accurate else "inaccurate"

    @property
    def ncu_verdict(self) -> str | None:
        """What limits the kernel, and what would make it faster."""
        return verdict(self)

    @property
    def noisy(self) -> bool:
        """Whether the calls differed so much that the ratio says little: something else was running."""
        peer_noisy = self.peer_us is not None and (self.peer_iqr_us or 0) > 0.5 * self.peer_us
        return self.iqr_us > 0.5 * self.median_us or peer_noisy


FIELDS = tuple(f.name for f in fields(Row))
_DEFAULTS = {f.name: f.default for f in fields(Row) if f.default is not MISSING}
_REQUIRED = tuple(name for name in FIELDS if name not in _DEFAULTS)


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


def write(rows: Sequence[Row], folder: Path, name: str = NAME) -> Path:
    """Writes NAME.json; returns its path."""
    path = folder / f"{name}.json"
    records.write(path, [asdict(row) for row in rows], OF_A_RUN, _DEFAULTS)
    return path


def read(path: Path) -> list[Row]:
    """The rows of a JSON file, of this format or an older one; ValueError says what is wrong with it."""
    return [from_object(values, f"{path}: row {i}") for i, values in enumerate(records.read(path))]


def from_object(values: Mapping[str, Any], where: str = "row") -> Row:
    if missing := [name for name in _REQUIRED if name not in values]:
        raise ValueError(f"{where}: lacks {', '.join(missing)}")
    row = Row(**{name: value for name, value in values.items() if name in FIELDS})
    if row.cache_tb_per_s is None and row.op != "copy":
        nbytes = row.bits_per_element / 8 * row.shape.elements
        row = replace(row, cache_tb_per_s=rounded(nbytes / row.median_us / 1e6))
    return row


def as_object(row: Row) -> dict[str, Any]:
    """Every field, derived ones too."""
    return asdict(row) | {name: getattr(row, name) for name in DERIVED}


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """None is an empty field; columns of defaults alone are left out."""
    records.write_csv(path, [as_object(row) for row in rows], _DEFAULTS | {"ncu_verdict": None})


class Keyed(Protocol):
    @property
    def key(self) -> tuple[Any, ...]: ...

    @property
    def timestamp(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=Keyed)


def newest(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """One row of each key, the one measured last; in the order of first appearance."""
    found: dict[tuple[Any, ...], AnyRow] = {}
    for row in rows:
        if row.key not in found or row.timestamp >= found[row.key].timestamp:
            found[row.key] = row
    return list(found.values())
