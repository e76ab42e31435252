"""A dense fp16 GEMM, C = A B with C of M x N: the CTA tile, K step and stages that a device's limits leave.

Operands come from shared memory: WGMMA reads A once and B once for every 64 rows of its warpgroup's tile; warps with
mma.sync load fragments of their own tile, each operand once a warp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import product

from profiling.tile_model.device import Device

ELEMENT_BYTES = 2
TILES_M, TILES_N, TILES_K = (64, 128, 256), (64, 128, 192, 256), (32, 64, 128)
WORKING_REGISTERS = 40  # addresses, descriptors, loop and barrier state beside accumulators (and fragments)
PRODUCER_REGISTERS = 24  # a thread of the producer warpgroup: setmaxnreg's minimum
CONSUMER_MOST = 240  # setmaxnreg for two consumers: 2 * 240 + 24 <= 65536 / 128
STEP_CLOCKS = 16  # of a K step that no MMA covers: barrier and issue (assumed)
BARRIER_BYTES = 1024
MOST_STAGES = 8
CLUSTER = 2  # CTAs that share the larger operand by multicast, 9.0
PORT_BYTES = 64  # that one SM takes from L2 a clock


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 1:
            raise ValueError(f"GEMM {self.m} x {self.n} x {self.k}: every size must be at least 1")

    @property
    def flop(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True)
class Candidate:
    """A tile with what it needs. Clocks are of one SM and one K step."""

    tile: tuple[int, int, int]
    groups: int  # warpgroups that multiply (9.0), else warps
    registers: int  # a thread that multiplies
    stages: int
    stage_bytes: int
    clocks: dict[str, float] = field(default_factory=dict)
    us: float = math.inf
    limiter: str = ""
    rejected: str = ""

    @property
    def name(self) -> str:
        return "x".join(str(size) for size in self.tile)


def candidates(device: Device, shape: Shape) -> list[Candidate]:
    """Every tile, the fastest first, those rejected last."""
    tiles = product(TILES_M, TILES_N, TILES_K)
    found = [_candidate(device, shape, tile) for tile in tiles]

    # Of tiles as fast as one another the one that loads the other resources least.
    def order(c: Candidate) -> tuple:
        return bool(c.rejected), round(c.us, 1), sum(c.clocks.values()) / math.prod(c.tile), c.tile

    return sorted(found, key=order)


def best(device: Device, shape: Shape) -> Candidate:
    """The fastest candidate.

    Raises:
        ValueError: none fits.
    """
    chosen = candidates(device, shape)[0]
    if chosen.rejected:
        raise ValueError(f"no tile fits {device.name}: {chosen.name} has {chosen.rejected}")
    return chosen


def _candidate(device: Device, shape: Shape, tile: tuple[int, int, int]) -> Candidate:
    bm, bn, bk = tile
    stage_bytes = (bm + bn) * bk * ELEMENT_BYTES
    groups, registers, limit = _warpgroups(device, bm, bn) if device.is_hopper else _warps(device, bm, bn)
    if registers > limit:
        return Candidate(
            tile, groups, registers, 0, stage_bytes, rejected=f"{registers} registers a thread of {limit} there are"
        )

    clocks = step_clocks(device, tile, groups)
    step = max(clocks.values()) + STEP_CLOCKS
    # The tile of C is staged, so that its stores overlap the next tile's loads; without a producer it takes the stages.
    staging = bm * bn * ELEMENT_BYTES + BARRIER_BYTES if device.is_hopper else 0
    fit = min(MOST_STAGES, (device.shared_bytes - staging) // stage_bytes)
    need = 1 + math.ceil((device.l2_latency + _l2_bytes(device, tile) / PORT_BYTES) / step)
    if fit < need:
        return Candidate(
            tile,
            groups,
            registers,
            fit,
            stage_bytes,
            clocks,
            rejected=f"{need} stages hide the latency, {fit} fit "
            + (f"beside {staging >> 10} KiB of C" if staging else "in shared memory"),
        )
    steps = math.ceil(shape.k / bk)
    tiles = math.ceil(shape.m / bm) * math.ceil(shape.n / bn)
    waves = math.ceil(tiles / device.multiprocessors)
    epilogue = bm * bn * ELEMENT_BYTES / device.shared_bytes_a_clock
    sm_us = waves * (steps * step + epilogue) / device.tensor_clock_mhz
    dram_us = dram_bytes(device, shape, tile) / (device.dram_tb_per_s * device.dram_achieved * 1e6)
    limiter = "DRAM" if dram_us > sm_us else max(clocks, key=clocks.get)
    return Candidate(tile, groups, registers, fit, stage_bytes, clocks, max(sm_us, dram_us), limiter)


def _warpgroups(device: Device, bm: int, bn: int) -> tuple[int, int, int]:
    """(consumers, registers of a thread, registers there are): two if rows allow, else whatever holds the tile."""
    options = [groups for groups in (2, 1, 3, 4) if bm % (64 * groups) == 0]
    plans = []
    for groups in options:
        limit = min(CONSUMER_MOST, (device.registers // 128 - PRODUCER_REGISTERS) // groups // 8 * 8)
        plans.append((groups, bm * bn // (128 * groups) + WORKING_REGISTERS, limit))
    return next((plan for plan in plans if plan[1] <= plan[2]), plans[0])


def _warps(device: Device, bm: int, bn: int) -> tuple[int, int, int]:
    """(warps, registers of a thread, registers there are): fragments of two k16 steps beside the accumulators."""
    plans = []
    for warps in (8, 4):
        rows, columns = warp_tile(bm, bn, warps)
        limit = min(device.registers_a_thread, device.registers // (32 * warps))
        plans.append((warps, rows * columns // 32 + (rows + columns) // 2 + WORKING_REGISTERS, limit))
    return next((plan for plan in plans if plan[1] <= plan[2]), plans[0])


def warp_tile(bm: int, bn: int, warps: int) -> tuple[int, int]:
    """A warp's rows and columns: the squarest, which reads least."""
    splits = [(bm // m, bn // (warps // m)) for m in (1, 2, 4, 8) if m <= warps and bm % m == bn % (warps // m) == 0]
    return min(splits, key=lambda split: (sum(split), split))


def step_clocks(device: Device, tile: tuple[int, int, int], groups: int) -> dict[str, float]:
    """Clocks of a K step, by resource."""
    bm, bn, bk = tile
    if device.is_hopper:
        read, fma = bm // 64 * (64 + bn) * bk * ELEMENT_BYTES, device.tensor_fma
    else:
        read, fma = groups * sum(warp_tile(bm, bn, groups)) * bk * ELEMENT_BYTES, device.mma_sync_fma
    written = (bm + bn) * bk * ELEMENT_BYTES
    l2_share = device.l2_bytes_a_clock / device.multiprocessors
    return {
        "tensor": bm * bn * bk / fma,
        "shared": (read + written) / device.shared_bytes_a_clock,
        "L2": _l2_bytes(device, tile) / l2_share,
    }


def _l2_bytes(device: Device, tile: tuple[int, int, int]) -> float:
    """That a CTA takes from L2 a K step; on 9.0 a cluster shares its larger operand."""
    bm, bn, bk = tile
    shared = max(bm, bn) / (CLUSTER if device.is_hopper else 1)
    return (shared + min(bm, bn)) * bk * ELEMENT_BYTES


def dram_bytes(device: Device, shape: Shape, tile: tuple[int, int, int]) -> float:
    """A wave of CTAs in the squarest arrangement reads its rows of A and columns of B once; C is written once."""
    bm, bn, _ = tile
    tiles_m, tiles_n = math.ceil(shape.m / bm), math.ceil(shape.n / bn)
    wave = min(device.multiprocessors, tiles_m * tiles_n)
    rows = min(tiles_m, max(1, round(math.sqrt(wave * bn / bm))))
    columns = min(tiles_n, math.ceil(wave / rows))
    read = tiles_m * tiles_n / wave * (rows * bm + columns * bn) * shape.k * ELEMENT_BYTES
    once = (shape.m + shape.n) * shape.k * ELEMENT_BYTES
    return max(read, once) + shape.m * shape.n * ELEMENT_BYTES
