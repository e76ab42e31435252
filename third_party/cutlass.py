"""The CUTLASS pin, and the finder of its headers.

The headers come from the PyPI wheel `nvidia-cutlass`; the environment variable CUTLASS_PATH (a checkout, or its include
folder) takes precedence. `python -m third_party.cutlass` prints the include folder.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from third_party import BuildError

VERSION = "4.2.0"
REQUIREMENT = "nvidia-cutlass==4.2.0.0"

_VERSION_HEADER = Path("cutlass", "version.h")
_REMEDY = f"install the pinned headers (pip install {REQUIREMENT}) or set CUTLASS_PATH to a CUTLASS {VERSION} checkout"


def header_version(include: Path) -> str:
    """The version, such as "4.2.0", that <include>/cutlass/version.h states."""
    header = include / _VERSION_HEADER
    text = header.read_text(encoding="utf-8", errors="replace")
    parts = []
    for name in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"^\s*#\s*define\s+CUTLASS_{name}\s+(\d+)", text, re.MULTILINE)
        if match is None:
            raise BuildError(f"{header} does not define CUTLASS_{name}: not a CUTLASS tree; {_REMEDY}")
        parts.append(match.group(1))
    return ".".join(parts)


def find_cutlass(environ: Mapping[str, str] | None = None) -> Path:
    """The include folder of CUTLASS `VERSION`.

    Raises:
        BuildError: there are no headers, CUTLASS_PATH holds none, or their version is not the pinned one.
    """
    environ = os.environ if environ is None else environ
    override = environ.get("CUTLASS_PATH")
    if override:
        root = Path(override).expanduser().absolute()
        include = next((p for p in (root, root / "include") if (p / _VERSION_HEADER).is_file()), None)
        if include is None:
            raise BuildError(
                f"CUTLASS_PATH={override} holds neither {_VERSION_HEADER} nor include/{_VERSION_HEADER}; "
                f"unset it or point it at a CUTLASS {VERSION} checkout"
            )
    else:
        include = _wheel_include()
        if include is None:
            raise BuildError(f"the CUTLASS headers were not found; {_REMEDY}")
    found = header_version(include)
    if found != VERSION:
        raise BuildError(f"found CUTLASS {found} in {include}, but this build wants CUTLASS {VERSION}; {_REMEDY}")
    return include


def _wheel_include() -> Path | None:
    # find_spec locates a top-level package without running it: importing cutlass_library pulls in all its dependencies.
    try:
        spec = importlib.util.find_spec("cutlass_library")
    except (ImportError, ValueError):
        spec = None
    for location in (spec and spec.submodule_search_locations) or ():
        include = Path(location, "source", "include")
        if (include / _VERSION_HEADER).is_file():
            return include
    return None


if __name__ == "__main__":
    print(find_cutlass())
