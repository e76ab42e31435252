"""The build: architecture list, header finders, sources and flags. Needs no compiler and no GPU."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import setuptools

from tests.support import ROOT
from third_party import BuildError, cuda, cutlass, tools


@pytest.fixture(scope="module")
def setup_py():
    spec = importlib.util.spec_from_file_location("cute_kernels_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def fake_cutlass(root: Path, version: str) -> Path:
    header = root / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."))
    header.write_text("#pragma once\n" + "".join(f"#define CUTLASS_{name} {part} \n" for name, part in parts))
    return root


def fake_toolkit(root: Path, release: str, *, headers: bool = True) -> Path:
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    if headers:
        (root / "include" / "cccl").mkdir(parents=True)
        (root / "include" / "cuda_runtime.h").touch()
    return root


# ---- Architectures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, names",
    [
        (None, ["8.0", "9.0a"]),
        ("", ["8.0", "9.0a"]),
        ("8.0;9.0a", ["8.0", "9.0a"]),
        ("9.0 8.6", ["8.6", "9.0a"]),
        ("8.9, 8.0;; 8.9", ["8.0", "8.9"]),
        ("9.0;9.0A", ["9.0a"]),
        ("Ampere;HOPPER ada", ["8.0", "8.6", "8.9", "9.0a"]),
    ],
)
def test_arch_list_accepts(text, names):
    assert [arch.name for arch in cuda.parse_arch_list(text)] == names


def test_arch_list_ptx():
    archs = cuda.parse_arch_list("8.0+PTX;8.0;ampere+ptx;9.0")
    assert [arch.gencode for arch in archs] == [
        "-gencode=arch=compute_80,code=[sm_80,compute_80]",
        "-gencode=arch=compute_86,code=[sm_86,compute_86]",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert [arch.ptx for arch in cuda.parse_arch_list("Ampere+PTX")] == [False, True]


@pytest.mark.parametrize("bad", ["7.5", "8.0a", "10.0", "9", "Volta", "+PTX", "8.0+PTX+PTX", "sm_80", "all"])
def test_arch_list_refuses(bad):
    with pytest.raises(BuildError) as error:
        cuda.parse_arch_list(f"8.0;{bad}")
    message = str(error.value)
    assert f"'{bad}'" in message
    for accepted in (*cuda.ACCEPTED_ARCHS, "+PTX", "Ampere", "Ada", "Hopper"):
        assert accepted in message


# ---- CUTLASS ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "include"])
def test_cutlass_path_overrides(tmp_path, folder):
    root = fake_cutlass(tmp_path / "checkout", cutlass.VERSION)
    assert cutlass.find_cutlass({"CUTLASS_PATH": str(root / folder)}) == root / "include"


def test_cutlass_wrong_version(tmp_path):
    root = fake_cutlass(tmp_path, "3.9.1")
    with pytest.raises(BuildError, match=rf"found CUTLASS 3\.9\.1 .* wants CUTLASS {re.escape(cutlass.VERSION)}"):
        cutlass.find_cutlass({"CUTLASS_PATH": str(root)})


def test_cutlass_path_without_headers(tmp_path):
    with pytest.raises(BuildError, match=r"CUTLASS_PATH=.*holds neither"):
        cutlass.find_cutlass({"CUTLASS_PATH": str(tmp_path)})


def test_cutlass_wheel_is_found_on_the_path_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "cutlass_library"
    fake_cutlass(package / "source", cutlass.VERSION)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cutlass_library", raising=False)
    assert cutlass.find_cutlass({}) == package / "source" / "include"


def test_cutlass_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=re.escape(f"pip install {cutlass.REQUIREMENT}")):
        cutlass.find_cutlass({})


def test_pins_agree():
    project = (ROOT / "pyproject.toml").read_text()
    headers = (ROOT / "third_party" / "headers.txt").read_text().splitlines()
    cuda_headers = (ROOT / "third_party" / "cuda-headers.txt").read_text().splitlines()
    assert cutlass.REQUIREMENT.split("==")[1].startswith(cutlass.VERSION + ".")
    assert cutlass.REQUIREMENT in headers
    lint = [line for line in (ROOT / "third_party" / "lint.txt").read_text().splitlines() if not line.startswith("#")]
    assert f"lint = [{', '.join(json.dumps(pin) for pin in lint)}]" in project
    assert all("==" in pin for pin in lint)
    for requirement in (cutlass.REQUIREMENT, *cuda.HEADER_REQUIREMENTS, *tools.CUOBJDUMP_REQUIREMENTS):
        assert f'"{requirement}"' in project
    nvcc = (ROOT / cuda.NVCC_REQUIREMENTS).read_text().splitlines()
    assert set(cuda.HEADER_REQUIREMENTS) < set(nvcc)
    assert set(cuda.HEADER_REQUIREMENTS) == {line for line in cuda_headers if line and not line.startswith("#")}


# ---- CUDA ------------------------------------------------------------------------------------------------------------


def test_toolkit_from_cuda_home(tmp_path):
    root = fake_toolkit(tmp_path / "cuda", "12.4")
    toolkit, archs = cuda.find_cuda({"CUDA_HOME": str(root), "TORCH_CUDA_ARCH_LIST": "8.9"})
    assert (toolkit.root, toolkit.version, [a.name for a in archs]) == (root, "12.4", ["8.9"])
    assert toolkit.include_dirs == (root / "include", root / "include" / "cccl")


def test_toolkit_behind_links_and_wrapper_scripts(tmp_path):
    root = fake_toolkit(tmp_path / "cuda", "13.0")
    real = root / "bin" / "nvcc"
    link = tmp_path / "linked" / "bin" / "nvcc"
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    real.write_text(real.read_text() + f"echo '#$ TOP={root}/bin/..' >&2\n")
    wrapper = tmp_path / "wrapped" / "bin" / "nvcc"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    for nvcc in (link, wrapper):
        toolkit = cuda.find_toolkit({"PATH": str(nvcc.parent)})
        assert (toolkit.root, toolkit.nvcc) == (root, real)


def fake_wheels(root: Path, monkeypatch) -> Path:
    """nvcc as the wheels of NVCC_REQUIREMENTS lay it out; no toolkit where one usually lies."""
    cu13 = fake_toolkit(root / "site" / "nvidia" / "cu13", "13.0")
    for part in ("nvvm/bin/cicc", "include/crt/host_defines.h", "include/cccl/cuda/std/utility"):
        (cu13 / part).parent.mkdir(parents=True, exist_ok=True)
        (cu13 / part).touch()
    (cu13 / "lib").mkdir()
    (cu13 / "lib" / "libcudart_static.a").touch()
    monkeypatch.setattr(cuda, "DEFAULT_ROOT", root / "none")
    monkeypatch.setattr(cuda, "_wheel_roots", lambda: [cu13])
    return cu13


def test_toolkit_from_wheels_comes_last(tmp_path, monkeypatch):
    cu13 = fake_wheels(tmp_path, monkeypatch)
    home, linked, default = (fake_toolkit(tmp_path / name, "12.4") for name in ("home", "linked", "default"))
    nowhere = {"PATH": str(tmp_path)}
    toolkit, archs = cuda.find_cuda(nowhere)
    assert (toolkit.root, toolkit.nvcc, toolkit.version) == (cu13, cu13 / "bin" / "nvcc", "13.0")
    assert toolkit.include_dirs == (cu13 / "include", cu13 / "include" / "cccl")
    assert toolkit.library_dirs == (cu13 / "lib",) and archs
    monkeypatch.setattr(cuda, "DEFAULT_ROOT", default)
    assert cuda.find_toolkit(nowhere).root == default
    on_path = {"PATH": str(linked / "bin")}
    assert cuda.find_toolkit(on_path).root == linked
    assert cuda.find_toolkit({**on_path, "CUDA_HOME": str(home)}).root == home


def test_toolkit_from_some_of_the_wheels(tmp_path, monkeypatch):
    cu13 = fake_wheels(tmp_path, monkeypatch)
    (cu13 / "nvvm" / "bin" / "cicc").unlink()
    with pytest.raises(BuildError, match=r"not nvvm/bin/cicc: pip install --no-deps -r third_party/nvcc\.txt"):
        cuda.find_toolkit({"PATH": str(tmp_path)})
    assert cuda.find_cuda({"PATH": str(tmp_path), "CUTE_KERNELS_CUDA": "0"}) == (None, [])


def test_cuda_home_without_toolkit(tmp_path):
    fake_toolkit(tmp_path, "13.0", headers=False)
    with pytest.raises(BuildError, match=r"CUDA_HOME=.* holds no CUDA toolkit"):
        cuda.find_cuda({"CUDA_HOME": str(tmp_path)})


def test_toolkit_too_old_for_hopper(tmp_path):
    fake_toolkit(tmp_path, "11.8")
    with pytest.raises(BuildError, match=r"CUDA 11\.8, but 9\.0a needs CUDA 12\.0"):
        cuda.find_cuda({"CUDA_HOME": str(tmp_path)})


def test_cpu_only_on_request(tmp_path, capsys):
    fake_toolkit(tmp_path, "13.0")
    assert cuda.find_cuda({"CUDA_HOME": str(tmp_path), "CUTE_KERNELS_CUDA": "0"}) == (None, [])
    assert capsys.readouterr().err == ""
    with pytest.raises(BuildError, match="CUTE_KERNELS_CUDA='yes'"):
        cuda.find_cuda({"CUTE_KERNELS_CUDA": "yes"})


def test_without_nvcc_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setattr(cuda, "find_toolkit", lambda environ: None)
    assert cuda.find_cuda({}) == (None, [])
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("cute_kernels: nvcc not found, building the CPU backend only")
    with pytest.raises(BuildError, match="CUDA_HOME"):
        cuda.find_cuda({"CUTE_KERNELS_CUDA": "1"})


def test_bad_arch_list_stops_a_build_without_cuda_too(monkeypatch):
    monkeypatch.setattr(cuda, "find_toolkit", lambda environ: None)
    with pytest.raises(BuildError, match=r"'7\.0'"):
        cuda.find_cuda({"TORCH_CUDA_ARCH_LIST": "7.0"})


# ---- Sources and flags -----------------------------------------------------------------------------------------------


def test_sources_by_architecture(setup_py, tmp_path):
    library = tmp_path / "cute_kernels"
    for name in ("cpu/a_avx512.cpp", "cpu/b_avx2.cpp", "zlast.cpp", "matmul/qk_sm80.cu", "matmul/qk_sm90.cu"):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).touch()

    def names(archs: str | None) -> list[str]:
        sources = setup_py.find_sources(tmp_path, cuda.parse_arch_list(archs) if archs else [])
        return [str(source.relative_to("cute_kernels")) for source in sources]

    # The baseline objects are linked before those that only some CPUs can run.
    cpu = ["zlast.cpp", "cpu/b_avx2.cpp", "cpu/a_avx512.cpp"]
    assert names(None) == cpu
    assert names("8.0") == [*cpu, "matmul/qk_sm80.cu"]
    assert names("8.0;9.0a") == [*cpu, "matmul/qk_sm80.cu", "matmul/qk_sm90.cu"]

    archs = cuda.parse_arch_list("8.0;9.0a")
    assert setup_py.line_flags({}) == setup_py.line_flags({"CUTE_KERNELS_LINEINFO": "0"}) == []
    assert setup_py.line_flags({"CUTE_KERNELS_LINEINFO": "1"}) == ["-lineinfo"]
    assert setup_py.gencode_flags(Path("qk_sm80.cu"), archs) == [arch.gencode for arch in archs]
    assert setup_py.gencode_flags(Path("qk_sm90.cu"), archs) == ["-gencode=arch=compute_90a,code=sm_90a"]


@pytest.mark.parametrize(
    "archs, spelled",
    [("9.0", "9.0a"), ("Hopper", "9.0a"), ("8.0+PTX", "8.0+PTX"), ("8.6 9.0a", "8.6;9.0a"), ("9.0,8.0", "8.0;9.0a")],
)
def test_defines_name_what_was_built(setup_py, archs, spelled):
    """In ascending order; the run time needs to know of PTX."""
    assert setup_py.defines(None, cuda.parse_arch_list(archs)) == [f'-DCUTE_KERNELS_ARCHS="{spelled}"']
    assert setup_py.defines(None, []) == ['-DCUTE_KERNELS_ARCHS=""']


def test_an_empty_checkout_is_an_error(setup_py, tmp_path):
    with pytest.raises(BuildError, match="no sources"):
        setup_py.find_sources(tmp_path, [])


def test_every_folder_of_python_is_a_package():
    """Else a wheel leaves it out without a word."""
    python = ROOT / "python"
    folders = {path.parent for path in python.rglob("*.py")}
    assert set(setuptools.find_packages(str(python))) == {".".join(f.relative_to(python).parts) for f in folders}
    assert (python / "cute_kernels" / "_C.pyi").is_file() and (python / "cute_kernels" / "py.typed").is_file()
    assert 'cute_kernels = ["py.typed", "*.pyi"]' in (ROOT / "pyproject.toml").read_text()


def test_a_source_distribution_holds_the_checkout(tmp_path):
    """Tests with all that they need, and the pages that they read, among the rest."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("only a git checkout knows its files")
    run = functools.partial(subprocess.run, cwd=ROOT, check=True, capture_output=True, text=True)
    run([sys.executable, "setup.py", "-q", "egg_info", f"--egg-base={tmp_path}", "sdist", f"--dist-dir={tmp_path}"])
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        held = {name.partition("/")[2] for name in file.getnames()}
    checked_in = {name for name in run(["git", "ls-files", "-z"]).stdout.split("\0") if (ROOT / name).is_file()}
    assert len(checked_in) > 100 and not checked_in - held
    assert not {name for name in held if name.endswith((".pyc", ".so"))}


