"""The evaluation: scores, pruned caches against the rules' definition, and answers of tiny random models."""

from __future__ import annotations

import sys
import types

import pytest
import torch

import cute_kernels as ck
from cute_kernels.eval import arguments, metrics, models
from cute_kernels.eval.settings import DENSE, Setting, grid, kept_elements
from tests.support import oracle

# ---- Scores ----------------------------------------------------------------------------------------------------------


def test_ruler():
    assert metrics.ruler("niah_single_1", "it is 123 and ABC", ["123", "abc", "9", "8"]) == 0.5
    assert metrics.ruler("qa_1", "it is 123", ["123", "456"]) == 1
    assert metrics.ruler("vt", "x\x00y", ["x\ny"]) == 1
    assert metrics.ruler("vt", "x", []) == 0


# ---- Settings --------------------------------------------------------------------------------------------------------


def test_grid():
    settings = grid(["magnitude", "think", "magnitude+channel-magnitude"], ["keys", "both"], [0.5, 0.7], window=8)
    assert settings[0].name == "dense" and len(settings) == 1 + 3 * 2 * 2 and {s.window for s in settings} == {8}
    names = [s.name for s in settings]
    assert names[1:3] == ["magnitude-keys-0.5", "magnitude-keys-0.7"] and "think-both-0.7" in names
    assert "magnitude+channel-magnitude-both-0.5" in names
    think = next(s for s in settings if s.name == "think-both-0.7")
    assert (think.rule_of("key"), think.rule_of("value")) == (("think", 0.7), ("thinv", 0.7))
    assert [s.name for s in grid(["random"], ["both", "values"], [(0.5, 0.7)])[1:]] == [
        "random-k0.5-v0.7",
        "random-values-0.7",
    ]
    assert arguments.parse(["m", "--tasks", "recall", "--sparsity", "0.5,0.5:0.7"]).sparsity == [
        0.5,
        (0.5, 0.7),
    ]
    assert grid(["magnitude", "random"], ["both", "keys"], [0.0]) == [DENSE]
    assert [s.name for s in grid(["magnitude"], ["both"], [0.0, 0.5, 0.5])] == ["dense", "magnitude-both-0.5"]
    assert [s.name for s in grid(["magnitude"], ["both"], [0.0, 0.5], codecs=["", "int4"])] == [
        "dense",
        "dense-int4",
        "magnitude-both-0.5",
        "magnitude-both-0.5-int4",
    ]
    assert arguments.parse(["m", "--tasks", "recall", "--codec", "own,fp8"]).codec == ["", "fp8"]


def test_evictions():
    settings = grid(["magnitude"], ["both"], [0.5, (0.5, 0.7)], evictions=[0.0, 0.25])
    assert [s.name for s in settings] == [
        *("dense", "h2o-0.25", "magnitude-both-0.5", "magnitude-k0.5-v0.7"),
        *("h2o-0.25+magnitude-both-0.5", "h2o-0.25+magnitude-k0.5-v0.7"),
    ]
    with pytest.raises(ValueError, match="--cache sparse evicts no tokens"):
        models.check([settings[1]], "sparse")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"key_rule": "best"}, "key_rule must be one of .* got 'best'"),
        ({"key_rule": "thinv"}, "think prunes keys and thinv values"),
        ({"key_sparsity": 1.0}, "key_sparsity must be from 0 to below 1"),
        ({"value_sparsity": -1}, "value_sparsity must be from 0 to below 1"),
        ({"window": -1}, "window must be .* got -1"),
        ({"evicted": 1.0}, "evicted must be from 0 to below 1"),
        ({"codec": "fp4"}, "codec must be one of fp8, int4, int8, e4m3, .* or '', got 'fp4'"),
    ],
    ids=str,
)
def test_settings_are_checked(wrong, message):
    with pytest.raises(ValueError, match=message):
        Setting(**wrong)


# ---- Pruned caches ---------------------------------------------------------------------------------------------------

B, HKV, G, D = 2, 2, 2, 16


@pytest.fixture
def pruned_cache():
    pytest.importorskip("transformers", reason="needs the extra eval")
    from cute_kernels.eval import pruned_cache

    return pruned_cache


