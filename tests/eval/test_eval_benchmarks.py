"""The evaluation's benchmarks from folders, its results, and whole runs of the command on a tiny random model."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch

from cute_kernels.eval import benchmarks, command, metrics, models, results
from cute_kernels.eval.settings import DENSE, grid

# ---- Benchmarks ------------------------------------------------------------------------------------------------------


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def longbench(tmp_path):
    path = tmp_path / "longbench"
    question = {"input": "who?", "context": "a long story. " * 60, "answers": ["me"], "all_classes": None, "length": 10}
    write_lines(path / "hotpotqa.jsonl", [question, {**question, "answers": ["you", "e"]}])
    write_lines(path / "trec_e.jsonl", [{**question, "all_classes": ["A", "B"], "length": n} for n in (10, 5000, 9000)])
    prompts = {"hotpotqa": "Read: {context} Q: {input} A:", "trec": "{context}{input}"}
    (path / "config").mkdir()
    (path / "config" / "dataset2prompt.json").write_text(json.dumps(prompts))
    (path / "config" / "dataset2maxlen.json").write_text(json.dumps({"hotpotqa": 4, "trec": 3}))
    return path


@pytest.fixture
def ruler(tmp_path):
    path = tmp_path / "ruler"
    write_lines(
        path / "niah_single_1" / "validation.jsonl", [{"input": "find it", "outputs": ["1"], "answer_prefix": ":"}]
    )
    write_lines(path / "qa_1" / "validation.jsonl", [{"input": "who", "outputs": ["1", "2"]}])
    return path


def test_reads_folders(longbench, ruler):
    hotpot, trec = benchmarks.longbench(longbench)
    assert (hotpot.name, hotpot.new_tokens, hotpot.by_length) == ("hotpotqa", 4, False)
    assert hotpot.examples[1].references == ("you", "e") and hotpot.examples[0].prompt.endswith("Q: who? A:")
    assert (trec.name, trec.by_length, trec.examples[0].classes) == ("trec_e", True, ("A", "B"))
    niah, qa = benchmarks.ruler(ruler, limit=1)
    assert (niah.name, niah.new_tokens, niah.examples[0].prompt) == ("niah_single_1", 128, "find it:")
    assert (qa.new_tokens, qa.score("2", qa.examples[0])) == (32, 1)
    scores = benchmarks.means(trec, [0, 0.5, 1])
    assert scores["trec_e"] == (50, 3) and scores["trec_e 4-8k"] == (50, 1) and scores["trec_e 8k+"] == (100, 1)


def test_wrong_folders_are_refused(longbench, ruler, tmp_path):
    for read, path, message in (
        (benchmarks.ruler, tmp_path / "none", "is no folder"),
        (benchmarks.ruler, longbench / "config", "has no .jsonl"),
        (benchmarks.ruler, longbench, "field outputs is missing"),
        (benchmarks.longbench, ruler, "dataset2prompt.json is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            read(path)
    (longbench / "other.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="no data set of LongBench"):
        benchmarks.longbench(longbench)
    (longbench / "other.jsonl").unlink()
    (longbench / "hotpotqa.jsonl").write_text('{"input": \n')
    with pytest.raises(ValueError, match=r"hotpotqa\.jsonl:1: not JSON"):
        benchmarks.longbench(longbench)


def test_prompts_that_are_too_long(folder, model, longbench, ruler):
    tokenizer = models.load_tokenizer(folder)
    hotpot, trec = benchmarks.longbench(longbench)
    example = hotpot.examples[0]
    ids = benchmarks.Predictor(model, tokenizer, 104, False).prompt_ids(hotpot, example)
    half = len(tokenizer(example.prompt).input_ids[:50])
    assert len(ids) == 100 and tokenizer.decode(ids) == example.prompt[:half] + example.prompt[-50:]
    chat = benchmarks.Predictor(model, tokenizer, 104, True)
    assert tokenizer.decode(chat.prompt_ids(hotpot, example)).startswith("<|user|>Read")
    assert tokenizer.decode(chat.prompt_ids(trec, trec.examples[0])).startswith("a long")
    niah = benchmarks.ruler(ruler)[0]
    with pytest.raises(ValueError, match="do not fit"):
        benchmarks.Predictor(model, tokenizer, 130, False).prompt_ids(niah, niah.examples[0])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chat template"):
        benchmarks.Predictor(model, tokenizer, 104, True)


def test_store(tmp_path):
    store = results.Store(tmp_path, {"model": "a"})
    settings = grid(["magnitude"], ["both"], [0.5])
    for setting, value in zip(settings, (50.0, 30.0)):
        store.add([results.row(setting, f"ruler/{task}", "score", value + i, 2) for i, task in enumerate(("a", "b"))])
    with store.predictions(DENSE, "ruler", "a") as (known, keep):
        assert known == []
        keep(0, "one\ntwo")
        keep(1, "三")
    path = tmp_path / "predictions" / "dense" / "ruler" / "a.jsonl"
    path.write_bytes(path.read_bytes() + b'{"index": 2, "pred')  # cut off in the middle
    with store.predictions(DENSE, "ruler", "a") as (known, keep):
        assert known == ["one\ntwo", "三"]
        keep(2, "x")
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3
    again = results.Store(tmp_path, {"model": "a"})
    assert again.rows == store.rows and again.has(DENSE, "ruler/a") and not again.has(DENSE, "ruler/c")
    again.write_tables()
    averages = {r["setting"]: r["value"] for r in json.loads((tmp_path / "results.json").read_text())[4:]}
    assert averages == {"dense": 50.5, "magnitude-both-0.5": 30.5}
    assert "| dense | 50 | 51 | 50.5 |" in (tmp_path / "results.md").read_text()
    with pytest.raises(ValueError, match="model: 'a' there, 'b' now"):
        results.Store(tmp_path, {"model": "b"})


# ---- The command -----------------------------------------------------------------------------------------------------


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run(*arguments) -> int:
    return command.main([str(argument) for argument in arguments])


def test_every_task(folder, longbench, ruler, tmp_path, capsys, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night; the rain fell in torrents. " * 20)
    arguments = [
        folder, "--tasks", "perplexity,needle,recall,longbench,ruler", "--text", text, "--longbench", longbench,
        "--ruler", ruler, "--sparsity", "0.7", "--rules", "magnitude", "--parts", "both", "--context", "96", "--limit",
        "2", "--lengths", "150", "--depths", "2", "--repeats", "1", "--pairs", "3", "--window", "8", "--device", "cpu",
        "--out", tmp_path / "out",
    ]  # fmt: skip
    # Without the harness its scores are of no account here.
    harness = importlib.util.find_spec("lm_eval") is not None and importlib.util.find_spec("jieba") is not None
    if not harness:
        monkeypatch.setattr(metrics, "require_longbench", lambda: None)
        monkeypatch.setattr(metrics, "longbench", lambda *_: 0.5)
    predicted = []
    original = benchmarks.Predictor.predict

    def interrupted(self, task, example, make_cache):
        if len(predicted) == 5:
            raise KeyboardInterrupt
        predicted.append(example)
        return original(self, task, example, make_cache)

    monkeypatch.setattr(benchmarks.Predictor, "predict", interrupted)
    assert run(*arguments) == 130
    earlier = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {r["setting"] for r in earlier} == {"dense"}
    predicted.clear()
    monkeypatch.setattr(benchmarks.Predictor, "predict", lambda *args: predicted.append(args[2]) or original(*args))
    assert run(*arguments) == 0
    assert len(predicted) == 12 - 5  # two settings of 2 + 2 + 1 + 1 examples
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert rows[:3] == earlier[:3]
    tasks = [r["task"] for r in rows if r["setting"] == "magnitude-both-0.7"]
    assert tasks == [
        "perplexity", "needle", "recall", "longbench/hotpotqa", "longbench/trec_e", "longbench/trec_e 0-4k",
        "longbench/trec_e 4-8k", "ruler/niah_single_1", "ruler/qa_1", "longbench average", "ruler average",
    ]  # fmt: skip
    perplexities = [r["value"] for r in rows if r["task"] == "perplexity"]
    assert perplexities[0] != perplexities[1] and all(value > 1 for value in perplexities)
    assert "| magnitude-both-0.7 |" in capsys.readouterr().out
    predicted.clear()
    assert run(*arguments) == 0 and not predicted
    assert run(*arguments, "--window", "9") == 2 and "choose another --out" in capsys.readouterr().err


def test_what_a_model_is_not_needed_for_is_said_first(folder, tmp_path, capsys, monkeypatch):
    out = ("--out", tmp_path / "out", "--device", "cpu")
    text = tmp_path / "text.txt"
    text.write_text("short")
    recall = (folder, "--tasks", "recall")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    monkeypatch.setattr(models, "load_model", lambda *_: pytest.fail("the model is loaded before the error"))
    for arguments, message in (
        ((tmp_path, "--tasks", "recall"), "config.json"),
        ((*recall, "--rules", "thinv"), "think prunes keys and thinv values"),
        ((*recall, "--cache", "sparse", "--rules", "think"), "tile by tile, which rule 'think'"),
        ((*recall, "--cache", "sparse"), "computes in float32: pass --dtype float16"),
        ((*recall, "--cache", "sparse", "--dtype", "float32"), "computes in float32: pass --dtype float16"),
        ((*recall, "--cache", "sparse", "--granularity", "1"), "pass --granularity 64 or none, got 1"),
        ((folder, "--tasks", "perplexity", "--text", text), "fewer than one segment"),
        ((folder, "--tasks", "needle", "--text", text), "needs a text"),
        ((folder, "--tasks", "needle", "--text", tmp_path / "none"), "--text"),
        ((folder, "--tasks", "needle", "--text", binary), "not UTF-8"),
        ((*recall, "--out", text), "File exists"),
    ):
        assert run(*out, *arguments) == 2, arguments
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "run.json").exists()  # a later run may differ


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tasks", "everything"], "argument --tasks: 'everything' is none of perplexity"),
        (["--tasks", "needle"], "--text is needed for needle"),
        (["--tasks", "ruler,longbench"], "--longbench is needed"),
        (["--rules", "magnitude,best"], "argument --rules: 'best' is none of magnitude"),
        (["--rules", "magnitude+best"], "argument --rules: 'best' is none of magnitude"),
        (["--parts", "all"], "argument --parts: 'all' is none of keys, values, both"),
        (["--sparsity", "0.5,1.5"], "argument --sparsity: '1.5' is no share from 0 to below 1"),
        (["--sparsity", "nan"], "argument --sparsity: 'nan' is no share"),
        (["--sparsity", "0.5:x"], "argument --sparsity: '0.5:x' is no share"),
        (["--window", "-1"], "argument --window: '-1' is not an integer of at least 0"),
        (["--granularity", "0"], "argument --granularity: '0' is not an integer of at least 1"),
        (["--limit", "x"], "argument --limit: 'x' is not an integer of at least 1"),
        (["--lengths", "5,-5"], "argument --lengths: '-5' is not an integer of at least 1"),
        (["--device", "foo"], "argument --device: 'foo': device must name a cpu or cuda device"),
        (["--device", "meta"], "argument --device: 'meta'"),
        (["--context", "4", "--prefill", "4"], "--prefill must be from 1 to below --context 4, got 4"),
        pytest.param(["--device", "cuda"], "pass device='cpu'", marks=NO_GPU),
    ],
    ids=str,
)
def test_arguments_that_are_wrong_for_any_model(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        run("model", *([] if "--tasks" in arguments else ["--tasks", "recall"]), *arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_the_sparse_cache_has_its_granularity(folder, tmp_path, capsys):
    arguments = [folder, "--tasks", "recall", "--cache", "sparse", "--pairs", "9", "--repeats", "1", "--depths", "1"]
    arguments += ["--sparsity", "0.5", "--window", "8", "--device", "cpu", "--dtype", "bfloat16", "--out", tmp_path]
    assert run(*arguments) == 0
    rows = json.loads((tmp_path / "results.json").read_text())
    assert {row["granularity"] for row in rows} == {64}
    said = capsys.readouterr().err
    assert "[1/2] dense, recall: 1 questions" in said and "[2/2] magnitude-both-0.5, recall" in said


def test_without_transformers(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert run(tmp_path, "--tasks", "recall", "--device", "cpu") == 2
    assert "needs transformers: pip install 'cute-kernels[eval]'" in capsys.readouterr().err


def test_longbench_without_the_harness(folder, longbench, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, metrics._HARNESS, None)
    assert run(folder, "--tasks", "longbench", "--longbench", longbench, "--out", tmp_path / "out") == 2
    assert "LongBench's scores need lm_eval" in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        run("--help")
    assert exit_.value.code == 0 and "--sparsity" in capsys.readouterr().out
