"""The C++ tests of this folder: each file is a program that evaluates layouts on the host, with no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import host_programs

HOST_TESTS = sorted(host_programs.FOLDER.glob("*.cpp"))


@pytest.mark.parametrize("test", HOST_TESTS, ids=lambda path: path.stem)
def test_host(test: Path, tmp_path: Path) -> None:
    program = host_programs.compile_program(test, tmp_path)
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
