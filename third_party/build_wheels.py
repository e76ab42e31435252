"""`make wheels`: a wheel for every CPython, on one machine; what does not know Python is compiled once.

`python -m third_party.build_wheels [PYTHON ...]` takes versions such as 3.12, for which it looks on the path, and paths
of interpreters; without any it takes `VERSIONS`, and `present` means those of them that are here. Each interpreter
needs its headers and the venv module. Those that cannot be had are named with the reason, the others are built, and the
exit status is 1. CUDA kernels are wanted, unless CUTE_KERNELS_CUDA=0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from third_party import BuildError
from third_party.cuda import find_cuda, find_headers
from third_party.cutlass import find_cutlass
from third_party.tools import find_ninja
from third_party.wheels import check_wheel

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PRESENT = "present"
_FOLDER = Path("build", "wheel")
_PROBE = """
import importlib.util, json, pathlib, sys, sysconfig
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "tag": sys.implementation.cache_tag,
    "plain": sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED"),
    "include": sysconfig.get_path("include"),
    "headers": pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file(),
    "venv": all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")),
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """One to build for."""

    path: Path
    version: str  # "3.12"
    tag: str  # "cpython-312"


def find_interpreter(asked: str) -> Interpreter:
    """The interpreter that a version or a path names.

    Raises:
        BuildError: there is none, or it cannot build a wheel; the message says why.
    """
    if re.fullmatch(r"\d+\.\d+", asked):
        own = "{}.{}".format(*sys.version_info[:2]) == asked
        path = sys.executable if own else shutil.which(f"python{asked}")
        if path is None:
            raise BuildError(f"python{asked} is not on the path: install it, or name its interpreter")
    else:
        path = shutil.which(asked)
        if path is None:
            raise BuildError("no such program")
    result = subprocess.run([path, "-I", "-c", _PROBE], capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{path} does not run: {(result.stderr.strip() or 'no message').splitlines()[0]}")
    found = json.loads(result.stdout)
    if re.fullmatch(r"\d+\.\d+", asked) and found["version"] != asked:
        raise BuildError(f"{path} is Python {found['version']}")
    if found["version"] not in VERSIONS or not found["plain"]:
        raise BuildError(f"{path} is {found['tag']}: wheels are for CPython {', '.join(VERSIONS)} with the GIL")
    if not found["headers"]:
        raise BuildError(f"{found['include']}/Python.h was not found: install python{found['version']}-dev")
    if not found["venv"]:
        raise BuildError(f"{path} cannot make virtual environments: install python{found['version']}-venv")
    return Interpreter(Path(path), found["version"], found["tag"])


def find_interpreters(asked: Sequence[str]) -> tuple[list[Interpreter], dict[str, str]]:
    """(those to build for, those that are skipped and why)."""
    only_present = list(asked) == [PRESENT]
    found: list[Interpreter] = []
    skipped: dict[str, str] = {}
    for name in VERSIONS if only_present or not asked else asked:
        try:
            interpreter = find_interpreter(name)
        except BuildError as error:
            skipped[name] = str(error)
            continue
        if interpreter.version not in [other.version for other in found]:
            found.append(interpreter)
    return found, skipped


def requirements() -> list[str]:
    """What a build needs of each Python, pinned as for `make build`."""
    lines = (ROOT / "third_party" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in ("setuptools", "pybind11")]


def build_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which every Python finds the headers, nvcc and ninja of this one.

    Raises:
        BuildError: some of it is missing, nvcc too unless CUTE_KERNELS_CUDA=0.
    """
    wanted = dict(environ) | {"CUTE_KERNELS_CUDA": environ.get("CUTE_KERNELS_CUDA") or "1"}
    toolkit, _ = find_cuda(wanted)
    home = toolkit.root if toolkit else _root_of_headers()
    wanted |= {"CUTLASS_PATH": str(find_cutlass()), "PATH": f"{Path(find_ninja()).parent}:{environ.get('PATH', '')}"}
    if home is not None:
        wanted["CUDA_HOME"] = str(home)
    for name in ("PYTHONPATH", "PYTHONHOME", "CUDA_PATH"):
        wanted.pop(name, None)
    return wanted


def _root_of_headers() -> Path:
    """Whose include folder the CPU backend needs; without nvcc it is no toolkit."""
    return find_headers(None)[0].parent


def build_wheel(interpreter: Interpreter, environ: Mapping[str, str]) -> Path:
    """Builds, repairs and checks a wheel, imports its module with its Python, and moves it to dist/."""
    folder = ROOT / _FOLDER / interpreter.tag
    shutil.rmtree(folder, ignore_errors=True)
    for old in (ROOT / "build").glob("lib.*"):  # may hold modules that the package no longer has
        shutil.rmtree(old)
    venv = folder / "venv"
    _run([interpreter.path, "-m", "venv", venv], environ)
    python = venv / "bin" / "python"
    _run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *requirements()], environ)
    _run([python, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", folder], environ)
    (plain,) = folder.glob("*.whl")
    tagged = folder / "tagged"
    _run([sys.executable, "-m", "auditwheel", "repair", "--strip", "--wheel-dir", tagged, plain], environ)
    (wheel,) = tagged.glob("*.whl")
    print(check_wheel(wheel), flush=True)
    _import_module(python, wheel, folder / "unpacked")
    (ROOT / "dist").mkdir(exist_ok=True)
    shutil.rmtree(venv)
    return wheel.replace(ROOT / "dist" / wheel.name)


def _import_module(python: Path, wheel: Path, folder: Path) -> None:
    """The extension module alone: it needs no torch."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".so"))
        path = archive.extract(name, folder)
    code = "import importlib.util as u, sys; s = u.spec_from_file_location('_C', sys.argv[1]); "
    code += "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.format.TILE_TOKENS)"
    _run([python, "-I", "-c", code, path], os.environ, stdout=subprocess.DEVNULL)


def _run(command: Sequence[str | Path], environ: Mapping[str, str], **options: int) -> None:
    result = subprocess.run([str(word) for word in command], cwd=ROOT, env=dict(environ), check=False, **options)
    if result.returncode:
        raise BuildError(f"{' '.join(map(str, command[:4]))} ... ended with {result.returncode}; its output says why")


def main(asked: Sequence[str]) -> int:
    found, skipped = find_interpreters(asked)
    for name, reason in skipped.items():
        print(f"cute_kernels: skips Python {name}: {reason}", file=sys.stderr, flush=True)
    try:
        environ = build_environment(os.environ)
        for interpreter in found:
            print(f"wrote {build_wheel(interpreter, environ).relative_to(ROOT)}", flush=True)
    except BuildError as error:
        print(f"cute_kernels: {error}", file=sys.stderr)
        return 1
    if not found:
        print("cute_kernels: no Python to build for", file=sys.stderr)
    return int(not found or (bool(skipped) and list(asked) != [PRESENT]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
