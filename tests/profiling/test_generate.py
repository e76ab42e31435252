"""python -m profiling.generate, on the CPU with tiny models."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed")

from profiling import generate, records
from profiling.generation import measure, models, rows
from profiling.rows import newest

SHORT = ["--device", "cpu", "--random-config", "tiny", "--prompt", "70", "--new", "4"]


pytestmark = pytest.mark.usefixtures("one_thread")


def read(folder):
    return records.read(folder / "generate.json")


def test_rows_of_both_sides(tmp_path, capsys):
    assert generate.main([*SHORT, "--batch", "2,1", "--out", str(tmp_path)]) == 0
    found = read(tmp_path)
    assert [(row["side"], row["batch"]) for row in found] == [("dense", 1), ("sparse", 1), ("dense", 2), ("sparse", 2)]
    for row in found:
        assert set(row) == set(rows.FIELDS)
        assert row["peak_bytes"] is None and not row["largest"] and row["repeats"] == 1
        assert row["lowest_tokens_per_s"] == row["highest_tokens_per_s"] == row["tokens_per_s"]
        assert row["ttft_ms"] > 0 and row["step_ms"] > 0
        # 4 tokens: the first, then three steps.
        assert row["total_tokens_per_s"] == pytest.approx(
            4 * row["batch"] / (row["ttft_ms"] / 1e3 + 3 * row["batch"] / row["tokens_per_s"]), rel=1e-2
        )
        assert (
            row["dense_kv_bytes"] == row["batch"] * 4 * 2 * 64 * 2 * 2 * 73
        )  # layers, heads, D, K and V, bytes, tokens
        assert "--batch " + str(row["batch"]) in row["command"]
    dense, sparse = found[2], found[3]
    assert dense["kv_bytes"] == dense["dense_kv_bytes"] and dense["cache"] == "DynamicCache"
    assert (sparse["key_keep"], sparse["value_keep"], sparse["window"]) == (19, 19, 32)
    table = rows.markdown(rows.read(tmp_path / "generate.json"))
    assert f"{sparse['tokens_per_s'] / dense['tokens_per_s']:.2f}" in table
    assert [path.name for path in tmp_path.iterdir()] == ["generate.json"]
    header, *lines = rows.table_of(rows.read(tmp_path / "generate.json"))
    assert len(set(header)) == len(header) and "peak, GiB" not in header
    kv = header.index("KV, KiB")
    assert lines[-1][kv] == f"{sparse['kv_bytes'] / 1024:.4g}" and float(lines[-1][kv]) > 1
    assert sparse["isa"] and f", {sparse['isa']}, bfloat16" in table
    out = capsys.readouterr()
    assert "SparseKVCache" in out.out and "[4/4]" in out.err


def test_a_row_is_measured_again_by_its_command(tmp_path):
    options = ["--batch", "1", "--side", "sparse", "--key-keep", "40", "--value-keep", "20", "--window", "5"]
    assert generate.main([*SHORT, *options, "--out", str(tmp_path)]) == 0
    (first,) = read(tmp_path)
    assert (first["key_keep"], first["value_keep"], first["window"]) == (40, 20, 5)
    command = first["command"].split()
    assert command[:3] == ["python", "-m", "profiling.generate"]
    assert generate.main([*command[3:], "--out", str(tmp_path)]) == 0
    (again,) = read(tmp_path)
    speeds = {"tokens_per_s", "total_tokens_per_s", "lowest_tokens_per_s", "highest_tokens_per_s"}
    measured = {"ttft_ms", "step_ms", "timestamp"} | speeds
    assert {key: again[key] for key in again.keys() - measured} == {key: first[key] for key in first.keys() - measured}


def test_dense_sides_are_measured_with_each_backend_of_sdpa(tmp_path, monkeypatch):
    enabled = []

    def run(model, side, *others):
        with measure._backends(side.sdpa):
            enabled.append((side.name, torch.backends.cuda.cudnn_sdp_enabled()))
        return measure.Result(1.0, 1.0, 1.0, 1.0, None, 1, "Cache")

    monkeypatch.setattr(measure, "run", run)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    options = ["--batch", "1", "--sdpa", "default,no-cudnn", "--name", "generate-both", "--out", str(tmp_path)]
    assert generate.main([*SHORT, *options]) == 0
    assert enabled == [("dense", before), ("dense", False), ("sparse", before)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    found = rows.read(tmp_path / "generate-both.json")
    assert [row.sdpa for row in found] == ["default", "no-cudnn", "default"]
    assert "--side dense --sdpa no-cudnn" in found[1].command
    assert "sdpa without cuDNN" in rows.markdown(found) and len(newest(found)) == 3


def test_sides_take_turns_and_medians_are_kept(tmp_path, monkeypatch):
    """Of 1, 2, 9 times and speeds in an order of their own."""
    runs = []

    def run(model, side, batch, *others):
        runs.append((side.name, batch))
        turn = runs.count(runs[-1]) - 1
        return measure.Result(
            (9.0, 1.0, 2.0)[turn],
            (1.0, 9.0, 2.0)[turn],
            (2.0, 9.0, 1.0)[turn],
            (1.0, 2.0, 9.0)[turn],
            (5, 7, 6)[turn] * batch,
            1,
            "Cache",
        )

    monkeypatch.setattr(measure, "run", run)
    assert generate.main([*SHORT, "--batch", "4,1", "--repeats", "3", "--out", str(tmp_path)]) == 0
    assert runs == [("dense", 1), ("sparse", 1)] * 3 + [("dense", 4), ("sparse", 4)] * 3
    found = rows.read(tmp_path / "generate.json")
    assert [(row.side, row.batch) for row in found] == [("dense", 1), ("sparse", 1), ("dense", 4), ("sparse", 4)]
    for row in found:
        assert (row.ttft_ms, row.step_ms, row.tokens_per_s, row.total_tokens_per_s) == (2, 2, 2, 2)
        assert (row.repeats, row.lowest_tokens_per_s, row.highest_tokens_per_s) == (3, 1, 9)
        assert row.peak_bytes == 7 * row.batch and row.command.endswith("--repeats 3")
    assert "1.0 to 9.0 of 3" in rows.markdown(found)


def test_rows_of_older_files_were_measured_once(tmp_path):
    assert generate.main([*SHORT, "--batch", "1", "--side", "dense", "--out", str(tmp_path)]) == 0
    (row,) = read(tmp_path)
    for name in ("sdpa", "repeats", "lowest_tokens_per_s", "highest_tokens_per_s"):
        del row[name]
    records.write(tmp_path / "generate.json", [row], ())
    (found,) = rows.read(tmp_path / "generate.json")
    assert (found.repeats, found.lowest_tokens_per_s, rows.spread(found)) == (1, None, "")


def test_commands_name_another_allocator(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert generate.main([*SHORT, "--batch", "1", "--side", "sparse", "--out", str(tmp_path)]) == 0
    assert read(tmp_path)[0]["command"].startswith("PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync python -m ")


def test_a_mesh_wants_its_processes(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert generate.main([*SHORT, "--batch", "1", "--mesh", "tp=2,cp=2"]) == generate.EXIT_MISSING
    assert "--mesh tp=2,cp=2 takes 4 processes, there are 3: torchrun --nproc-per-node 4" in capsys.readouterr().err


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_a_mesh_of_processes(tmp_path):
    command = [sys.executable, "-m", "profiling.generate", *SHORT, "--batch", "1", "--mesh", "tp=2,cp=1"]
    command += ["--side", "sparse", "--out", str(tmp_path)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    shared |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    (row,) = read(tmp_path)
    assert row["mesh"] == "tp=2,cp=1" and row["step_ms"] > 0
    assert row["command"].startswith("torchrun --nproc-per-node 2 -m profiling.generate --mesh tp=2,cp=1 ")
    assert (
        "[1/1]" in outputs[0][1] and "wrote" in outputs[0][0] and outputs[1][0] == "" and "[1/1]" not in outputs[1][1]
    )


def test_a_local_folder(tmp_path):
    models.load(None, "tiny", torch.bfloat16, torch.device("cpu"), 0).save_pretrained(tmp_path / "model")
    assert (
        generate.main(
            ["--model", str(tmp_path / "model"), *SHORT[:2], *SHORT[4:], "--batch", "1", "--out", str(tmp_path)]
        )
        == 0
    )
    assert {row["model"] for row in read(tmp_path)} == {str(tmp_path / "model")}


def test_an_unsupported_model_is_said_so(tmp_path, capsys):
    import transformers

    config = transformers.MistralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=16,
    )
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path / "model")
    status = generate.main(
        ["--model", str(tmp_path / "model"), *SHORT[:2], *SHORT[4:], "--batch", "1", "--out", str(tmp_path)]
    )
    assert status == generate.EXIT_MISSING
    assert "sliding_attention" in capsys.readouterr().err
    assert not (tmp_path / "generate.json").exists()  # said before anything is measured


def test_interrupted_runs_keep_their_rows(tmp_path, monkeypatch, capsys):
    real, calls = measure.run, []

    def interrupted(model, side, batch, *others):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(model, side, batch, *others)

    monkeypatch.setattr(measure, "run", interrupted)
    assert generate.main([*SHORT, "--batch", "1,2", "--out", str(tmp_path)]) == generate.EXIT_INTERRUPTED
    assert len(read(tmp_path)) == 2
    assert "kept the 2 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--batch", "max", "--device", "cpu"], "--batch max needs a GPU"),
        (["--batch", "0"], "'0' is not a positive integer"),
        (["--new", "2"], "at least 3 new tokens"),
        (["--repeats", "0"], "'0' is not a positive integer"),
        (["--key-keep", "3"], "come together"),
        (["--sparsity", "0.5", "--key-keep", "3", "--value-keep", "3"], "not both"),
        (["--sparsity", "1"], "below 1, got 1.0"),
        (["--side", "sparse-graph", "--device", "cpu"], "CUDA graphs need a GPU"),
        (["--model", "/nowhere"], "no config.json there"),
        (["--model", "/nowhere", "--random-config", "tiny"], "not allowed with"),
        (["--random-config", "llama"], "invalid choice"),
        (["--commit-results", "--device", "cpu"], "--commit-results needs a GPU"),
        (["--commit-results", "--quick"], "without --out and --quick"),
        (["--mesh", "tp"], "must be as tp=2, cp=4 or tp=2,cp=2, got 'tp'"),
        (["--mesh", "cp=2,cp=2"], "must be as tp=2, cp=4 or tp=2,cp=2, got 'cp=2,cp=2'"),
        (
            ["--mesh", "tp=2", "--side", "sparse-graph"],
            "--mesh goes without --side sparse-graph, which are of one device",
        ),
        (["--mesh", "cp=2", "--side", "dense"], "--mesh with cp spreads sparse caches only"),
        (["--sdpa", "default,flash"], "must be of default, no-cudnn, got 'flash'"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        generate.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_the_configs(capsys):
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in models.RANDOM_CONFIGS) and "%" in text and "%%" not in text


def test_the_largest_batch_is_found(monkeypatch):
    """A device of 1000 bytes, 100 of them for the model; a sequence needs 10, or what the first runs say, 9."""
    tried = []

    def run(model, side, batch, *others):
        tried.append(batch)
        if 100 + 10 * batch > 1000:
            raise torch.cuda.OutOfMemoryError("full")
        return batch

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure, "usable_bytes", lambda device: 1000)
    monkeypatch.setattr(measure, "_settle", lambda device: None)
    model = type("Model", (), {"device": torch.device("cpu")})
    batch, result = measure.run_largest(model, None, {1: 109, 8: 172}, 1, 1, 0)
    assert tried == [96, 91, 86] and batch == result == 86
    tried.clear()
    with pytest.raises(RuntimeError, match="no batch from 604 on fits"):
        measure.run_largest(model, None, {1: 101, 8: 108}, 1, 1, 0)
    with pytest.raises(ValueError, match="two batches at least"):
        measure.largest_batch({4: 100}, 1000)
    with pytest.raises(ValueError, match="did not grow"):
        measure.largest_batch({1: 100, 4: 100}, 1000)


def test_ratios_are_to_the_dense_row_alike():
    def row(**fields):
        return rows.Row(**dict.fromkeys(rows.FIELDS, 1) | {"model": "m", "side": "dense", "largest": False} | fields)

    dense8, dense_max = row(batch=8), row(batch=100, largest=True)
    sparse8, sparse_max = row(side="sparse", batch=8), row(side="sparse", batch=250, largest=True)
    every = [dense8, dense_max, sparse8, sparse_max]
    assert rows.dense_beside(sparse8, every) == [dense8]
    assert rows.dense_beside(sparse_max, every) == [dense_max]
    assert rows.dense_beside(row(side="sparse", batch=100), every) == []
    assert rows.dense_beside(row(side="sparse", batch=8, prompt=2), every) == []


@pytest.mark.gpu
def test_the_largest_batch_on_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "usable_bytes", lambda device: 3 << 30)
    arguments = ["--random-config", "tiny", "--prompt", "200", "--new", "4", "--batch", "1,4,max", "--repeats", "2"]
    assert generate.main([*arguments, "--out", str(tmp_path)]) == 0
    found = {(row["side"], row["largest"]): row for row in read(tmp_path) if row["batch"] not in (1, 4)}
    assert found["sparse", True]["batch"] > found["dense", True]["batch"] > 4
    assert found["dense", True]["peak_bytes"] < 3 << 30
    for row in found.values():
        assert row["repeats"] == 2 and "--batch max" in row["command"] and row["command"].endswith("--repeats 2")


def test_a_second_turn(tmp_path):
    """Times are those of the second prompt; the cache holds both."""
    assert generate.main([*SHORT, "--turn", "40", "--batch", "2", "--out", str(tmp_path)]) == 0
    found = read(tmp_path)
    assert [row["side"] for row in found] == ["dense", "sparse"]
    for row in found:
        assert (row["prompt"], row["turn"], row["new_tokens"]) == (70, 40, 4)
        assert row["dense_kv_bytes"] == 2 * 4 * 2 * 64 * 2 * 2 * (70 + 40 + 3)
        assert "--turn 40" in row["command"]
    assert found[0]["kv_bytes"] == found[0]["dense_kv_bytes"]
    assert "| 70 + 40 + 4 |" in rows.markdown(rows.read(tmp_path / "generate.json"))


def test_a_prompt_in_chunks_and_prompt_lookup(tmp_path):
    arguments = [*SHORT, "--prompt-chunk", "32", "--lookup", "3", "--batch", "1", "--out", str(tmp_path)]
    assert generate.main(arguments) == 0
    for row in read(tmp_path):
        assert (row["chunk"], row["lookup"]) == (32, 3)
        assert row["tokens_per_s"] > 0 and "--prompt-chunk 32 --lookup 3" in row["command"]
    header, *_ = rows.table_of(rows.read(tmp_path / "generate.json"))
    assert {"chunk", "lookup"} <= set(header)


def test_rows_of_other_turns_are_not_beside_each_other(tmp_path):
    for arguments in (["--turn", "40"], []):
        assert generate.main([*SHORT, *arguments, "--batch", "1", "--out", str(tmp_path / "".join(arguments))]) == 0
    with_turn, without = (rows.read(tmp_path / name / "generate.json") for name in ("--turn40", ""))
    every = [*with_turn, *without]
    assert rows.dense_beside(with_turn[1], every) == [with_turn[0]]
    assert rows.dense_beside(without[1], every) == [without[0]] and with_turn[1].key != without[1].key


@pytest.mark.parametrize(
    "arguments",
    [["--lookup", "3", "--batch", "2"], ["--turn", "0"], ["--turn", "5", "--side", "sparse-loop-graph"]],
)
def test_turns_and_lookup_that_do_not_go(arguments):
    with pytest.raises(SystemExit) as stopped:
        generate.parse(["--device", "cpu", *arguments])
    assert stopped.value.code == 2


def test_codecs_of_sparse_caches(tmp_path):
    arguments = [*SHORT, "--batch", "1", "--codec", "dtype,int4", "--out", str(tmp_path)]
    assert generate.main(arguments) == 0
    done = rows.read(tmp_path / "generate.json")
    assert [(row.side, row.codec) for row in done] == [("dense", ""), ("sparse", ""), ("sparse", "int4")]
    assert done[2].kv_bytes < done[1].kv_bytes and done[2].key != done[1].key
    assert "--codec int4" in done[2].command and "--codec" not in done[1].command
    assert rows.ratio(done[2], done, "tokens_per_s")  # beside the same dense row
