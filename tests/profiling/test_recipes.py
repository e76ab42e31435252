"""The recipe of pruning rules: its sequences, a few steps of training, and what it writes."""

from __future__ import annotations

import pytest
import torch

from profiling import plots, records
from profiling.recipes import sequences
from profiling.recipes.sequences import MARKERS, SEPARATOR, draw


def asked_and_told(drawn):
    """What is counted stands where it is said to have been told, so far back."""
    batch, places = drawn.counted.nonzero(as_tuple=True)
    told = drawn.told[batch, places]
    assert torch.equal(drawn.ids[batch, places], drawn.ids[batch, told]) and (told < drawn.context - 1).all()
    assert torch.equal(drawn.distances[batch, places], places - told) and not drawn.distances[~drawn.counted].any()


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
    asked_and_told(drawn)


def test_copying_repeats_the_context(rng):
    drawn = draw("copying", 6, 32, 20, torch.Generator().manual_seed(rng.randrange(2**31)))
    assert torch.equal(drawn.ids[:, 1:13], drawn.ids[:, 14:]) and (drawn.ids[:, 0] == sequences.COPYING).all()
    assert drawn.ids[:, 1:13].min() >= MARKERS and drawn.ids.max() < sequences.vocabulary(32)
    assert drawn.counted[:, 14:].all() and not drawn.counted[:, :14].any()
    asked_and_told(drawn)


@pytest.mark.parametrize("pairs", [1, 4, 11, 16])
def test_hops_walk_over_the_pairs(pairs, rng):
    drawn = draw("hops", pairs, 32, 20, torch.Generator().manual_seed(rng.randrange(2**31)))
    assert drawn.ids.shape == (20, 4 * pairs + 2) and drawn.together == sequences.HOPS == 4
    assert (drawn.ids[:, 0] == sequences.HOPS_MARKER).all() and (drawn.ids[:, 2 * pairs + 1] == SEPARATOR).all()
    for ids, counted in zip(drawn.ids.tolist(), drawn.counted.tolist(), strict=True):
        told, walked = ids[1 : drawn.context - 1], ids[drawn.context :]
        leads_to = dict(zip(told[::2], told[1::2], strict=True))
        assert len(leads_to) == pairs and set(leads_to) == set(leads_to.values())
        walks, seen = pairs // 4, []
        for start in range(0, 5 * walks, 5):
            walk = walked[start : start + 5]
            assert [leads_to[symbol] for symbol in walk[:4]] == walk[1:]
            seen += walk[:4]
        assert len(set(seen)) == 4 * walks  # every pair is asked for once at most
        assert walked[5 * walks :] == [SEPARATOR] * (2 * pairs - 5 * walks)
        assert counted[drawn.context :] == [False, *[True] * 4] * walks + [False] * (2 * pairs - 5 * walks)
        assert min(told) >= MARKERS and max(told) < MARKERS + 16
    asked_and_told(drawn)


def test_a_short_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="needs the extra eval")
    pytest.importorskip("matplotlib", reason="needs the extra profile")
    from profiling.plots import accuracy
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
    of_rules = 1 + len(recipe.RULES) * 3 * len(recipe.SPARSITIES)
    evicted = len(recipe.EVICTED) * (1 + len(recipe.SPARSITIES))
    whole = [row for row in rows if "," not in row["task"]]
    assert len(whole) == 3 * (of_rules + evicted)
    assert {(r["task"], r["samples"]) for r in whole} == {("recall", 3 * 31), ("copying", 3 * 62), ("hops", 3 * 7)}
    of_dense = [row for row in rows if row["setting"] == "dense"]
    quarters = [row for row in of_dense if "," in row["task"]]
    assert len(quarters) == 4 and sum(row["samples"] for row in quarters) == 3 * 31
    right = sum(row["value"] * row["samples"] for row in quarters)
    assert right == pytest.approx(next(row["value"] for row in of_dense if row["task"] == "recall") * 3 * 31)
    assert all(0 <= r["value"] <= 100 and r["context"] == 64 and "--quick" in r["command"] for r in rows)
    assert "| dense |" in recipe.markdown(rows) and "| dense |" in capsys.readouterr().out
    paths = plots.draw_accuracy(rows, tmp_path)
    assert [path.name for path in paths] == ["accuracy.png"] and paths[0].stat().st_size > 10_000
    figure = accuracy.figure(rows)
    assert [axis.get_title() for axis in figure.axes] == [
        f"{task}: {part}" for task in sequences.TASKS for part in accuracy.PARTS.values()
    ]
    lines = {line.get_label(): len(line.get_xdata()) for line in figure.axes[0].get_lines()}
    assert lines == {"dense": 2} | dict.fromkeys(map(accuracy.NAMES.get, recipe.RULES), 2)


