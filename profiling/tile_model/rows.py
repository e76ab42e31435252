"""Rows of a committed sweep that a prediction can stand beside."""

from __future__ import annotations

import json
from pathlib import Path

from profiling import ROOT
from profiling.cases import PRODUCTS, Case, Load, Shape
from profiling.tile_model.device import Device

RESULTS = ROOT / "profiling" / "results"


def load(device: Device, folder: Path = RESULTS) -> list[tuple[Case, float]]:
    """(case, measured us) of the sparse products on a device, none if it has no results."""
    path = folder / device.slug / "sweep.json"
    if not path.is_file():
        return []
    found = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        if row["op"] in PRODUCTS and not row.get("stages_ahead"):
            shape = Shape(*(row[name] for name in ("B", "Hq", "Hkv", "Sq", "T", "D")))
            case = Case(row["op"], row["backend"], Load(shape, row["keep"], row["dtype"], row["data"]))
            found.append((case, row["median_us"]))
    return found


def measured(device: Device, case: Case, folder: Path = RESULTS) -> float | None:
    """Microseconds of this case, if it was measured with the same backend, dtype and data."""
    return next((us for row, us in load(device, folder) if (row.op, row.backend, row.load) ==
                 (case.op, case.backend, case.load)), None)
