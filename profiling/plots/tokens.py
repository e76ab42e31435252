"""Time of a call against the number of cached tokens."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from profiling.ceilings import Ceilings
from profiling.plots import choose, style
from profiling.rows import Row

NEEDS = "rows of one shape with at least three numbers of tokens (--suite tokens)"


def figure(rows: Sequence[Row], limits: Ceilings) -> Figure | None:
    usual = choose.plain(rows)
    series = choose.longest_series(
        usual, lambda row: (row.B, row.Hq, row.Hkv, row.Sq, row.D, row.keep), lambda row: row.T
    )
    if len({row.T for row in series}) < 3:
        return None
    drawn, panels, names = style.operation_panels(series)
    for op, axis in panels.items():
        lines = choose.by_backend(series, op, lambda row: row.T)
        for backend, line in lines.items():
            axis.loglog(
                [row.T for row in line],
                [row.median_us for row in line],
                label=backend,
                **style.backend_style(backend, names),
            )
        dense = [row for row in next(iter(lines.values())) if row.peer_us]
        axis.loglog([row.T for row in dense], [row.peer_us for row in dense], "--", color=style.RED, label="dense")
        _floor(axis, next(iter(lines.values())), limits)
        places = sorted({row.T for row in series})
        axis.set_xticks(places[::2], [choose.size(place) for place in places[::2]])
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.set(xlabel="cached tokens")
    drawn.axes[0].set_ylabel("time, us")
    style.shared_legend(drawn, list(panels.values()))
    first = series[0]
    shape = choose.shape_text(first, tokens=False)
    drawn.suptitle(f"{choose.device(series)}, {shape}, {first.keep} kept, fp16, cold cache", fontsize=10)
    return drawn


def _floor(axis: Axes, line: Sequence[Row], limits: Ceilings) -> None:
    """The time that a copy's bandwidth would take for the bytes of a call."""
    if limits.copy_tb_per_s:
        axis.loglog(
            [row.T for row in line],
            [row.median_us * row.tb_per_s / limits.copy_tb_per_s for row in line],
            ":",
            color=style.GREY,
            linewidth=1.2,
            label="our bytes at copy speed",
        )