def test_build_files_name_no_path_of_a_machine():
    files = [ROOT / name for name in ("setup.py", "pyproject.toml", "Makefile", ".ci/run")]
    files += [p for p in (ROOT / "third_party").iterdir() if p.suffix in (".py", ".txt")]
    allowed = {"/usr/local/cuda", "/usr/bin/env", "/dev/null"}  # conventions of every Linux machine
    for file in files:
        found = set(re.findall(r"(?<![\w.})])/(?:usr|opt|home|root|mnt|tmp|var|dev)/[\w./-]+", file.read_text()))
        assert found <= allowed, f"{file.name}: {found - allowed}"


def test_what_does_not_know_python_is_compiled_for_all_of_them(setup_py, monkeypatch):
    monkeypatch.setenv("CUTE_KERNELS_CUDA", "0")
    extension = setup_py.NinjaBuildExt(setuptools.Distribution())
    files = extension.build_files(Path("build/all"), Path("build/own"))
    every, own = files.values()
    assert [str(path) for path in files] == ["build/all/build.ninja", "build/own/build.ninja"]
    python = str(setup_py.python_include())
    assert python in own and python not in every and "pybind11" not in every
    compiled = re.findall(r"^build (\S+): cxx (\S+)$", every + own, re.MULTILINE)
    assert {source for _, source in compiled} == {str(source) for source in setup_py.find_sources(ROOT, [])}
    assert all(object_.startswith("build/own/") == ("/bindings/" in source) for object_, source in compiled)
    (linked,) = re.findall(r"^build build/own/_C.so: link (.*)$", own, re.MULTILINE)
    assert sorted(linked.split()) == sorted(object_ for object_, _ in compiled)
    others = {"bindings", "__pycache__"}  # the folder has a module, of which Python keeps bytecode
    library = [path for path in (ROOT / "cute_kernels").rglob("*.[chd]*") if path.parent.name not in others]
    assert len(library) > 50 and not [path for path in library if re.search(r"pybind11/|Python\.h", path.read_text())]


