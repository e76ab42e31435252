"""One side of a comparison: a process that has one build's cute_kernels and times what it is told to.

It uses the package's public API and torch only, so that builds of any internal structure can be compared. Messages are
lines of JSON: a request on stdin, an answer on stdout; what is printed otherwise goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

import torch
from torch import Tensor

import cute_kernels as ck
from profiling import environment, timing
from profiling.ab.tasks import Task

APPENDS = 64  # tokens of a call of append: each sequence completes one tile
SPARE_TOKENS = 512  # of a paged cache at least, for what calls append; when they are used up it is built anew


class Flush:
    """Reads twice the last-level cache, which leaves it cold for what comes next, and without lines to write back."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._buffer = torch.ones(max(1, nbytes // 4), dtype=torch.int32, device=device)
        self._out = torch.empty((), dtype=torch.int32, device=device)

    def __call__(self) -> None:
        torch.amax(self._buffer, dim=0, out=self._out)


class Worker:
    """Keeps the storage of the latest task: the next one may have the same."""

    def __init__(self, device: torch.device, backend: str, flush_bytes: int | None) -> None:
        self._env = environment.environment(device)
        self._device, self._backend = device, backend
        self._flush = Flush(device, 2 * self._env.cache_bytes if flush_bytes is None else flush_bytes)
        self._key: object = None
        self._storage: Any = None
        self._spare = 0
        self._call: Callable[[], object] | None = None
        self._operations = 1
        self._clock: timing.CpuTimer | timing.CudaTimer = timing.CpuTimer()

    def about(self) -> dict[str, Any]:
        name = f"{self._env.name}, {self._env.isa}" if self._env.isa else self._env.name
        return {
            "device": name,
            "backends": ck.backends(),
            "kind": self._device.type,
            "torch": torch.__version__,
            "driver": self._env.driver,
            "package": os.path.dirname(ck.__file__),
        }

    def prepare(self, task: Task, calls: int) -> None:
        """Builds what the task needs for so many calls, besides some to warm up.

        Raises RuntimeError, ValueError or TypeError if it cannot be served, as for want of memory.
        """
        self._call = None
        needed = self._appended(task, calls + timing.WARM_UP_CALLS)
        if task.storage != self._key or self._spare < needed:
            self._key = self._storage = None
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            torch.manual_seed(0)  # the same data on both sides
            self._spare = max(SPARE_TOKENS, needed)
            self._storage, self._key = self._built(task), task.storage
        self._call = self._call_of(task)
        self._operations = APPENDS if task.op == "append" else 1
        self._clock = timing.timer(self._device, self._env.clock_mhz)
        self._clock.warm_up([self._call] * timing.WARM_UP_CALLS)
        self._spare -= needed

    def sample(self, count: int) -> list[float]:
        """Microseconds of `count` operations, each with a cold cache, after one that is not counted."""
        assert self._call is not None
        times = []
        for _ in range(count + 1):
            self._flush()
            times.append(self._clock.sample(self._call) / self._operations)
        return times[1:]

    def _appended(self, task: Task, calls: int) -> int:
        """Tokens that calls append to each sequence."""
        return calls * {"step": 1, "append": APPENDS}.get(task.op, 0)

    def _normal(self, *sizes: int, dtype: str) -> Tensor:
        return torch.randn(sizes, dtype=getattr(torch, dtype), device=self._device)

    def _built(self, task: Task) -> Any:
        """dense: (k, v). compressed: (keys, values, window). paged: the cache, prefilled."""
        shape = task.shape
        k, v = (
            self._normal(shape.batch, shape.kv_heads, shape.tokens, shape.head_dim, dtype=task.dtype) for _ in range(2)
        )
        kind = task.storage[0]
        if kind == "dense":
            return k, v
        if kind == "compressed":
            window = tuple(
                self._normal(shape.batch, shape.kv_heads, task.window, shape.head_dim, dtype=task.dtype)
                for _ in range(2)
            )
            return *ck.compress_kv(k, v, keep=task.keep), window
        cache = ck.KVCache(
            max_batch=shape.batch,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=k.dtype,
            capacity=shape.tokens + self._spare,
            keep=task.keep,
            window=task.window,
            device=self._device,
        )
        cache.prefill(k, v)
        return cache

    def _call_of(self, task: Task) -> Callable[[], object]:
        shape, backend, storage = task.shape, self._backend, self._storage
        q = self._normal(shape.batch, shape.query_heads, shape.query_tokens, shape.head_dim, dtype=task.dtype)
        out = torch.empty_like(q)
        if task.op == "sparse_qk":
            logits = torch.empty(*q.shape[:3], shape.tokens, dtype=q.dtype, device=q.device)
            return lambda: ck.sparse_qk(q, storage[0], out_dtype=q.dtype, out=logits, backend=backend)
        if task.op == "sparse_av":
            p = self._normal(*q.shape[:3], shape.tokens, dtype=task.dtype).softmax(-1)
            return lambda: ck.sparse_av(p, storage[1], out=out, backend=backend)
        if task.op == "sparse_attention":
            return lambda: ck.sparse_attention(q, *storage[:2], window=storage[2], out=out, backend=backend)
        if task.storage[0] == "dense":
            return self._compression(task, *storage)
        if task.op == "attend":
            return lambda: storage.attend(q, out=out, backend=backend)
        k, v = (self._normal(shape.batch, shape.kv_heads, 1, shape.head_dim, dtype=task.dtype) for _ in range(2))

        def step() -> None:
            storage.append(k, v)
            storage.attend(q, out=out, backend=backend)

        def append() -> None:
            for _ in range(APPENDS):
                storage.append(k, v)

        return {"step": step, "append": append}[task.op]

    def _compression(self, task: Task, k: Tensor, v: Tensor) -> Callable[[], object]:
        keep = task.keep
        if task.op == "compress_kv":
            return lambda: ck.compress_kv(k, v, keep=keep)
        if task.op == "compress_kv_out":
            keys, values = (
                ck.SparseKV.preallocate(x.shape, x.dtype, role=role, keep=keep, device=x.device)
                for x, role in ((k, "key"), (v, "value"))
            )
            return lambda: ck.compress_kv(k, v, keep=keep, out=(keys, values))
        role = task.op.removeprefix("compress_")
        x = k if role == "key" else v
        return lambda: ck.compress(x, role=role, keep=keep)


def serve(worker: Worker, requests: TextIO, answers: TextIO) -> None:
    """Answers requests until there are no more."""

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    answer(worker.about())
    for line in requests:
        request = json.loads(line)
        try:
            if "task" in request:
                worker.prepare(Task.from_object(request["task"]), request["calls"])
                answer({})
            else:
                answer({"us": worker.sample(request["samples"])})
        except (RuntimeError, ValueError, TypeError) as error:
            answer({"error": " ".join(str(error).split())})


def main() -> None:
    """Settings, a JSON object, are the first argument."""
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything prints is no answer
    with torch.no_grad():
        device = torch.device(settings["device"], 0 if settings["device"] == "cuda" else None)
        worker = Worker(device, settings["backend"], settings["flush_bytes"])
        serve(worker, sys.stdin, answers)
