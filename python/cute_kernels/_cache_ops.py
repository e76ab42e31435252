"""KVCache.append and attend in torch.ops.cute_kernels, so that a step of decoding compiles whole.

A cache is tensors and the host's books about them, which no compiler can follow. So an operation names its cache by a
number and does what the method does, checks included, when it is run. `content`, a tensor without meaning, stands for
all that the cache holds: append is declared to write to it and attend to read it, which keeps their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from cute_kernels import _cache_checks, _ops

if TYPE_CHECKING:
    from cute_kernels.kv_cache import KVCache

_caches: WeakValueDictionary[int, KVCache] = WeakValueDictionary()
_numbers = itertools.count()


def register(cache: KVCache) -> int:
    """The number by which operations name a cache, as long as it lives."""
    number = next(_numbers)
    _caches[number] = cache
    return number


def _cache(number: int) -> KVCache:
    cache = _caches.get(number)
    if cache is None:
        raise RuntimeError("the KVCache that a compiled function was made for is no longer there")
    return cache


def append(cache: KVCache, k: Tensor, v: Tensor, sequences: Sequence[int] | Tensor | None) -> None:
    _APPEND(cache._storage.content, cache._number, k, v, *_named(sequences))


def attend(
    cache: KVCache,
    q: Tensor,
    scale: float,
    causal: bool,
    return_lse: bool,
    out: Tensor | None,
    sequences: Sequence[int] | Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    if out is None:
        out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    _ATTEND(cache._storage.content, cache._number, q, *_named(sequences), scale, causal, backend, out, lse)
    return out, lse


def _named(sequences: Sequence[int] | Tensor | None) -> tuple[Sequence[int] | None, Tensor | None]:
    return (None, sequences) if isinstance(sequences, Tensor) else (sequences, None)


def _append(
    content: Tensor, number: int, k: Tensor, v: Tensor, rows: Sequence[int] | None, row_tensor: Tensor | None
) -> None:
    cache = _cache(number)
    _cache_checks.new_tokens(cache._config, k, v)  # again: strides are the compiler's
    cache._append(k, v, rows if row_tensor is None else row_tensor)


def _attend(
    content: Tensor,
    number: int,
    q: Tensor,
    rows: Sequence[int] | None,
    row_tensor: Tensor | None,
    scale: float,
    causal: bool,
    backend: str,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    cache = _cache(number)
    _cache_checks.queries(cache._config, q)
    cache._attend(q, scale, causal, lse is not None, out, rows if row_tensor is None else row_tensor, backend, lse)


_NAMED = "SymInt[]? rows, Tensor? row_tensor"
_APPEND = _ops.define(
    f"kv_cache_append(Tensor(a!) content, SymInt number, Tensor k, Tensor v, {_NAMED}) -> ()", _append, _ops.no_results
)
_ATTEND = _ops.define(
    f"kv_cache_attend(Tensor content, SymInt number, Tensor q, {_NAMED}, float scale, bool causal, str backend, "
    "Tensor(a!) out, Tensor(b!)? lse) -> ()",
    _attend,
    _ops.no_results,
)
