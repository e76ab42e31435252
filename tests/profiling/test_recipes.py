"""The recipe: its sequences, a few steps of training, and what it writes."""

from __future__ import annotations

import pytest
import torch

from profiling import plots, records
from profiling.recipes import sequences
from profiling.recipes.sequences import MARKERS, SEPARATOR, draw


@pytest.mark.parametrize("pairs", [1, 5, 16])
def test_recall_asks_for_every_pair_once(pairs, rng):
    drawn = draw("recall", pairs, 32, 50, torch.Generator().manual_seed(rng.randrange(2**31)))
    assert drawn.ids.shape == drawn.counted.shape == (50, 4 * pairs + 2) and drawn.context == 2 * pairs + 2
    assert (drawn.ids[:, 0] == sequences.RECALL).all() and (drawn.ids[:, 2 * pairs + 1] == SEPARATOR).all()
    for ids, counted in zip(drawn.ids.tolist(), drawn.counted.tolist(), strict=True):
        told, asked = ids[1 : drawn.context - 1], ids[drawn.context :]
        told_pairs = list(zip(told[::2], told[1::2], strict=True))
        assert sorted(zip(asked[::2], asked[1::2], strict=True)) == sorted(told_pairs)
        assert len(dict(told_pairs)) == pairs  # a key comes once, so that its value follows
        assert all(MARKERS <= key < MARKERS + 16 <= value < MARKERS + 32 for key, value in told_pairs)
        assert counted == [False] * drawn.context + [False, True] * pairs


def test_copying_repeats_the_context(rng):
    drawn = draw("copying", 6, 32, 20, torch.Generator().manual_seed(rng.randrange(2**31)))
    assert torch.equal(drawn.ids[:, 1:13], drawn.ids[:, 14:]) and (drawn.ids[:, 0] == sequences.COPYING).all()
    assert drawn.ids[:, 1:13].min() >= MARKERS and drawn.ids.max() < sequences.vocabulary(32)
    assert drawn.counted[:, 14:].all() and not drawn.counted[:, :14].any()


def test_a_short_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="needs the extra eval")
    pytest.importorskip("matplotlib", reason="needs the extra profile")
    from profiling.plots import accuracy, frontier
    from profiling.recipes import associative_recall as recipe
    from profiling.recipes import training

    size = training.Size(
        pairs=31,
        symbols=64,
        layers=1,
        hidden=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        intermediate=16,
        tokens=128,
        steps=12,
    )
    monkeypatch.setattr(training, "QUICK", size)
    monkeypatch.setattr(recipe, "SPARSITIES", (0.5, 0.9))
    arguments = ["--quick", "--sequences", "3", "--batch", "2", "--device", "cpu", "--out", str(tmp_path)]
    assert recipe.main([*arguments, "--save", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accuracy.json", "model"]
    rows = records.read(tmp_path / "accuracy.json")
    of_rules, of_codecs = 1 + len(recipe.RULES) * 3 * len(recipe.SPARSITIES), 3 * (1 + len(recipe.SPARSITIES))
    evicted = len(recipe.EVICTED) * (1 + len(recipe.SPARSITIES))
    assert len(rows) == 2 * (of_rules + of_codecs + evicted)
    bits = {row["setting"]: row["bits"] for row in rows}
    assert (bits["dense"], bits["dense-int8"], bits["magnitude-keys-0.5"]) == (16, 8 + 16 / 8, None)
    settings = {setting.name: setting for setting in recipe.chosen_settings()}
    ordered = ["magnitude-both-0.9-int4", "magnitude-both-0.5-int4", "magnitude-both-0.5-fp8", "magnitude-both-0.5"]
    of_64 = [recipe.bits_per_element(settings[name], 64) for name in ordered]
    assert of_64 == sorted(of_64) and 1 < of_64[0] < of_64[1] < 4
    assert {(r["task"], r["samples"]) for r in rows} == {("recall", 3 * 31), ("copying", 3 * 62)}
    assert all(0 <= r["value"] <= 100 and r["context"] == 64 and "--quick" in r["command"] for r in rows)
    assert "| dense |" in recipe.markdown(rows) and "| dense |" in capsys.readouterr().out
    paths = plots.draw_accuracy(rows, tmp_path)
    assert [path.name for path in paths] == ["accuracy.png", "frontier.png"]
    assert all(path.stat().st_size > 10_000 for path in paths)
    assert frontier.frontier([(4, 90.0), (8, 89.0), (3, 20.0), (16, 91.0)]) == [(3, 20.0), (4, 90.0), (16, 91.0)]
    figure = accuracy.figure(rows)
    assert [axis.get_title() for axis in figure.axes] == [
        f"{task}: {part}" for task in ("recall", "copying") for part in ("keys only", "values only", "keys and values")
    ]
    lines = {line.get_label(): len(line.get_xdata()) for line in figure.axes[0].get_lines()}
    assert lines == {"dense": 2} | dict.fromkeys(map(accuracy.NAMES.get, recipe.RULES), 2)


def test_what_is_learnt_is_measured():
    """On a model that says what comes next in the ids, with known mistakes."""
    pytest.importorskip("transformers", reason="needs the extra eval")
    from types import SimpleNamespace

    from cute_kernels.eval.settings import DENSE
    from profiling.recipes import associative_recall as recipe

    drawn = draw("recall", 5, 16, 4, torch.Generator().manual_seed(0))
    wrong = torch.zeros_like(drawn.ids, dtype=torch.bool)
    wrong[0, 13] = wrong[1, 12] = True  # a value and, not counted, a key
    said = torch.where(wrong, (drawn.ids + 1) % 19, drawn.ids)

    def model(input_ids, past_key_values, use_cache, logits_to_keep):
        first, last = past_key_values.seen, past_key_values.seen + input_ids.shape[1]
        past_key_values.seen = last
        logits = torch.nn.functional.one_hot(torch.roll(said, -1, 1)[:, first:last], 19).float()
        return SimpleNamespace(logits=logits[:, -1:] if logits_to_keep else logits)

    class Cache:
        seen = 0

        def get_seq_length(self) -> int:
            return self.seen

    caches = lambda *_: Cache  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.models, "cache_maker", caches)
        measured = recipe.accuracies(model, DENSE, {"recall": drawn}, 4)
    assert measured == {"recall": (pytest.approx(95.0), 20)}
