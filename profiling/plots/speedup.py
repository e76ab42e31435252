"""Speed-up over the dense product against sparsity."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiling.ceilings import Ceilings
from profiling.plots import choose, style
from profiling.rows import Row

NEEDS = "rows of one shape with at least two keeps and a dense peer (--suite sparsity)"


def figure(rows: Sequence[Row], limits: Ceilings) -> Figure | None:
    usual = [row for row in choose.plain(rows) if row.ratio]
    series = choose.longest_series(usual, lambda row: row.shape, lambda row: row.keep)
    if len({row.keep for row in series}) < 2:
        return None
    drawn, panels, names = style.operation_panels(series)
    for op, axis in panels.items():
        lines = choose.by_backend(series, op, lambda row: row.sparsity)
        for backend, line in lines.items():
            axis.plot(
                [100 * row.sparsity for row in line],
                [row.ratio for row in line],
                label=backend,
                **style.backend_style(backend, names),
            )
        bits = {row.sparsity: 16 / row.bits_per_element for row in series if row.op == op}
        axis.plot(
            [100 * s for s in sorted(bits)],
            [bits[s] for s in sorted(bits)],
            ":",
            color=style.GREY,
            linewidth=1.2,
            label="16 bits / our bits",
        )
        _references(axis, op, rows, series[0])
        axis.set(xlabel="elements pruned, %")
        axis.set(xlim=(0, 100), ylim=(0, 1.15 * max(2.0, *(row.ratio for line in lines.values() for row in line))))
    drawn.axes[0].set_ylabel("speed-up over dense")
    style.shared_legend(drawn, list(panels.values()))
    drawn.suptitle(f"{choose.device(series)}, {choose.shape_text(series[0])}, fp16, cold cache", fontsize=10)
    return drawn


def _references(axis: Axes, op: str, rows: Sequence[Row], like: Row) -> None:
    """Dense at 1; FP8 as measured, or else at what half the bytes would give."""
    axis.axhline(1, color=style.RED, linewidth=1.2, label="dense, 16 bits")
    times = {row.peer: row.peer_us for row in rows if row.op == op and row.shape == like.shape and row.peer_us}
    times |= {
        row.backend: row.median_us
        for row in rows
        if row.op == op.replace("sparse", "dense") and row.shape == like.shape and row.cache == "cold"
    }
    fp8 = [us for name, us in times.items() if "fp8" in name]
    dense = [us for name, us in times.items() if "fp8" not in name]
    measured = bool(fp8 and dense)
    axis.axhline(
        min(dense) / min(fp8) if measured else 2,
        color=style.RED,
        linewidth=1.2,
        linestyle="--",
        label="dense FP8, measured" if measured else "dense FP8, if bytes were all",
    )
