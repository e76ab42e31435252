"""Which cases a sweep measures: suites, grids and grid files, filters, the backends at hand; and who its peers are."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import types

import pytest
import torch

import cute_kernels as ck
from cute_kernels import attention, products
from cute_kernels._runtime.extension import _C
from profiling import check, grid, measure, operations, options, peers, selection, suites, sweep, timing
from profiling.cases import Case, Load, Shape
from profiling.peers import Unavailable, base
from profiling.rows import read

H200 = {"reference": "ok", "cpu": "ok", "sm80": "ok", "sm90": "ok"}
SHAPE = "1,4,2,2,200,64"


def chosen(*arguments, backends=H200) -> list[Case]:
    return selection.choose(options.parse(arguments), backends)


def test_a_new_backend_is_measured_as_soon_as_it_is_there():
    found = chosen("--suite", "qk", backends={**H200, "sm100": "ok", "sm90": "no sm_90a"})
    assert {case.backend for case in found} == {"sm80", "sm100"}
    assert {case.backend for case in chosen("--suite", "qk", backends={"reference": "ok", "cpu": "ok"})} == {"cpu"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_suite_has_cases(device):
    backends = H200 if device == "cuda" else {"cpu": "ok"}
    everything = chosen(backends=backends)
    assert len(set(everything)) == len(everything)
    for name, suite in suites.SUITES.items():
        found = chosen("--suite", name, backends=backends)
        assert found and (set(found) <= set(everything)) == suite.by_default
    attention = {(case.op, case.backend) for case in chosen("--suite", "attention", backends=backends)}
    on_gpu = {"sdpa flash", "sdpa cudnn", "sdpa efficient", "flashinfer", "flashinfer fp8"}
    dense = on_gpu if device == "cuda" else {"sdpa"}
    assert {backend for op, backend in attention if op == "dense_attention"} == dense
    assert ("sparse_attention", "sm90" if device == "cuda" else "cpu") in attention


def test_serving_is_measured_in_the_best_backend():
    found = chosen("--suite", "serving")
    assert {(case.op, case.backend) for case in found} == {("sparse_attention", "sm90"), ("attend", "sm90")}
    assert {case.backend for case in chosen("--suite", "serving", "--backend", "sm80")} == {"sm80"}


def test_every_case_names_itself():
    for case in chosen():
        command = shlex.split(case.command)
        assert command[:3] == ["python", "-m", "profiling.sweep"] and chosen(*command[3:]) == [case]


def test_the_readme_flow_has_float32_weights():
    flow = [case for case in chosen("--suite", "av") if case.scores == "float32"]
    assert {(case.op, case.load.dtype) for case in flow} == {("sparse_av", "float16")}
    inputs = operations.prepare(
        Case("sparse_av", "cpu", Load(Shape.parse(SHAPE), 19), scores="float32"), torch.device("cpu")
    )
    assert (inputs.left.dtype, inputs.dense.dtype, inputs.out.dtype) == (torch.float32, torch.float16, torch.float16)


def test_the_tokens_suite_goes_from_1_k_to_1_m():
    tokens = {case.load.shape.tokens for case in chosen("--suite", "tokens")}
    assert min(tokens) == 1 << 10 and max(tokens) == 1 << 20


# ---- Grids -----------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination():
    found = chosen(
        "--grid", "T=1024..8192", "keep=16..32+16", "B=1,8", "op=sparse_qk", "backend=sm90", "cache=warm,cold"
    )
    assert len(found) == 4 * 2 * 2 * 2
    assert {case.load.shape.tokens for case in found} == {1024, 2048, 4096, 8192}
    assert {case.load.keep for case in found} == {16, 32} and {case.backend for case in found} == {"sm90"}


def test_depths_of_the_pipeline_are_those_of_kernels_that_have_one():
    found = chosen("--grid", "T=1024", "keep=38", "ahead=2,4..16", "op=sparse_attention,compress,dense_attention")
    for op, depths in (("sparse_attention", [2, 4, 8, 16]), ("compress", [0]), ("dense_attention", [0])):
        assert sorted({case.stages_ahead for case in found if case.op == op}) == depths
    for case in found:
        assert chosen(*shlex.split(case.command)[3:]) == [case]
    with pytest.raises(ValueError, match="compress has no stages ahead"):
        Case("compress", "cuda", Load(Shape.parse(SHAPE), 19), stages_ahead=4)


def test_a_grid_takes_sparsity_like_prune():
    (case,) = chosen("--grid", "sparsity=0.7", "op=sparse_qk", "backend=sm90")
    x = torch.randn(1, 1, 1, 128)
    assert case.load.keep == int(ck.prune(x.half(), sparsity=0.7).count_nonzero()) == 38


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_a_grid_file(tmp_path, suffix):
    if suffix == ".yaml":
        pytest.importorskip("yaml")
    path = tmp_path / f"grid{suffix}"
    av = {"op": "sparse_av", "T": [1024, "2048..4096"], "keep": 38, "backend": "sm80"}
    content = {"suites": ["readme"], "grids": [av]}
    path.write_text(json.dumps(content))  # JSON is YAML
    found = chosen("--grid-file", str(path), "--backend", "sm80")
    assert len(found) == 3 * 5 * 2 + 3


def test_yaml_without_pyyaml_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    (tmp_path / "grid.yaml").write_text("suites: [qk]")
    with pytest.raises(ValueError, match=r"cute-kernels\[profile\]"):
        grid.from_file(tmp_path / "grid.yaml")


@pytest.mark.parametrize(
    "words, message",
    [
        (["T"], "not KEY=VALUE"),
        (["T=1024", "T=2048"], "twice"),
        (["tokens=1024"], "unknown key tokens"),
        (["T=0"], "neither a positive integer nor a range"),
        (["T=8..4"], "nor a range"),
        (["ahead=0"], "ahead '0' is neither"),
        (["T=4..8+0"], "nor a range"),
        (["dtype=float8"], "takes float16, bfloat16"),
        (["keep=38", "sparsity=0.5"], "not both"),
        (["sparsity=1.5"], "not in"),
        (["D=64", "keep=65"], "keep 65 is not in 1..64"),
        (["Hq=6", "Hkv=4"], "not a multiple"),
        (["T=1..100000+1"], "more than"),
    ],
)
def test_wrong_grids(words, message):
    with pytest.raises(ValueError, match=message):
        grid.from_words(words)


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1, 2]", "expected the keys"),
        ('{"grids": [3]}', "list of mappings"),
        ('{"grids": [', "JSON|Expecting"),
        ('{"gird": []}', "expected the keys"),
    ],
)
def test_wrong_grid_files(tmp_path, text, message):
    (tmp_path / "grid.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        grid.from_file(tmp_path / "grid.json")


def test_wrong_names(tmp_path, capsys):
    assert sweep.main(["--backend", "sm81"]) == 2
    assert "sm81: there are" in capsys.readouterr().err
    assert sweep.main(["--peer", "cutlass"]) == 2
    assert sweep.main(["--plugin", "no_such_module"]) == 2
    assert sweep.main(["--grid-file", str(tmp_path / "missing.yaml")]) == 2
    (tmp_path / "grid.json").write_text('{"suites": ["all"]}')
    assert sweep.main(["--grid-file", str(tmp_path / "grid.json")]) == 2
    with pytest.raises(SystemExit):
        sweep.main(["--shape", SHAPE, "--suite", "qk"])


def test_rules_of_pruning():
    (case,) = chosen("--op", "compress", "--backend", "cpu", "--shape", SHAPE, "--keep", "32", "--method", "2of4")
    assert case.load.method == "2of4" and case.command.endswith("--method 2of4") and "2of4" in str(case)
    assert case.load.compression == {"codec": None, "method": "2of4"}
    assert dataclasses.replace(case.load, method="magnitude-2of4").compression["keep"] == 32
    assert Load(case.load.shape, 19).compression == {"codec": None, "keep": 19}
    for keep in (19, 33):
        with pytest.raises(ValueError, match=f"keeps 32 of 64 elements, got {keep}"):
            Load(case.load.shape, keep, method="2of4")
    with pytest.raises(ValueError, match="got 33"):
        Load(case.load.shape, 33, method="magnitude-2of4")
    assert {(case.op, case.load.method) for case in chosen("--suite", "two-of-four")} == {
        ("compress", ""),  # as much kept without the constraint
        *((op, rule) for op in ("sparse_attention", "attend", "compress") for rule in ("2of4", "magnitude-2of4")),
    }


def test_complete_sweeps():
    def complete(*arguments):
        return selection.results_name(options.parse(arguments))

    assert complete() == "sweep" and complete("--suite", "readme", "--ncu") == "readme"
    for name in ("serving", "queries", "codecs", "two-of-four"):
        assert complete("--suite", name) == name
    for partial in (
        ["--quick"],
        ["--suite", "qk"],
        ["--seed", "1"],
        ["--cache", "warm"],
        ["--peer", "cublas"],
        ["--suite", "readme", "--suite", "qk"],
        ["--timing", "auto"],
        ["--grid", "T=64"],
        ["--stages-ahead", "4"],
    ):
        assert not complete(*partial)


# ---- Peers -----------------------------------------------------------------------------------------------------------


def test_dense_attention_is_what_the_oracle_computes():
    case = Case("sparse_attention", "reference", Load(Shape(2, 6, 2, 1, 96, 64), 19))
    inputs = operations.prepare(case, torch.device("cpu"))
    (plugin,) = peers.of(case, "cpu", None)
    peer, error = plugin.peer(case, inputs).checked(lambda got: check.relative_error(case, inputs, got))
    assert set(peer.forms) == {"fp16 gqa", "fp16 folded"} and 0 < error < 2e-3
    assert check.relative_error(case, inputs, operations.call(case, inputs)) < 2e-3


def test_a_peer_that_is_wrong_or_fails_is_left_out():
    def fails(x):
        raise RuntimeError("no kernel for this")

    peer = base.dense_peer(
        "toy",
        (torch.ones(2),),
        {"wrong": lambda x: 2 * x, "right": lambda x: x, "fails": fails},
        (torch.ones(2),),
        tolerance=1e-3,
    )
    good, error = peer.checked(lambda got: float((got - 1).abs().max()))
    assert list(good.forms) == ["right"] and error == 0
    with pytest.raises(Unavailable, match=r"toy: wrong: relative error 1\.0e\+00 > 1e-03"):
        base.Peer(**{**vars(peer), "forms": {"wrong": peer.forms["wrong"]}}).checked(lambda got: 1.0)


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    case = Case("sparse_attention", "sm90", Load(Shape(1, 8, 2, 1, 96, 64), 19))
    for name in ("flashinfer", "flashinfer fp8"):
        with pytest.raises(Unavailable, match=r"not installed .pip install 'cute-kernels\[peers\]'"):
            peers.named(name).peer(case, None)


def test_a_plugin_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "my_peers.py").write_text(
        "from profiling.peers import products\nfrom profiling.peers.base import Plugin\n"
        "PLUGINS = [Plugin('mine', ('qk',), ('cpu',), products._torch)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(peers, "_plugins", dict(peers._plugins))
    out = tmp_path / "out"
    assert (
        sweep.main(
            [
                "--plugin",
                "my_peers",
                "--peer",
                "mine",
                "--shape",
                SHAPE,
                "--keep",
                "19",
                "--op",
                "sparse_qk",
                "--backend",
                "cpu",
                "--repeats",
                "2",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    (row,) = read(out / "sweep.json")
    assert row.peer == "torch"  # the name that the built peer has


def test_graphs_need_a_gpu(tmp_path, capsys):
    arguments = ["--shape", SHAPE, "--keep", "19", "--backend", "cpu", "--timing", "graph", "--out", str(tmp_path)]
    assert sweep.main(arguments) == 2
    assert "needs a CUDA device" in capsys.readouterr().out


def test_a_cpu_has_no_stages_ahead(tmp_path, capsys):
    arguments = ["--shape", SHAPE, "--keep", "19", "--backend", "cpu", "--stages-ahead", "2", "--out", str(tmp_path)]
    assert sweep.main([*arguments, "--op", "sparse_qk"]) == 2
    assert "backend cpu has no stages ahead" in capsys.readouterr().out


@pytest.mark.parametrize("op", ["sparse_qk", "sparse_av", "sparse_attention"])
def test_stages_ahead_reach_the_kernels(monkeypatch, op):
    """As an argument of the call; the CPU stands in for the GPU's backends, which take it."""
    seen = []
    monkeypatch.setattr(_C, "cuda", types.SimpleNamespace(), raising=False)
    monkeypatch.setattr(_C, "BACKENDS", {"cpu": {}})
    for module, name in ((products, "run_qk"), (products, "run_av"), (attention, "run")):
        run = getattr(module, name)

        def seeing(*arguments, stages_ahead=0, run=run, **options):
            seen.append(stages_ahead)
            return run(*arguments, **options)

        monkeypatch.setattr(module, name, seeing)
    tuned = Case(op, "cpu", Load(Shape.parse(SHAPE), 19), stages_ahead=2)
    inputs = operations.prepare(tuned, torch.device("cpu"))
    operations.call(tuned, inputs)
    staged = inputs.out.clone()
    operations.call(dataclasses.replace(tuned, stages_ahead=0), inputs)
    assert seen == [2, 0] and torch.equal(inputs.out, staged)


def test_auto_timing_is_events_on_a_cpu_and_warm_is_not_interleaved():
    case = Case("sparse_qk", "cpu", Load(Shape.parse(SHAPE), 19), repeats=2, cache="warm", timing="auto")
    order = []
    rotations = {name: [lambda name=name: order.append(name)] for name in "ab"}
    timings, how = measure._times(case, {"op": rotations["a"], "peer": rotations["b"]}, timing.CpuTimer())
    assert how == "events" and set(timings) == {"op", "peer"} and "".join(order).count("ab") == 1


def test_arguments_are_documented():
    with pytest.raises(SystemExit):
        options.parse(["--help"])
    assert isinstance(options.parse([]), argparse.Namespace)
