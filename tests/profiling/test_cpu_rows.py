"""What rows of a CPU say: the instruction set, cold and warm caches, and the fastest of torch's dtypes as the peer."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from profiling import check, measure, operations, peers, report, rows, run, suites, sweep, tables, timing
from profiling.cases import Case, Load, Shape
from profiling.environment import environment
from profiling.timing import Timing

CPU = torch.device("cpu")
SHAPE = Shape(1, 4, 2, 1, 200, 64)
TINY = ["--shape", str(SHAPE), "--keep", "19", "--op", "sparse_qk", "--backend", "cpu", "--repeats", "2"]
DTYPES = ("fp16", "bf16", "fp32")


@pytest.fixture(autouse=True)
def other_cpu(monkeypatch):
    """With a small cache, so that few operand sets leave it cold, and an instruction set that no CPU has."""
    real = run.environment
    changed = {"cache_bytes": 1 << 18, "isa": "avx10k"}
    monkeypatch.setattr(run, "environment", lambda device: dataclasses.replace(real(device), **changed))


@pytest.mark.parametrize("name", [*suites.SUITES, "quick"])
def test_suites_of_a_cpu_are_cold_and_warm(name):
    blocks = suites.quick if name == "quick" else suites.SUITES[name].blocks
    assert all(block.caches == ("cold", "warm") for block in blocks("cpu"))
    assert name == "short" or all(block.caches == ("cold",) for block in blocks("cuda"))
    (op, *_), block = blocks("cpu")[0].ops, blocks("cpu")[0]
    cases = block.cases(op, ["cpu"], 0, 2)
    assert [case.cache for case in cases] == ["cold", "warm"] * (len(cases) // 2)  # side by side
    assert all(a.load == b.load for a, b in zip(cases[::2], cases[1::2]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sparse_qk", "sparse_av", "sparse_attention"])
def test_the_peer_has_the_fastest_dtype(op, dtype, monkeypatch):
    case = Case(op, "cpu", Load(SHAPE, 19, dtype), repeats=2)
    env, real = environment(CPU), timing.measure
    for fastest in DTYPES:
        seen = set()

        def as_if(rotations, repeats, clock, interleaved=True, fastest=fastest, seen=seen):
            if "op" in rotations:
                return real(rotations, repeats, clock, interleaved)
            seen |= {form.split()[0] for form in rotations}
            return {form: Timing(1.0 if form.startswith(fastest) else 2.0, 0.0) for form in rotations}

        monkeypatch.setattr(timing, "measure", as_if)
        (row,) = measure.measure_case(case, env).rows
        assert row.peer_form.split()[0] == fastest and seen == set(DTYPES)
        assert row.peer == ("sdpa" if op == "sparse_attention" else "torch") and row.dtype == dtype
        assert row.ratio and row.peer_rel_err <= 1e-2


@pytest.mark.parametrize("op", ["sparse_qk", "sparse_av", "sparse_attention"])
def test_every_dtype_of_the_peer_is_right(op):
    case = Case(op, "cpu", Load(SHAPE, 19))
    inputs = operations.prepare(case, CPU)
    (plugin,) = peers.of(case, "cpu", None)
    peer = plugin.peer(case, inputs)
    for each in (peer, *peer.alternatives):
        good, _ = each.checked(lambda got: check.relative_error(case, inputs, got))
        assert set(good.forms) == set(each.forms)
    assert {form.split()[0] for each in (peer, *peer.alternatives) for form in each.forms} == set(DTYPES)


def test_rows_and_tables_say_the_instruction_set(tmp_path, capsys):
    assert sweep.main([*TINY, "--cache", "cold", "--cache", "warm", "--out", str(tmp_path)]) == 0
    found = rows.read(tmp_path / "sweep.json")
    assert [(row.isa, row.cache) for row in found] == [("avx10k", "cold"), ("avx10k", "warm")]
    assert "cpu avx10k" in capsys.readouterr().out
    assert report.main(["--no-plots", "--out", str(tmp_path / "tables"), str(tmp_path)]) == 0
    (table,) = (tmp_path / "tables").rglob("sweep.md")
    text = table.read_text()
    assert f"{found[0].device}, avx10k, torch" in text and text.count("| cpu avx10k |") == 2
    assert ",isa" in next((tmp_path / "tables").rglob("sweep.csv")).read_text().splitlines()[0]


def test_rows_of_another_instruction_set_are_others(tmp_path, monkeypatch):
    assert sweep.main([*TINY, "--out", str(tmp_path)]) == 0
    resumed = [*TINY, "--resume", str(tmp_path / "sweep.json")]
    assert sweep.main(resumed) == 0 and len(rows.read(tmp_path / "sweep.json")) == 1
    real = run.environment
    monkeypatch.setattr(run, "environment", lambda device: dataclasses.replace(real(device), isa="scalar"))
    assert sweep.main(resumed) == 0
    found = rows.read(tmp_path / "sweep.json")
    assert [row.isa for row in found] == ["avx10k", "scalar"] and len(rows.newest(found)) == 2


def test_folders_and_lines_name_the_instruction_set():
    env = environment(CPU)
    assert env.isa in ("avx512bf16", "avx512", "avx2", "scalar")
    assert env.slug.startswith("cpu-") and env.slug.endswith(f"-{env.isa}") and f", {env.isa}, " in env.about


def test_tables_of_a_cpu_have_fitting_units_and_no_empty_columns(tmp_path):
    assert sweep.main([*TINY, "--out", str(tmp_path)]) == 0
    (row,) = rows.read(tmp_path / "sweep.json")
    header, line = tables.table_of([dataclasses.replace(row, tb_per_s=0.00912, cache_tb_per_s=0.0084)])
    assert dict(zip(header, line))["GB/s"] == "9.12" and dict(zip(header, line))["cache GB/s"] == "8.4"
    assert "TB/s" not in header and "el/clk/SM" not in header and all(line)
    header, line = tables.table_of([dataclasses.replace(row, peer="", peer_form="", peer_us=None)])
    assert not {"peer", "peer us", "ratio"} & set(header) and all(line)
    text = tables.markdown([row])
    assert "GB/s: the cache as stored" in text and "TB/s" not in text
    small = dataclasses.replace(row, peer_us=row.median_us / 500)
    assert dict(zip(*tables.table_of([small])))["ratio"].startswith("0.002")


@pytest.mark.parametrize("path", report.DOCS, ids=lambda path: path.name)
def test_claims_about_cpus_name_an_instruction_set(path):
    for paragraph in re.split(r"\n(?=\s*(?:\n|[*|] ))", path.read_text(encoding="utf-8")):
        if re.search(r"\bCPUs?\b|`cpu`", paragraph) and re.search(r"\d(\.\d+)?x\b|\bGB/s\b", paragraph):
            assert re.search(r"avx|AVX|scalar", paragraph), paragraph
