"""Builds the extension module cute_kernels._C with ninja: every .cpp file always, the .cu files where there is nvcc.

Metadata lies in pyproject.toml. Environment variables:
    CUDA_HOME, CUDA_PATH    root of the CUDA toolkit (default: that of nvcc on PATH, then /usr/local/cuda,
                            then the wheels of third_party/nvcc.txt)
    CUTE_KERNELS_CUDA       0 builds the CPU backend only, 1 makes a missing nvcc an error
    TORCH_CUDA_ARCH_LIST    architectures, see cute_kernels/common/architectures.def
    CUTLASS_PATH            a CUTLASS checkout of the pinned version, in place of the nvidia-cutlass wheel
    CUTE_KERNELS_LINEINFO   1 adds source lines to the CUDA kernels, for Nsight Compute and compute-sanitizer
    CUTE_KERNELS_SANITIZE   sanitizers of g++ to compile the CPU backend with, such as address,undefined; needs
                            CUTE_KERNELS_CUDA=0
    MAX_JOBS                compilations at a time (default: ninja's own choice)
    CXX, CXXFLAGS, LDFLAGS  as usual
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # an isolated build does not put the project's folder on the path

from third_party import BuildError  # noqa: E402
from third_party.architectures import BACKENDS  # noqa: E402
from third_party.cuda import Arch, Toolkit, find_cuda, find_headers  # noqa: E402
from third_party.cutlass import find_cutlass  # noqa: E402
from third_party.tools import find_ninja, find_pybind11  # noqa: E402

LIBRARY = "cute_kernels"  # the folder of the C++ library
BINDINGS = "bindings"  # its folder that includes Python's headers; all others serve every Python
COMMON_FLAGS = ["-O3", "-std=c++17", "-DNDEBUG"]
CXX_FLAGS = [*COMMON_FLAGS, "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
NVCC_FLAGS = [
    *COMMON_FLAGS,
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall",
    "-Xptxas=--warn-on-spills",
]
# They follow what they replace. What a sanitizer finds ends the process; bounds of std::vector are checked too.
SANITIZE_FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]
LINK_FLAGS = ["-shared", "-pthread", "-Wl,--exclude-libs,ALL"]
# The static runtime opens the driver only when it is first used, so the module can be imported without one.
CUDA_LIBRARIES = ["-lcudart_static", "-ldl", "-lrt", "-lpthread"]

# CPU kernels of one instruction set, by the ending of the file's name. Linked in this order: of an inline function that
# several objects hold the linker keeps the first, which must be one that every CPU can run.
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512_FLAGS = [*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
X86_FLAGS = {
    "_avx2": AVX2_FLAGS,
    "_avx512": AVX512_FLAGS,
    "_avx512bf16": [*AVX512_FLAGS, "-mavx512vbmi2", "-mavx512bf16"],
}
HEAD_DIM_MACRO = "CUTE_KERNELS_HEAD_DIM"  # files that use it are compiled once for each head_dim


def isa_suffix(source: Path) -> str:
    return next((suffix for suffix in X86_FLAGS if source.stem.endswith(suffix)), "")


def isa_flags(source: Path) -> list[str]:
    on_x86 = platform.machine() in ("x86_64", "AMD64")  # elsewhere these files compile to nothing
    return X86_FLAGS.get(isa_suffix(source), []) if on_x86 else []


def find_sources(root: Path, archs: list[Arch]) -> list[Path]:
    """The files to compile, relative to `root`, in the order in which their objects are linked."""
    suffixes = ["", *X86_FLAGS]
    sources = sorted((root / LIBRARY).rglob("*.cpp"), key=lambda p: (suffixes.index(isa_suffix(p)), p))
    if archs:
        sources += [p for p in sorted((root / LIBRARY).rglob("*.cu")) if gencode_flags(p, archs)]
    if not sources:
        raise BuildError(f"no sources under {root / LIBRARY}: is this checkout complete?")
    return [p.relative_to(root) for p in sources]


def compression_flags(toolkit: Toolkit | None) -> list[str]:
    """Machine code is stored compressed, an eighth of its size; the driver unpacks what is used."""
    newest = toolkit is not None and tuple(map(int, toolkit.version.split("."))) >= (12, 8)
    return ["--compress-mode=size"] if newest else []


def line_flags(environ: Mapping[str, str]) -> list[str]:
    """Source lines are more than half of an object's size, so only who looks at them has them."""
    return ["-lineinfo"] if environ.get("CUTE_KERNELS_LINEINFO") == "1" else []


