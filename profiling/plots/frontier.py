"""Accuracy against bits an element, all stored bits counted: a panel a task, a line a codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiling.plots.style import BLUE, GREEN, GREY, ORANGE, RED, shared_legend

LOOKS = {
    "": (GREY, "x", "16 bits"),
    "fp8": (BLUE, "o", "fp8"),
    "int8": (GREEN, "s", "int8"),
    "int4": (ORANGE, "^", "int4"),
}


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (bits, accuracy), those that no other has both fewer bits and as much accuracy than."""
    best: list[tuple[float, float]] = []
    for bits, value in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or value > best[-1][1]:
            best.append((bits, value))
    return best


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """rows: as profiling.recipes.associative_recall writes them; those with `bits` are drawn."""
    drawn_rows = [row for row in rows if row.get("bits") is not None]
    tasks = list(dict.fromkeys(row["task"] for row in drawn_rows))
    drawn, axes = plt.subplots(1, len(tasks), figsize=(5.4 * len(tasks), 3.9), sharex=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        of_task = [row for row in drawn_rows if row["task"] == task]
        for codec, (color, marker, name) in LOOKS.items():
            of_codec = [row for row in of_task if row["codec"] == codec]
            pruned = sorted((row["bits"], row["value"]) for row in of_codec if row["part"] != "none")
            dense = [(row["bits"], row["value"]) for row in of_codec if row["part"] == "none"]
            if pruned:
                axis.plot(*zip(*pruned, strict=True), color=color, marker=marker, label=f"pruned, {name}")
            if dense:
                axis.plot(
                    *zip(*dense, strict=True),
                    color=color,
                    marker="D",
                    linestyle="",
                    fillstyle="none",
                    label=f"dense, {name}",
                )
        best = frontier([(row["bits"], row["value"]) for row in of_task])
        axis.step(*zip(*best, strict=True), where="post", color=RED, linewidth=0.8, linestyle=":", label="frontier")
        axis.set_title(task)
        axis.set_xlabel("bits an element")
    axes[0][0].set_ylabel("accuracy, %")
    shared_legend(drawn, list(axes.flat))
    return drawn
