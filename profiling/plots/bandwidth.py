"""Achieved bandwidth of each figure's shape against what a copy achieves."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from profiling import units
from profiling.cases import DECODE_OPS, Shape, usual_keeps
from profiling.ceilings import Ceilings
from profiling.plots import choose, style
from profiling.rows import Row
from profiling.suites import figures

NEEDS = "rows of the README's shapes (--suite readme)"


def figure(rows: Sequence[Row], limits: Ceilings) -> Figure | None:
    usual = choose.plain(rows)
    known = figures("cuda" if any(row.multiprocessors for row in usual) else "cpu")
    usual = [row for row in usual if row.shape in known]
    if not usual:
        return None
    keeps = list(usual_keeps(usual[0].D))
    shapes = [shape for shape in known if any(row.shape == shape for row in usual)]
    ops = [op for op in DECODE_OPS if any(row.op == op for row in usual)]
    names = choose.backends(usual)
    rate = units.rate(row.tb_per_s for row in usual)
    unit, scale = rate.name, 1 / rate.size
    drawn, axes = style.panels(len(ops), 4.8, 1.8 + 0.55 * len(shapes))
    last = 0.0
    for op, axis in zip(ops, axes, strict=True):
        for row in usual:
            if row.op != op or row.keep not in keeps:
                continue
            look, faint = style.backend_style(row.backend, names), row.keep != keeps[0]
            axis.plot(
                scale * row.tb_per_s,
                _place(row, shapes, names),
                look["marker"],
                color=look["color"],
                markersize=8,
                fillstyle="none" if faint else "full",
            )
        for shape in shapes:
            if dense := _dense(usual, op, shape):
                axis.plot(
                    scale * dense,
                    len(shapes) - 1 - shapes.index(shape),
                    "|",
                    color=style.RED,
                    markersize=14,
                    markeredgewidth=2.5,
                )
        if limits.copy_tb_per_s:
            axis.axvline(
                scale * limits.copy_tb_per_s,
                color=style.GREY,
                linestyle="--",
                linewidth=1.2,
                label=f"copy, {scale * limits.copy_tb_per_s:.3g} {unit}",
            )
        axis.set_yticks(range(len(shapes)), [_label(s) for s in reversed(shapes)] if axis is axes[0] else [])
        axis.set(title=style.PRODUCTS[op], xlabel=f"{unit} read and written", ylim=(-0.6, len(shapes) - 0.4))
        last = max(last, axis.get_xlim()[1])
    for axis in axes:
        axis.set_xlim(0, last)
    _legend(drawn, axes[0], names, keeps)
    drawn.suptitle(f"{choose.device(usual)}, fp16, cold cache: cache as stored and dense operands", fontsize=10)
    return drawn


def _place(row: Row, shapes: list[Shape], names: list[str]) -> float:
    """Height of a row; backends side by side."""
    offset = 0.16 * (names.index(row.backend) - (len(names) - 1) / 2)
    return len(shapes) - 1 - shapes.index(row.shape) - offset


def _dense(rows: Sequence[Row], op: str, shape: Shape) -> float | None:
    """TB/s of the fastest dense peer: the dense cache instead of the compressed one, in as much time as it took."""
    found = []
    for row in rows:
        if row.op == op and row.shape == shape and row.peer_us and "fp8" not in row.peer:
            operands = (row.tb_per_s - row.cache_tb_per_s) * row.median_us
            caches = row.case.elements * 2 / 1e6
            found.append((caches + operands) / row.peer_us)
    return max(found, default=None)


def _label(shape: Shape) -> str:
    return f"B {shape.batch}  Hq {shape.query_heads}  Hkv {shape.kv_heads}  T {choose.size(shape.tokens)}"


def _legend(drawn: Figure, axis: Axes, names: list[str], keeps: list[int]) -> None:
    for backend in names:
        look = style.backend_style(backend, names)
        for keep in keeps:
            axis.plot(
                [],
                [],
                look["marker"],
                color=look["color"],
                markersize=8,
                fillstyle="full" if keep == keeps[0] else "none",
                label=f"{backend}, {keep} kept",
            )
    axis.plot([], [], "|", color=style.RED, markersize=12, markeredgewidth=2.5, label="dense")
    style.shared_legend(drawn, [axis])
