"""Why the extension module cannot be loaded. Imports nothing of the package, so that it can say so in every case."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def built_modules(package: Path = PACKAGE) -> list[Path]:
    """The files of extension modules in the package's folder, for whichever Python."""
    return sorted(package.glob("_C*.so"))


def why_not(error: BaseException, package: Path = PACKAGE) -> str:
    """What is in the way of importing cute_kernels._C, and what to do about it.

    error: what the import raised.
    """
    text = str(error)
    built = built_modules(package)
    own = sys.implementation.cache_tag
    needed = re.findall(r"version [`'\"](GLIBC(?:XX)?_[\d.]+)['\"] not found", text)
    if needed:
        library = "libstdc++" if needed[0].startswith("GLIBCXX") else "glibc"
        found = "" if library == "libstdc++" else f", this machine has glibc {platform.libc_ver()[1] or '(unknown)'}"
        cause = f"it was built on a newer Linux and needs {library} with {needed[0]}{found}"
    elif not built:
        cause = "it is not built"
    elif not any(path.name == "_C.so" or str(own) in path.name for path in built):
        cause = f"there is {', '.join(path.name for path in built)}, but this Python is {own}"
    else:
        cause = text
    return (
        f"cute_kernels: the extension module cute_kernels._C cannot be imported: {cause}. In a checkout, build it with "
        "the same Python: 'make build' or 'python setup.py build_ext --inplace'. Otherwise reinstall the package. "
        "'python -m cute_kernels.info' says what is here."
    )
