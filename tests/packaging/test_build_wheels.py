"""make wheels: which Pythons there are, what is skipped, and with what each is built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import ROOT
from third_party import BuildError, build_wheels

OWN = "{}.{}".format(*sys.version_info[:2])


def fake_python(folder: Path, name: str, **changes: object) -> Path:
    """A program that answers as an interpreter of that version would."""
    found = {"version": name, "tag": f"cpython-{name.replace('.', '')}", "plain": True}
    found |= {"include": "/include", "headers": True, "venv": True} | changes
    path = folder / f"python{name}"
    path.write_text(f"#!{sys.executable}\nimport json\nprint(json.dumps({found!r}))\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_wheels.sys, "version_info", (3, 8))  # the tests' own Python is none of them
    return tmp_path


def test_versions_are_looked_up_and_reasons_given(on_path):
    for version in ("3.10", "3.13"):
        fake_python(on_path, version)
    fake_python(on_path, "3.12", headers=False)
    fake_python(on_path, "3.14", venv=False)
    found, skipped = build_wheels.find_interpreters([])
    assert [(each.version, each.tag) for each in found] == [("3.10", "cpython-310"), ("3.13", "cpython-313")]
    assert skipped == {
        "3.11": "python3.11 is not on the path: install it, or name its interpreter",
        "3.12": "/include/Python.h was not found: install python3.12-dev",
        "3.14": f"{on_path}/python3.14 cannot make virtual environments: install python3.14-venv",
    }
    assert build_wheels.find_interpreters(["present"]) == (found, skipped)
    assert build_wheels.find_interpreters(["3.13", str(on_path / "python3.13")]) == (found[1:], {})


@pytest.mark.parametrize(
    "version, changes, message",
    [
        (
            "3.9",
            {"tag": "cpython-39"},
            "is cpython-39: wheels are for CPython 3.10, 3.11, 3.12, 3.13, 3.14 with the GIL",
        ),
        ("3.14", {"plain": False}, "with the GIL"),
        ("3.12", {"version": "3.11"}, "is Python 3.11"),
    ],
)
def test_other_interpreters_are_refused(on_path, version, changes, message):
    fake_python(on_path, version, **changes)
    with pytest.raises(BuildError, match=message):
        build_wheels.find_interpreter(version)


def test_an_interpreter_that_does_not_run(on_path):
    broken = on_path / "python3.12"
    broken.write_text("#!/bin/sh\necho 'python3.12: command not found' >&2\necho more >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(BuildError, match=r"python3.12 does not run: python3.12: command not found$"):
        build_wheels.find_interpreter("3.12")
    with pytest.raises(BuildError, match="no such program"):
        build_wheels.find_interpreter("nowhere")


@pytest.mark.parametrize(
    "asked, built, status",
    [
        ([], ["3.10", "3.11"], 1),
        (["3.10", "3.11"], ["3.10", "3.11"], 0),
        (["present"], ["3.10", "3.11"], 0),
        (["3.12"], [], 1),
    ],
)
def test_what_is_built_and_how_it_ends(on_path, monkeypatch, capsys, asked, built, status):
    for version in ("3.10", "3.11"):
        fake_python(on_path, version)
    seen = []

    def build(interpreter, environ):
        assert environ == {"checked": "once"}
        seen.append(interpreter.version)
        return ROOT / "dist" / f"{interpreter.tag}.whl"

    monkeypatch.setattr(build_wheels, "build_environment", lambda environ: {"checked": "once"})
    monkeypatch.setattr(build_wheels, "build_wheel", build)
    assert build_wheels.main(asked) == status and seen == built
    said = capsys.readouterr()
    assert said.out.split() == [word for v in built for word in ("wrote", f"dist/cpython-{v.replace('.', '')}.whl")]
    assert ("skips Python 3.12: python3.12 is not on the path" in said.err) == (asked != ["3.10", "3.11"])
    assert ("no Python to build for" in said.err) == (not built)


def test_a_wheel_has_cuda_kernels_unless_told_otherwise(monkeypatch):
    asked = []
    monkeypatch.setattr(
        build_wheels, "find_cuda", lambda environ: (asked.append(environ["CUTE_KERNELS_CUDA"]), (None, []))[1]
    )
    for given, wanted in (({}, "1"), ({"CUTE_KERNELS_CUDA": ""}, "1"), ({"CUTE_KERNELS_CUDA": "0"}, "0")):
        environ = build_wheels.build_environment(given | {"PATH": "/bin", "PYTHONPATH": "/elsewhere"})
        assert asked.pop() == wanted == environ["CUTE_KERNELS_CUDA"]
        assert "PYTHONPATH" not in environ and environ["PATH"].endswith(":/bin")
        assert (Path(environ["CUDA_HOME"]) / "include").is_dir() and Path(environ["CUTLASS_PATH"]).is_dir()


def test_every_python_is_built_with_the_pinned_packages():
    names = [pin.partition("==")[0] for pin in build_wheels.requirements()]
    assert sorted(names) == ["pybind11", "setuptools"] and all("==" in pin for pin in build_wheels.requirements())


def test_versions_begin_with_the_oldest_that_the_package_serves():
    assert f'requires-python = ">={build_wheels.VERSIONS[0]}"' in (ROOT / "pyproject.toml").read_text()
    assert build_wheels.find_interpreter(sys.executable).version == OWN
