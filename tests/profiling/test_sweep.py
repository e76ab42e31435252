"""The sweep on the CPU: its rows, its files, what interrupts it; and the parts whose mistakes rows would not show."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys

import pytest
import torch

import profiling
from cute_kernels._runtime.extension import _C
from profiling import (
    cases,
    check,
    data,
    decode_microbench,
    folders,
    operations,
    peers,
    rows,
    run,
    selection,
    suites,
    sweep,
    tables,
    timing,
)
from profiling.cases import Block, Case, Load, Shape

SHAPE = "1,4,2,2,200,64"
TINY = ["--shape", SHAPE, "--keep", "19", "--backend", "cpu", "--repeats", "3"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Few operand sets are enough to leave a small cache."""
    real = run.environment
    monkeypatch.setattr(run, "environment", lambda device: dataclasses.replace(real(device), cache_bytes=1 << 18))


def read(folder):
    return [rows.as_object(row) for row in rows.read(folder / "sweep.json")]


def test_rows_and_files(tmp_path, capsys):
    assert sweep.main([*TINY, "--dtype", "float16", "--dtype", "bfloat16", "--out", str(tmp_path)]) == 0
    objects = read(tmp_path)
    ops = "sparse_qk", "sparse_av", "sparse_attention", "compress"
    assert [(r["op"], r["dtype"]) for r in objects] == [(op, d) for op in ops for d in ("float16", "bfloat16")]
    for row in objects:
        assert [row[name] for name in ("B", "Hq", "Hkv", "Sq", "T", "D")] == [1, 4, 2, 2, 200, 64]
        assert (row["backend"], row["keep"], row["data"], row["repeats"], row["seed"]) == ("cpu", 19, "gaussian", 3, 0)
        assert row["peer"] == {"compress": "copy", "sparse_attention": "sdpa"}.get(row["op"], "torch")
        assert (row["op"] == "compress") == (row["peer_form"].split()[0] not in ("fp16", "bf16", "fp32"))
        assert row["isa"] == _C.cpu.isa()
        assert row["median_us"] > 0 and row["iqr_us"] >= 0 and row["tb_per_s"] > 0
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["median_us"], rel=1e-4)
        assert row["rel_err"] <= row["tolerance"] and row["status"] == "ok"
        assert row["cache_tb_per_s"] < row["tb_per_s"] and row["peer_rel_err"] <= 1e-2
        assert 19 / 64 * 16 < row["bits_per_element"] < 16
        assert row["elements_per_clk_sm"] is None and row["threads"] == torch.get_num_threads()
        assert row["torch"] == torch.__version__ and row["device"] and row["commit"] and row["timestamp"]
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]
    assert f"wrote {tmp_path / 'sweep.json'}" in capsys.readouterr().out


def test_a_row_names_the_command_that_reproduces_it(tmp_path):
    assert sweep.main([*TINY, "--op", "sparse_av", "--seed", "7", "--out", str(tmp_path / "first")]) == 0
    (first,) = read(tmp_path / "first")
    command = shlex.split(first["command"])
    assert command[:3] == ["python", "-m", "profiling.sweep"]
    assert sweep.main([*command[3:], "--out", str(tmp_path / "second")]) == 0
    (second,) = read(tmp_path / "second")
    for name in ("command", "seed", "repeats", "rel_err", "bits_per_element"):
        assert first[name] == second[name]


