"""Roofline: elements decompressed and multiplied a second, against elements for each byte moved.

The slope is the copy's bandwidth; the flat roofs are what decoding alone reaches, scheme by scheme, with everything in
shared memory. A dense fp16 cache has half an element a byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from profiling.cases import DECODE_OPS
from profiling.ceilings import Ceilings
from profiling.plots import choose, style
from profiling.rows import Row

NEEDS = "rows of products on a GPU and of a copy (--suite readme --suite peers, or --suite compress)"
MARKERS = {"sparse_qk": "o", "sparse_av": "s", "sparse_attention": "^"}


def figure(rows: Sequence[Row], limits: Ceilings) -> Figure | None:
    usual = [row for row in choose.plain(rows) if row.sm_clock_mhz and row.Sq == 1]
    if not usual or not limits.copy_tb_per_s:
        return None
    series = choose.longest_series(usual, lambda row: row.shape, lambda row: row.keep)
    names = choose.backends(series)
    drawn, (axis,) = style.panels(1, 6.6, 4.8)
    for op in DECODE_OPS:
        for backend, line in choose.by_backend(series, op, lambda row: row.keep).items():
            axis.loglog(
                [_intensity(row) for row in line],
                [_rate(row) for row in line],
                linewidth=0.8,
                color=style.backend_style(backend, names)["color"],
                marker=MARKERS[op],
                label=f"{op}, {backend}",
            )
        found = [row for row in series if row.op == op and row.peer_us and "fp8" not in row.peer]
        if found:
            dense = min(found, key=lambda row: row.peer_us)
            axis.loglog(
                *_dense(dense),
                MARKERS[op],
                color=style.RED,
                fillstyle="none",
                markersize=7,
                label=f"{dense.peer}, dense {op.removeprefix('sparse_')}",
            )
    _roofs(axis, series[0], limits)
    axis.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 4]))
    axis.yaxis.set_major_locator(FixedLocator([0.5, 1, 2, 4, 8, 16]))
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_minor_locator(NullLocator())
        ticks.set_major_formatter(FuncFormatter(lambda place, _: f"{place:g}"))
    axis.set(xlim=(0.36, 4), xlabel="cached elements for each byte moved", ylabel="cached elements, 1e12 a second")
    axis.legend(loc="lower right")
    drawn.suptitle(f"{choose.device(series)}, {choose.shape_text(series[0])}, fp16, cold cache", fontsize=10)
    return drawn


def _rate(row: Row) -> float:
    """1e12 elements a second."""
    return row.case.elements / row.median_us / 1e6


def _intensity(row: Row) -> float:
    return row.case.elements / (row.tb_per_s * row.median_us * 1e6)


def _dense(row: Row) -> tuple[float, float]:
    """(intensity, rate) of the peer: 2 bytes an element and the dense operands, which are the same."""
    operands = (row.tb_per_s - (row.cache_tb_per_s or 0.0)) * row.median_us * 1e6
    return row.case.elements / (2 * row.case.elements + operands), row.case.elements / row.peer_us / 1e6


def _roofs(axis: Axes, row: Row, limits: Ceilings) -> None:
    intensities = [0.36, 4.0]
    axis.loglog(intensities, [limits.copy_tb_per_s * x for x in intensities], color="black", linewidth=1.3)
    axis.annotate(
        f"copy, {limits.copy_tb_per_s:.3g} TB/s",
        (0.62, 0.62 * limits.copy_tb_per_s),
        rotation=38,
        xytext=(-6, 6),
        textcoords="offset points",
        fontsize=9,
    )
    per_clock = row.sm_clock_mhz * 1e6 * row.multiprocessors / 1e12
    for scheme, rate in limits.decode.items():
        axis.axhline(rate * per_clock, color=style.GREY, linestyle="--", linewidth=1.1)
        axis.annotate(
            f"decode micro-benchmark, {scheme}: {rate:.3g} elements/clk/SM",
            (0.37, rate * per_clock),
            xytext=(0, 3),
            textcoords="offset points",
            fontsize=8,
            color=style.GREY,
        )
    top = max([limits.copy_tb_per_s, *(rate * per_clock for rate in limits.decode.values())])
    axis.set_ylim(0.5, 1.6 * top)
