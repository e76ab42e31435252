"""Plots of a sweep's rows. Needs matplotlib (the extra `profile`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profiling.ceilings import Ceilings
from profiling.rows import Row


class PlotsError(RuntimeError):
    """There are no plots; the message says what is missing."""


def draw(rows: Sequence[Row], limits: Ceilings, folder: Path) -> tuple[list[Path], list[str]]:
    """Writes every plot that the rows suffice for, as PNG and SVG; returns (paths, why others are missing).

    Raises:
        PlotsError: matplotlib is missing.
    """
    try:
        from profiling.plots import bandwidth, bits, roofline, speedup, style, tokens
    except ImportError as error:
        raise PlotsError(f"plots need matplotlib (pip install 'cute-kernels[profile]' or matplotlib): {error}"
                         ) from None
    kinds = {"speedup": speedup, "bandwidth": bandwidth, "roofline": roofline, "tokens": tokens, "bits": bits}
    rows = [row for row in rows if row.accurate]
    paths, missing = [], []
    with style.settings():
        for name, module in kinds.items():
            figure = module.figure(rows, limits)
            if figure is None:
                missing.append(f"{name}: {module.NEEDS}")
            else:
                paths += style.save(figure, folder, name)
    return paths, missing
