"""Plots of a sweep's rows. Needs matplotlib (the extra `profile`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profiling.ceilings import Ceilings
from profiling.rows import Row

NAMES = ("speedup", "bandwidth", "roofline", "tokens", "bits", "serving")


class PlotsError(RuntimeError):
    """There are no plots; the message says what is missing."""


def draw(
    rows: Sequence[Row], limits: Ceilings, folder: Path, names: Collection[str] = NAMES
) -> tuple[list[Path], list[str]]:
    """Writes every plot that the rows suffice for; returns (paths, why others are missing).

    Raises:
        PlotsError: matplotlib is missing.
    """
    with _matplotlib():
        from profiling.plots import bandwidth, bits, roofline, serving, speedup, style, tokens
    modules = (speedup, bandwidth, roofline, tokens, bits, serving)
    kinds = dict(zip(NAMES, modules, strict=True))
    rows = [row for row in rows if row.accurate]
    paths, missing = [], []
    with style.settings():
        for name in names:
            module = kinds[name]
            figure = module.figure(rows, limits)
            if figure is None:
                missing.append(f"{name}: {module.NEEDS}")
            else:
                colors = style.MAP_COLORS if name == "serving" else style.COLORS
                paths.append(style.save(figure, folder, name, colors))
    return paths, missing


def draw_accuracy(rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Writes accuracy.png of the rows of profiling.recipes.associative_recall.

    Raises:
        PlotsError: matplotlib is missing.
    """
    with _matplotlib():
        from profiling.plots import accuracy, style
    with style.settings():
        return [style.save(accuracy.figure(rows), folder, "accuracy")]


def draw_frontier(rows: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    """Writes frontier.png of the rows of profiling.recipes.frontier, .language and .outputs.

    Raises:
        PlotsError: matplotlib is missing.
    """
    with _matplotlib():
        from profiling.plots import frontier, style
    with style.settings():
        return style.save(frontier.figure(rows), folder, "frontier", style.MAP_COLORS)


def draw_load(rows: Sequence[Any], folder: Path) -> Path:
    """Writes load.png of rows of profiling.serving_load.

    Raises:
        PlotsError: matplotlib is missing.
    """
    with _matplotlib():
        from profiling.plots import load, style
    with style.settings():
        return style.save(load.figure(rows), folder, "load")


@contextmanager
def _matplotlib() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise PlotsError(
            f"plots need matplotlib (pip install 'cute-kernels[profile]' or matplotlib): {error}"
        ) from None
