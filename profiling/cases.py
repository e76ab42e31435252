"""What a row measures: shapes, loads, cases, and the command that names one of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from profiling.command_line import LARGEST

PRODUCTS = ("sparse_qk", "sparse_av")
DECODE_OPS = (*PRODUCTS, "sparse_attention")  # their GPU kernels have a pipeline of stages
SPARSE_OPS = (*DECODE_OPS, "compress")
CACHE_OPS = ("attend",)  # KVCache.attend: pages, lengths on the device, a window; measured where it is named
# The peers measured for themselves: their "backend" is the name of a peer.
DENSE_OPS = ("dense_qk", "dense_av", "dense_attention", "copy")
OPS = SPARSE_OPS + CACHE_OPS + DENSE_OPS

DTYPES = ("float16", "bfloat16")
CODECS = ("fp8", "int8", "int4")  # beside those of the dtypes
METHODS = ("2of4", "magnitude-2of4")  # rules beside "magnitude"
DATA = ("gaussian", "outlier", "equal")  # see data.py
CACHES = ("cold", "warm")  # last-level cache at every call: other operands, or the same ones again
TIMINGS = ("events", "graph", "auto")  # see timing.py
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
        if not all(1 <= size <= LARGEST for size in vars(self).values()):
            raise ValueError(f"shape {self}: every size must be from 1 to {LARGEST}")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"shape {self}: Hq = {self.query_heads} is not a multiple of Hkv = {self.kv_heads}")

    @classmethod
    def parse(cls, text: str) -> Shape:
        """ "8,32,8,1,16384,128" (B,Hq,Hkv,Sq,T,D) -> Shape; ValueError says what is wrong."""
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

    @property
    def heads(self) -> int:
        """KV heads of all batch rows."""
        return self.batch * self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of the query side that meet one KV head."""
        return self.query_heads // self.kv_heads * self.query_tokens


@dataclass(frozen=True)
class Load:
    """What is in the cache. keep = head dim stands for a dense one."""

    shape: Shape
    keep: int
    dtype: str = "float16"
    data: str = "gaussian"
    codec: str = ""  # that the cache is stored in, if not that of its dtype
    method: str = ""  # the rule by which it is pruned, if not "magnitude"

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= self.shape.head_dim:
            raise ValueError(f"keep {self.keep} is not in 1..{self.shape.head_dim}, the head dim of shape {self.shape}")
        if self.data == "equal" and (self.keep % EQUAL_BLOCK or self.shape.head_dim % EQUAL_BLOCK):
            raise ValueError(
                f"data 'equal' takes keep and D that are multiples of {EQUAL_BLOCK}, not keep {self.keep} "
                f"and D {self.shape.head_dim}"
            )
        half = self.shape.head_dim // 2
        if (self.method == "2of4" and self.keep != half) or (self.method == "magnitude-2of4" and self.keep > half):
            raise ValueError(f"method '{self.method}' keeps {half} of {self.shape.head_dim} elements, got {self.keep}")

    @property
    def compression(self) -> dict[str, Any]:
        """Arguments of `compress` and `compress_kv`."""
        arguments: dict[str, Any] = {"codec": self.codec or None}
        if self.method:
            arguments["method"] = self.method
        if self.method != "2of4":
            arguments["keep"] = self.keep
        return arguments


@dataclass(frozen=True)
class Case:
    """One operation on one load, to be measured beside each of its peers."""

    op: str
    backend: str  # of a dense operation: the peer's name
    load: Load
    seed: int = 0
    repeats: int = 30
    scores: str = ""  # dtype of sparse_qk's result and sparse_av's p, if not the load's
    cache: str = "cold"
    timing: str = "events"
    stages_ahead: int = 0  # depth of a GPU kernel's pipeline; 0: as cute_kernels/dispatch chooses

    def __post_init__(self) -> None:
        if self.stages_ahead and self.op not in DECODE_OPS:
            raise ValueError(f"{self.op} has no stages ahead: {', '.join(DECODE_OPS)} have")

    @property
    def is_dense(self) -> bool:
        return self.op in DENSE_OPS

    @property
    def product(self) -> str:
        """What is computed: qk, av, attention, compress or copy."""
        if self.op in CACHE_OPS:
            return "attention"
        return self.op.removeprefix("sparse_").removeprefix("dense_")

    @property
    def role(self) -> str:
        return "value" if self.product == "av" else "key"

    @property
    def elements(self) -> int:
        """Cached elements that a call reads: attention has keys and values."""
        return self.load.shape.elements * (2 if self.product == "attention" else 1)

    @property
    def scores_dtype(self) -> str:
        """The dtype of logits and weights."""
        return self.scores or self.load.dtype

    @property
    def command(self) -> str:
        """Measures exactly this row."""
        load = self.load
        text = (
            f"python -m profiling.sweep --op {self.op} --backend {shlex.quote(self.backend)} --shape {load.shape} "
            f"--keep {load.keep} --dtype {load.dtype} --data {load.data} "
            f"--seed {self.seed} --repeats {self.repeats}"
        )
        extra = (
            ("--codec", load.codec, ""),
            ("--method", load.method, ""),
            ("--scores", self.scores, ""),
            ("--cache", self.cache, "cold"),
            ("--timing", self.timing, "events"),
            ("--stages-ahead", self.stages_ahead, 0),
        )
        return text + "".join(f" {option} {value}" for option, value, default in extra if value != default)

    def __str__(self) -> str:
        load = self.load
        words = (
            self.op,
            self.backend,
            str(load.shape),
            f"keep {load.keep}",
            load.dtype,
            load.data,
            load.codec,
            load.method,
            self.scores and f"scores {self.scores}",
            "warm" if self.cache == "warm" else "",
            "" if self.timing == "events" else self.timing,
            f"{self.stages_ahead} stages ahead" if self.stages_ahead else "",
        )
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Block:
    """Part of a suite or grid: every combination of operations, loads and settings, on the backends that have them."""

    ops: tuple[str, ...]
    loads: tuple[Load, ...]
    backends: tuple[str, ...] = ()  # empty: those of the device
    scores: tuple[str, ...] = ("",)
    caches: tuple[str, ...] = ("cold",)
    timings: tuple[str, ...] = ("events",)
    stages_ahead: tuple[int, ...] = (0,)
    best_backend: bool = False  # of several that serve the device, the last alone

    def cases(self, op: str, backends: Iterable[str], seed: int, repeats: int) -> list[Case]:
        """The cases of one operation; the scores' dtype matters to products only, the keep to sparse ones, stages ahead
        to those with a pipeline."""
        scores = self.scores if op in PRODUCTS else ("",)
        depths = self.stages_ahead if op in DECODE_OPS else (0,)
        found = []
        for load in self.loads:
            if op in DENSE_OPS:
                load = Load(load.shape, load.shape.head_dim, load.dtype)
            found += [
                Case(op, backend, load, seed, repeats, "" if score == load.dtype else score, cache, timing, depth)
                for backend in backends
                for score in scores
                for cache in self.caches
                for timing in self.timings
                for depth in depths
            ]
        return found


def usual_keeps(head_dim: int) -> tuple[int, int]:
    """30 % and 50 % of the channels: 38 and 64 of 128."""
    return max(1, round(0.3 * head_dim)), max(1, head_dim // 2)


def keep_of(sparsity: float, head_dim: int) -> int:
    """The channels that stay at a sparsity, as ck.prune counts them."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity {sparsity} is not in [0, 1)")
    return max(1, int(head_dim * (1 - sparsity) + 1e-6))
