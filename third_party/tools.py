"""The finders of pybind11's headers and of the ninja program."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from third_party import BuildError

PYBIND11_REQUIREMENT = "pybind11>=2.13"
NINJA_REQUIREMENT = "ninja>=1.11"


def find_pybind11() -> Path:
    """The folder that holds pybind11/pybind11.h: of the pybind11 module, else the copy that torch ships."""
    for module in ("pybind11", "torch"):
        for location in _locations(module):
            include = Path(location, "include")
            if (include / "pybind11" / "pybind11.h").is_file():
                return include
    raise BuildError(f'the pybind11 headers were not found: pip install "{PYBIND11_REQUIREMENT}"')


def find_ninja() -> str:
    """The ninja program: of the ninja module, else on PATH."""
    try:
        from ninja import BIN_DIR  # a module of a few lines: it knows where its installation keeps the program
    except ImportError:
        BIN_DIR = None
    if BIN_DIR and os.access(Path(BIN_DIR, "ninja"), os.X_OK):
        return str(Path(BIN_DIR, "ninja"))
    program = shutil.which("ninja")
    if program is None:
        raise BuildError(f'ninja was not found: pip install "{NINJA_REQUIREMENT}"')
    return program


def _locations(module: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(module)  # finds a top-level module without importing it
    except (ImportError, ValueError):
        return []
    return list((spec and spec.submodule_search_locations) or ())
