"""The counters of a row, and the Nsight Compute metrics that they come from."""

from __future__ import annotations

from dataclasses import dataclass

# field -> metric. Percentages are shares of the unit's peak over the whole kernel, its start and tail included. A chip
# that lacks a metric leaves its field empty: compute capability 8.0 has no separate heavy FMA pipe.
METRICS = {
    "ncu_kernel_us": "gpu__time_duration.sum",
    "ncu_cycles": "sm__cycles_elapsed.max",
    "ncu_sm_active_pct": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "ncu_dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_dram_mb": "dram__bytes.sum",
    "ncu_l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "ncu_issue_pct": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "ncu_alu_pct": "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "ncu_fma_heavy_pct": "sm__pipe_fmaheavy_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "ncu_lsu_pct": "sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_elapsed",
    "ncu_tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "ncu_shared_pct": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "ncu_shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "ncu_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "ncu_instructions": "smsp__inst_executed.sum",
    "ncu_occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "ncu_registers": "launch__registers_per_thread",
}
STALLS = (
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
)


def stall_metric(reason: str) -> str:
    """Warps that stall for a reason, for each instruction issued."""
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


METRIC_NAMES = (*METRICS.values(), *map(stall_metric, STALLS))


@dataclass(frozen=True)
class Counters:
    """Counters of the call's longest kernel, unless a field says otherwise; None where they were not taken."""

    ncu_kernel: str | None = None  # function name
    ncu_kernels: int | None = None  # of the call
    ncu_us: float | None = None  # all kernels of the call, one after the other
    ncu_kernel_us: float | None = None
    ncu_clock_mhz: float | None = None  # SM clock while it ran
    ncu_sm_active_pct: float | None = None  # time in which an SM has warps; the rest is start, tail and imbalance
    ncu_dram_pct: float | None = None
    ncu_dram_mb: float | None = None  # 1e6 bytes read and written
    ncu_dram_tb_per_s: float | None = None
    ncu_l2_pct: float | None = None
    ncu_issue_pct: float | None = None  # issue slots used
    ncu_alu_pct: float | None = None
    ncu_fma_heavy_pct: float | None = None
    ncu_lsu_pct: float | None = None  # load/store instructions
    ncu_tensor_pct: float | None = None
    ncu_shared_pct: float | None = None  # data stage of L1 and shared memory
    ncu_shared_wavefronts: float | None = None
    ncu_bank_conflicts: float | None = None  # wavefronts that conflicts added
    ncu_instructions: float | None = None  # executed, of warps
    ncu_occupancy_pct: float | None = None  # warps that are there, of those an SM can hold
    ncu_registers: int | None = None  # a thread
    ncu_elements_per_clk_sm: float | None = None  # cached elements per SM clock that elapsed and SM
    ncu_stall: str | None = None  # the most frequent reason why warps wait, being not selected aside
    ncu_stall_warps: float | None = None  # warps waiting for it at each issue
