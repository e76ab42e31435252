"""What is compared: the suites' tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from profiling.cases import PRODUCTS, Shape, usual_keeps
from profiling.suites import figures

KEEP, WINDOW, HEAD_DIM = 38, 64, 128
MAX_BYTES = 20e9  # a task whose worker would hold more is left out
BYTES_OF_DENSE = 2.0  # what a worker holds at most: dense keys and values and what they become, by the dense bytes

ATTENTION_OPS = ("sparse_attention", "attend", "step")
COMPRESS_OPS = ("compress_key", "compress_value", "compress_kv", "compress_kv_out", "append")
OPS = (*PRODUCTS, *ATTENTION_OPS, *COMPRESS_OPS)


@dataclass(frozen=True)
class Task:
    """One call on one cache.

    op: sparse_qk, sparse_av; sparse_attention: with a dense window; attend: KVCache.attend, paged, with lengths on the
    device; step: KVCache.append of a token and attend; compress_key, compress_value, compress_kv; compress_kv_out: into
    preallocated storage; append: KVCache.append, the mean of 64 tokens, one of which completes a tile.
    """

    op: str
    shape: Shape
    keep: int
    dtype: str = "float16"
    window: int = WINDOW

    @property
    def storage(self) -> tuple[str, Shape, int, str, int]:
        """Tasks of equal storage, one after the other, share what their worker built."""
        paged = self.op in ("attend", "step", "append")
        kind = "paged" if paged else "dense" if self.op in COMPRESS_OPS else "compressed"
        shape = self.shape
        alike = Shape(shape.batch, shape.kv_heads, shape.kv_heads, 1, shape.tokens, shape.head_dim)
        return kind, alike, self.keep, self.dtype, self.window

    @property
    def nbytes(self) -> float:
        """That a worker holds at most."""
        return BYTES_OF_DENSE * 2 * 2 * self.shape.elements

    def to_object(self) -> dict[str, Any]:
        return asdict(self) | {"shape": str(self.shape)}

    @classmethod
    def from_object(cls, values: Mapping[str, Any]) -> Task:
        return cls(**{**values, "shape": Shape.parse(values["shape"])})

    def __str__(self) -> str:
        return f"{self.op} {self.shape} keep {self.keep}" + (f" {self.dtype}" if self.dtype != "float16" else "")


@dataclass(frozen=True)
class Sizes:
    """The serving grid: batches, cached tokens, (query heads, KV heads)."""

    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    tokens: Sequence[int] = (256, 1024, 4096, 16384, 65536, 131072)
    heads: Sequence[tuple[int, int]] = ((32, 8), (64, 8))


PRODUCT_SIZES = ((1, 4096), (1, 65536), (8, 1024), (8, 16384), (64, 4096))  # (B, T) at which serving has products, too


def serving(sizes: Sizes, device: str) -> list[Task]:
    """Attention over plain and over paged caches, and whole steps, at every size; products at some."""
    found = []
    for batch in sizes.batches:
        for tokens in sizes.tokens:
            shapes = [Shape(batch, q, kv, 1, tokens, HEAD_DIM) for q, kv in sizes.heads]
            ops = (*PRODUCTS, *ATTENTION_OPS) if (batch, tokens) in PRODUCT_SIZES else ATTENTION_OPS
            found += [Task(op, shape, KEEP) for op in ops for shape in shapes]
    return found


def readme(sizes: Sizes, device: str) -> list[Task]:
    """The figures that the README quotes."""
    return [
        Task(op, shape, keep)
        for shape in figures(device)
        for keep in usual_keeps(shape.head_dim)
        for op in (*PRODUCTS, "sparse_attention")
    ]


def compress(sizes: Sizes, device: str) -> list[Task]:
    """Compression of whole caches, and appends."""
    if device == "cpu":
        shapes = [(Shape(1, 8, 8, 1, 2048, 128), "float16"), (Shape(1, 8, 8, 1, 2048, 64), "bfloat16")]
    else:
        shapes = [
            (Shape(*sizes, 1, tokens, head_dim), dtype)
            for *sizes, tokens, head_dim, dtype in (
                (8, 8, 8, 16384, 128, "float16"),
                (8, 8, 8, 16384, 128, "bfloat16"),
                (1, 8, 8, 32768, 128, "float16"),
                (8, 8, 8, 4096, 128, "float16"),
                (8, 8, 8, 16384, 64, "float16"),
                (8, 8, 8, 8192, 256, "float16"),
            )
        ]
    found = [
        Task(op, shape, keep, dtype)
        for shape, dtype in shapes
        for keep in usual_keeps(shape.head_dim)
        for op in COMPRESS_OPS
        if op != "append"
    ]
    batches = (1,) if device == "cpu" else (1, 8, 64)
    return found + [Task("append", Shape(batch, 8, 8, 1, 1024, HEAD_DIM), KEEP) for batch in batches]


SUITES: Mapping[str, Callable[[Sizes, str], list[Task]]] = {"readme": readme, "serving": serving, "compress": compress}


def choose(suites: Sequence[str], sizes: Sizes, device: str, ops: Sequence[str]) -> tuple[list[Task], list[Task]]:
    """(the suites' tasks of the operations, once each, those of one storage together; those that are too large)."""
    found = dict.fromkeys(task for name in suites for task in SUITES[name](sizes, device) if not ops or task.op in ops)
    groups: dict[object, list[Task]] = {}
    for task in found:
        groups.setdefault(task.storage, []).append(task)
    ordered = [task for group in groups.values() for task in group]
    return (
        [task for task in ordered if task.nbytes <= MAX_BYTES],
        [task for task in ordered if task.nbytes > MAX_BYTES],
    )