def feed(layer, k, v, lengths, queries=None):
    """Updates with consecutive pieces; returns what each update gave."""
    first, given = 0, []
    for length in lengths:
        piece = slice(first, first + length)
        given.append([x.clone() for x in layer.update(k[:, :, piece], v[:, :, piece])])
        if queries is not None:
            layer.observe(queries[:, :, piece], k[:, :, : first + length], 0.25)
        first += length
    return given


@pytest.mark.parametrize("granularity", [1, 3, 64])
@pytest.mark.parametrize("part", ["keys", "values", "both"])
def test_tokens_behind_the_window_are_pruned(pruned_cache, part, granularity, rng):
    setting = grid(["magnitude"], [part], [0.7], window=5, granularity=granularity)[1]
    k, v = oracle.gaussian(B, HKV, 100, D), oracle.gaussian(B, HKV, 100, D)
    lengths = [70] + [1] * 20 + [10]
    given = feed(pruned_cache.PrunedLayer(setting), k, v, lengths)
    before = 0
    for length, (keys, values) in zip(lengths, given):
        old = max(0, before - 5) // granularity * granularity
        for got, x, pruned in ((keys, k, part != "values"), (values, v, part != "keys")):
            assert torch.equal(got[:, :, old:], x[:, :, old : before + length])
            expected = oracle.prune(x[:, :, :old], kept_elements(D, 0.7)) if pruned else x[:, :, :old]
            assert oracle.same_bits(got[:, :, :old], expected)
        before += length


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_codecs_round_as_a_cache_stores(pruned_cache, codec, rng):
    """Scales of channels from the first tile, in whichever steps tokens leave the window; what is not pruned too."""
    setting = grid(["magnitude"], ["keys"], [0.7], window=5, codecs=[codec])[1]
    k, v = (oracle.lognormal_channels(B, HKV, 100, D) for _ in range(2))
    given = feed(pruned_cache.PrunedLayer(setting), k, v, [80] + [1] * 20)
    for got, x, keep in ((given[-1][0], k, kept_elements(D, 0.7)), (given[-1][1], v, None)):
        expected = oracle.to_dtype(oracle.narrow(x[:, :, :94], keep, codec, 64), x.dtype)
        assert oracle.relative_error(got[:, :, :94], expected.double()) < 1e-3  # sums of scales in another order
        assert torch.equal(got[:, :, 94:], x[:, :, 94:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rules_get_groups_and_queries(pruned_cache, dtype, rng):
    window, prefill = 6, 80
    k, v = torch.randn(B, HKV, 120, D).to(dtype), torch.randn(B, HKV, 120, D).to(dtype)
    q = torch.randn(B, HKV * G, 120, D).to(dtype)
    old = (prefill - window) // 32 * 32
    recent = q[:, :, prefill - 32 : prefill]
    mass = ck.rules.attention_mass(recent, k[:, :, :prefill], scale=0.25)[:, :, :old]
    for name, key_rule, value_rule in (
        ("channel-magnitude", ck.rules.ChannelMagnitude(), ck.rules.ChannelMagnitude()),
        ("output-aware", ck.rules.OutputAware(q=recent), ck.rules.OutputAware(attention=mass)),
        ("think", ck.rules.ThinK(recent), ck.rules.ThinV()),
    ):
        layer = pruned_cache.PrunedLayer(grid([name], ["both"], [0.5], window=window)[1])
        keys, values = feed(layer, k, v, [prefill, 1], q)[1]
        assert torch.equal(keys[:, :, :old], key_rule.prune(k[:, :, :old], D // 2))
        assert torch.equal(values[:, :, :old], value_rule.prune(v[:, :, :old], D // 2))
        assert torch.equal(keys[:, :, old:], k[:, :, old : prefill + 1])


def test_queries_have_to_be_shown(pruned_cache):
    layer = pruned_cache.PrunedLayer(grid(["think"], ["keys"], [0.5], window=0)[1])
    x = torch.randn(1, 1, 64, D)
    layer.update(x, x)
    with pytest.raises(RuntimeError, match="observe"):
        layer.update(x, x)


def test_cropped_layers_prune_again(pruned_cache, rng):
    setting = grid(["magnitude"], ["both"], [0.5], window=4)[1]
    layer, k = pruned_cache.PrunedLayer(setting), oracle.gaussian(1, 1, 40, D)
    feed(layer, k, k, [20, 1])
    layer.crop(-11)  # 10 are left, all pruned
    keys, _ = layer.update(k[:, :, 10:30], k[:, :, 10:30])
    assert torch.equal(keys[:, :, 10:], k[:, :, 10:30])
    keys, _ = layer.update(k[:, :, 30:31], k[:, :, 30:31])
    assert torch.equal(keys[:, :, :26], oracle.prune(k[:, :, :26], 8)) and torch.equal(keys[:, :, 26:], k[:, :, 26:31])


def test_sliding_windows_are_refused(pruned_cache):
    from transformers import MistralConfig

    with pytest.raises(ValueError, match="layer 0 of this mistral model keeps a DynamicSlidingWindowLayer"):
        pruned_cache.make(MistralConfig(num_hidden_layers=2, sliding_window=8), DENSE)


# ---- Models ----------------------------------------------------------------------------------------------------------


def test_likelihood_of_the_dense_cache(model, rng):
    from cute_kernels.eval.decoding import correct, negative_log_likelihood

    ids = torch.randint(3, 90, (40,))
    with torch.inference_mode():
        ids[20:30] = model(ids[None]).logits[0, 19:29].argmax(-1)  # some that are right, or were before the others
        logits = model(ids[None]).logits[0, :-1].double()
    expected = float(torch.nn.functional.cross_entropy(logits[9:], ids[10:], reduction="sum"))
    for chunk in (1, 7, 64):
        got = negative_log_likelihood(model, models.cache_maker(model, DENSE), ids, 10, chunk)
        assert got == pytest.approx(expected, rel=1e-5)
        right = correct(model, models.cache_maker(model, DENSE), ids[None].expand(2, -1), 10, chunk)
        assert torch.equal(right, (logits.argmax(-1)[9:] == ids[10:]).expand(2, -1))


def test_answers_come_from_the_pruned_cache(model, rng):
    """Against a cache of Transformers' own, pruned between the calls."""
    from transformers import DynamicCache

    from cute_kernels.eval.decoding import answer

    setting = grid(["magnitude"], ["both"], [0.8], window=4)[1]
    context, question = torch.randint(3, 90, (3, 30)), torch.randint(3, 90, (3, 6))
    got = answer(model, models.cache_maker(model, setting), context, question, 5)
    cache, pruned, said = DynamicCache(config=model.config), 0, []
    with torch.inference_mode():
        for ids in (context, question, None, None, None, None):
            logits = model(said[-1] if ids is None else ids, past_key_values=cache).logits
            if ids is not context:
                said.append(logits[:, -1].argmax(-1, keepdim=True))
            end = cache.get_seq_length() - 4
            for layer in cache.layers:
                for x in (layer.keys, layer.values):
                    old = x[:, :, pruned:end]
                    old.scatter_(-1, old.abs().argsort(-1)[..., : 16 - kept_elements(16, 0.8)], 0)
            pruned = end
    assert torch.equal(got, torch.cat(said, dim=1))
    dense = answer(model, models.cache_maker(model, DENSE), context, question, 5)
    assert not torch.equal(got, dense)


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_answers_come_from_what_eviction_leaves(folder, sparsity, rng):
    """Against a cache of Transformers' own, from which the attention that it returns takes tokens."""
    from transformers import DynamicCache

    from cute_kernels.eval.decoding import answer

    model = models.load_model(folder, torch.device("cpu"))
    setting = Setting(key_sparsity=sparsity, value_sparsity=sparsity, window=4, evicted=0.4)
    context, question = torch.randint(3, 90, (2, 30)), torch.randint(3, 90, (2, 6))
    model.set_attn_implementation("eager")
    cache, pruned, said = DynamicCache(config=model.config), 0, []
    with torch.inference_mode():
        weights = model(context, past_key_values=cache, output_attentions=True).attentions
        for layer, got in zip(cache.layers, weights):
            heads = layer.keys.shape[1]
            mass = got.unflatten(1, (heads, -1)).sum((2, 3))  # (B, Hkv, T)
            for b in range(2):
                for h in range(heads):
                    recent = range(30 - 9, 30)  # half of the 18 that stay
                    heavy = mass[b, h, :21].argsort(descending=True)[:9].tolist()
                    stay = torch.tensor([*sorted(heavy), *recent])
                    for x in (layer.keys, layer.values):
                        x[b, h, :18] = x[b, h, stay]
            layer.keys, layer.values = layer.keys[:, :, :18], layer.values[:, :, :18]
        for ids, place in ((question, 30), (None, 36), (None, 37), (None, 38)):
            end = cache.get_seq_length() - 4
            for layer in cache.layers if sparsity else ():
                for x in (layer.keys, layer.values):
                    old = x[:, :, pruned:end]
                    old.scatter_(-1, old.abs().argsort(-1)[..., : 16 - kept_elements(16, sparsity)], 0)
            pruned = end
            ids = said[-1] if ids is None else ids
            positions = torch.arange(place, place + ids.shape[1])[None]
            logits = model(ids, past_key_values=cache, position_ids=positions).logits
            said.append(logits[:, -1].argmax(-1, keepdim=True))
    models.prepare(model, [setting], "pruned")
    assert torch.equal(answer(model, models.cache_maker(model, setting), context, question, 4), torch.cat(said, dim=1))


@pytest.mark.parametrize("name", ["output-aware", "think", "random", "magnitude"])
def test_generation_without_pruned_tokens_is_the_models_own(folder, name, rng):
    from cute_kernels.eval.decoding import generate

    model = models.load_model(folder, torch.device("cpu"))
    expected = torch.empty(0)
    while len(expected) < 6:  # few random prompts are answered with the end at once
        prompt = torch.randint(3, 90, (40,))
        expected = model.generate(prompt[None], attention_mask=torch.ones(1, 40), max_new_tokens=12, do_sample=False)[
            0, 40:
        ]
    for setting in (DENSE, grid([name], ["both"], [0.5], window=64)[1]):
        models.prepare(model, [setting], "pruned")
        got = generate(model, models.cache_maker(model, setting), prompt, 12, [1])
        assert got.tolist() == expected.tolist()
    pruning = grid([name], ["both"], [0.9], window=1)[1]
    assert generate(model, models.cache_maker(model, pruning), prompt, 12, [1]).tolist() != expected.tolist()


def test_the_sparse_cache_is_asked_for(model, monkeypatch):
    made = []

    class SparseKVCache:
        def __init__(self, config, **options):
            made.append(options)

    module = types.SimpleNamespace(SparseKVCache=SparseKVCache)
    monkeypatch.setitem(sys.modules, "cute_kernels.integrations", types.ModuleType("cute_kernels.integrations"))
    monkeypatch.setitem(sys.modules, "cute_kernels.integrations.transformers", module)
    models.prepare(model, grid(["magnitude"], ["keys", "both"], [0.5], window=8, granularity=64), "sparse")
    made_of = {"window": 8, "key_keep": 8, "key_rule": "magnitude"}
    assert made == [made_of | {"value_keep": 16}, made_of | {"value_keep": 8, "value_rule": "magnitude"}]
    monkeypatch.setitem(sys.modules, "cute_kernels.integrations.transformers", None)
    with pytest.raises(models.Missing, match=r"needs cute_kernels\.integrations\.transformers"):
        models.prepare(model, [grid(["magnitude"], ["both"], [0.5], granularity=64)[1]], "sparse")


def test_the_sparse_cache_prunes_like_the_pruned_one(folder, rng):
    """Rules that prune tile by tile: the same logits of tokens that come one by one, but for rounding to 16 bits."""
    model = models.load_model(folder, torch.device("cpu")).bfloat16()
    ids = torch.randint(3, 90, (1, 150))
    for setting in grid(["magnitude", "channel-magnitude"], ["both"], [0.6], window=8, granularity=64)[1:]:
        models.prepare(model, [setting], "sparse")
        found = []
        for cache in ("pruned", "sparse"):
            made = models.cache_maker(model, setting, cache)()
            with torch.inference_mode():
                logits = [model(ids[:, :140], past_key_values=made).logits[:, -1]]
                logits += [model(ids[:, i : i + 1], past_key_values=made).logits[:, -1] for i in range(140, 150)]
            found.append(torch.cat(logits).float())
        assert (found[0] - found[1]).norm() < 0.05 * found[0].norm(), setting.name
    with pytest.raises(ValueError, match="prunes tile by tile, which rule 'think' does not"):
        models.prepare(model, grid(["think"], ["keys"], [0.5], granularity=64), "sparse")
