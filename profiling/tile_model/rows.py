"""Rows of a committed sweep that a prediction can stand beside."""

from __future__ import annotations

from pathlib import Path

from profiling import folders, rows
from profiling.cases import PRODUCTS, Case
from profiling.tile_model.device import Device


def load(device: Device, folder: Path = folders.RESULTS) -> list[tuple[Case, float]]:
    """(case, measured us) of the sparse products on a device, none if it has no results."""
    path = folder / device.slug / "sweep.json"
    if not path.is_file():
        return []
    return [
        (Case(row.op, row.backend, row.case.load), row.median_us)
        for row in rows.read(path)
        if row.op in PRODUCTS and not row.stages_ahead
    ]


def measured(device: Device, case: Case, folder: Path = folders.RESULTS) -> float | None:
    """Microseconds of this case, if it was measured with the same backend, dtype and data."""
    return next(
        (
            us
            for row, us in load(device, folder)
            if (row.op, row.backend, row.load) == (case.op, case.backend, case.load)
        ),
        None,
    )
