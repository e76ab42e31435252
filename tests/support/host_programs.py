"""C++ programs that run on the host, with no GPU: each includes the package's headers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT
from third_party.cuda import find_headers
from third_party.cutlass import find_cutlass

FOLDER = ROOT / "tests" / "host"


def linked_sources(source: Path) -> list[str]:
    """Sources that a program is compiled with, from its lines `// link: path/from/the/root.cpp`."""
    return _paths(source, "link")


def _paths(source: Path, word: str) -> list[str]:
    return [
        str(ROOT / path)
        for path in re.findall(rf"^// {word}: (\S+)$", source.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def compile_program(source: Path, folder: Path) -> Path:
    """The program made of a source, in `folder`. Skips the test that runs where there is no C++ compiler."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler[0]}")
    program = folder / source.stem
    includes = [word for path in (find_cutlass(), *find_headers(None)) for word in ("-isystem", str(path))]
    first = [f"-I{path}" for path in _paths(source, "include")]  # headers in place of the package's
    command = [*compiler, "-std=c++17", "-O1", "-pthread", "-Wall", "-Wextra", *first, "-I", str(ROOT), *includes]
    compiled = subprocess.run(
        [*command, str(source), *linked_sources(source), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    return program
