"""The sweep where there is a GPU: graphs, warm caches, dense attention, counters."""

from __future__ import annotations

import statistics

import pytest

import cute_kernels as ck
from profiling import cases, peers, rows, selection, sweep
from profiling.counters import collect

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def backends() -> list[str]:
    names = [name for name in selection.default_backends(ck.backends()) if name not in selection.ON_HOST]
    if not names:
        pytest.skip("no GPU backend works here")
    return names


def measured(folder, *arguments) -> list[rows.Row]:
    assert sweep.main([*arguments, "--repeats", "5", "--out", str(folder)]) == 0
    return rows.read(folder / "sweep.json")


def test_products_in_every_setting(tmp_path, backends):
    found = measured(
        tmp_path,
        "--grid",
        "op=sparse_qk,sparse_av",
        "T=2048",
        "keep=38",
        "cache=cold,warm",
        "timing=events,graph",
        "scores=float32,float16",
    )
    assert len(found) == 2 * 2 * 2 * 2 * len(backends)
    assert all(row.peer == "cublas" and row.peer_rel_err < 2e-3 and row.elements_per_clk_sm > 0 for row in found)
    times = {how: statistics.mean(row.median_us for row in found if row.timing == how) for how in ("events", "graph")}
    assert times["graph"] < 1.2 * times["events"]


def test_auto_takes_a_graph_for_short_kernels(tmp_path, backends):
    found = measured(tmp_path, "--grid", "op=sparse_qk,compress", "T=1024", "keep=38", "timing=auto")
    assert {(row.op, row.timing) for row in found} == {("sparse_qk", "graph"), ("compress", "events")}
    assert all("auto" not in row.command for row in found)


@pytest.mark.parametrize("backend, depths", [("sm80", (1, 2)), ("sm90", (1, 3, 8))])
def test_any_depth_of_the_pipeline(backend, depths, tmp_path, backends, capsys):
    if backend not in backends:
        pytest.skip(f"no {backend} here")
    words = ["--grid", f"op={','.join(cases.DECODE_OPS)}", "B=2", "T=16384", "Sq=1,16", "keep=38", f"backend={backend}"]
    found = measured(tmp_path, *words, f"ahead={','.join(map(str, depths))}")
    # The prefill kernel of sm90 has no such depth, and takes 16 tokens of 4 query heads.
    served = {(op, queries) for op in cases.DECODE_OPS for queries in (1, 16)}
    served -= {("sparse_attention", 16)} if backend == "sm90" else set()
    assert {(row.op, row.Sq, row.stages_ahead) for row in found} == {(*case, n) for case in served for n in depths}
    refused = "64 query rows a KV head, which the prefill kernel takes" in capsys.readouterr().out
    assert refused == (backend == "sm90")
    assert sweep.main([*words, "ahead=60", "--out", str(tmp_path / "none")]) == 2
    assert "60 stages ahead: at most" in capsys.readouterr().out


def test_dense_rows(tmp_path):
    found = measured(tmp_path, "--grid", "op=dense_qk,dense_av,dense_attention,copy", "T=4096", "B=2")
    assert {"cublas", "copy", "sdpa flash"} <= {row.backend for row in found}
    assert {row.backend for row in found} <= set(peers.names(device="cuda"))
    assert all(row.keep == row.D and row.bits_per_element in (8.0, 16.0) and row.ratio is None for row in found)


def test_counters(tmp_path, backends, capsys):
    try:
        collect.check(list(collect.PROBE), collect.Options())
    except collect.CountersError as reason:
        pytest.skip(str(reason))
    found = measured(tmp_path, "--grid", "op=sparse_av,dense_av", "T=16384", "keep=38", "--ncu")
    said = capsys.readouterr()
    for row in found:
        assert row.ncu_verdict in said.out and row.ncu_kernels >= 1
        assert 0 < row.ncu_dram_pct <= 100 and 0 < row.ncu_issue_pct <= 100 and row.ncu_registers > 0
        assert row.ncu_us == pytest.approx(row.median_us, rel=0.5)
        if row.op == "sparse_av":  # it must read its cache
            assert row.ncu_dram_mb * 1e6 > 0.9 * row.cache_tb_per_s * row.median_us * 1e6
