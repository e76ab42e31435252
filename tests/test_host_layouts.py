"""The C++ tests of tests/host: each file is a program that evaluates layouts on the host, with no GPU."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from third_party.cuda import find_headers
from third_party.cutlass import find_cutlass

ROOT = Path(__file__).resolve().parents[1]
HOST_TESTS = sorted((ROOT / "tests" / "host").glob("*.cpp"))


def _linked_sources(test: Path) -> list[str]:
    """Sources that a test is compiled with, from its lines `// link: path/from/the/root.cpp`."""
    paths = re.findall(r"^// link: (\S+)$", test.read_text(encoding="utf-8"), re.MULTILINE)
    return [str(ROOT / path) for path in paths]


@pytest.mark.parametrize("test", HOST_TESTS, ids=lambda path: path.stem)
def test_host(test: Path, tmp_path: Path) -> None:
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler: {compiler[0]}")
    headers = [find_cutlass(), *find_headers(None)]
    program = tmp_path / test.stem
    includes = [argument for folder in headers for argument in ("-isystem", str(folder))]
    command = [*compiler, "-std=c++17", "-O1", "-Wall", "-Wextra", "-I", str(ROOT), *includes]
    compiled = subprocess.run(
        [*command, str(test), *_linked_sources(test), "-o", str(program)], capture_output=True, text=True
    )
    assert compiled.returncode == 0, compiled.stderr[-4000:]
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-4000:]
