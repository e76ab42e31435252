"""What limits a kernel, in words: its busiest units, or what its warps wait for, and what would make it faster."""

from __future__ import annotations

from profiling.counters.fields import Counters

SATURATED = 80.0  # % of peak: no more is to be had from a unit
BUSY = 50.0  # % of peak: units this busy limit together, as their work does not overlap perfectly
IDLE_SMS = 85.0  # % of the time with warps on an SM, below which start, tail or imbalance cost much

UNITS = {  # name -> (field, what would make a kernel faster that it limits)
    "issue slots": ("ncu_issue_pct", "fewer instructions an element"),
    "ALU": ("ncu_alu_pct", "fewer integer and logic instructions an element, or moving some to the FMA pipes"),
    "FMA-heavy": ("ncu_fma_heavy_pct", "fewer integer multiplications and dot products an element"),
    "LSU": ("ncu_lsu_pct", "fewer or wider loads and stores"),
    "shared memory": ("ncu_shared_pct", "fewer shared-memory wavefronts: wider loads, no bank conflicts"),
    "tensor": ("ncu_tensor_pct", "fewer or larger MMAs: rows of zeros and repeated query heads cost full ones"),
    "DRAM": ("ncu_dram_pct", "fewer bytes: a smaller format, or reading the cache once for all query heads"),
    "L2": ("ncu_l2_pct", "fewer or larger requests to L2"),
}
STALLS = {
    "long_scoreboard": ("global memory", "more bytes under way: more stages, or more warps"),
    "short_scoreboard": ("shared memory", "more independent loads under way, or fewer dependent ones"),
    "lg_throttle": ("the queue of global accesses", "fewer, wider global accesses"),
    "mio_throttle": ("the queue of shared-memory accesses", "fewer, wider shared-memory accesses"),
    "math_pipe_throttle": ("a busy math pipe", "instructions that other pipes execute"),
    "dispatch_stall": ("the dispatcher", "fewer register-bank conflicts"),
    "barrier": ("a barrier", "fewer barriers, or evener work between them"),
    "gmma": ("a warp-group MMA", "more MMAs under way, decoding the next operand meanwhile"),
    "wait": ("fixed latencies", "more independent instructions between dependent ones, or more warps"),
    "no_instruction": ("instruction fetch", "less code: loops kept rolled, cold paths out of the way"),
    "imc_miss": ("constants", "fewer constants, or loading them before the loop"),
    "branch_resolving": ("branches", "fewer branches"),
    "drain": ("stores at the end", "smaller output, or stores spread over the run"),
    "membar": ("a memory fence", "fewer fences"),
    "sleeping": ("sleep", "polling that sleeps less"),
}


def units(counters: Counters) -> list[tuple[str, float]]:
    """(unit, % of peak), the busiest first; units that were not counted are left out."""
    found = [(name, getattr(counters, field)) for name, (field, _) in UNITS.items()]
    return sorted(((name, pct) for name, pct in found if pct is not None), key=lambda unit: -unit[1])


def verdict(counters: Counters) -> str | None:
    """One line: the three busiest units, what that means, what would help. None without counters."""
    busiest = units(counters)
    if not busiest:
        return None
    figures = ", ".join(f"{name} {pct:.0f} %" for name, pct in busiest[:3])
    return f"{figures}: {_meaning(busiest, counters)}"


def _meaning(busiest: list[tuple[str, float]], counters: Counters) -> str:
    name, pct = busiest[0]
    advice = UNITS[name][1]
    if pct >= SATURATED:
        return f"{name} is at its limit; faster with {advice}"
    busy = [unit for unit, share in busiest if share >= BUSY]
    rest = _idle(counters) + _stall(counters)
    if len(busy) > 1:
        return f"{' and '.join(busy[:3])} limit together; faster with {advice}, then {UNITS[busy[1]][1]}{rest}"
    if busy:
        return f"{name} is closest to its limit; faster with {advice}{rest}"
    return "no unit is busy, latency limits" + (rest or "; faster with more warps or more work under way")


def _idle(counters: Counters) -> str:
    active = counters.ncu_sm_active_pct
    if active is None or active >= IDLE_SMS:
        return ""
    return (
        f"; SMs have warps {active:.0f} % of the time only: shorter start and tail, splits of more equal work, "
        "or a larger problem"
    )


def _stall(counters: Counters) -> str:
    if counters.ncu_stall not in STALLS:
        return ""
    what, advice = STALLS[counters.ncu_stall]
    warps = "" if counters.ncu_stall_warps is None else f" ({counters.ncu_stall_warps:.1f} an issue)"
    return f"; warps wait most for {what}{warps}: {advice}"
