"""The sparse products: workers and stages that a device leaves, and the time they take.

A worker, a warp or (sm90, many query rows) a warpgroup, takes whole tiles; all workers of an SM share its pipes. sm80
workers fetch for themselves, each into a ring of stages of its own; sm90 workers share one ring and have a warpgroup of
producers beside them, which leaves them other registers. A round is a tile for every worker of the device: its data
take `memory` to arrive and its decoding takes `sm`, so with r rounds

    time = FIXED_US + memory + (r - 1) * (memory^p + sm^p)^(1/p) + sm

The constants come from the micro-benchmark, from one case at two lengths and, for the start of sm90, from its counters;
no other row is fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from profiling.cases import Case
from profiling.tile_model.counts import Tile
from profiling.tile_model.device import Device

# Warps that multiply, in fours as schedulers are, and stages of a worker of sm80.
WARPS = (4, 8, 12, 16)
STAGES = (2, 3)

# The ring of sm90: stages at most, and what there is of them beyond one a worker, as dispatch/heuristics.hpp has it.
RING_STAGES = 48
BYTES_AHEAD, MIN_AHEAD, MAX_AHEAD = 32 << 10, 2, 8
PRODUCERS = (4, 3, 2, 1)

# sm90: registers of a producer's thread, and the most that a worker's gets (setmaxnreg). Warps fetch nothing there, so
# they do with fewer than the traits count, by warpgroups (ops/product/sm90/warp_pipeline.hpp).
PRODUCER_REGISTERS = 40
WORKER_MOST = 232
SPARED_REGISTERS = {1: 16, 2: 16, 3: 16, 4: 20}

# What part of the slowest pipe's rate the decoder reaches: decode_microbench (docs/notes/products.md) has 21.4, 25.1
# and 27.8 elements a clock and SM of 31 with 8, 12 and 16 warps, 0.69, 0.81 and 0.90. Few warps are limited by latency,
# so in proportion to their number; with so many both limits are equal.
LATENCY_WARPS = 8.4

# p: how far memory and SM hide one another. sparse_qk on sm80, 8,32,8,1,T,128, 38 kept, takes 465 clocks an SM and tile
# more between T 4096 and 16384 (17.3 and 39.2 us), memory alone 422 and the pipes alone 400: that is a p of 6. With 5,
# 473 clocks, the model chooses what dispatch/heuristics.hpp does.
OVERLAP_POWER = 5.0

# Launch, first offsets and queries, instruction cache, last stores. sm80: what is left of that case's 39.2 us (and 7.0
# of the 17.3 us at T 4096). sm90: the 6.7 k of 63.4 k clocks without a resident warp (docs/notes/products.md).
# sparse_av reduces splits, sm80 in a second kernel, which overlaps the drain: what it takes longer than sparse_qk at
# T 4096.
FIXED_US = {"sm80": 6.5, "sm90": 3.8}
COMBINE_US = {"sm80": 2.0, "sm90": 2.5}

TIE = 0.06  # within which times are equal: the model is no better than that


@dataclass(frozen=True)
class Plan:
    """A layout of the work: one CTA an SM, `warps` warps that multiply, `stages` stages a worker (sm90: of all)."""

    warps: int
    workers: int
    stages: int
    registers: int  # there are, a thread that multiplies
    shared_bytes: int  # of the CTA
    in_flight_bytes: float  # of an SM
    clocks: dict[str, float] = field(default_factory=dict)  # of an SM and tile, by resource
    rounds: float = 0.0
    us: float = math.inf
    limiter: str = ""
    rejected: str = ""


def clocks_of(device: Device, tile: Tile, warps: int) -> dict[str, float]:
    """Clocks of an SM that a tile keeps each resource busy; all but DRAM at the rate that `warps` warps achieve."""
    n = tile.instructions
    pipes = {
        "issue": sum(n.values()) / device.issue,
        "shared": tile.wavefronts * 128 / device.shared_bytes_a_clock,
        "FMA-heavy": (n["IDP"] + n["IMAD"]) * 32 / device.fma_heavy_lanes,
        "ALU": (n["PRMT"] + n["LOP3"] + n["SHF"]) * 32 / device.alu_lanes,
        "POPC": n["POPC"] * 32 / device.popc_lanes,
        "tensor": n["HMMA"] * 16 * 8 * 16 / device.mma_sync_fma + n["HGMMA"] * 16 * tile.n * 16 / device.tensor_fma,
    }
    return {
        **{name: clocks / achieved(warps) for name, clocks in pipes.items()},
        "DRAM": tile.dram_bytes / device.dram_bytes_a_clock,
    }


def achieved(warps: int) -> float:
    """Of the slowest pipe's rate, where latency and the pipe limit together."""
    return 1 / math.hypot(1, LATENCY_WARPS / warps)


