"""nvcc, the CUDA headers and the architecture list.

`python -m third_party.cuda` prints the include folders that host code needs, and fails if there are none.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from third_party import BuildError
from third_party.architectures import ARCHITECTURES, families

HEADER_REQUIREMENTS = (
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-crt==13.0.88",
)

DEFAULT_ARCH_LIST = ";".join(arch.name for arch in ARCHITECTURES.values() if arch.by_default)
_NAME_OF = {spelling: arch.name for arch in ARCHITECTURES.values() for spelling in arch.spellings}
ACCEPTED_ARCHS = tuple(_NAME_OF)

DEFAULT_ROOT = Path("/usr/local/cuda")
NVCC_REQUIREMENTS = "third_party/nvcc.txt"
_REMEDY = f"set CUDA_HOME to the CUDA toolkit's root, or pip install --no-deps -r {NVCC_REQUIREMENTS}"
_NO_NVCC = f"cute_kernels: nvcc not found, building the CPU backend only ({_REMEDY})"


# ---- Architectures ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arch:
    """One of ARCHITECTURES to compile for, such as 8.0, and whether its PTX goes along."""

    name: str
    ptx: bool = False

    @property
    def spelled(self) -> str:
        return self.name + ("+PTX" if self.ptx else "")

    @property
    def gencode(self) -> str:
        number = self.name.replace(".", "")
        if self.ptx:
            return f"-gencode=arch=compute_{number},code=[sm_{number},compute_{number}]"
        return f"-gencode=arch=compute_{number},code=sm_{number}"


def parse_arch_list(text: str | None, source: str = "TORCH_CUDA_ARCH_LIST") -> list[Arch]:
    """A list as in TORCH_CUDA_ARCH_LIST -> the architectures in ascending order; None or blank: `DEFAULT_ARCH_LIST`.

    Entries are separated by ';', ',' or white space. Each is a compute capability or a family's name, upper or lower
    case, and may end in +PTX. Which there are, and which spellings mean the same, the table of architectures says.
    source: the variable or option that it comes from, for errors.

    Raises:
        BuildError: an entry is not one of those.
    """
    entries = [e for e in re.split(r"[;,\s]+", text or "") if e] or DEFAULT_ARCH_LIST.split(";")
    members = {family.lower(): names for family, names in families().items()}
    ptx_of: dict[str, bool] = {}
    for entry in entries:
        name, plus, ptx = entry.lower().partition("+")
        names = (_NAME_OF[name],) if name in _NAME_OF else members.get(name, ())
        if not names or plus + ptx not in ("", "+ptx"):
            known = [f"{family} ({';'.join(names)})" for family, names in families().items()]
            raise BuildError(
                f"{source}: '{entry}' is not supported; it takes {', '.join(ACCEPTED_ARCHS)}, each with an "
                f"optional +PTX, and the names {', '.join(known[:-1])} and {known[-1]}, for instance "
                f'"{DEFAULT_ARCH_LIST}"'
            )
        for n in names:
            ptx_of[n] = ptx_of.get(n, False) or (ptx != "" and n == names[-1])  # of a family: its newest member's
    return [Arch(n, ptx_of[n]) for n in ARCHITECTURES if n in ptx_of]


# ---- Toolkit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that can compile."""

    root: Path
    nvcc: Path
    version: str  # "13.0"
    include_dirs: tuple[Path, ...]
    library_dirs: tuple[Path, ...]  # empty: the linker's own search path

    def check_archs(self, archs: list[Arch]) -> None:
        """Raises BuildError for what this nvcc cannot compile."""
        for arch in archs:
            oldest = ARCHITECTURES[arch.name].oldest_cuda
            if _numbers(self.version) < _numbers(oldest):
                raise BuildError(
                    f"{self.nvcc} is CUDA {self.version}, but {arch.name} needs CUDA {oldest} or newer; set CUDA_HOME "
                    f"to a newer toolkit or take {arch.name} out of TORCH_CUDA_ARCH_LIST"
                )


def find_toolkit(environ: Mapping[str, str] | None = None) -> Toolkit | None:
    """The toolkit of CUDA_HOME or CUDA_PATH, of the nvcc on PATH, of `DEFAULT_ROOT`, of the wheels `NVCC_REQUIREMENTS`.

    The first of these that there is; None if there is none.

    Raises:
        BuildError: CUDA_HOME or CUDA_PATH is set but holds no toolkit, nvcc does not run, or some of the wheels are
            missing.
    """
    environ = os.environ if environ is None else environ
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        value = environ.get(variable)
        if value:
            root = Path(value).expanduser().absolute()
            if not (root / "bin" / "nvcc").is_file() or not _include_dirs(root):
                raise BuildError(
                    f"{variable}={value} holds no CUDA toolkit (bin/nvcc and include/cuda_runtime.h); correct or unset "
                    "it, or set CUTE_KERNELS_CUDA=0 to build the CPU backend only"
                )
            return _toolkit(root, root / "bin" / "nvcc")
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    if on_path:
        root = _root_of(Path(on_path))
        if root is not None:
            own = root / "bin" / "nvcc"
            return _toolkit(root, own if own.is_file() else Path(on_path))
    if (DEFAULT_ROOT / "bin" / "nvcc").is_file() and _include_dirs(DEFAULT_ROOT):
        return _toolkit(DEFAULT_ROOT, DEFAULT_ROOT / "bin" / "nvcc")
    for root in _wheel_roots():
        if (root / "bin" / "nvcc").is_file():
            parts = (
                "nvvm/bin/cicc",
                "include/cuda_runtime.h",
                "include/crt/host_defines.h",
                "include/cccl/cuda/std/utility",
            )
            missing = [part for part in parts if not (root / part).is_file()]
            if missing:
                raise BuildError(
                    f"{root} holds nvcc, but not {', '.join(missing)}: pip install --no-deps -r {NVCC_REQUIREMENTS}, "
                    "or set CUTE_KERNELS_CUDA=0 to build the CPU backend only"
                )
            return _toolkit(root, root / "bin" / "nvcc")
    return None


