"""`import cute_kernels` from the checkout's root, where the C++ library's folder has the package's name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

SHOW = "import cute_kernels as ck; print(ck.__file__, *dir(ck))"


def python(*arguments: str, folder: Path, path: tuple[Path, ...] = ()) -> subprocess.CompletedProcess:
    """Python as it starts in `folder`, with nothing on its path but `path` and what is installed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def checkout(folder: Path, built: str) -> Path:
    """One with a package that imports the extension and nothing else."""
    package = folder / "python" / "cute_kernels"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from cute_kernels import _C\n")
    (package / "sub.py").write_text("from cute_kernels import _C\nprint('sub', _C.NAME)\n")
    (package / "_C.py").write_text(f"NAME = {built!r}\n")
    library(folder)
    return folder


def library(folder: Path) -> None:
    (folder / "cute_kernels" / "bindings").mkdir(parents=True)
    shutil.copy(ROOT / "cute_kernels" / "__init__.py", folder / "cute_kernels")


def test_the_package_is_imported_from_the_root():
    result = python("-c", SHOW, folder=ROOT)
    assert result.returncode == 0, result.stderr
    file, *names = result.stdout.split()
    assert Path(file) == ROOT / "python" / "cute_kernels" / "__init__.py"
    assert "compress" in names and "Path" not in names


def test_modules_and_scripts_find_it(tmp_path):
    root = checkout(tmp_path, "own")
    assert python("-m", "cute_kernels.sub", folder=root).stdout == "sub own\n"
    (root / "script.py").write_text("from cute_kernels import sub\n")
    assert python("script.py", folder=root).stdout == "sub own\n"


def test_an_installed_package_comes_first(tmp_path):
    """As in every other folder; and of two checkouts the one that the path names."""
    root, other = (checkout(tmp_path / name, name) for name in ("root", "other"))
    for path in ((other / "python",), (other,), (root, other / "python")):
        result = python("-c", "import cute_kernels; print(cute_kernels._C.NAME)", folder=root, path=path)
        assert result.stdout == ("root\n" if path == (other,) else "other\n"), result.stderr


def test_without_the_extension_it_says_what_to_do(tmp_path):
    shutil.copytree(ROOT / "python", tmp_path / "python", ignore=shutil.ignore_patterns("_C.*.so", "__pycache__"))
    library(tmp_path)
    result = python("-c", SHOW, folder=tmp_path)
    assert result.returncode == 1 and "make build" in result.stderr.splitlines()[-1]
    shutil.rmtree(tmp_path / "python")
    result = python("-c", SHOW, folder=tmp_path)
    assert result.returncode == 1 and "the checkout is incomplete" in result.stderr.splitlines()[-1]
