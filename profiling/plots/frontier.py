"""What is lost against bits an element, all stored bits counted: a panel a size and task, the frontier marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from profiling.plots.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, shared_legend
from profiling.recipes.means import mean, of_full_length

COLUMNS = 4
CODECS = {"": (GREY, "16 bits"), "fp8": (BLUE, "fp8"), "int8": (GREEN, "int8"), "int4": (ORANGE, "int4")}
RULES = {"magnitude": "o", "2of4": "s", "magnitude-2of4": "^", "channel-magnitude": "v"}
DENSE = {  # to compare with
    "e4m3": ("P", "dense FP8, a scale a head"),
    "kivi": ("*", "dense KIVI, 8, 5, 3 bits"),
    "kivi-64": ("d", "dense KIVI, groups of 64"),
    "nvfp4": ("X", "dense NVFP4"),
}
# Metric -> (label, what is lost of a value, the least that is drawn).
METRICS = {
    "accuracy %": ("wrong, %", lambda row: 100 - row["value"], 0.01),
    "bits a byte": ("bits a byte over the dense cache", lambda row: row["over"], 1e-4),
    "relative error": ("relative error of the output", lambda row: row["value"], 1e-3),
}
Point = tuple[float, float, float]  # bits, what is lost, its standard error


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (bits, lost), those that no other has fewer bits and loses no more than, from the fewest bits on."""
    best: list[tuple[float, float]] = []
    for bits, lost in sorted(points):
        if not best or lost < best[-1][1]:
            best.append((bits, lost))
    return best


def points(rows: Sequence[Mapping[str, Any]]) -> dict[str, Point]:
    """Setting -> point, of the rows of one size and task: the mean over seeds, or one row with its own error."""
    found: dict[str, Point] = {}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        of_setting = [row for row in rows if row["setting"] == setting]
        lost, error = mean([METRICS[row["metric"]][1](row) for row in of_setting])
        if len(of_setting) == 1:
            own = (of_setting[0].get(name) for name in ("over_error", "error"))
            error = next((x for x in own if x is not None), 0.0)  # 0 of the cache that others are compared with
        found[setting] = (of_setting[0]["bits"], lost, error)
    return found


def series(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Setting -> (label, how it is drawn); of caches of which keys and values are stored alike."""
    looks: dict[str, tuple[str, dict[str, Any]]] = {}
    for row in rows:
        codec, color = row["codec"], CODECS.get(row["codec"], (PURPLE, ""))[0]
        if row["part"] == "both":
            label = f"{row['rule']}, {CODECS[codec][1]}"
            line = "-" if row["rule"] == "magnitude" else ""
            looks[row["setting"]] = label, {"color": color, "marker": RULES[row["rule"]], "linestyle": line}
        elif row["part"] == "none":
            if codec in CODECS:
                marker, label = "D", f"dense, {CODECS[codec][1]}"
            else:
                family = "kivi" + codec[5:] if codec.startswith("kivi") else codec
                marker, label = DENSE[family]
            looks[row["setting"]] = label, {"color": color, "marker": marker, "linestyle": "", "fillstyle": "none"}
    return looks


def figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """rows: as profiling.recipes.frontier, .language and .outputs write them."""
    rows = of_full_length(row for row in rows if "," not in row["task"])  # recall by distance is part of recall
    panels = list(dict.fromkeys((row["size"], row["task"]) for row in rows))
    columns = min(COLUMNS, len(panels))
    drawn, axes = plt.subplots(
        -(-len(panels) // columns), columns, figsize=(4 * columns, 3.4 * -(-len(panels) // columns)), squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (size, task) in zip(axes.flat, panels, strict=False):
        chosen = [row for row in rows if (row["size"], row["task"]) == (size, task)]
        looks, found = series(chosen), points(chosen)
        label, _, least = METRICS[chosen[0]["metric"]]
        for name in dict.fromkeys(name for name, _ in looks.values()):
            of_series = sorted(found[setting] for setting, (series_name, _) in looks.items() if series_name == name)
            look = next(look for series_name, look in looks.values() if series_name == name)
            bits, lost, errors = zip(*of_series, strict=True)
            shown = [max(least, x) for x in lost]
            axis.errorbar(bits, shown, yerr=errors, label=name, linewidth=1, markersize=5, **look)
        best = frontier([(bits, max(least, lost)) for bits, lost, _ in (found[setting] for setting in looks)])
        axis.step(*zip(*best, strict=True), where="post", color=RED, linewidth=1, linestyle=":", label="frontier")
        axis.set_yscale("log", nonpositive="clip")
        axis.set_ylim(bottom=max(axis.get_ylim()[0], least / 2))
        axis.set_xscale("log", base=2)
        axis.set_xticks([2, 3, 4, 6, 8, 16], ["2", "3", "4", "6", "8", "16"])
        axis.set_title(f"{size}: {task}")
        axis.set_xlabel("bits an element")
        axis.set_ylabel(label)
    shared_legend(drawn, list(axes.flat[: len(panels)]), 2 * columns)
    return drawn
