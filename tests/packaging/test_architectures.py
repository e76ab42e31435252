"""The table of architectures: what runs where. The build and the extension read the same one, and nobody repeats it."""

from __future__ import annotations

import dataclasses
import re

import pytest

from cute_kernels import _C
from tests.support import ROOT
from third_party import BuildError, architectures

DEVICES = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0)]

# Built architectures -> backend -> the devices of DEVICES that it serves, by CUDA's rules: machine code runs within its
# major version from its minor version up, PTX on later devices too, 9.0a on 9.0 alone; no backend takes 10.0.
SERVED = {
    "8.0": {"sm80": [(8, 0), (8, 6), (8, 7), (8, 9)], "sm90": []},
    "8.6": {"sm80": [(8, 6), (8, 7), (8, 9)], "sm90": []},
    "8.9": {"sm80": [(8, 9)], "sm90": []},
    "8.0+PTX": {"sm80": [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)], "sm90": []},
    "8.6+PTX": {"sm80": [(8, 6), (8, 7), (8, 9), (9, 0)], "sm90": []},
    "9.0a": {"sm80": [(9, 0)], "sm90": [(9, 0)]},
    "9.0a+PTX": {"sm80": [(9, 0)], "sm90": [(9, 0)]},
    "8.0;9.0a": {"sm80": [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)], "sm90": [(9, 0)]},
    "8.0+PTX;9.0a": {"sm80": [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)], "sm90": [(9, 0)]},
}


@pytest.mark.parametrize("archs", SERVED)
def test_which_backend_serves_which_device(archs):
    for name, expected in SERVED[archs].items():
        served = [device for device in DEVICES if not _C.backend_status(name, *device, archs)]
        assert served == expected, name


@pytest.mark.parametrize(
    "name, device, archs, missing",
    [
        ("sm80", (10, 0), "8.0+PTX;9.0a", ["10.0", "sm80 takes 8.0 to 9.0", "sm90 takes 9.0"]),
        ("sm90", (10, 0), "8.0;9.0a", ["10.0", "sm80 takes 8.0 to 9.0", "sm90 takes 9.0"]),
        ("sm80", (7, 5), "8.0", ["7.5", "sm80 takes 8.0 to 9.0"]),
        ("sm90", (8, 6), "8.0;9.0a", ["compute capability 8.6", "needs 9.0"]),
        ("sm90", (9, 0), "8.0+PTX", ["built without 9.0a", "TORCH_CUDA_ARCH_LIST: 8.0+PTX"]),
        ("sm80", (9, 0), "8.0", ["without kernels for compute capability 9.0", "TORCH_CUDA_ARCH_LIST: 8.0"]),
        ("sm80", (8, 0), "8.6;9.0a", ["without kernels for compute capability 8.0", "TORCH_CUDA_ARCH_LIST: 8.6;9.0a"]),
        ("sm80", (8, 0), "", ["without CUDA", "CUTE_KERNELS_CUDA=0"]),
        ("sm100", (9, 0), "9.0a", ["no such"]),
    ],
)
def test_the_status_says_what_is_missing(name, device, archs, missing):
    status = _C.backend_status(name, *device, archs)
    for text in missing:
        assert text in status


def test_code_for_a_device_without_a_backend():
    """Compression asks for no backend: PTX serves it on later devices."""
    assert _C.build_status(10, 0, "8.0+PTX;9.0a") == ""
    assert "compute capability 10.0" in _C.build_status(10, 0, "8.0;9.0a")
    assert _C.build_status(8, 9, "8.6") == ""


def test_auto_prefers_the_newest_backend_that_takes_the_device():
    chosen = {device: _C.automatic_backend(*device) for device in DEVICES}
    assert chosen == {device: "sm90" if device == (9, 0) else "sm80" for device in DEVICES}


def test_the_extension_describes_its_own_build():
    archs = _C.build_info()["archs"]
    assert bool(archs) == _C.build_info()["cuda"]
    assert _C.backend_status("sm80", 8, 0) == _C.backend_status("sm80", 8, 0, ";".join(archs))


@pytest.mark.parametrize(
    "read, exported",
    [(architectures.ARCHITECTURES, _C.ARCHITECTURES), (architectures.BACKENDS, _C.BACKENDS)],
    ids=["architectures", "backends"],
)
def test_the_build_reads_what_the_extension_has(read, exported):
    assert {name: dataclasses.asdict(row) for name, row in read.items()} == {
        name: {"name": name, **row} for name, row in exported.items()
    }
    assert list(read) == list(exported)


def test_every_backend_has_devices_and_an_architecture():
    known = architectures.ARCHITECTURES
    for backend in architectures.BACKENDS.values():
        assert backend.architecture in ("", *known)
        assert any(not _C.backend_status(backend.name, *device, ";".join(known)) for device in DEVICES)


@pytest.mark.parametrize(
    "entry, said",
    [
        ('CUTE_KERNELS_BACKEND("sm80", "8.0")', "cannot be read"),
        ("CUTE_KERNELS_BACKEND(sm80, 8, 9, true)", "cannot be read"),
        ('// CUTE_KERNELS_BACKEND("sm80", "8.0", "9.0", "")', "no entry"),
    ],
)
def test_a_table_that_cannot_be_read_stops_the_build(tmp_path, monkeypatch, entry, said):
    table = tmp_path / "architectures.def"
    table.write_text(entry + "\n")
    monkeypatch.setattr(architectures, "TABLES", table)
    with pytest.raises(BuildError, match=said):
        architectures._entries("CUTE_KERNELS_BACKEND", architectures.Backend)


def test_nobody_repeats_the_rules():
    """No code but the table names an architecture or compares a compute capability.

    profiling/tile_model is not looked at: it describes devices, and needs no extension.
    """
    rule = re.compile(
        r'"(?:8\.[069]|9\.0a?)\b|\bsm_?90a\b|HAVE_SM\d|\b(?:Ampere|Hopper)\b'
        r"|\b(?:major|minor|capability(?:\[\d\])?)\s*(?:==|!=|>=|<=|<|>)\s*\(?\d"
    )
    suffixes = {".py", ".hpp", ".cpp", ".cu"}
    folders = [ROOT / name for name in ("cute_kernels", "python", "third_party", "profiling")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes]
    for path in (ROOT / "setup.py", *files):
        if "tile_model" in path.parts:
            continue
        code = re.sub(r"//.*|#(?!if|elif).*", "", path.read_text(encoding="utf-8"))
        assert not rule.search(code), f"{path.relative_to(ROOT)}: {rule.search(code).group()}"
