"""The finders of pybind11's headers and of the programs ninja and cuobjdump."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from third_party import BuildError
from third_party.cuda import DEFAULT_ROOT

PYBIND11_REQUIREMENT = "pybind11>=2.13"
NINJA_REQUIREMENT = "ninja>=1.11"
CUOBJDUMP_REQUIREMENTS = ("nvidia-cuda-cuobjdump>=13", "nvidia-cuda-nvdisasm>=13")


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
        # A module of a few lines, which knows where its installation keeps the program.
        from ninja import BIN_DIR  # noqa: PLC0415
    except ImportError:
        BIN_DIR = None
    if BIN_DIR and os.access(Path(BIN_DIR, "ninja"), os.X_OK):
        return str(Path(BIN_DIR, "ninja"))
    program = shutil.which("ninja")
    if program is None:
        raise BuildError(f'ninja was not found: pip install "{NINJA_REQUIREMENT}"')
    return program


def find_cuobjdump(environ: Mapping[str, str] | None = None) -> Path:
    """cuobjdump with an nvdisasm beside it: of CUDA_HOME or CUDA_PATH, on PATH, of `DEFAULT_ROOT`, else of a wheel.

    Wheels are `CUOBJDUMP_REQUIREMENTS`, then the copies that triton ships.

    Raises:
        BuildError: there is none.
    """
    environ = os.environ if environ is None else environ
    folders = [Path(environ[v], "bin") for v in ("CUDA_HOME", "CUDA_PATH") if environ.get(v)]
    on_path = shutil.which("cuobjdump", path=environ.get("PATH"))
    folders += [Path(on_path).resolve().parent] if on_path else []
    folders += [DEFAULT_ROOT / "bin"]
    folders += [Path(location, "cu13", "bin") for location in _locations("nvidia")]
    folders += [Path(location, "backends", "nvidia", "bin") for location in _locations("triton")]
    for folder in folders:
        if all(os.access(folder / program, os.X_OK) for program in ("cuobjdump", "nvdisasm")):
            return folder / "cuobjdump"
    raise BuildError(
        "cuobjdump and nvdisasm were not found: pip install "
        + " ".join(f'"{requirement}"' for requirement in CUOBJDUMP_REQUIREMENTS)
    )


def _locations(module: str) -> list[str]:
    try:
        spec = importlib.util.find_spec(module)  # finds a top-level module without importing it
    except (ImportError, ValueError):
        return []
    return list((spec and spec.submodule_search_locations) or ())
