"""From a report of Nsight Compute to counters: which kernels belong to which case, and the values of their metrics.

Works on the objects of the ncu_report module: a context of ranges of actions (profiled kernels) with metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from profiling.counters.fields import METRICS, STALLS, Counters, stall_metric
from profiling.rows import rounded

LABEL = "case "  # names of the NVTX ranges: "case 0", "case 1", ...


def kernels_by_case(context: Any) -> dict[int, list[Any]]:
    """Case index -> its profiled kernels, in order."""
    found: dict[int, list[Any]] = {}
    for action in _actions(context):
        index = next((int(name.removeprefix(LABEL)) for name in _nvtx_ranges(action) if name.startswith(LABEL)), None)
        if index is not None:
            found.setdefault(index, []).append(action)
    return found


def counters_of(kernels: Iterable[Any], elements: int, multiprocessors: int | None) -> Counters:
    """The counters of one call. elements: those that it reads of the cache."""
    kernels = list(kernels)
    times = [value(kernel, METRICS["ncu_kernel_us"]) or 0.0 for kernel in kernels]  # ns
    longest = kernels[times.index(max(times))]
    fields: dict[str, Any] = {name: value(longest, metric) for name, metric in METRICS.items()}
    cycles, ns, nbytes = fields.pop("ncu_cycles"), fields["ncu_kernel_us"], fields["ncu_dram_mb"]
    fields["ncu_kernel_us"] = ns / 1e3 if ns else None
    fields["ncu_dram_mb"] = None if nbytes is None else nbytes / 1e6
    fields["ncu_dram_tb_per_s"] = nbytes / ns / 1e3 if nbytes and ns else None  # bytes a ns are 1e-3 TB/s
    fields["ncu_clock_mhz"] = cycles / ns * 1e3 if cycles and ns else None
    if cycles and multiprocessors:
        fields["ncu_elements_per_clk_sm"] = elements / (cycles * multiprocessors)
    fields = {name: None if number is None else rounded(number, 4) for name, number in fields.items()}
    if fields["ncu_registers"] is not None:
        fields["ncu_registers"] = int(fields["ncu_registers"])
    stalls = {reason: value(longest, stall_metric(reason)) or 0.0 for reason in STALLS if reason != "not_selected"}
    stall = max(stalls, key=lambda reason: stalls[reason])
    if stalls[stall] > 0:
        fields |= {"ncu_stall": stall, "ncu_stall_warps": rounded(stalls[stall], 3)}
    return Counters(
        ncu_kernel=str(longest.name()), ncu_kernels=len(kernels), ncu_us=rounded(sum(times) / 1e3), **fields
    )


def value(action: Any, metric_name: str) -> float | None:
    """A metric's value, or None if the chip does not have it. Reports hold base units: ns, bytes, %.

    The unit itself is not asked for: ncu_report 2025.3 crashes.
    """
    metric = action.metric_by_name(metric_name)
    number = None if metric is None else metric.value()
    if not isinstance(number, (int, float)) or number != number:  # a missing metric may also be NaN
        return None
    return float(number)


def _actions(context: Any) -> Iterator[Any]:
    for i in range(context.num_ranges()):
        found = context.range_by_idx(i)
        for j in range(found.num_actions()):
            yield found.action_by_idx(j)


def _nvtx_ranges(action: Any) -> Iterator[str]:
    """Names of the push/pop ranges around a kernel, in all domains."""
    state = action.nvtx_state()
    for domain in state.domains() if state is not None else ():
        yield from state.domain_by_id(domain).push_pop_ranges()
