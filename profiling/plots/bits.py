"""Storage: bits per element against sparsity."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from profiling.cases import SPARSE_OPS
from profiling.ceilings import Ceilings
from profiling.plots import choose, style
from profiling.rows import Row

NEEDS = "rows of one head dim with at least two keeps (--suite sparsity)"
MIN_TOKENS = 4096  # fewer, and what a head stores once shows
DENSE = {"fp16": 16.0, "FP8": 8.0, "NVFP4": 4.5}  # bits per element


def figure(rows: Sequence[Row], limits: Ceilings) -> Figure | None:
    stored = [row for row in rows if row.op in SPARSE_OPS and not (row.codec or row.method) and row.T >= MIN_TOKENS]
    series = choose.longest_series(stored, lambda row: row.D, lambda row: row.keep)
    if len({row.keep for row in series}) < 2:
        return None
    drawn, (axis,) = style.panels(1, 6.0, 4.2)
    shares = [s / 100 for s in range(101)]
    axis.plot(
        [100 * s for s in shares],
        [1 + 16 * (1 - s) for s in shares],
        ":",
        color=style.GREY,
        linewidth=1.2,
        label="bitmap and nonzeros alone",
    )
    for data, color in style.DATA_COLORS.items():
        bits = {row.sparsity: row.bits_per_element for row in series if row.data == data}
        if bits:
            axis.plot(
                [100 * s for s in sorted(bits)],
                [bits[s] for s in sorted(bits)],
                "-o" if len(bits) > 2 else "o",
                color=color,
                label=f"{data}, as stored",
            )
    for name, level in DENSE.items():
        axis.axhline(level, color=style.RED, linewidth=1, linestyle="-" if name == "fp16" else "--")
        axis.annotate(
            f"dense {name}",
            (100, level),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
            color=style.RED,
        )
    axis.set(
        title=f"Storage, D {series[0].D}, 16-bit values, offsets and token order counted",
        xlim=(0, 100),
        ylim=(0, 18),
        xlabel="elements pruned, %",
        ylabel="bits per element",
    )
    axis.legend(loc="lower left")
    return drawn
