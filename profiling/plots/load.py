"""Continuous batching under load: tokens a second and memory against requests under way, and waiting for a token."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from profiling.plots import style
from profiling.serving_load.rows import DENSE, Row

_COLORS = {"sparse": style.BLUE, "sparse-eager": style.GREEN, "sdpa": style.ORANGE, "sdpa-no-cudnn": style.RED}
_LABELS = {
    "sparse": "sparse, graphs",
    "sparse-eager": "sparse",
    "sdpa": "paged|sdpa",
    "sdpa-no-cudnn": "paged|sdpa, no cuDNN",
    "flash": "paged|flash",
}


def figure(rows: Sequence[Row]) -> Figure:
    """Of one load: a line for each side, a marker for each number of users."""
    loads = sorted((row for row in rows if row.users), key=lambda row: row.users)
    drawn, axes = style.panels(3)
    titles = "tokens/s", "cache in use, GiB", "time to first token, p99, s"
    values = (
        lambda row: row.tokens_per_s,
        lambda row: row.used / 2**30,
        lambda row: math.nan if row.first_token_p99_ms is None else row.first_token_p99_ms / 1e3,
    )
    for axis, title, value in zip(axes, titles, values, strict=True):
        for side in dict.fromkeys(row.side for row in loads):
            mine = [row for row in loads if row.side == side]
            line = "--" if side in DENSE else "-"
            axis.plot(
                [row.under_way if axis is not axes[2] else row.users for row in mine],
                [value(row) for row in mine],
                line + "o",
                color=_COLORS.get(side, style.PURPLE),
                label=_LABELS[side],
            )
        axis.set_title(title)
        axis.set_xlabel("requests under way" if axis is not axes[2] else "users")
    budget = loads[0].memory / 2**30
    axes[1].axhline(budget, color=style.GREY, linestyle=":", label="budget of cache")
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(0, 1.05 * budget)
    users = sorted({row.users for row in loads})
    axes[2].set_xscale("log", base=2)
    axes[2].set_xticks(users, [str(count) for count in users])
    axes[2].xaxis.set_minor_formatter(NullFormatter())
    axes[2].set_yscale("log")
    style.shared_legend(drawn, axes)
    first = loads[0]
    drawn.suptitle(
        f"{first.device.removeprefix('NVIDIA ')}, {first.model}, prompts of {first.prompt} and answers of "
        f"{first.answer} tokens (medians), {first.memory / 2**30:g} GiB of cache",
        fontsize=10,
    )
    return drawn
