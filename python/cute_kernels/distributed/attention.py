"""Attention over the tokens of all ranks: each attends to its own, outputs are gathered, and every rank merges them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._cache.config import CacheConfig
from cute_kernels._runtime import checks
from cute_kernels._runtime.backends import check_name
from cute_kernels.distributed.exchange import Parts
from cute_kernels.distributed.ranks import Ranks
from cute_kernels.distributed.shard import Shard
from cute_kernels.merging import merge_states

_FAILED = 2  # in the place of the pool's error: this rank's call raised
_CHECKED_EVERY = 64  # calls of attend, on GPUs, after which the host looks at what ranks say of themselves


class PendingAttention:
    """What `ShardedKVCache.attend` returns with async_op=True: ranks' outputs are on their way."""

    def __init__(self, attention: ShardedAttention, parts: Parts, work: Any, kept: tuple[bool, bool]) -> None:
        self._attention, self._parts, self._work, self._kept = attention, parts, work, kept
        self._result: Any = None

    def wait(self) -> Tensor | tuple[Tensor, Tensor]:
        """What `attend` would have returned. On GPUs the current stream waits, not the host; call it in the stream that
        called `attend`. Once per rank, in the order of the calls; again: the same result.

        Raises RuntimeError as `attend` does, where another rank failed.
        """
        if self._result is None:
            if self._work is not None:
                self._work.wait()
            self._result = self._attention.merged(self._parts, *self._kept)
            self._work = None
        return self._result


class ShardedAttention:
    """Of one cache: what its ranks have agreed on, and how they tell one another of failures."""

    def __init__(self, ranks: Ranks, shard: Shard, made_for: CacheConfig) -> None:
        self._ranks, self._shard = ranks, shard
        self._head_dim, self._dtype, self._device = made_for.head_dim, made_for.dtype, made_for.device
        self._max_batch, self._capacity = made_for.max_batch, made_for.capacity
        self._known: set[tuple[Any, ...]] = set()  # calls in which all ranks have agreed
        self._last: tuple[int, ...] | None = None  # shape of the queries of the last of them
        self._calls = 0

    def attend(
        self,
        q: Tensor,
        *,
        scale: float | None,
        return_lse: bool,
        backend: str,
        async_op: bool,
        capturing: bool,
        check: Callable[[], None],
        part: Callable[[Tensor, float, str, Parts], None],
    ) -> Any:
        """`ShardedKVCache.attend`. check: raises for queries that the cache cannot serve. part: attends over this
        rank's tokens (q, scale, backend) and writes output and LSE."""
        error: Exception | None = None
        key: tuple[Any, ...] = ()
        factor = 0.0
        try:
            check()
            factor = 1 / math.sqrt(self._head_dim) if scale is None else checks.scale(scale)
            checks.flag(return_lse, "return_lse")
            checks.flag(async_op, "async_op")
            check_name(backend)
            key = (tuple(q.shape), str(q.dtype), factor, return_lse, backend)
        except (TypeError, ValueError, RuntimeError) as caught:
            error = caught
        if capturing and (error is not None or key not in self._known):
            raise error or RuntimeError("attend is new like this: call it once on all ranks before the capture")
        new = error is None and key not in self._known
        if new or (error is not None and self._last is None):
            names = ("q's shape", "q's dtype", "scale", "return_lse", "backend")
            self._ranks.agree("attend", {name: repr(value) for name, value in zip(names, key)}, error)
        if not capturing:
            self._calls += 1
        look = not capturing and (self._device.type == "cpu" or new or self._calls % _CHECKED_EVERY == 0)
        # Other ranks are about to gather results of the last call's shape where this one's arguments are wrong.
        parts = self.parts(q.shape if error is None else self._last or (0, 0, 0, self._head_dim))
        if error is None:
            try:
                part(q, factor, backend, parts)
            except Exception as caught:
                if capturing:
                    raise
                error = caught
        if error is not None:
            parts.out.fill_(math.nan)
            parts.lse.fill_(math.nan)
        if look:
            self._describe(parts.header, failed=error is not None)
        work = self._ranks.gather(parts.bytes, async_op=async_op and error is None)
        if error is not None:
            raise error
        self._known.add(key)
        self._last = tuple(q.shape)
        pending = PendingAttention(self, parts, work, (return_lse, look))
        return pending if async_op else pending.wait()

    def merged(self, parts: Parts, return_lse: bool, look: bool) -> Any:
        """attend's result, from what all ranks sent."""
        if look:
            self._compare(parts.headers().tolist())
        out, lse = merge_states(*parts.states()) if self._ranks.world_size > 1 else (parts.out, parts.lse)
        return (out, lse) if return_lse else out

    def parts(self, shape: Sequence[int]) -> Parts:
        """Room for what ranks send of queries (B, Hq, Sq, D)."""
        ranks, headers = self._ranks, self._max_batch + 1
        return Parts(ranks.world_size, ranks.rank, shape, self._dtype, headers, self._device)

    def _describe(self, header: Tensor, *, failed: bool) -> None:
        """Tokens of every sequence and a mark of failure, written on the device: the host waits for nothing."""
        torch.add(self._shard.lengths, self._shard.windows.lengths, out=header[:-1])
        if failed:
            header[-1:].fill_(_FAILED)
        else:
            header[-1:].copy_(self._shard.pool.error)

    def _compare(self, headers: list[list[int]]) -> None:
        marks = [header[-1] for header in headers]
        if failed := [rank for rank, mark in enumerate(marks) if mark == _FAILED]:
            raise RuntimeError(f"attend failed on {_ranks(failed)} of the group, which say why")
        if full := [rank for rank, mark in enumerate(marks) if mark]:
            raise RuntimeError(
                f"replays of a captured append exceeded the capacity of {self._capacity} on {_ranks(full)} of the "
                "group, which left their tokens out"
            )
        for sequence, lengths in enumerate(zip(*(header[:-1] for header in headers))):
            if len(set(lengths)) > 1:
                listed = ", ".join(f"rank {rank}: {length}" for rank, length in enumerate(lengths))
                raise RuntimeError(f"ranks must hold the same tokens: {listed} tokens in sequence {sequence}")


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
