"""Attention of a decoding step over 1, 2, 4, ... ranks: processes, one a GPU, or on a CPU with gloo.

On one rank it is a KVCache, on several a ShardedKVCache. On GPUs every time is that of a call among many in a CUDA
graph, on a CPU that of a call; medians of the repeats, and of the ranks the slowest.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cute_kernels as ck
from profiling.check import pruned

CHUNK = 1 << 17  # tokens that are made, compressed and checked at a time
CALLS = 16  # in a graph
WARM_UP = 3


@dataclass(frozen=True)
class Problem:
    """float16, one query token a sequence."""

    tokens: int  # a sequence
    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    keep: int  # of head_dim
    window: int


@dataclass(frozen=True)
class Times:
    """Microseconds of a layer's call; gather and merge are those of attend, each measured alone."""

    attend: float
    step: float  # append of a token, too
    attention: float  # of the rank's own tokens
    gather: float
    merge: float
    rel_err: float  # of attend's result to float64


def measure(problems: Sequence[Problem], ranks: int, device: str, repeats: int, seed: int) -> Iterator[Times]:
    """The problems in turn, on so many ranks of this host. Raises RuntimeError where a rank fails."""
    context = torch.multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, list(problems), device, repeats, seed, Path(folder) / "store", results)
        processes = torch.multiprocessing.start_processes(
            _rank, arguments, nprocs=ranks, join=False, start_method="spawn"
        )
        for _ in problems:
            while results.empty():
                if processes.join(timeout=0.2):  # raises what a rank raised
                    break
            yield results.get(timeout=10)
        while not processes.join():
            pass


def _rank(
    rank: int, ranks: int, problems: Sequence[Problem], kind: str, repeats: int, seed: int, store: Path, results: Any
) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # collectives are captured
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        device_id=device if kind == "cuda" else None,
    )
    try:
        for problem in problems:
            times = _measure(problem, ranks, device, repeats, seed)
            if rank == 0:
                results.put(times)
    finally:
        dist.destroy_process_group()


@torch.inference_mode()
def _measure(problem: Problem, ranks: int, device: torch.device, repeats: int, seed: int) -> Times:
    # Graphs of steps append a token a call; repeats of them, captures and warm-ups.
    spare = CALLS * (repeats + WARM_UP + 2) + 64
    options: dict[str, Any] = {
        "max_batch": problem.batch,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "capacity": problem.tokens + spare,
        "keep": problem.keep,
        "window": problem.window,
        "device": device,
    }
    cache: Any
    if ranks > 1:
        from cute_kernels.distributed import ShardedKVCache

        cache = ShardedKVCache(**options)
    else:
        cache = ck.KVCache(**options)
    generator = torch.Generator(device).manual_seed(seed)
    q = _random(problem, problem.query_heads, 1, generator)
    expected = _fill(cache, problem, q, generator)
    error = _relative_error(cache.attend(q), expected)
    new = [_random(problem, problem.kv_heads, 1, generator) for _ in range(2)]
    timed = _timer(device, repeats)
    attend = timed(lambda: cache.attend(q))
    attention, gather, merge = attend, 0.0, 0.0
    if ranks > 1:
        parts = cache._attention.parts(q.shape)
        attention = timed(lambda: cache._attend_here(q, problem.head_dim**-0.5, "auto", parts))
        gather = timed(lambda: cache._ranks.gather(parts.bytes))
        merge = timed(lambda: ck.merge_states(*parts.states()))
    if ranks == 1:
        cache.reserve(spare)
    step = timed(lambda: cache.step(q, *new))
    return Times(*(_slowest(each, device) for each in (attend, step, attention, gather, merge)), rel_err=error)


def _random(problem: Problem, heads: int, tokens: int, generator: torch.Generator) -> Tensor:
    """The same on every rank."""
    shape = problem.batch, heads, tokens, problem.head_dim
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float16)


def _fill(cache: Any, problem: Problem, q: Tensor, generator: torch.Generator) -> Tensor:
    """Appends the tokens; returns what `attend` of q has to be, (B, Hkv, Hq / Hkv, D) in float64."""
    compressed = max(0, problem.tokens - problem.window) // 64 * 64
    grouped = q.unflatten(1, (problem.kv_heads, -1)).squeeze(3).double() * problem.head_dim**-0.5
    largest = torch.full_like(grouped[..., :1], -math.inf)
    total, out = torch.zeros_like(largest), torch.zeros_like(grouped)
    for first in range(0, problem.tokens, CHUNK):
        count = min(CHUNK, problem.tokens - first)
        k, v = (_random(problem, problem.kv_heads, count, generator) for _ in range(2))
        cache.append(k, v)
        sparse = max(0, min(count, compressed - first))
        k, v = (torch.cat([pruned(x[:, :, :sparse], problem.keep), x[:, :, sparse:]], 2).double() for x in (k, v))
        logits = grouped @ k.transpose(-1, -2)
        before, largest = largest, torch.maximum(largest, logits.amax(-1, keepdim=True))
        weights, kept = (logits - largest).exp(), (before - largest).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        out = out * kept + weights @ v
    return out / total


def _relative_error(found: Tensor, expected: Tensor) -> float:
    found = found.squeeze(2).unflatten(1, expected.shape[1:3]).double()
    return ((found - expected).norm() / expected.norm()).item()


def _slowest(us: float, device: torch.device) -> float:
    """Of all ranks."""
    found = torch.tensor([us], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return round(found.item(), 3)


def _timer(device: torch.device, repeats: int) -> Callable[[Callable[[], Any]], float]:
    return lambda call: (_of_graph if device.type == "cuda" else _of_calls)(call, repeats)


def _of_calls(call: Callable[[], Any], repeats: int) -> float:
    call()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - start))
    return statistics.median(samples)


def _of_graph(call: Callable[[], Any], repeats: int) -> float:
    """Microseconds of a call in a graph of CALLS; all ranks capture and replay the same ones."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # a capture follows a call like it
        stream.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for _ in range(WARM_UP):
            graph.replay()
        for start, end in events:
            start.record()
            graph.replay()
            end.record()
        stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(1e3 * start.elapsed_time(end) for start, end in events) / CALLS