def gencode_flags(source: Path, archs: list[Arch]) -> list[str]:
    """nvcc's -gencode flags for a .cu file; none if it has nothing to offer to these architectures."""
    backends = [backend for backend in BACKENDS.values() if source.stem.endswith(backend.suffix)]
    return [arch.gencode for arch in archs if all(backend.compiles_for(arch.name) for backend in backends)]


def head_dims(root: Path) -> list[int]:
    """What kernels are instantiated for, see cute_kernels/format/head_dims.def."""
    text = (root / LIBRARY / "format" / "head_dims.def").read_text(encoding="utf-8")
    return [int(d) for d in re.findall(r"^CUTE_KERNELS_FOR_HEAD_DIM\((\d+)\)", text, re.MULTILINE)]


def compilations(root: Path, source: Path) -> list[tuple[str, list[str]]]:
    """(object's name, flags) for every time that a file is compiled: once, or for each head_dim if it names the macro.

    All codecs of a head_dim share an object, since they share headers and CuTe's layout algebra."""
    if HEAD_DIM_MACRO not in (root / source).read_text(encoding="utf-8"):
        return [(f"{source}.o", [])]
    return [(f"{source}.d{d}.o", [f"-D{HEAD_DIM_MACRO}={d}"]) for d in head_dims(root)]


def defines(toolkit: Toolkit | None, archs: list[Arch]) -> list[str]:
    return [
        *(["-DCUTE_KERNELS_CUDA=1"] if toolkit else []),
        f'-DCUTE_KERNELS_ARCHS="{";".join(arch.spelled for arch in archs)}"',
    ]


def sanitizers(environ: Mapping[str, str]) -> str:
    """What CUTE_KERNELS_SANITIZE names, as -fsanitize= takes it; empty: nothing."""
    names = environ.get("CUTE_KERNELS_SANITIZE", "")
    if names and environ.get("CUTE_KERNELS_CUDA") != "0":
        raise BuildError(
            f"CUTE_KERNELS_SANITIZE={names} compiles the CPU backend alone: set CUTE_KERNELS_CUDA=0 too. "
            "For GPU kernels there is compute-sanitizer, which needs no build of its own"
        )
    return names


def python_include() -> Path:
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(f"{include}/Python.h was not found: install this Python's development files (python3-dev)")
    return include


def ninja_path(path: Path | str) -> str:
    return re.sub(r"([$ :])", r"$\1", str(path))


def ninja_value(words: Iterable[str | Path]) -> str:
    return shlex.join(str(word) for word in words).replace("$", "$$")


class NinjaBuildExt(build_ext):
    """Writes two files for ninja and runs them, then puts the module where setuptools wants it."""

    def run(self) -> None:
        try:
            super().run()
        except BuildError as error:
            raise SetupError(f"cute_kernels: {error}") from None

    def build_extension(self, ext: Extension) -> None:
        if not sys.platform.startswith("linux"):
            raise BuildError(f"cute_kernels builds on Linux only, not on {sys.platform}")
        ending = "-sanitize" if sanitizers(os.environ) else ""
        shared = Path("build", sysconfig.get_platform() + ending)
        own = Path("build", f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}{ending}")
        for build_file, text in self.build_files(shared, own).items():
            (ROOT / build_file).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / build_file).write_text(text, encoding="utf-8")
            self.run_ninja(build_file)

        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # never write into a file that a running process has mapped
        shutil.copy2(ROOT / own / "_C.so", target)

    def run_ninja(self, build_file: Path) -> None:
        command = [find_ninja(), "-f", str(build_file)]
        if os.environ.get("MAX_JOBS"):
            command += ["-j", os.environ["MAX_JOBS"]]
        if self.verbose and self.verbose > 1:
            command += ["-v"]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status != 0:
            raise BuildError(f"the compilation failed (ninja ended with {status}); its output above says why")

    def build_files(self, shared: Path, own: Path) -> dict[Path, str]:
        """The ninja files to run in this order, relative to the root, and their texts: in `shared` what every Python
        links, in `own` the bindings and the module `_C.so` of this Python."""
        toolkit, archs = find_cuda()
        sources = find_sources(ROOT, archs)
        headers = [find_cutlass(), *find_headers(toolkit)]
        of_python = [s for s in sources if s.parts[1] == BINDINGS]
        rules = toolkit, archs
        statements, objects = build_statements(shared, [s for s in sources if s not in of_python], headers, *rules)
        bindings, own_objects = build_statements(own, of_python, [*headers, find_pybind11(), python_include()], *rules)
        # The bindings are of the baseline, which comes first.
        module = link_statements(own / "_C.so", [*own_objects, *objects], toolkit)
        texts = {shared: [*statements, f"default {' '.join(map(ninja_path, objects))}"], own: [*bindings, *module]}
        return {folder / "build.ninja": "\n".join(lines) + "\n" for folder, lines in texts.items()}


