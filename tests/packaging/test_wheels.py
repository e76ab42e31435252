"""What a wheel may link, and how large it may be."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from cute_kernels import _C
from third_party import BuildError, wheels

NAME = "cute_kernels-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl"


def fake_wheel(path: Path, *modules: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for i, module in enumerate(modules):
            archive.writestr(f"cute_kernels/_C{i}.so", module)
    return path


def test_the_extension_links_neither_torch_nor_python_nor_cuda():
    needed = wheels.needed_libraries(Path(_C.__file__).read_bytes())
    assert "libc.so.6" in needed and set(needed) <= wheels.LIBRARIES


def test_a_wheel_is_checked(tmp_path, monkeypatch):
    module = Path(_C.__file__).read_bytes()
    good = fake_wheel(tmp_path / NAME, module)
    monkeypatch.setattr(wheels, "MAX_BYTES", 10**9)  # fake_wheel does not compress
    assert NAME in wheels.check_wheel(good)
    with pytest.raises(BuildError, match="links libcudart"):
        wheels.check_wheel(fake_wheel(good, module.replace(b"libstdc++.so.6\0", b"libcudart.so.1\0")))
    with pytest.raises(BuildError, match="no extension module"):
        wheels.check_wheel(fake_wheel(good))
    with pytest.raises(BuildError, match="no manylinux tag"):
        wheels.check_wheel(fake_wheel(tmp_path / "cute_kernels-0.1.0-cp311-cp311-linux_x86_64.whl", module))
    monkeypatch.setattr(wheels, "MAX_BYTES", 10**6)
    with pytest.raises(BuildError, match="at most 1 MB"):
        wheels.check_wheel(fake_wheel(good, module))


def test_not_a_library():
    with pytest.raises(BuildError, match="ELF"):
        wheels.needed_libraries(b"text")
