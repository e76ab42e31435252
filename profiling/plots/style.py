"""How plots look, and how they are written so that equal rows give equal files."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Colours that colour-blind readers can tell apart (Okabe and Ito).
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#555555"
DATA_COLORS = {"gaussian": BLUE, "outlier": ORANGE, "equal": GREEN}
PRODUCTS = {"sparse_qk": "sparse_qk: logits", "sparse_av": "sparse_av: weighted values",
            "sparse_attention": "sparse_attention"}
_BACKEND_COLORS = (BLUE, GREEN, PURPLE, ORANGE)
_MARKERS = "os^D"
DPI = 130

_SETTINGS = {
    "figure.dpi": DPI, "savefig.dpi": DPI, "figure.constrained_layout.use": True, "font.size": 10,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3, "grid.linewidth": 0.6,
    "axes.titlesize": 11, "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 9,
    "lines.linewidth": 1.8, "lines.markersize": 5, "svg.hashsalt": "cute_kernels", "svg.fonttype": "none",
}


def settings() -> AbstractContextManager[object]:
    return plt.rc_context(_SETTINGS)


def panels(count: int, width: float = 4.6, height: float = 3.9) -> tuple[Figure, list[Axes]]:
    """A row of panels; sizes in inches."""
    figure, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False)
    return figure, list(axes[0])


def backend_style(backend: str, backends: list[str]) -> dict[str, str]:
    """Colour and marker of a backend among those in a plot."""
    i = backends.index(backend)
    return {"color": _BACKEND_COLORS[i % len(_BACKEND_COLORS)], "marker": _MARKERS[i % len(_MARKERS)]}


def shared_legend(figure: Figure, axes: list[Axes]) -> None:
    """One legend below all panels, an entry for each label."""
    entries = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=min(len(entries), 3 * len(axes)))


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    for path in paths:
        figure.savefig(path, metadata={"Software": None} if path.suffix == ".png" else {"Date": None})
    plt.close(figure)
    return paths
