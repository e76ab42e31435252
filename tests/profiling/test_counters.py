"""Hardware counters: from a report's objects to rows, the verdict, and what is said where there are none."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from profiling import folders, rows, run, sweep, tables
from profiling.cases import Case, Load, Shape
from profiling.counters import child, collect, join
from profiling.counters.fields import METRIC_NAMES, METRICS, Counters, stall_metric
from profiling.counters.verdict import STALLS, UNITS, verdict

CASE = Case("sparse_av", "sm90", Load(Shape(8, 32, 8, 1, 16384, 128), 38), scores="float32")
H200 = folders.RESULTS / "nvidia-h200" / "sweep.json"


# ---- What the ncu_report module gives --------------------------------------------------------------------------------


@dataclasses.dataclass
class Metric:
    number: object

    def value(self):
        return self.number


class Kernel:
    def __init__(self, name, label, us, **metrics):
        self._name, self._label = name, label
        self._metrics = {
            METRICS["ncu_kernel_us"]: Metric(1e3 * us),
            **{METRICS.get(field, field): Metric(number) for field, number in metrics.items()},
        }

    def name(self):
        return self._name

    def metric_by_name(self, name):
        return self._metrics.get(name)

    def nvtx_state(self):
        if self._label is None:
            return None
        domain = types.SimpleNamespace(push_pop_ranges=lambda: ("outer", self._label))
        return types.SimpleNamespace(domains=lambda: (0,), domain_by_id=lambda number: domain)


def report(*kernels):
    half = len(kernels) // 2
    ranges = [
        types.SimpleNamespace(num_actions=lambda part=part: len(part), action_by_idx=lambda i, part=part: part[i])
        for part in (kernels[:half], kernels[half:])
    ]
    return types.SimpleNamespace(num_ranges=lambda: len(ranges), range_by_idx=lambda i: ranges[i])


def kernels():
    counts = {
        "ncu_cycles": 70_000,
        "ncu_dram_pct": 62.04,
        "ncu_dram_mb": 113e6,
        "ncu_issue_pct": 71.0,
        "ncu_lsu_pct": 68.0,
        "ncu_alu_pct": 45.0,
        "ncu_registers": 168,
        "ncu_bank_conflicts": 12,
        "ncu_sm_active_pct": 93.0,
        "ncu_tensor_pct": float("nan"),
        "ncu_occupancy_pct": 18.7,
    }
    stalls = {stall_metric("not_selected"): 1.5, stall_metric("wait"): 0.95, stall_metric("long_scoreboard"): 0.78}
    return (
        Kernel("main", "case 3", 40.0, **counts, **stalls),
        Kernel("combine", "case 3", 3.0, ncu_dram_pct=9.0),
        Kernel("other", "case 4", 5.0),
        Kernel("stray", None, 5.0),
        Kernel("nameless", "warm-up", 5.0),
    )


def test_kernels_are_found_by_their_nvtx_range():
    found = join.kernels_by_case(report(*kernels()))
    assert {i: [k.name() for k in group] for i, group in found.items()} == {3: ["main", "combine"], 4: ["other"]}


def test_counters_of_a_call():
    counted = join.counters_of(join.kernels_by_case(report(*kernels()))[3], CASE.elements, 132)
    assert (counted.ncu_kernel, counted.ncu_kernels, counted.ncu_us, counted.ncu_kernel_us) == ("main", 2, 43.0, 40.0)
    assert (counted.ncu_clock_mhz, counted.ncu_dram_mb, counted.ncu_dram_tb_per_s) == (1750.0, 113.0, 2.825)
    assert counted.ncu_elements_per_clk_sm == pytest.approx(8 * 8 * 16384 * 128 / 70_000 / 132, rel=1e-3)
    assert (counted.ncu_issue_pct, counted.ncu_dram_pct, counted.ncu_registers) == (71.0, 62.04, 168)
    assert counted.ncu_tensor_pct is None and counted.ncu_fma_heavy_pct is None  # NaN, and a chip without the metric
    assert (counted.ncu_stall, counted.ncu_stall_warps) == ("wait", 0.95)
    assert verdict(counted).startswith(
        "issue slots 71 %, LSU 68 %, DRAM 62 %: issue slots and LSU and DRAM limit "
        "together; faster with fewer instructions an element"
    )


def test_metrics_that_are_no_number():
    kernel = types.SimpleNamespace(metric_by_name=lambda name: {"a": Metric(2), "b": Metric("text")}.get(name))
    assert join.value(kernel, "a") == 2 and join.value(kernel, "b") is None and join.value(kernel, "c") is None


def test_every_field_has_a_metric_or_is_derived():
    derived = {
        "ncu_kernel",
        "ncu_kernels",
        "ncu_us",
        "ncu_clock_mhz",
        "ncu_dram_tb_per_s",
        "ncu_elements_per_clk_sm",
        "ncu_stall",
        "ncu_stall_warps",
    }
    assert {f.name for f in dataclasses.fields(Counters)} == (set(METRICS) - {"ncu_cycles"}) | derived
    assert {field for field, _ in UNITS.values()} <= set(METRICS)
    assert len(set(METRIC_NAMES)) == len(METRIC_NAMES) and all(stall_metric(name) in METRIC_NAMES for name in STALLS)


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"ncu_dram_pct": 91.0, "ncu_issue_pct": 40.0},
            "DRAM 91 %, issue slots 40 %: DRAM is at its limit; faster with fewer bytes",
        ),
        ({"ncu_shared_pct": 65.0, "ncu_alu_pct": 61.0}, "shared memory and ALU limit together"),
        ({"ncu_issue_pct": 30.0, "ncu_sm_active_pct": 60.0}, "latency limits; SMs have warps 60 % of the time only"),
        ({"ncu_issue_pct": 70.0, "ncu_sm_active_pct": 95.0}, "issue slots is closest to its limit"),
        (
            {"ncu_issue_pct": 30.0, "ncu_stall": "long_scoreboard", "ncu_stall_warps": 4.21},
            "no unit is busy, latency limits; warps wait most for global memory (4.2 an issue): more bytes under way",
        ),
        ({"ncu_issue_pct": 30.0}, "latency limits; faster with more warps"),
    ],
)
def test_verdicts(fields, words):
    assert words in verdict(Counters(**fields))


def test_no_verdict_without_counters():
    assert verdict(Counters()) is None


# ---- Rows ------------------------------------------------------------------------------------------------------------


def test_counters_join_the_rows_of_their_case(tmp_path):
    uncounted = {field.name: field.default for field in dataclasses.fields(Counters)}
    earlier = [dataclasses.replace(row, **uncounted) for row in rows.read(H200)[:3]]
    sweep_run = run.Run({"sm80": "ok"}, earlier=earlier)
    asked = [dataclasses.replace(earlier[0].case, timing="auto"), earlier[1].case]
    forms = sweep_run.forms(asked)
    assert list(forms) == [row.case for row in earlier[:2]]
    counted = Counters(ncu_kernel="main", ncu_issue_pct=71.0)
    sweep_run.join({earlier[0].case: counted})
    assert [row.ncu_issue_pct for row in sweep_run.rows] == [71.0, None, None]
    rows.write(sweep_run.rows, tmp_path)
    assert rows.read(tmp_path / "sweep.json") == sweep_run.rows
    assert "## Limiters" in tables.markdown(sweep_run.rows)
    assert tables.limits(sweep_run.rows) == f"{earlier[0].case}: {verdict(counted)}"
    rows.write_csv(sweep_run.rows, tmp_path / "sweep.csv")
    header = (tmp_path / "sweep.csv").read_text().splitlines()[0].split(",")
    assert {"ncu_issue_pct", "ncu_verdict", "ratio", "command"} <= set(header) and "ncu_dram_pct" not in header


def test_cases_reach_the_child_whole():
    dense = Case("dense_av", "cublas", CASE.load, seed=3, cache="warm")
    for case, form in ((CASE, ""), (dense, "matmul")):
        assert child.from_object(json.loads(json.dumps(child.to_object(case, form)))) == (case, form)


def test_the_child_goes_on_after_a_case_that_fails(tmp_path, capsys, monkeypatch):
    calls = []

    def run_one(index, call):
        calls.append((index, call))
        if index == 0:
            raise RuntimeError("no kernels yet")

    monkeypatch.setattr(child, "run_one", run_one)
    monkeypatch.setattr(child, "prepared", lambda case, form: str(case))
    listing = tmp_path / "cases.json"
    listing.write_text(json.dumps({"plugins": [], "cases": [(i, child.to_object(CASE, "")) for i in (0, 5)]}))
    assert child.main([str(listing)]) == 0
    assert calls == [(0, str(CASE)), (5, str(CASE))]
    assert "[2/2] counting sparse_av sm90" in (err := capsys.readouterr().err) and "no counters: no kernels yet" in err


# ---- Where there are none --------------------------------------------------------------------------------------------


TINY = ["--shape", "1,4,2,2,200,64", "--backend", "cpu", "--op", "sparse_qk", "--keep", "19", "--repeats", "2"]


def test_what_counters_need_is_looked_for_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sweep.Run, "measure", lambda *_: pytest.fail("measured before the error"))
    arguments = [*TINY, "--ncu", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.main(arguments) == 2
    assert "error: --ncu: no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(collect, "find_module", lambda path: None)
    cpu = dataclasses.replace(CASE, backend="cpu")
    with pytest.raises(collect.CountersError, match="no case runs a GPU kernel"):
        collect.check([cpu], collect.Options())
    with pytest.raises(collect.CountersError, match="there is no"):
        collect.check([CASE, cpu], collect.Options(tmp_path / "ncu"))
    forbids = "print('==ERROR== ERR_NVGPUCTRPERM - no', file=open(value('--log-file'), 'w'))"
    options = collect.Options(fake_ncu(tmp_path, forbids), report=tmp_path / "mine.ncu-rep")
    with pytest.raises(collect.CountersError, match="may not read GPU performance"):
        collect.check([CASE, cpu], options)


def test_rows_without_counters_that_were_asked_for_are_a_failure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collect, "check", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.main([*TINY, "--ncu", "--out", str(tmp_path)]) == 1
    assert "no counters: no CUDA device" in capsys.readouterr().err
    assert rows.read(tmp_path / "sweep.json")[0].accurate


def test_without_ncu(tmp_path, monkeypatch):
    monkeypatch.setattr(collect.shutil, "which", lambda name: None)
    monkeypatch.setattr(collect.Path, "is_file", lambda path: False)
    with pytest.raises(collect.CountersError, match="--ncu-path names it"):
        collect.find_ncu(None)
    with pytest.raises(collect.CountersError, match="there is no"):
        collect.find_ncu(tmp_path / "ncu")


def test_the_module_comes_from_the_tool_if_not_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    tool = tmp_path / "cuda" / "bin" / "ncu"
    with pytest.raises(collect.CountersError, match=r"cute-kernels\[profile\]"):
        collect.find_module(tool)
    folder = tmp_path / "cuda" / "nsight-compute-2025.3.1" / "extras" / "python"
    folder.mkdir(parents=True)
    (folder / "ncu_report.py").write_text("here = True")
    monkeypatch.delitem(sys.modules, "ncu_report")
    monkeypatch.setattr(sys, "path", [str(Path(json.__file__).parent.parent)])
    assert collect.find_module(tool).here
    sys.modules.pop("ncu_report")


def fake_ncu(folder: Path, script: str) -> Path:
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport sys\nvalue = lambda name: sys.argv[sys.argv.index(name) + 1]\n{script}"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "script, message",
    [
        (
            "print('==ERROR== ERR_NVGPUCTRPERM - no', file=open(value('--log-file'), 'w'))",
            "may not read GPU performance",
        ),
        (
            "print('==ERROR== Unknown', file=open(value('--log-file'), 'w')); sys.exit(1)",
            r"status 1.: ==ERROR== Unknown",
        ),
        ("", "no message"),
    ],
)
def test_what_ncu_complains_about(tmp_path, script, message):
    line = collect.command(fake_ncu(tmp_path, script), tmp_path / "r.ncu-rep", tmp_path / "cases.json", "none", "cold")
    with pytest.raises(collect.CountersError, match=message):
        collect._profile(line, tmp_path / "r.ncu-rep")


def test_cases_are_counted_with_the_cache_they_were_timed_with(tmp_path, monkeypatch):
    """ncu is a script that keeps its arguments; the module reads what it wrote."""
    ncu = fake_ncu(tmp_path, "import json\njson.dump(sys.argv, open(value('--export'), 'w'))")
    lines = []

    def load_report(path):
        lines.append(json.loads(Path(path).read_text()))
        index = json.loads(Path(lines[-1][-1]).read_text())["cases"][0][0]
        return report(Kernel("main", f"case {index}", 4.0, ncu_cycles=7000))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(collect, "find_module", lambda path: types.SimpleNamespace(load_report=load_report))
    warm, cpu = dataclasses.replace(CASE, cache="warm"), dataclasses.replace(CASE, backend="cpu")
    options = collect.Options(ncu, clock_control="base", report=tmp_path / "kept" / "mine.ncu-rep")
    found = collect.collect({warm: "", CASE: "", cpu: ""}, options)
    assert set(found) == {CASE, warm} and found[CASE].ncu_kernel_us == 4.0
    assert [line[line.index("--cache-control") + 1] for line in lines] == ["all", "none"]
    assert all(line[line.index("--clock-control") + 1] == "base" for line in lines)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"mine.ncu-rep", "mine-warm.ncu-rep"}
    monkeypatch.setattr(
        collect,
        "find_module",
        lambda path: types.SimpleNamespace(load_report=lambda report_path: report(Kernel("main", None, 4.0))),
    )
    with pytest.raises(collect.CountersError, match="1 kernels, none of them in a case's NVTX range"):
        collect.collect({CASE: ""}, options)
    with pytest.raises(collect.CountersError, match="no row ran a GPU kernel"):
        collect.collect({cpu: ""}, options)
