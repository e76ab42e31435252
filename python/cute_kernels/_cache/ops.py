"""KVCache.append and attend in torch.ops.cute_kernels, so that a step of decoding compiles whole.

A cache consists of tensors and of the host's record of its sequences, which no compiler can follow. So an operation
names its cache by a number, and runs the same code as the eager method, checks included. `content`, a tensor without
meaning, stands for all that the cache holds: append is declared to write to it and attend to read it, which keeps their
order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cute_kernels._attention import packed as packed_queries
from cute_kernels._attention.packed import PackedQueries
from cute_kernels._cache import checks
from cute_kernels._runtime import ops
from cute_kernels._runtime.backends import resolve

Sequences = Sequence[int] | Tensor | None  # rows of a cache that a call names


class Config(checks.Sizes, Protocol):
    """A `config.CacheConfig`."""

    @property
    def max_batch(self) -> int: ...


class Target(Protocol):
    """What operations are called for: a `core.CacheCore`."""

    number: int  # from `register`

    @property
    def content(self) -> Tensor: ...

    @property
    def config(self) -> Config: ...

    def append(self, k: Tensor, v: Tensor, sequences: Sequences) -> None: ...

    def attend(
        self,
        q: Tensor,
        scale: float,
        causal: bool,
        return_lse: bool,
        out: Tensor | None,
        sequences: Sequences,
        backend: str,
        lse: Tensor | None,
        packed: PackedQueries | None,
    ) -> tuple[Tensor, Tensor | None]: ...


_targets: WeakValueDictionary[int, Target] = WeakValueDictionary()
_numbers = itertools.count()


def register(target: Target) -> int:
    """The number by which operations name a cache, as long as it lives."""
    number = next(_numbers)
    _targets[number] = target
    return number


def _target(number: int) -> Target:
    target = _targets.get(number)
    if target is None:
        raise RuntimeError("the KVCache that a compiled function was made for is no longer there")
    return target


def append(target: Target, k: Tensor, v: Tensor, sequences: Sequences, backend: str | None = None) -> None:
    """backend: of an `attend` that follows: what cannot serve it raises before anything changes."""
    _APPEND(target.content, target.number, k, v, *_named(target, sequences), backend)


def attend(
    target: Target,
    q: Tensor,
    scale: float,
    causal: bool,
    return_lse: bool,
    out: Tensor | None,
    sequences: Sequences,
    backend: str,
    packed: PackedQueries | None = None,
) -> tuple[Tensor, Tensor | None]:
    if out is None:
        out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    starts, most = (None, None) if packed is None else (packed.starts, packed.most)
    named = *_named(target, sequences), starts, most
    _ATTEND(target.content, target.number, q, *named, scale, causal, backend, out, lse)
    return out, lse


def _named(target: Target, sequences: Sequences) -> tuple[Sequence[int] | None, Tensor | None]:
    """torch.library's argument of integers, and that of a tensor. Its own errors name neither, so integers are checked
    before; a compiler would make a graph for every one of them, and its operation checks them when it runs."""
    if isinstance(sequences, Tensor):
        return None, sequences
    if sequences is not None and not torch.compiler.is_compiling():
        sequences = checks.row_numbers(sequences, "sequences", target.config.max_batch)
    return sequences, None


def _append(
    content: Tensor,
    number: int,
    k: Tensor,
    v: Tensor,
    rows: Sequence[int] | None,
    row_tensor: Tensor | None,
    backend: str | None = None,
) -> None:
    target = _target(number)
    checks.new_tokens(target.config, k, v)  # again: a compiler may have changed their strides
    if backend is not None:
        resolve(backend, content.device)
    target.append(k, v, rows if row_tensor is None else row_tensor)


def _attend(
    content: Tensor,
    number: int,
    q: Tensor,
    rows: Sequence[int] | None,
    row_tensor: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    scale: float,
    causal: bool,
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    target = _target(number)
    checks.queries(target.config, q)
    packed = packed_queries.check(cu_seqlens_q, max_seqlen_q, q)
    sequences = rows if row_tensor is None else row_tensor
    target.attend(q, scale, causal, lse is not None, out, sequences, backend, lse, packed)


_NAMED = "SymInt[]? rows, Tensor? row_tensor"
_APPEND = ops.define(
    f"kv_cache_append(Tensor(a!) content, SymInt number, Tensor k, Tensor v, {_NAMED}, str? backend=None) -> ()",
    _append,
    ops.no_results,
)
_ATTEND = ops.define(
    f"kv_cache_attend(Tensor content, SymInt number, Tensor q, {_NAMED}, Tensor? cu_seqlens_q, SymInt? max_seqlen_q, "
    "float scale, bool causal, str backend, Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _attend,
    ops.no_results,
)
