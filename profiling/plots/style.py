"""How plots look, and how they are written so that equal rows give equal files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image  # which matplotlib needs, too

from profiling.cases import DECODE_OPS
from profiling.rows import Row

# Colours that colour-blind readers can tell apart (Okabe and Ito).
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#555555"
DATA_COLORS = {"gaussian": BLUE, "outlier": ORANGE, "equal": GREEN}
PRODUCTS = {
    "sparse_qk": "sparse_qk: logits",
    "sparse_av": "sparse_av: weighted values",
    "sparse_attention": "sparse_attention",
}
_BACKEND_COLORS = (BLUE, GREEN, PURPLE, ORANGE)
_MARKERS = "os^D"
DPI = 110
COLORS, MAP_COLORS = 48, 128  # of a file; of one with a heat map

_SETTINGS = {
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


def settings() -> AbstractContextManager[object]:
    return plt.rc_context(_SETTINGS)


def panels(count: int, width: float = 4.6, height: float = 3.9) -> tuple[Figure, list[Axes]]:
    """A row of panels; sizes in inches."""
    figure, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False)
    return figure, list(axes[0])


def grid(lines: int, columns: int, width: float = 5.4, height: float = 3.2) -> tuple[Figure, list[list[Axes]]]:
    """Lines of panels; sizes in inches."""
    figure, axes = plt.subplots(lines, columns, figsize=(width * columns, height * lines), squeeze=False)
    return figure, [list(line) for line in axes]


def operation_panels(series: Sequence[Row]) -> tuple[Figure, dict[str, Axes], list[str]]:
    """(figure, operation -> its panel, backends) for the operations that have rows; the first panel is the leftmost."""
    ops = [op for op in DECODE_OPS if any(row.op == op for row in series)]
    figure, axes = panels(len(ops))
    for op, axis in zip(ops, axes, strict=True):
        axis.set_title(PRODUCTS[op])
    return figure, dict(zip(ops, axes, strict=True)), list(dict.fromkeys(row.backend for row in series))


def backend_style(backend: str, backends: list[str]) -> dict[str, str]:
    """Colour and marker of a backend among those in a plot."""
    i = backends.index(backend)
    return {"color": _BACKEND_COLORS[i % len(_BACKEND_COLORS)], "marker": _MARKERS[i % len(_MARKERS)]}


def shared_legend(figure: Figure, axes: list[Axes], columns: int | None = None) -> None:
    """One legend below all panels, an entry for each label; in three columns a panel unless `columns` says how many."""
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=min(len(entries), columns or 3 * len(axes))
    )


def save(figure: Figure, folder: Path, name: str, colors: int = COLORS) -> Path:
    """Writes NAME.png with a palette of few colours, which a plot looks the same with; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path, drawn = folder / f"{name}.png", io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    plt.close(figure)
    Image.open(drawn).convert("RGB").quantize(colors, dither=Image.Dither.NONE).save(path, optimize=True)
    return path
