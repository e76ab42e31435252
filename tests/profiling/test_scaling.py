"""Several GPUs: the model beside committed rows; measuring, on processes of a CPU; files and tables."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from cute_kernels._cache.config import _tile_bytes
from cute_kernels._cache.slot_rows import SlotRows
from profiling import folders, report, rows
from profiling.generation import rows as generated
from profiling.scaling import __main__ as command
from profiling.scaling import generation, model
from profiling.scaling import rows as scaling

HEADS = {"query_heads": 32, "kv_heads": 8}
SHAPE = {"batch": 1, "layers": 32, **HEADS}
SMALL = [
    "--measure", "--device", "cpu", "--tokens", "200,512", "--query-heads", "4", "--kv-heads", "2", "--head-dim", "64",
    "--keep", "20", "--repeats", "2",
]  # fmt: skip


def test_one_gpu_takes_as_long_as_was_measured():
    measured = [
        row
        for row in rows.read(folders.RESULTS / "nvidia-h200" / "readme.json")
        if (row.op, row.backend, row.D, row.keep, row.Sq) == ("sparse_attention", "sm90", 128, 38, 1)
    ]
    assert len(measured) >= 5
    for row in measured:
        expected = model.attention_us(-(-row.T // model.TILE) * row.B * row.Hkv)
        assert expected == pytest.approx(row.median_us, rel=0.2), row


def committed(pattern: str) -> list:
    return [path for folder in folders.devices() for path in sorted(folder.glob(pattern))]


def test_the_model_agrees_with_committed_rows_of_several_gpus():
    found = [
        row for path in committed(report.SCALING) if "generate" not in path.name for row in scaling.read(path)
    ]  # fmt: skip
    assert {row.gpus for row in found} >= {1, 2}
    for row in found:
        assert row.accurate
        assert row.attend_us == pytest.approx(row.model_us, rel=0.15), row


def test_the_model_agrees_with_committed_rows_of_generation():
    found = [row for path in committed(report.SCALING_GENERATED) for row in generated.read(path)]
    assert {row.mesh for row in found} >= {"", "tp=2", "cp=2"}
    for row in found:
        tokens = row.prompt + row.new_tokens // 2
        expected = model.generation_ms(tokens, row.batch, gpu=model.KINDS[row.device], **generation.sizes(row))
        assert row.step_ms == pytest.approx(expected, rel=0.15), row


def test_bytes_are_those_of_the_caches_pages():
    assert _tile_bytes(SlotRows.holding(128, 38, 38).both) == model.PAIR_BYTES


def test_what_is_divided_and_what_is_sent():
    one, two, many = (model.step(1 << 20, gpus, **SHAPE) for gpus in (1, 2, 64))
    assert one.gather_us == one.merge_us == one.sent_bytes == 0
    assert one.cache_gb == pytest.approx(2 * two.cache_gb) == pytest.approx(64 * many.cache_gb)
    call_us = model.H200.call_us
    assert one.attention_us - call_us == pytest.approx(2 * (two.attention_us - call_us))
    assert two.sent_bytes == many.sent_bytes == 32 * (128 * 2 + 4)
    assert 0 < two.gather_us < many.gather_us and 0 < two.merge_us < many.merge_us
    # The rank with the most tiles: 3 of 5 on two ranks.
    assert model.step(5 * 64, 2, **SHAPE).cache_gb == pytest.approx(3 * 8 * 32 * model.PAIR_BYTES / 1e9)
    alone, heads, tokens = (model.generation_ms(1 << 15, 32, **mesh) for mesh in ({}, {"tp": 2}, {"cp": 2}))
    assert alone / 2 < heads < tokens < alone


def test_table_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert command.main(["--plot", str(tmp_path / "scaling.png"), "--gpus", "8,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:] if line[:1].isdigit()] == [
        ["1048576", "1"], ["1048576", "8"], ["10485760", "1"], ["10485760", "8"],
    ]  # fmt: skip
    assert any("A model, not a measurement" in line for line in lines)
    assert (tmp_path / "scaling.png").stat().st_size > 5000


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_measuring(tmp_path, capsys):
    assert command.main([*SMALL, "--gpus", "1,2", "--out", str(tmp_path)]) == 0
    found = scaling.read(tmp_path / "scaling.json")
    assert [(row.gpus, row.tokens) for row in found] == [(1, 200), (1, 512), (2, 200), (2, 512)]
    for row in found:
        assert row.accurate and row.rel_err > 0 and row.model_us is None
        assert min(row.attend_us, row.step_us, row.attention_us) > 0
        assert (row.gather_us > 0) == (row.merge_us > 0) == (row.gpus == 2)
        assert row.command.startswith("python -m profiling.scaling --measure --device cpu ")
    assert found[2].alone(found) == found[0]
    assert "speed-up" in capsys.readouterr().out
    assert report.main([str(tmp_path), "--out", str(tmp_path / "report"), "--no-plots"]) == 0
    assert "| 1,4,2,512,64 |" in (tmp_path / "report" / tmp_path.name / "scaling.md").read_text()


def test_a_rank_that_fails_is_an_error(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("rank 1 failed")
        yield

    monkeypatch.setattr(command.attention, "measure", fail)
    assert command.main([*SMALL, "--gpus", "2", "--out", str(tmp_path)]) == command.EXIT_FAILED
    assert "rank 1 failed" in capsys.readouterr().err and not (tmp_path / "scaling.json").exists()


def test_meshes_and_their_runs(tmp_path, monkeypatch, capsys):
    assert list(generation.meshes([1, 2, 8])) == [
        {}, {"tp": 2}, {"cp": 2}, {"tp": 8}, {"cp": 8}, {"tp": 2, "cp": 4},
    ]  # fmt: skip
    args = command.parse([*SMALL, "--gpus", "1,2", "--generate", "--prompt", "300", "--random-config", "tiny"])
    words = generation.command({"tp": 2, "cp": 2}, args, tmp_path)
    assert words[:3] == [sys.executable, "-m", "torch.distributed.run"]
    assert words[words.index("--nproc-per-node") + 1] == "4" and words[words.index("--mesh") + 1] == "tp=2,cp=2"
    assert words[words.index("--side") + 1] == "sparse" and words[words.index("--batch") + 1] == "1,32"
    assert "--mesh" not in generation.command({}, args, tmp_path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--generate"], "--generate goes with --measure"),
        ([*SMALL, "--commit-results"], "--commit-results needs a GPU"),
        ([*SMALL, "--name", "rows"], "--name: must begin with scaling, got rows"),
        ([*SMALL, "--keep", "65"], "must be at most --head-dim 64, got 65"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_without_rows(tmp_path):
    (tmp_path / "scaling.json").write_text(json.dumps([{"op": "sparse_qk"}]))
    with pytest.raises(ValueError, match=r"scaling.json: no rows of profiling.scaling"):
        scaling.read(tmp_path / "scaling.json")
