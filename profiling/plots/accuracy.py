"""Accuracy against the share of elements pruned: a row of panels a task, a column a part of the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiling.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, shared_legend

LOOKS = {
    "magnitude": (BLUE, "o"),
    "output-aware": (GREEN, "s"),
    "channel-magnitude": (ORANGE, "^"),
    "think": (PURPLE, "D"),
    "random": (GREY, "x"),
}
NAMES = {
    "magnitude": "per-token magnitude",
    "output-aware": "output-aware",
    "channel-magnitude": "per-channel magnitude",
    "think": "ThinK / ThinV (whole channels)",
    "random": "random",
}
PARTS = {"keys": "keys only", "values": "values only", "both": "keys and values"}


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """rows: as profiling.recipes.associative_recall writes them; those without evicted tokens are drawn."""
    rows = [row for row in rows if not row.get("evicted") and "," not in row["task"]]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    drawn, axes = plt.subplots(
        len(tasks), len(PARTS), figsize=(11, 3.1 * len(tasks)), sharex=True, sharey=True, squeeze=False
    )
    for line, task in zip(axes, tasks, strict=True):
        dense = next(row["value"] for row in rows if row["task"] == task and row["part"] == "none")
        for axis, (part, title) in zip(line, PARTS.items(), strict=True):
            axis.axhline(dense, color=RED, linestyle="--", linewidth=1, label="dense")
            axis.set_title(f"{task}: {title}")
            for rule in dict.fromkeys(row["rule"] for row in rows if row["part"] != "none"):
                points = sorted(
                    (100 * max(row["key_sparsity"], row["value_sparsity"]), row["value"])
                    for row in rows
                    if (row["task"], row["part"], row["rule"]) == (task, part, rule)
                )
                color, marker = LOOKS.get(rule, (RED, "v"))
                axis.plot(*zip(*points, strict=True), color=color, marker=marker, label=NAMES.get(rule, rule))
    for axis in axes[-1]:
        axis.set_xlabel("elements pruned, %")
    for line in axes:
        line[0].set_ylabel("accuracy, %")
        line[0].set_ylim(-3, 103)
    shared_legend(drawn, list(axes.flat))
    return drawn