def registers_there_are(device: Device, tile: Tile, warps: int) -> int:
    """Of a thread, when so many warps multiply."""
    if tile.backend == "sm80":
        return min(device.registers_a_thread, device.registers // (32 * warps) // 8 * 8)
    groups = math.ceil(warps / 4)
    at_launch = device.registers // (128 * (groups + 1)) // 8 * 8
    return min(WORKER_MOST, (at_launch * (groups + 1) - PRODUCER_REGISTERS) // groups // 8 * 8)


def fits_registers(device: Device, tile: Tile, warps: int) -> bool:
    spared = SPARED_REGISTERS[math.ceil(warps / 4)] if tile.backend == "sm90" and tile.worker_warps == 1 else 0
    return tile.registers - spared <= registers_there_are(device, tile, warps)


def tiles_of(case: Case, tile: Tile) -> int:
    """Of all heads and passes over the cache."""
    shape = case.load.shape
    rows = shape.query_heads // shape.kv_heads * shape.query_tokens
    return shape.batch * shape.kv_heads * math.ceil(shape.tokens / 64) * math.ceil(rows / tile.n)


def candidates(device: Device, case: Case) -> list[Plan]:
    """Every number of warps and stages, the chosen one first, those rejected last.

    Raises:
        ValueError: the device cannot run the backend, or no kernel takes the case.
    """
    if case.backend == "sm90" and not device.is_hopper:
        raise ValueError(
            f"backend sm90 needs compute capability 9.0, {device.name} has {'.'.join(map(str, device.capability))}"
        )
    tile = Tile.of(case)
    plans = [_plan(device, case, tile, warps, stages) for warps in WARPS for stages in _stages(device, tile, warps)]
    fastest = min((plan.us for plan in plans), default=math.inf)
    # Of equals the one with more warps, then more stages: what the model leaves out is latency, which both hide.
    return sorted(plans, key=lambda p: (bool(p.rejected), p.us > fastest * (1 + TIE), -p.warps, -p.stages))


def best(device: Device, case: Case) -> Plan:
    """The chosen plan.

    Raises:
        ValueError: none fits.
    """
    plan = candidates(device, case)[0]
    if plan.rejected:
        raise ValueError(f"no plan fits {device.name}: {plan.rejected}")
    return plan


def _fixed_bytes(device: Device, tile: Tile, warps: int) -> int:
    """Of a CTA; the kernel is compiled for the most warps that registers and shared memory allow."""
    fitting = (w for w in WARPS if fits_registers(device, tile, w) and w <= 4 * tile.most_warpgroups)
    return tile.fixed_bytes(max(fitting, default=warps) // 4)


def _stages(device: Device, tile: Tile, warps: int) -> tuple[int, ...]:
    """That are tried: of a worker, or of the ring that all share."""
    if tile.backend == "sm80":
        return STAGES
    workers = warps // tile.worker_warps
    fit = (device.shared_bytes - _fixed_bytes(device, tile, warps)) // tile.stage_bytes
    ahead = min(max(math.ceil(BYTES_AHEAD / tile.stage_bytes), 1), MAX_AHEAD)
    if fit < workers + ahead:
        return (workers + ahead,)  # to be rejected
    most = min(RING_STAGES, fit, workers + MAX_AHEAD)
    usable = [most - most % p for p in PRODUCERS if workers % p == 0]  # producers divide workers and stages
    return (next((stages for stages in usable if stages >= workers + MIN_AHEAD), usable[-1]),)


def _plan(device: Device, case: Case, tile: Tile, warps: int, stages: int) -> Plan:
    registers, workers = registers_there_are(device, tile, warps), warps // tile.worker_warps
    all_stages = workers * stages if tile.backend == "sm80" else stages
    shared = all_stages * tile.stage_bytes + _fixed_bytes(device, tile, warps)
    in_flight = (all_stages - workers) * tile.copied_bytes
    needed = device.dram_latency * device.dram_bytes_a_clock
    clocks = clocks_of(device, tile, warps)
    clocks["DRAM"] *= max(1.0, needed / in_flight)  # Little's law
    sm_clocks, limiter = max((value, name) for name, value in clocks.items() if name != "DRAM")
    if clocks["DRAM"] > sm_clocks:
        limiter = "DRAM" if in_flight >= needed else "latency"
    tiles_an_sm = tiles_of(case, tile) / device.multiprocessors
    working = max(1, min(workers, math.floor(tiles_an_sm)))  # a thin load leaves workers idle
    rounds = max(1.0, tiles_an_sm / working)
    us = _time_us(device, tile, working, rounds, sm_clocks, clocks["DRAM"])
    rejected = ""
    if not fits_registers(device, tile, warps):
        rejected = f"{tile.registers} registers a thread of {registers} there are"
    elif warps > 4 * tile.most_warpgroups:
        rejected = f"{warps // 4} warpgroups of {tile.most_warpgroups} that shared memory always holds"
    elif shared > device.shared_bytes:
        rejected = f"{shared} bytes of shared memory of {device.shared_bytes}"
    return Plan(
        warps,
        workers,
        stages,
        registers,
        shared,
        in_flight,
        clocks,
        rounds,
        math.inf if rejected else us,
        limiter,
        rejected,
    )


def fixed_us(tile: Tile) -> float:
    """Of start and end."""
    return FIXED_US[tile.backend] + (COMBINE_US[tile.backend] if tile.role == "value" else 0)


def _time_us(device: Device, tile: Tile, workers: int, rounds: float, sm_clocks: float, dram_clocks: float) -> float:
    """The module's formula. Rounds are not whole: a worker that is done leaves its share of the pipes to the others."""
    memory, sm = dram_clocks * workers, sm_clocks * workers
    steady = (memory**OVERLAP_POWER + sm**OVERLAP_POWER) ** (1 / OVERLAP_POWER)
    return fixed_us(tile) + (memory + (rounds - 1) * steady + sm) / device.clock_mhz