def test_kernels_of_operations_are_compiled_once_for_each_head_dim(setup_py):
    compiled = setup_py.compilations(ROOT, Path("cute_kernels/ops/qk/qk_sm90.cu"))
    assert compiled == [
        (f"cute_kernels/ops/qk/qk_sm90.cu.d{d}.o", [f"-DCUTE_KERNELS_HEAD_DIM={d}"]) for d in (64, 128, 256)
    ]
    others = Path("cute_kernels/compress/pack.cu")
    assert setup_py.compilations(ROOT, others) == [(f"{others}.o", [])]


def test_long_compilations_start_first(setup_py):
    short, long = Path("cute_kernels/compress/pack.cu"), Path("cute_kernels/ops/qk/qk_sm90.cu")
    lines, objects = setup_py.build_statements(Path("build"), [short, long], [], None, [cuda.Arch("9.0a", False)])
    compiled = [match[1] for line in lines if (match := re.match(r"build \S+: nvcc (\S+)", line))]
    assert compiled == [*[str(long)] * 3, str(short)]
    assert objects[0] == Path("build", f"{short}.o") and len(objects) == 4  # in the order of linking


@pytest.mark.parametrize("names", ["address", "address,undefined"])
def test_sanitizers_compile_and_link_the_cpu_backend_apart(setup_py, monkeypatch, names):
    for variable, value in (("CUTE_KERNELS_CUDA", "0"), ("CUTE_KERNELS_SANITIZE", names)):
        monkeypatch.setenv(variable, value)
    assert setup_py.sanitizers(os.environ) == names
    files = setup_py.NinjaBuildExt(setuptools.Distribution()).build_files(Path("build"), Path("build/own"))
    flags = [
        found
        for text in files.values()
        for found in re.findall(r"^build (.*): .*\n  flags = (.*)$", text, re.MULTILINE)
    ]
    assert len(flags) > 10 and all(f"-fsanitize={names}" in words for _, words in flags)
    assert all(("-O1" in words) == (output != "build/own/_C.so") for output, words in flags)
    monkeypatch.delenv("CUTE_KERNELS_SANITIZE")
    assert setup_py.sanitizers(os.environ) == ""


def test_sanitizers_are_not_for_gpu_kernels(setup_py):
    with pytest.raises(BuildError, match="CUTE_KERNELS_CUDA=0"):
        setup_py.sanitizers({"CUTE_KERNELS_SANITIZE": "address"})