def build_statements(
    folder: Path, sources: list[Path], system: list[Path], toolkit: Toolkit | None, archs: list[Arch]
) -> tuple[list[str], list[Path]]:
    """The lines that compile sources into a folder, and their objects. Paths are relative to the root, except those of
    compilers and headers. system: folders of headers."""
    includes = ["-I.", *(word for path in system for word in ("-isystem", str(path)))]
    cxx = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(cxx[0]) is None:
        raise BuildError(f"the C++ compiler {cxx[0]} was not found; install g++ or set CXX")
    user_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
    sanitize = [f"-fsanitize={sanitizers(os.environ)}"] if sanitizers(os.environ) else []

    lines = [
        "# Written by setup.py.",
        "ninja_required_version = 1.5",
        f"builddir = {ninja_path(folder)}",
        "cxx = " + ninja_value(cxx),
        "includes = " + ninja_value([*includes, *defines(toolkit, archs)]),
        "rule cxx",
        "  command = $cxx -MMD -MF $out.d $includes $flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = CXX $in",
    ]
    if toolkit:
        # nvcc hands the last word to its host passes: a launcher such as ccache has no place there.
        host_compiler = ["-ccbin", cxx[-1]] if os.environ.get("CXX") else []
        lines += [
            "nvcc = " + ninja_value([toolkit.nvcc, *host_compiler]),
            "rule nvcc",
            "  command = $nvcc -MD -MF $out.d $includes $flags -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = NVCC $in",
        ]
    objects, long, short = [], [], []
    for source in sources:
        if source.suffix == ".cu":
            rule, flags = "nvcc", [*NVCC_FLAGS, *line_flags(os.environ), *compression_flags(toolkit)]
            flags += gencode_flags(source, archs)
        else:
            rule, flags = "cxx", [*CXX_FLAGS, *isa_flags(source)]
            flags += [*(SANITIZE_FLAGS if sanitize else []), *sanitize, *user_flags]
        for name, macros in compilations(ROOT, source):
            objects.append(folder / name)
            (long if macros else short).extend(
                [
                    f"build {ninja_path(objects[-1])}: {rule} {ninja_path(source)}",
                    "  flags = " + ninja_value([*flags, *macros]),
                ]
            )
    # Ninja starts them in this order: begun last, a long one would keep all others waiting.
    return [*lines, *long, *short], objects


def link_statements(module: Path, objects: list[Path], toolkit: Toolkit | None) -> list[str]:
    sanitize = [f"-fsanitize={sanitizers(os.environ)}"] if sanitizers(os.environ) else []
    link_flags = [
        *LINK_FLAGS,
        *([f"-L{path}" for path in toolkit.library_dirs] if toolkit else []),
        *(CUDA_LIBRARIES if toolkit else []),
        *sanitize,
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]
    return [
        "rule link",
        "  command = $cxx $in -o $out $flags",
        "  description = LINK $out",
        f"build {ninja_path(module)}: link {' '.join(ninja_path(o) for o in objects)}",
        "  flags = " + ninja_value(link_flags),
        f"default {ninja_path(module)}",
    ]


if __name__ == "__main__":
    setup(
        # The sources are named in build.ninja; setuptools only needs to know the module.
        ext_modules=[Extension("cute_kernels._C", sources=[])],
        cmdclass={"build_ext": NinjaBuildExt},
    )
