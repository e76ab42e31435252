"""The comparison of two builds, on the CPU: the same build twice, and what stops it."""

from __future__ import annotations

import shutil
from itertools import pairwise

import pytest

import profiling
from profiling import records
from profiling.ab import __main__ as command
from profiling.ab import run
from profiling.ab.run import AbError, Comparison, Side, measure
from profiling.ab.tasks import MAX_BYTES, OPS, SUITES, Sizes, Task, choose
from profiling.cases import Shape

TINY = [
    "--device",
    "cpu",
    "--backend",
    "cpu",
    "--flush-mib",
    "1",
    "--rounds",
    "2",
    "--samples",
    "2",
    "--again",
    "0",
    "--limit",
    "1e9",
]
SHAPE = Shape(2, 4, 2, 1, 100, 64)


@pytest.fixture(scope="module")
def sides():
    with (
        Side("base", profiling.ROOT, "cpu", "cpu", 1 << 16) as base,
        Side("new", profiling.ROOT, "cpu", "cpu", 1 << 16) as new,
    ):
        yield base, new


@pytest.mark.parametrize("op", OPS)
def test_every_operation_is_timed_on_both_sides(op, sides):
    found = measure(Task(op, SHAPE, 19), *sides, rounds=3, samples=2)
    assert isinstance(found, Comparison), found
    assert len(found.base) == len(found.new) == 6 and min(*found.base, *found.new) > 0
    more = found.with_more(found)
    assert more.ratio == found.ratio and len(more.new) == 12


def test_a_paged_cache_is_built_anew_when_it_is_full(sides):
    for _ in range(3):  # 640 tokens a time, and the first cache holds 512 besides its prompt
        assert isinstance(measure(Task("append", SHAPE, 19), *sides, rounds=1, samples=6), Comparison)


def test_what_a_side_cannot_run_is_said(sides):
    assert measure(Task("attend", SHAPE, 65), *sides, rounds=1, samples=1).startswith("base: keep")
    assert isinstance(measure(Task("attend", SHAPE, 19), *sides, rounds=1, samples=1), Comparison)


def test_sides_take_turns():
    asked = []

    class Fake:
        def __init__(self, name, us):
            self.name, self.us = name, us

        def ask(self, request):
            asked.append((self.name, request.get("samples")))

        def answer(self):
            return {"us": [self.us] * 2}

    found = measure(Task("attend", SHAPE, 19), Fake("base", 4.0), Fake("new", 5.0), rounds=3, samples=2)
    assert asked[2:] == [("base", 2), ("new", 2), ("new", 2), ("base", 2), ("base", 2), ("new", 2)]
    assert found.ratio == 1.25 and found.base == (4.0,) * 6
    assert "1 of 1 cases above 1.02" in command.summary([found], 1.02)
    assert "worst 1.250 (attend 2,4,2,1,100,64 keep 19)" in command.summary([found], 1.3)


def test_the_command(tmp_path, capsys):
    """A copy of the package beside this checkout's."""
    copy = tmp_path / "copy" / "cute_kernels"
    shutil.copytree(profiling.ROOT / "python" / "cute_kernels", copy)
    arguments = [str(tmp_path / "copy"), *TINY, "--suite", "serving", "--batches", "1", "--tokens", "64,128"]
    out = tmp_path / "out" / "ab.json"
    assert command.main([*arguments, "--heads", "4/2,8/2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"base: {copy}" in said and "all: 12 cases" in said and f"wrote {out}" in said
    found = records.read(out)
    assert {row["op"] for row in found} == {"sparse_attention", "attend", "step"} and len(found) == 12
    assert all(row["ratio"] == pytest.approx(row["new_us"] / row["base_us"], rel=1e-4) for row in found)
    assert all(row["base_commit"] == "unknown" and row["samples"] == 4 for row in found)
    assert (
        command.main(
            [*arguments, "--heads", "4/2", "--limit", "1e-9", "--again", "1", "--op", "attend", "--out", str(out)]
        )
        == 1
    )
    assert "measured again" in capsys.readouterr().out and records.read(out)[0]["samples"] == 12


def test_a_checkout_that_cannot_be_compared(tmp_path, capfd):
    assert command.main([str(tmp_path), *TINY]) == 2
    assert "no python/cute_kernels there" in capfd.readouterr().err
    (tmp_path / "cute_kernels").mkdir()
    (tmp_path / "cute_kernels" / "__init__.py").write_text("raise ImportError('not built')")
    assert command.main([str(tmp_path), *TINY]) == 2
    assert "not built" in (said := capfd.readouterr().err) and "is it built (make build)?" in said


def test_a_worker_that_ends_is_an_error():
    with Side("base", profiling.ROOT, "cpu", "cpu", 1 << 16) as base:
        base._process.kill()
        base._process.wait()  # so that the request meets a pipe that nobody reads
        base.ask({"samples": 1})
        with pytest.raises(AbError, match="the process of base"):
            base.answer()


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_suites(name, device):
    tasks, large = choose([name, name], Sizes(), device, ())
    assert len(set(tasks)) == len(tasks) > 3 and all(task.nbytes <= MAX_BYTES for task in tasks)
    assert all(Task.from_object(task.to_object()) == task for task in tasks)
    storages = [task.storage for task in tasks]
    changes = sum(a != b for a, b in pairwise(storages))
    assert changes + 1 == len(set(storages))  # each is built once
    assert bool(large) == (name == "serving")


def test_serving_covers_batches_and_lengths():
    tasks, _ = choose(["serving"], Sizes(), "cuda", ())
    for op in ("sparse_attention", "attend", "step"):
        shapes = {task.shape for task in tasks if task.op == op}
        assert {shape.batch for shape in shapes} == {1, 2, 4, 8, 16, 32, 64}
        assert {shape.tokens for shape in shapes} == {256, 1024, 4096, 16384, 65536, 131072}
        assert {shape.query_heads for shape in shapes} == {32, 64}
    assert choose(["serving"], Sizes(), "cuda", ("sparse_qk",))[0]


@pytest.mark.parametrize("arguments", [["--heads", "4"], ["--heads", "4/3"], ["--tokens", "0"], ["--suite", "all"]])
def test_wrong_arguments(arguments):
    with pytest.raises(SystemExit) as exit_info:
        command.main([str(profiling.ROOT), *arguments])
    assert exit_info.value.code == 2


def test_list(capsys):
    assert command.main([str(profiling.ROOT), "--device", "cuda", "--suite", "readme", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 30
    assert run.package_folder(profiling.ROOT) == profiling.ROOT / "python"
