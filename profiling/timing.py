"""Times calls: rotating operands, callables interleaved, one sample a call; or many calls in a CUDA graph.

Each callable comes as a rotation: a list of calls that do the same on operands at different addresses. A rotation whose
operands together exceed twice the last-level cache finds it cold at every call; a rotation of one finds it as warm as
it gets, if nothing else runs in between.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

MAX_COPIES = 128
WARM_UP_CALLS = 3
SLEEP_MARGIN_US = 50.0
GRAPH_CALLS = 32  # at least so many calls in a graph: the events around it cost about a microsecond
GRAPH_BELOW_US = 50.0  # "auto" times calls shorter than this in a graph


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call."""

    median_us: float
    iqr_us: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
        return cls(quartiles[1], quartiles[2] - quartiles[0])


def copies_for_cold_cache(bytes_per_call: int, cache_bytes: int) -> int:
    """How many operand sets a rotation needs; at most `MAX_COPIES`, which is short of cold for tiny operands only."""
    return min(MAX_COPIES, max(2, math.ceil(2 * cache_bytes / max(1, bytes_per_call)) + 1))


class CpuTimer:
    """Wall clock."""

    def warm_up(self, calls: Sequence[Call]) -> None:
        for call in calls:
            call()

    def sample(self, call: Call) -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3


class CudaTimer:
    """CUDA events around the call, on a device that is kept busy until everything has been enqueued."""

    def __init__(self, clock_mhz: float) -> None:
        self._clock_mhz = clock_mhz
        self._host_us = 0.0
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def warm_up(self, calls: Sequence[Call]) -> None:
        for call in calls:
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            call()
            host_us = (time.perf_counter_ns() - start) / 1e3
        self._host_us = max(self._host_us, host_us)  # the last call's: the first one may load modules
        torch.cuda.synchronize()

    def sample(self, call: Call) -> float:
        # The spin kernel outlasts the host's part of the call, so launch overhead stays outside the events.
        torch.cuda._sleep(int(self._clock_mhz * (2 * self._host_us + SLEEP_MARGIN_US)))
        self._start.record()
        call()
        self._end.record()
        torch.cuda.synchronize()
        return self._start.elapsed_time(self._end) * 1e3


def timer(device: torch.device, clock_mhz: float | None) -> CpuTimer | CudaTimer:
    """The timer of a device; clock_mhz is the fastest SM clock of a GPU."""
    return CudaTimer(clock_mhz or 2000.0) if device.type == "cuda" else CpuTimer()


def measure(
    rotations: Mapping[str, Sequence[Call]], repeats: int, clock: CpuTimer | CudaTimer, interleaved: bool = True
) -> dict[str, Timing]:
    """Times every rotation `repeats` times: all in turn, so that drift of clocks and load meets them alike, or, to
    leave the cache to each, one after the other."""
    if not interleaved:
        return {name: measure({name: calls}, repeats, clock)[name] for name, calls in rotations.items()}
    samples: dict[str, list[float]] = {name: [] for name in rotations}
    for calls in rotations.values():
        # The last ones of a rotation, so that the first samples find their operands cold.
        clock.warm_up([calls[i % len(calls)] for i in range(-WARM_UP_CALLS, 0)])
    for i in range(repeats):
        for name, calls in rotations.items():
            samples[name].append(clock.sample(calls[i % len(calls)]))
    return {name: Timing.of(values) for name, values in samples.items()}


def measure_graphs(
    rotations: Mapping[str, Sequence[Call]], repeats: int, clock: CudaTimer, interleaved: bool = True
) -> dict[str, Timing]:
    """Times a call as part of a CUDA graph of many: what it takes where launches cost nothing and kernels follow on."""
    graphs = {name: _graph(calls) for name, calls in rotations.items()}
    timings = measure({name: [graph.replay] for name, (graph, _) in graphs.items()}, repeats, clock, interleaved)
    return {
        name: Timing(timing.median_us / graphs[name][1], timing.iqr_us / graphs[name][1])
        for name, timing in timings.items()
    }


def _graph(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, int]:
    """(a graph of whole rounds of a rotation, its number of calls)."""
    rounds = math.ceil(GRAPH_CALLS / len(calls))
    for call in calls[:WARM_UP_CALLS]:  # loads modules, which a capture must not do
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph, rounds * len(calls)
