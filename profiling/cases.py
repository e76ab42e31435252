"""What a sweep measures: the cases, the default lists, and the command that names one of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

# The backends of each operation. "reference" is plain torch: measured only when asked for.
BACKENDS = {
    "sparse_qk": ("cpu", "sm80", "sm90", "reference"),
    "sparse_av": ("cpu", "sm80", "sm90", "reference"),
    "compress": ("cpu", "cuda"),  # takes no backend argument: the device of its input decides
}
# Registered, but not measured yet.
LEFT_OUT = {"sparse_attention": "it has only the reference backend so far"}

DTYPES = ("float16", "bfloat16")
DATA = ("gaussian", "outlier", "equal")  # see data.py
EQUAL_BLOCK = 8  # "equal" keeps whole blocks of so many channels


@dataclass(frozen=True, order=True)
class Shape:
    """Batch, query heads, KV heads, query tokens, cached tokens, head dim."""

    batch: int
    query_heads: int
    kv_heads: int
    query_tokens: int
    tokens: int
    head_dim: int

    def __post_init__(self) -> None:
        if min(vars(self).values()) < 1:
            raise ValueError(f"shape {self}: every size must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"shape {self}: Hq = {self.query_heads} is not a multiple of Hkv = {self.kv_heads}")

    @classmethod
    def parse(cls, text: str) -> Shape:
        """"8,32,8,1,16384,128" (B,Hq,Hkv,Sq,T,D) -> Shape; ValueError says what is wrong."""
        try:
            sizes = [int(part) for part in text.split(",")]
        except ValueError:
            sizes = []
        if len(sizes) != 6:
            raise ValueError(f"shape '{text}' is not six integers B,Hq,Hkv,Sq,T,D, such as 8,32,8,1,16384,128")
        return cls(*sizes)

    def __str__(self) -> str:
        return ",".join(str(size) for size in vars(self).values())

    @property
    def elements(self) -> int:
        """Elements of one dense cache."""
        return self.batch * self.kv_heads * self.tokens * self.head_dim


@dataclass(frozen=True)
class Load:
    """What is in the cache: everything of a case but the operation and its backend."""

    shape: Shape
    keep: int
    dtype: str = "float16"
    data: str = "gaussian"

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= self.shape.head_dim:
            raise ValueError(f"keep {self.keep} is not in 1..{self.shape.head_dim}, the head dim of shape {self.shape}")
        if self.data == "equal" and (self.keep % EQUAL_BLOCK or self.shape.head_dim % EQUAL_BLOCK):
            raise ValueError(f"data 'equal' takes keep and D that are multiples of {EQUAL_BLOCK}, not keep {self.keep} "
                             f"and D {self.shape.head_dim}")


@dataclass(frozen=True)
class Case:
    """One row of the sweep."""

    op: str
    backend: str
    load: Load
    seed: int = 0
    repeats: int = 30

    @property
    def role(self) -> str:
        return "value" if self.op == "sparse_av" else "key"

    @property
    def command(self) -> str:
        """Measures exactly this row."""
        load = self.load
        return (f"python -m profiling.sweep --op {self.op} --backend {self.backend} --shape {load.shape} "
                f"--keep {load.keep} --dtype {load.dtype} --data {load.data} "
                f"--seed {self.seed} --repeats {self.repeats}")

    def __str__(self) -> str:
        load = self.load
        return f"{self.op} {self.backend} {load.shape} keep {load.keep} {load.dtype} {load.data}"


def usual_keeps(head_dim: int) -> tuple[int, int]:
    """30 % and 50 % of the channels: 38 and 64 of 128."""
    return max(1, round(0.3 * head_dim)), max(1, head_dim // 2)


def _multiple(keep: int) -> int:
    return -(-keep // EQUAL_BLOCK) * EQUAL_BLOCK


def _list(figures: Iterable[Shape], headline: Shape, variants: Iterable[Shape]) -> list[Load]:
    """The figures with both distributions, then bf16 and equal streams on the headline, then its variants."""
    loads = [Load(s, k, data=d) for s in figures for k in usual_keeps(s.head_dim) for d in ("gaussian", "outlier")]
    loads += [Load(headline, k, dtype="bfloat16") for k in usual_keeps(headline.head_dim)]
    loads += [Load(headline, _multiple(k), data="equal") for k in usual_keeps(headline.head_dim)]
    loads += [Load(s, k) for s in variants for k in usual_keeps(s.head_dim)]
    return loads


def default_loads(device: str, quick: bool) -> list[Load]:
    """The default list of a device ("cuda" or "cpu"): the project's figures, scaled down for a CPU."""
    if device == "cpu":
        shape, odd = Shape(1, 32, 8, 1, 4096, 128), Shape(1, 8, 2, 4, 4000, 64)
    else:
        shape, odd = Shape(8, 32, 8, 1, 4096, 128), Shape(8, 32, 8, 4, 4000, 64)
    if quick:
        return [Load(shape, 38), Load(shape, 64), Load(shape, 38, data="outlier"), Load(shape, 64, data="equal"),
                Load(shape, 38, dtype="bfloat16"), Load(odd, 19)]
    if device == "cpu":
        figures = [Shape(1, 32, 8, 1, 8192, 128), Shape(1, 8, 8, 1, 4096, 128)]
        return _list(figures, figures[0], [Shape(1, 32, 8, 1, 8192, 64), Shape(1, 32, 8, 1, 4096, 256),
                                           Shape(1, 32, 8, 16, 4096, 128)])
    figures = [Shape(8, 32, 8, 1, 16384, 128), Shape(8, 32, 8, 1, 4096, 128), Shape(1, 32, 8, 1, 32768, 128),
               Shape(8, 32, 32, 1, 4096, 128), Shape(8, 64, 8, 1, 16384, 128)]
    return _list(figures, figures[0], [Shape(8, 32, 8, 1, 16384, 64), Shape(8, 32, 8, 1, 16384, 256),
                                       Shape(8, 32, 8, 16, 16384, 128)])


def own_loads(shapes: Iterable[Shape], keeps: Iterable[int] | None, dtypes: Iterable[str] | None,
              data: Iterable[str] | None) -> list[Load]:
    """Every combination; without keeps the usual two of each shape, without dtypes float16, without data gaussian."""
    return [Load(shape, keep, dtype, distribution) for shape in shapes
            for keep, dtype, distribution in product(keeps or usual_keeps(shape.head_dim), dtypes or DTYPES[:1],
                                                     data or DATA[:1])]


def select(loads: Iterable[Load], keeps: Iterable[int] | None, dtypes: Iterable[str] | None,
           data: Iterable[str] | None) -> list[Load]:
    """Those of `loads` that pass every filter given."""
    return [load for load in loads if (not keeps or load.keep in keeps) and (not dtypes or load.dtype in dtypes)
            and (not data or load.data in data)]


def expand(loads: Iterable[Load], ops: Iterable[str], backends: Iterable[str], seed: int, repeats: int) -> list[Case]:
    """Cases in the order operation, load, backend; a backend counts only for operations that have it."""
    loads, backends = list(dict.fromkeys(loads)), list(backends)
    return [Case(op, backend, load, seed, repeats) for op in ops for load in loads for backend in backends
            if backend in BACKENDS.get(op, ())]
