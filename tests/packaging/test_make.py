"""Targets of the Makefile, and what CI runs. Needs no compiler and no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest

from tests.support import ROOT


def make(*arguments: str) -> str:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "NVCC")}
    command = ["make", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_make_help():
    said = make()
    assert said == make("help")
    for target in (
        "test",
        "fuzz",
        "fuzz-sanitize",
        "sweep",
        "build",
        "wheel",
        "wheels",
        "test-wheel",
        "lint",
        "format",
        "stubs",
        "clean",
    ):
        assert re.search(rf"^make {target}\b", said, re.MULTILINE)


@pytest.mark.parametrize(
    "target, module",
    [
        ("test", "-m pytest -n auto --maxprocesses 4"),
        ("sweep", "-m profiling.sweep --help"),
        ("fuzz", "-m tests.fuzz --minutes 3 --seed 1"),
        ("fuzz-sanitize", "-m tests.fuzz --device cpu --minutes 3 --seed 1"),
    ],
)
def test_make_without_environment_installs_nothing(target, module):
    arguments = "SWEEP_ARGS=--help", "MINUTES=3", "FUZZ_ARGS=--seed 1"
    commands = make("--dry-run", target, "VENV=", "PYTHON=some-python", *arguments)
    assert f"some-python {module}" in commands
    assert "some-python setup.py" in commands
    assert "pip" not in commands and "venv" not in commands


def test_make_lint_checks_and_make_format_rewrites():
    checked = make("--dry-run", "lint", "VENV=", "PYTHON=some-python")
    for command in ("ruff check .", "ruff format --check .", "clang-format --dry-run --Werror", "some-python -m mypy"):
        assert command in checked
    assert "setup.py" not in checked and "pip" not in checked
    rewritten = make("--dry-run", "format", "VENV=", "PYTHON=some-python")
    for command in ("ruff check --fix .", "ruff format .", "clang-format -i"):
        assert command in rewritten
    assert "some-python setup.py" in make("--dry-run", "stubs", "VENV=", "PYTHON=some-python")


def test_continuous_integration_lints_and_tests():
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[-3:] == ["make lint", "make test", "make test-wheel"]


@pytest.mark.parametrize("toolkit", [True, False])
def test_continuous_integration_compiles_cuda_code_everywhere(tmp_path, toolkit):
    """Stand-ins: make prints what it is asked, python3 says whether there is a toolkit."""
    for name, text in {
        "make": 'echo "$@ NVCC=${NVCC:-} $TORCH_CUDA_ARCH_LIST"',
        "python3": f"exit {int(not toolkit)}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    bash = shutil.which("bash")
    result = subprocess.run(
        [bash, ROOT / ".ci" / "run"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    given = "" if toolkit else "1"
    assert result.stdout.splitlines() == [f"{target} NVCC={given} 9.0" for target in ("lint", "test", "test-wheel")]


def test_make_installs_into_a_new_environment(tmp_path):
    commands = make("--dry-run", "sweep", f"VENV={tmp_path / 'env'}")
    assert f"-m venv {tmp_path / 'env'}" in commands
    assert "-r third_party/requirements.txt" in commands
    assert not (tmp_path / "env").exists()


def test_make_installs_nvcc_on_request(tmp_path):
    environment = f"VENV={tmp_path / 'env'}"
    assert "-r third_party/nvcc.txt" in make("--dry-run", "build", environment, "NVCC=1")
    assert "nvcc.txt" not in make("--dry-run", "build", environment)
    assert "pip" not in make("--dry-run", "build", "VENV=", "PYTHON=some-python", "NVCC=1")