@pytest.mark.parametrize("method, keep, codec", [("2of4", 32, ""), ("magnitude-2of4", 19, "int8")])
def test_rules_of_two_of_four(method, keep, codec, tmp_path):
    """Every row is accurate, and its command names the rule."""
    ops = [word for op in ("sparse_attention", "attend", "compress") for word in ("--op", op)]
    arguments = [*ops, "--backend", "cpu", "--shape", SHAPE, "--keep", str(keep), "--method", method, "--repeats", "2"]
    assert sweep.main([*arguments, *(["--codec", codec] if codec else []), "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "sweep.json")
    assert {(row.op, row.method, row.codec) for row in found} == {
        (op, method, codec) for op in ("sparse_attention", "attend", "compress")
    }
    assert all(row.accurate and f"--method {method}" in row.command for row in found)


def test_interrupt_keeps_finished_rows(tmp_path, capsys, monkeypatch):
    measure_case, calls = run.measure_case, []

    def interrupted_after_one(case, env, wanted):
        if calls:
            raise KeyboardInterrupt
        calls.append(case)
        return measure_case(case, env, wanted)

    monkeypatch.setattr(run, "measure_case", interrupted_after_one)
    assert sweep.main([*TINY, "--out", str(tmp_path)]) == 130
    assert len(read(tmp_path)) == 1
    assert "kept the 1 rows" in capsys.readouterr().out


def test_an_inaccurate_row_is_marked_and_fails(tmp_path, capsys, monkeypatch):
    call = operations.call

    def off_by_a_percent(case, inputs):
        return call(case, inputs).mul_(1.01)

    monkeypatch.setattr(operations, "call", off_by_a_percent)
    assert sweep.main([*TINY, "--op", "sparse_qk", "--out", str(tmp_path)]) == 1
    (row,) = rows.read(tmp_path / "sweep.json")
    assert row.status == "inaccurate" and row.rel_err == pytest.approx(1e-2, rel=0.05)
    assert "INACCURATE" in capsys.readouterr().out
    assert " ! |" in tables.markdown([row])


def test_an_unwritten_output_is_inaccurate(tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "call", lambda case, inputs: inputs.out)
    assert sweep.main([*TINY, "--op", "sparse_av", "--out", str(tmp_path)]) == 1


def test_what_cannot_run_is_skipped(capsys, monkeypatch):
    monkeypatch.setattr(sweep.ck, "backends", lambda: {"cpu": "ok", "sm80": "no device", "sm90": "no device"})
    arguments = ["--shape", SHAPE, "--backend", "sm80", "--op", "sparse_qk", "--keep", "19"]
    assert sweep.main(arguments) == 2
    printed = capsys.readouterr()
    assert "skipped sparse_qk sm80" in printed.err and "no device" in printed.err
    assert "skipped 1 cases: no device" in printed.out


def test_errors_of_a_case_are_reasons(tmp_path, capsys, monkeypatch):
    measure_case = run.measure_case

    def no_values(case, env, wanted):
        if case.op == "sparse_av":
            raise RuntimeError("head_dim 64 is not instantiated")
        return measure_case(case, env, wanted)

    monkeypatch.setattr(run, "measure_case", no_values)
    assert sweep.main([*TINY, "--out", str(tmp_path)]) == 0
    assert [row["op"] for row in read(tmp_path)] == ["sparse_qk", "sparse_attention", "compress"]
    assert "head_dim 64 is not instantiated" in capsys.readouterr().out


def test_a_lost_device_stops_the_sweep(tmp_path, monkeypatch):
    def lost(case, env, wanted):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(run, "measure_case", lost)
    assert sweep.main([*TINY, "--out", str(tmp_path)]) == 1
    assert not list(tmp_path.iterdir())


def test_results_are_written_when_asked_for(tmp_path, monkeypatch, capsys):
    results, scratch = tmp_path / "results", tmp_path / "scratch"
    monkeypatch.setattr(folders, "RESULTS", results)
    monkeypatch.setattr(folders, "SCRATCH", scratch)
    monkeypatch.setattr(sweep.ck, "backends", lambda: {"cpu": "ok", "sm80": "no device"})
    tiny = Block(("compress",), (Load(Shape.parse(SHAPE), 19),))
    monkeypatch.setattr(suites, "quick", lambda device: [tiny])
    for name in suites.SUITES:
        monkeypatch.setitem(suites.SUITES, name, dataclasses.replace(suites.SUITES[name], lists=lambda device: [tiny]))
    monkeypatch.setattr(selection, "REPEATS", 3)
    for arguments in ([], ["--op", "compress"], ["--quick"], ["--suite", "compress"], ["--suite", "readme"]):
        assert sweep.main(arguments) == 0
    assert {path.name for path in scratch.glob("cpu-*/*")} == {"sweep.json", "readme.json"} and not results.exists()
    assert sweep.main(["--suite", "readme", "--commit-results"]) == 0
    assert [path.name for path in results.glob("cpu-*/*")] == ["readme.json"]
    assert sweep.main(["--commit-results"]) == 0
    assert {path.name for path in results.glob("cpu-*/*")} == {"readme.json", "sweep.json"}
    assert sweep.main(["--suite", "serving", "--commit-results"]) == 0
    assert {path.name for path in results.glob("cpu-*/*")} == {"readme.json", "serving.json", "sweep.json"}
    for part in (["--op", "compress"], ["--quick"], ["--suite", "compress"], ["--repeats", "3"], ["--out", "x"]):
        with pytest.raises(SystemExit):
            sweep.main([*part, "--commit-results"])
        assert (
            "--commit-results takes all suites or one of readme, codecs, two-of-four, queries, paged, serving"
            in capsys.readouterr().err
        )


def test_rows_under_way_leave_other_results_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep.ck, "backends", lambda: {"cpu": "ok"})
    blocks = [Block(("compress",), (Load(Shape.parse(SHAPE), 19), Load(Shape.parse(SHAPE), 32)))]
    monkeypatch.setitem(
        suites.SUITES, "readme", dataclasses.replace(suites.SUITES["readme"], lists=lambda device: blocks)
    )
    monkeypatch.setattr(selection, "REPEATS", 3)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0)
    (tmp_path / "sweep.json").write_text("of an earlier run", encoding="utf-8")
    folders, save = [], run.Run.save

    def seen(self, folder, name):
        folders.append((folder, name))
        return save(self, folder, name)

    monkeypatch.setattr(run.Run, "save", seen)
    assert sweep.main(["--suite", "readme", "--out", str(tmp_path)]) == 0
    assert len(folders) > 1 and set(folders) == {(tmp_path, "readme")}
    assert (tmp_path / "sweep.json").read_text(encoding="utf-8") == "of an earlier run"


