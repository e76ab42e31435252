"""The version has one place; `python -m cute_kernels.info` says what is here, and what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from setuptools.config.pyprojecttoml import read_configuration

import cute_kernels as ck
from cute_kernels import _C
from cute_kernels._runtime.loading import why_not
from tests.support import ROOT


def run(*arguments: str, python: Path = ROOT / "python", isa: str = "scalar") -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(python), "CUTE_KERNELS_CPU_ISA": isa}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=python, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def without_extension(tmp_path):
    """A copy of the package that lacks the extension module."""
    source = ROOT / "python" / "cute_kernels"
    shutil.copytree(source, tmp_path / "cute_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tmp_path


def test_version_has_one_place():
    project = read_configuration(ROOT / "pyproject.toml")["project"]
    assert project["version"] == ck.__version__
    assert ck.__version__ not in (ROOT / "pyproject.toml").read_text() + (ROOT / "setup.py").read_text()


def test_info_says_what_is_here():
    result = run("-m", "cute_kernels.info", "--json")
    assert result.returncode == 0, result.stderr
    info = json.loads(result.stdout)
    assert info["cute_kernels"] == ck.__version__
    assert info["format_version"] == 5
    assert info["extension"]["archs"] == _C.build_info()["archs"]
    assert info["extension"]["compiler"].split()[0] in ("GCC", "Clang")
    assert info["extension"]["cpu_isa"] == "scalar"
    assert info["backends"].keys() == ck.backends().keys() and info["backends"]["cpu"] == "ok"
    assert info["torch"] == {"version": torch.__version__, "cuda": torch.version.cuda}
    assert bool(info["gpus"]) == torch.cuda.is_available()
    assert info["environment"]["CUTE_KERNELS_CPU_ISA"] == "scalar"
    lines = run("-m", "cute_kernels.info").stdout
    for word in (ck.__version__, "storage format", "reference: ok", f"torch           {torch.__version__}", "driver"):
        assert word in lines


def test_an_instruction_set_that_is_not_there():
    ran = run("-m", "cute_kernels.info", "--json", isa="sse")
    assert ran.returncode == 0, ran.stderr
    isa = json.loads(ran.stdout)["extension"]["cpu_isa"]
    assert isa.startswith("none: ") and "CUTE_KERNELS_CPU_ISA" in isa


def test_info_says_that_the_extension_is_not_built(without_extension):
    result = run("-m", "cute_kernels.info", python=without_extension)
    assert result.returncode == 0, result.stderr
    assert "NOT LOADED" in result.stdout and "it is not built" in result.stdout
    assert torch.__version__ in result.stdout and ck.__version__ in result.stdout
    info = json.loads(run("-m", "cute_kernels.info", "--json", python=without_extension).stdout)
    assert info["backends"] is None and "make build" in info["extension"]["error"]


def test_info_says_that_the_extension_cannot_be_loaded(without_extension):
    (without_extension / "cute_kernels" / "_C.so").write_bytes(b"not a library")
    result = run("-m", "cute_kernels.info", python=without_extension)
    assert result.returncode == 0, result.stderr
    assert "NOT LOADED" in result.stdout and "_C.so" in result.stdout


def test_importing_the_package_without_its_extension_is_an_error(without_extension):
    result = run("-c", "import cute_kernels", python=without_extension)
    assert result.returncode == 1
    assert "ImportError" in result.stderr and "python -m cute_kernels.info" in result.stderr


@pytest.mark.parametrize(
    "file, error, cause",
    [
        (None, "No module named 'cute_kernels._C'", "it is not built"),
        ("_C.cpython-39-x86_64-linux-gnu.so", "No module named", f"this Python is {sys.implementation.cache_tag}"),
        (
            f"_C.{sys.implementation.cache_tag}-x86_64-linux-gnu.so",
            "/lib/libc.so.6: version `GLIBC_2.99' not found (required by _C.so)",
            "needs glibc with GLIBC_2.99",
        ),
        (f"_C.{sys.implementation.cache_tag}-x86_64-linux-gnu.so", "undefined symbol: x", "undefined symbol: x"),
    ],
)
def test_why_the_extension_cannot_be_loaded(tmp_path, file, error, cause):
    if file:
        (tmp_path / file).touch()
    assert cause in why_not(ImportError(error), tmp_path)