def find_cuda(environ: Mapping[str, str] | None = None) -> tuple[Toolkit | None, list[Arch]]:
    """What to build for: (toolkit, architectures), or (None, []) for the CPU backend only.

    CUTE_KERNELS_CUDA=0 asks for the latter, CUTE_KERNELS_CUDA=1 makes a missing toolkit an error. Without either, a
    missing toolkit is announced in one line.
    """
    environ = os.environ if environ is None else environ
    archs = parse_arch_list(environ.get("TORCH_CUDA_ARCH_LIST"))
    wanted = environ.get("CUTE_KERNELS_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(f"CUTE_KERNELS_CUDA='{wanted}' is not supported; it takes 0 (CPU only) or 1 (CUDA required)")
    if wanted == "0":
        return None, []
    toolkit = find_toolkit(environ)
    if toolkit is None:
        if wanted == "1":
            raise BuildError(f"CUTE_KERNELS_CUDA=1, but nvcc was not found; {_REMEDY}")
        print(_NO_NVCC, file=sys.stderr, flush=True)
        return None, []
    toolkit.check_archs(archs)
    return toolkit, archs


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _toolkit(root: Path, nvcc: Path) -> Toolkit:
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{nvcc} --version failed: {error}") from error
    match = re.search(r"release (\d+\.\d+)", output)
    if match is None:
        raise BuildError(f"{nvcc} --version names no release: {output.strip()!r}")
    libraries = (root / "lib64", root / "lib", *(t / "lib" for t in _targets(root)))
    found = tuple(d for d in libraries if (d / "libcudart_static.a").is_file())[:1]
    return Toolkit(root, nvcc, match.group(1), _include_dirs(root), found)


def _root_of(nvcc: Path) -> Path | None:
    for root in (nvcc.resolve().parent.parent, nvcc.absolute().parent.parent):
        if _include_dirs(root):
            return root
    # A wrapper script: nvcc itself says where it lives.
    try:
        command = [nvcc, "-dryrun", "-E", "-x", "cu", os.devnull]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    match = re.search(r"^#\$ TOP=(.+)$", result.stderr + result.stdout, re.MULTILINE)
    root = Path(match.group(1).strip()).resolve() if match else None
    return root if root is not None and _include_dirs(root) else None


def _targets(root: Path) -> list[Path]:
    machine = platform.machine()
    names = {"x86_64": ("x86_64-linux",), "aarch64": ("sbsa-linux", "aarch64-linux")}.get(machine, ())
    return [root / "targets" / name for name in names]


# ---- Headers ---------------------------------------------------------------------------------------------------------


def find_headers(toolkit: Toolkit | None, environ: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """The folders of cuda_runtime_api.h and cuda/std, which the host side of CuTe includes.

    They are the toolkit's, or without one (`toolkit` None) those of any toolkit on this machine, else those of the PyPI
    wheels `HEADER_REQUIREMENTS`.

    Raises:
        BuildError: there are none.
    """
    if toolkit is not None:
        return toolkit.include_dirs
    environ = os.environ if environ is None else environ
    roots = [Path(environ[v]).expanduser().absolute() for v in ("CUDA_HOME", "CUDA_PATH") if environ.get(v)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    root = _root_of(Path(on_path)) if on_path else None
    roots += [root] if root is not None else []
    roots += [DEFAULT_ROOT]
    for root in roots:
        dirs = _include_dirs(root)
        if _complete(dirs):
            return dirs
    for root in _wheel_roots():
        dirs = _with_cccl(root / "include")
        if _complete(dirs):
            return dirs
    raise BuildError(
        "the CUDA headers (cuda_runtime_api.h, cuda/std) were not found; the CPU backend needs them too: "
        f"pip install {' '.join(HEADER_REQUIREMENTS)}, or set CUDA_HOME to a CUDA toolkit's root"
    )


def _with_cccl(include: Path) -> tuple[Path, ...]:
    return tuple(d for d in (include, include / "cccl") if d.is_dir())  # cccl/: where CUDA 13 keeps cuda/std


def _include_dirs(root: Path) -> tuple[Path, ...]:
    for base in (root, *_targets(root)):
        if (base / "include" / "cuda_runtime.h").is_file():
            return _with_cccl(base / "include")
    return ()


def _complete(dirs: tuple[Path, ...]) -> bool:
    needed = ("cuda_runtime_api.h", "crt/host_defines.h", "cuda/std/utility")
    return all(any((d / name).is_file() for d in dirs) for name in needed)


def _wheel_roots() -> list[Path]:
    """Where NVIDIA's wheels of CUDA 13 lie, each laid out as a toolkit."""
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    return [Path(location, "cu13") for location in (spec and spec.submodule_search_locations) or ()]


if __name__ == "__main__":
    try:
        print(*find_headers(None), sep="\n")
    except BuildError as error:
        sys.exit(f"cute_kernels: {error}")
