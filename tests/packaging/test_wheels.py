"""What a wheel may link, how large it may be, and how it is tested."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from cute_kernels import _C
from third_party import BuildError, test_wheel, wheels

ROOT = Path(__file__).resolve().parents[2]
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


# ---- Tests with a wheel installed ------------------------------------------------------------------------------------


def test_the_oldest_torch_is_that_of_the_package():
    text = (ROOT / "pyproject.toml").read_text()
    oldest = ".".join(test_wheel.OLDEST_TORCH.split(".")[:2])
    assert f'dependencies = ["torch>={oldest}"]' in text
    assert test_wheel.pinned("torch") == [f"torch=={test_wheel.newest_torch()}"]
    assert all((ROOT / folder).is_dir() for folder in test_wheel.TESTS)


def test_every_torch_has_an_environment_of_its_own(tmp_path, monkeypatch, capsys):
    commands: list[list[str]] = []

    def run(command, **options):
        commands.append(command)
        fails = "pytest" in command and "torch-2.7" in command[0]
        return subprocess.CompletedProcess(command, 1 if fails else 0)

    monkeypatch.setattr(test_wheel, "ROOT", tmp_path)
    monkeypatch.setattr(test_wheel, "pinned", lambda *names: [f"{name}==1" for name in names])
    monkeypatch.setattr(test_wheel.shutil, "rmtree", lambda *arguments, **options: None)
    monkeypatch.setattr(test_wheel.subprocess, "run", run)
    wheel = tmp_path / "x.whl"
    wheel.touch()
    assert test_wheel.main([str(wheel), "--torch", "2.6"]) == 0
    made, installed, probed, tested = commands
    assert made[1:3] == ["-m", "venv"] and made[3].endswith("torch-2.6")
    assert {"torch==2.6", str(wheel)} <= set(installed) and tested[0] == installed[0] == probed[0]
    assert tested[-len(test_wheel.TESTS) :] == list(test_wheel.TESTS) and "pythonpath=." in tested
    assert test_wheel.main([str(wheel), "--torch", "2.7"]) == 1
    assert "x.whl with torch 2.7: " in capsys.readouterr().err
    commands.clear()
    monkeypatch.setattr(test_wheel, "newest_torch", lambda: "2.8")
    assert test_wheel.main([str(wheel), "--torch", "2.8"]) == 0  # make test runs the others with it
    assert commands[-1][-2:] == ["4", test_wheel.TESTS[0]]


def test_a_wheel_that_is_not_there(capsys):
    with pytest.raises(SystemExit):
        test_wheel.main(["nowhere.whl"])
    assert "there is no nowhere.whl: make wheel builds one" in capsys.readouterr().err
