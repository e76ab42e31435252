"""`make test-wheel`: tests with a wheel installed in new environments, which have the oldest and the newest torch.

`python -m third_party.test_wheel [--torch VERSION]... WHEEL` makes a virtual environment for each torch in
build/test-wheel, with this Python, installs torch and the wheel into it, and runs the tests of `TESTS` beside the
checkout's, but not with its package. With the pinned torch, with which `make test` runs all of them, these are those of
the first folder: they show that the wheel is whole.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from third_party import BuildError

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("build", "test-wheel")
OLDEST_TORCH = "2.6.0"  # pyproject.toml's
TESTS = ("tests/format", "tests/compress", "tests/products", "tests/attention")
_PROBE = """
import pathlib, sys, cute_kernels, torch
where = pathlib.Path(cute_kernels.__file__)
assert where.is_relative_to(sys.prefix), f"tests would run with {where}"
print(f"cute_kernels {cute_kernels.__version__} of {where.parent}, torch {torch.__version__}")
"""


def pinned(*names: str) -> list[str]:
    """Lines of third_party/requirements.txt, in the form that pip takes."""
    lines = (ROOT / "third_party" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


def newest_torch() -> str:
    (line,) = pinned("torch")
    return line.partition("==")[2]


def test_with(torch: str, wheel: Path) -> None:
    """Raises BuildError where a step fails, whose output says why."""
    folder = ROOT / FOLDER / f"torch-{torch}"
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    packages = [f"torch=={torch}", *pinned("numpy", "pytest", "pytest-xdist", "hypothesis"), wheel]
    _run(python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *packages)
    _run(python, "-c", _PROBE)
    tests = TESTS[:1] if torch == newest_torch() else TESTS
    # Without the checkout's package on the path, and without plug-ins that write beside the tests.
    options = ["-o", "pythonpath=.", "-p", "no:cacheprovider", "-q", "-n", "auto", "--maxprocesses", "4"]
    _run(python, "-m", "pytest", *options, *tests)
    shutil.rmtree(folder)  # an old torch brings gigabytes of CUDA libraries


def _run(*command: str | Path) -> None:
    words = [str(word) for word in command]
    if status := subprocess.run(words, cwd=ROOT, check=False).returncode:
        raise BuildError(f"{' '.join(words[:4])} ... ended with {status}; its output says why")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m third_party.test_wheel", description=__doc__.partition("\n")[0])
    versions = [OLDEST_TORCH, newest_torch()]
    parser.add_argument("--torch", action="append", metavar="VERSION", help=f"one or more (default: {versions})")
    parser.add_argument("wheel", type=Path, metavar="WHEEL", help="for this Python")
    args = parser.parse_args(arguments)
    if not args.wheel.is_file():
        parser.error(f"there is no {args.wheel}: make wheel builds one")
    try:
        for torch in args.torch or versions:
            test_with(torch, args.wheel.resolve())
    except BuildError as error:
        print(f"cute_kernels: {args.wheel.name} with torch {torch}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