def test_what_is_learnt_is_measured():
    """On a model that says what comes next in the ids, with known mistakes."""
    pytest.importorskip("transformers", reason="needs the extra eval")
    from types import SimpleNamespace

    from cute_kernels.eval.settings import DENSE
    from profiling.recipes import associative_recall as recipe

    generator = torch.Generator().manual_seed(0)
    drawn = {"recall": draw("recall", 9, 32, 4, generator), "hops": draw("hops", 9, 32, 4, generator)}
    ids = torch.cat([sequences.ids for sequences in drawn.values()])
    wrong = torch.zeros_like(ids, dtype=torch.bool)
    wrong[0, 21] = wrong[1, 20] = True  # a value and, not counted, a key
    wrong[4, 22] = wrong[4, 23] = wrong[5, 25] = True  # two hops of a walk, and, not counted, the start of another
    said = torch.where(wrong, (ids + 1) % 36, ids)

    def model(input_ids, past_key_values, use_cache, logits_to_keep):
        first, last = past_key_values.seen, past_key_values.seen + input_ids.shape[1]
        past_key_values.seen = last
        logits = torch.nn.functional.one_hot(torch.roll(said, -1, 1)[:, first:last], 36).float()
        return SimpleNamespace(logits=logits[:, -1:] if logits_to_keep else logits)

    class Cache:
        seen = 0

        def get_seq_length(self) -> int:
            return self.seen

    caches = lambda *_: Cache  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.models, "cache_maker", caches)
        measured = recipe.accuracies(model, DENSE, drawn, 8)
    whole = {task: found for task, found in measured.items() if "," not in task}
    assert whole == {"recall": (pytest.approx(100 * 35 / 36), 36), "hops": (pytest.approx(100 * 7 / 8), 8)}
    far = drawn["recall"].distances[0, 21] // 10
    quarter = next(found for task, found in measured.items() if task == f"recall, {recipe._QUARTERS[far]}")
    assert quarter[0] == pytest.approx(100 - 100 / quarter[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_training_step(device, rng):
    """The forward pass and the step beside Transformers' own model and plain AdamW; a GPU computes in bfloat16."""
    pytest.importorskip("transformers", reason="needs the extra eval")
    import copy

    from profiling.recipes import training
    from profiling.recipes.llama import forward
    from profiling.recipes.steps import IGNORED, Steps

    model = training.build(training.QUICK, 0).to(device)
    plain = copy.deepcopy(model)
    ids = torch.randint(3, 60, (3, 21), device=device)
    tolerance = 1e-5 if device == "cpu" else 0.03
    with torch.no_grad():
        expected, got = plain(ids).logits[:, -8:], forward(model, ids, 8).float()
    assert (got - expected).norm() < tolerance * expected.norm()
    steps = Steps(model, (0.9, 0.98), 0.01)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    for shape in ((3, 21), (2, 12), (3, 21)):
        ids = torch.randint(3, 60, shape, device=device)
        targets = torch.where(torch.rand(shape, device=device) < 0.5, ids, IGNORED)[:, -8:]
        again = 1 if device == "cpu" or (shape == (3, 21) and optimizer.state) else 3  # a capture takes three steps
        for _ in range(again):
            logits = plain(ids).logits[:, -8:]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
        got_loss, right = steps(ids, targets, 1e-3)
        assert got_loss.item() == pytest.approx(loss.item(), rel=tolerance)
        hit = (logits.argmax(-1) == targets)[targets != IGNORED]
        assert right.item() == pytest.approx(hit.float().mean().item(), abs=0.1)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert (a - b).norm() < (1e-4 if device == "cpu" else 0.02) * b.norm()