def test_list(capsys):
    assert sweep.main(["--list", "--backend", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) > 20
    assert all(line.startswith("python -m profiling.sweep --op ") for line in lines)
    assert sweep.main(["--list", "--backend", "sm80", "--op", "sparse_qk", "--keep", "38", "--data", "gaussian"]) == 0
    listed = capsys.readouterr().out
    for shape in (
        "8,32,8,1,16384,128",
        "8,32,8,1,4096,128",
        "1,32,8,1,32768,128",
        "8,32,32,1,4096,128",
        "8,64,8,1,16384,128",
    ):
        assert f"--shape {shape} --keep 38 --dtype float16" in listed


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--shape", "1,2,3"], "six integers"),
        (["--shape", "1,8,3,1,64,128"], "not a multiple of Hkv"),
        (["--shape", SHAPE, "--keep", "0"], "positive integer"),
        (["--op", "dense"], "invalid choice"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        sweep.main(arguments)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_contradicting_arguments(capsys):
    assert sweep.main(["--shape", SHAPE, "--keep", "65"]) == 2
    assert "keep 65 is not in 1..64" in capsys.readouterr().err
    assert sweep.main(["--shape", SHAPE, "--keep", "19", "--data", "equal"]) == 2
    assert "multiples of 8" in capsys.readouterr().err
    assert sweep.main(["--keep", "50"]) == 2
    assert "nothing to measure" in capsys.readouterr().out


def test_runs_from_a_checkout_without_pythonpath():
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-m", "profiling.sweep", "--list", "--backend", "cpu", "--quick"],
        cwd=profiling.ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "--op compress --backend cpu" in result.stdout


def test_decode_microbench_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(decode_microbench, "find_toolkit", lambda: None)
    assert decode_microbench.main([]) == 2
    assert "nvcc not found" in capsys.readouterr().err


# ---- Parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sparse_qk", "sparse_av"])
def test_every_form_of_the_peer_computes_the_product(op):
    case = Case(op, "cpu", Load(Shape(2, 6, 2, 3, 130, 64), 19, "bfloat16"))
    inputs = operations.prepare(case, CPU)
    (plugin,) = peers.of(case, "cpu", None)
    peer = plugin.peer(case, inputs)
    assert len(peer.forms) > 1
    for form in peer.forms:
        out = peer.operands[-1].fill_(float("nan"))
        peer.rotation(form, 2)[0]()
        assert check.relative_error(case, inputs, out) < 1e-2


def test_oracle_keeps_the_largest_and_the_lower_of_equals():
    x = torch.tensor([[1.0, -3.0, 3.0, 2.0], [0.0, 2.0, 2.0, -2.0]], dtype=torch.float16)
    want = torch.tensor([[0.0, -3.0, 3.0, 0.0], [0.0, 2.0, 2.0, 0.0]], dtype=torch.float16)
    assert torch.equal(check.pruned(x, 2), want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("keep", [40, 64])
def test_equal_data_needs_no_padding(dtype, keep):
    inputs = operations.prepare(Case("compress", "cpu", Load(Shape(1, 2, 2, 1, 512, 128), keep, dtype, "equal")), CPU)
    rows = inputs.sparse.row_offsets.diff()
    assert rows.unique().tolist() == [128 // 16 + keep]  # bitmap rows; 64 keep values in 64 streams


def test_outlier_data_has_outlier_channels():
    def spread(distribution):
        x = data.cache(Load(Shape(1, 1, 1, 1, 512, 128), 38, data=distribution), CPU, data.generator(CPU, 0)).float()
        return x.std(dim=2).log().std().item()

    assert spread("gaussian") < 0.1 and 0.8 < spread("outlier") < 1.2


def test_inputs_follow_from_the_seed():
    def dense(seed):
        return operations.prepare(Case("compress", "cpu", Load(Shape.parse(SHAPE), 19), seed), CPU).dense

    assert torch.equal(dense(3), dense(3)) and not torch.equal(dense(3), dense(4))


def test_copies_are_equal_and_elsewhere():
    case = Case("sparse_qk", "cpu", Load(Shape.parse(SHAPE), 19))
    inputs = operations.prepare(case, CPU)
    copy = operations.copy_of(case, inputs)
    assert torch.equal(operations.call(case, inputs), operations.call(case, copy))
    for name in ("blocks", "row_offsets", "token_order", "channel_order"):
        assert getattr(inputs.sparse, name).data_ptr() != getattr(copy.sparse, name).data_ptr()
    assert inputs.left.data_ptr() != copy.left.data_ptr() and inputs.out.data_ptr() != copy.out.data_ptr()
    assert copy.sparse.validate() is None


def test_timings():
    assert timing.Timing.of([5.0, 1.0, 3.0, 2.0, 4.0]) == timing.Timing(median_us=3.0, iqr_us=2.0)
    assert timing.copies_for_cold_cache(100 << 20, 32 << 20) == 2
    assert timing.copies_for_cold_cache(10 << 20, 32 << 20) == 8
    calls = []
    rotations = {"a": [lambda i=i: calls.append(f"a{i}") for i in range(2)], "b": [lambda: calls.append("b")]}
    timing.measure(rotations, 3, timing.CpuTimer())
    assert calls[2 * timing.WARM_UP_CALLS :] == ["a0", "b", "a1", "b", "a0", "b"]
