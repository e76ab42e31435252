"""The reasoning of a plan, line by line, and the same as data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from profiling.cases import Case
from profiling.tables import aligned
from profiling.tile_model import gemm, products
from profiling.tile_model.counts import WORKING_REGISTERS, Tile
from profiling.tile_model.device import Device, describe

SHOWN = 16  # candidates, without --all


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return aligned([header, *rows]).splitlines()


def as_data(item: Any) -> dict[str, Any]:
    """A candidate or a plan for JSON, which has no infinity."""
    return {
        name: None if isinstance(value, float) and math.isinf(value) else value for name, value in asdict(item).items()
    }


# ---- GEMM ------------------------------------------------------------------------------------------------------------


def gemm_lines(device: Device, shape: gemm.Shape, everything: bool = False) -> list[str]:
    found = gemm.candidates(device, shape)
    peak = 2e-6 * device.multiprocessors * device.tensor_clock_mhz * device.tensor_fma  # TFLOPS
    dram = ((shape.m + shape.n) * shape.k + shape.m * shape.n) * gemm.ELEMENT_BYTES
    dram_us = dram / (device.dram_tb_per_s * device.dram_achieved * 1e6)
    staging = "beside the staged tile of C and barriers" if device.is_hopper else "of a CTA"
    lines = [
        *describe(device),
        "",
        (
            f"C ({shape.m} x {shape.n}) = A B, k {shape.k}, fp16: {shape.flop / 1e12:.3g} TFLOP, at least "
            f"{shape.flop / peak / 1e6:.1f} us at {peak:.0f} TFLOPS; {dram / 1e6:.0f} MB, at least {dram_us:.1f} us"
        ),
        "registers: "
        + (
            f"accumulators and {gemm.WORKING_REGISTERS}; setmaxnreg leaves two warpgroups that multiply "
            f"{gemm.CONSUMER_MOST} a thread, three 160"
            if device.is_hopper
            else f"accumulators, fragments of two k16 steps, and {gemm.WORKING_REGISTERS}"
        ),
        f"shared memory: stages x (m + n) x k x {gemm.ELEMENT_BYTES} bytes {staging} in {device.shared_bytes}",
        f"stages: enough to hide {device.l2_latency} clocks and a transfer at {gemm.PORT_BYTES} bytes a clock",
        f"clocks of a k step: the slowest of tensor, shared (read and fill, {device.shared_bytes_a_clock} bytes), L2"
        + (f" (clusters of {gemm.CLUSTER} share the larger operand)" if device.is_hopper else "")
        + f", and {gemm.STEP_CLOCKS} for barriers",
        "",
    ]
    rows = [
        [
            c.name,
            str(c.groups),
            str(c.registers),
            f"{c.stage_bytes >> 10}",
            str(c.stages),
            " ".join(f"{clocks:.0f}" for clocks in c.clocks.values()),
            "" if c.rejected else f"{c.us:.1f}",
            "" if c.rejected else f"{shape.flop / c.us / 1e6:.0f}",
            c.rejected or c.limiter,
        ]
        for c in (found if everything else _shown(found))
    ]
    unit = "warpgroups" if device.is_hopper else "warps"
    lines += table(
        ("tile", unit, "registers", "KiB a stage", "stages", "tensor shared L2", "us", "TFLOPS", "limiter, or why not"),
        rows,
    )
    if not everything and len(rows) < len(found):
        lines.append(f"({len(found) - len(rows)} more with --all)")
    return [*lines, "", *_chosen_gemm(device, shape, found[0])]


def _shown(found: list[gemm.Candidate]) -> list[gemm.Candidate]:
    """The fastest, and of what was rejected the tiles of the chosen K step."""
    kept = [c for c in found if not c.rejected][: SHOWN - 4]
    rejected = [c for c in found if c.rejected]
    return kept + sorted(rejected, key=lambda c: c.tile[2] != found[0].tile[2])[:4]


def _chosen_gemm(device: Device, shape: gemm.Shape, chosen: gemm.Candidate) -> list[str]:
    if chosen.rejected:
        return [f"no tile fits {device.name}"]
    stages = f"{chosen.stages} stages"
    if device.is_hopper:
        half = device.shared_bytes - chosen.tile[0] * chosen.tile[1] - gemm.BARRIER_BYTES
        more = min(gemm.MOST_STAGES, half // chosen.stage_bytes)
        stages += f" ({more} if C is staged half by half)" if more > chosen.stages else ""
    groups = (
        f"{chosen.groups} warpgroups that multiply and one that loads" if device.is_hopper else f"{chosen.groups} warps"
    )
    return [
        (
            f"-> {chosen.name}, {stages}, {groups}; limiter {chosen.limiter}; {chosen.us:.1f} us, "
            f"{shape.flop / chosen.us / 1e6:.0f} TFLOPS at {device.tensor_clock_mhz:g} MHz (power may clock it lower)"
        )
    ]


# ---- Sparse products -------------------------------------------------------------------------------------------------


def product_lines(device: Device, case: Case, measured_us: float | None) -> list[str]:
    tile, plans = Tile.of(case), products.candidates(device, case)
    counts, total = tile.instructions, sum(tile.instructions.values())
    tiles, working = products.tiles_of(case, tile), WORKING_REGISTERS[tile.role, tile.n]
    worker, operand = ("warp", "B fragments") if tile.worker_warps == 1 else ("warpgroup", "A fragments")
    lines = [
        *describe(device),
        "",
        f"{case}",
        (
            f"tile: 64 tokens x {tile.head_dim} channels x N {tile.n} ({tile.rows} rows exist), a {worker} each; "
            f"{tiles} tiles, {tiles / device.multiprocessors:.1f} an SM; K step 64 elements a lane (two bitmap words)"
        ),
        (
            f"bytes of a tile: {tile.block_rows:.1f} rows of 128 (longest {tile.longest_rows}), {tile.dram_bytes:.0f} "
            f"from and to memory, {tile.stage_bytes} a stage"
        ),
        f"instructions of a tile: {total:.0f} = " + ", ".join(f"{n:.0f} {name}" for name, n in counts.items()),
        f"shared memory of a tile: {tile.wavefronts:.0f} wavefronts",
        f"registers a thread: {tile.registers} = accumulators, {operand} and {working} for the decoder",
        f"in flight: memory latency asks for {device.dram_latency * device.dram_bytes_a_clock / 1024:.0f} KiB an SM",
        "rate: "
        + ", ".join(f"{products.achieved(warps):.0%} with {warps} warps" for warps in products.WARPS)
        + " of the slowest pipe's, decode_microbench",
        "",
    ]
    names = list(plans[0].clocks)
    rows = [
        [
            str(p.warps),
            str(p.stages),
            str(p.registers),
            str(p.shared_bytes),
            f"{p.in_flight_bytes / 1024:.0f}",
            *(f"{p.clocks[name]:.0f}" for name in names),
            "" if p.rejected else f"{p.rounds:.2f}",
            "" if p.rejected else f"{p.us:.1f}",
            p.rejected or p.limiter,
        ]
        for p in plans
    ]
    lines += table(
        (
            "warps",
            "stages",
            "registers",
            "shared bytes",
            "KiB in flight",
            *names,
            "rounds",
            "us",
            "limiter, or why not",
        ),
        rows,
    )
    chosen = plans[0]
    if chosen.rejected:
        return [*lines, "", f"no plan fits {device.name}"]
    beside = " beside a warpgroup of producers" if tile.backend == "sm90" else ""
    stages = f"x {chosen.stages} stages a {worker}" if tile.backend == "sm80" else f"and {chosen.stages} stages for all"
    lines += [
        "",
        f"(clocks of an SM and tile; within {products.TIE:.0%} the plan with most warps, then stages)",
        (
            f"-> {chosen.warps} warps ({chosen.warps / 4:g} warpgroups) {stages}, one CTA an SM{beside}; "
            f"limiter {chosen.limiter}; {chosen.us:.1f} us, of which {products.fixed_us(tile):.1f} for start and end"
        ),
    ]
    if measured_us is not None:
        lines.append(f"   measured {measured_us:.1f} us: predicted {chosen.us / measured_us - 1:+.0%}")
    else:
        lines.append(f"   not in profiling/results/{device.slug}/sweep.json")
    return lines
