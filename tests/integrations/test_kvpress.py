"""kvpress: ElementPress against the rules' definitions, and caches compressed behind presses that evict tokens against
kvpress's own dense ones."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.support import tiny_tokenizer
from tests.support.oracle import same_bits

kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed (extra kvpress; it needs Transformers < 5.3)")

from kvpress import (
    AdaKVPress,
    ComposedPress,
    DecodingPress,
    KeyRerotationPress,
    KnormPress,
    KVPressTextGenerationPipeline,
    ObservedAttentionPress,
    PyramidKVPress,
    SnapKVPress,
    StreamingLLMPress,
)
from kvpress.attention_patch import attention_patch
from transformers import DynamicCache, pipeline
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cute_kernels import rules
from cute_kernels.integrations.kvpress import ElementPress, SparseKVPressPipeline, prefill
from cute_kernels.integrations.kvpress._support import check_found
from cute_kernels.integrations.transformers import NAME, SparseKVCache
from tests.support.tiny_models import HEAD_DIM, RoundingAttention, make

# kvpress wraps all attention functions when it is imported: here they are so while this module's tests run.
WRAPPED = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
ALL_ATTENTION_FUNCTIONS._local_mapping.clear()

TILE, WINDOW, CONTEXT = 64, 8, 160
KEPT = {"keep": HEAD_DIM, "window": WINDOW, "dtype": torch.float16}

pytestmark = pytest.mark.usefixtures("one_thread", "wrapped")


@pytest.fixture(autouse=True)
def wrapped(monkeypatch):
    for name, function in WRAPPED.items():
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, function)


@pytest.fixture
def rounding(monkeypatch):
    """Dense attention computes as a cache of float16 does."""
    function = RoundingAttention()

    def attention(module, query, key, value, mask, dropout, **kwargs):  # kvpress passes dropout by place
        return function(module, query, key, value, mask, dropout=dropout, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attention_patch(attention))
    return function


def context(batch=1, length=CONTEXT):
    return torch.randint(1, 89, (batch, length))


def read(model, ids, press=None) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        if press is None:
            model.model(input_ids=ids, past_key_values=cache)
        else:
            with press(model):
                model.model(input_ids=ids, past_key_values=cache)
    return cache


# ---- ElementPress: definitions in float64 ----------------------------------------------------------------------------


def largest(scores: np.ndarray, count: int, axis: int) -> np.ndarray:
    """Mask of the largest along an axis."""
    order = np.argsort(-scores, axis=axis, kind="stable").take(range(count), axis=axis)
    mask = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(mask, order, True, axis=axis)
    return mask


def kept_by(rule: str, role: str, x, keys, queries, kept: int) -> np.ndarray:
    """What stays of (Hkv, T', D), the older part of one sequence; keys (Hkv, T, D), queries (Hq, 32, D) of the newest
    tokens."""
    heads, tokens, head_dim = x.shape
    by_head = queries.reshape(heads, -1, *queries.shape[1:])
    if rule == "magnitude":
        return largest(np.abs(x), kept, 2)
    if rule == "think":
        energy = (x**2).sum(1) * ((by_head**2).sum((1, 2)) if role == "key" else 1)
        return np.broadcast_to(largest(energy, kept, 1)[:, None], x.shape)
    if rule == "output-aware" and role == "key":
        return largest(np.abs(x) * np.abs(by_head).sum((1, 2))[:, None], kept, 2)
    weights = np.ones((heads, tokens))
    if rule == "output-aware":
        every, count = keys.shape[1], queries.shape[1]
        logits = by_head @ keys[:, None].transpose(0, 1, 3, 2) / np.sqrt(head_dim)
        logits[..., np.triu(np.ones((count, every), dtype=bool), every - count + 1)] = -np.inf
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        weights = (shares / shares.sum(-1, keepdims=True)).sum((1, 2))[:, :tokens]
    scores = (np.abs(x) * weights[..., None]).reshape(heads, tokens // 32, 32, head_dim)
    return largest(scores, max(1, 32 * kept // head_dim), 2).reshape(x.shape)


@pytest.mark.parametrize("rule", ["magnitude", "channel-magnitude", "output-aware", "think"])
@pytest.mark.parametrize("name", ["llama", "llama-mha", "qwen3"])
def test_zeros_are_where_the_rule_drops_elements(rng, rule, name, monkeypatch):
    model, ids, seen = make(name, dtype=torch.float64), context(2, rng.randrange(80, 200)), {}

    def observed(module, query, *args, **kwargs):
        seen[module.layer_idx] = query[:, :, -32:].double().numpy()
        return sdpa_attention_forward(module, query, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", observed)
    dense = read(model, ids)
    shares = rng.choice([(0.5, 0.75), (0.7, 0.0), (0.0, 0.5)])
    pressed = read(model, ids, ElementPress(*shares, rule=rule, window=WINDOW))
    end = (ids.shape[1] - WINDOW) // TILE * TILE
    assert end > 0
    for number, (before, after) in enumerate(zip(dense.layers, pressed.layers)):
        for role, share in zip(("key", "value"), shares):
            tensors = [getattr(layer, f"{role}s") for layer in (before, after)]
            for row in range(2):
                x, got = (tensor[row].numpy() for tensor in tensors)
                expected = x.copy()
                if share:
                    arguments = x[:, :end], before.keys[row].numpy(), seen[number][row]
                    mask = kept_by(rule, role, *arguments, int(HEAD_DIM * (1 - share) + 1e-6))
                    expected[:, :end] *= mask
                assert np.array_equal(got, expected)


def test_random_elements_differ_from_layer_to_layer(rng):
    model = make()
    pressed = read(model, context(1, TILE + WINDOW), ElementPress(0.5, 0.5, rule="random", window=WINDOW))
    found = [x[0, :, :TILE] != 0 for layer in pressed.layers for x in (layer.keys, layer.values)]
    assert all(bool((mask.sum(-1) == HEAD_DIM // 2).all()) for mask in found)
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("rule", ["magnitude", "channel-magnitude", ("magnitude", "channel-magnitude")], ids=str)
def test_the_press_writes_what_a_sparse_cache_holds(rng, rule):
    model, ids = make(dtype=torch.bfloat16), context(2, 230)
    pressed = read(model, ids, ElementPress(0.25, 0.25, rule=rule, window=WINDOW))
    key_rule, value_rule = rule if isinstance(rule, tuple) else (rule, rule)
    cache = prefill(model, ids, sparsity=0.25, key_rule=key_rule, value_rule=value_rule, window=WINDOW)
    for dense, sparse in zip(pressed.layers, cache.layers):
        assert not any(count for what, count in sparse.kv.statistics().items() if "dropped" in what)
        for row in range(2):
            assert all(same_bits(*both) for both in zip(sparse.kv.dense(row), (dense.keys[row], dense.values[row])))


class Largest(rules.Rule):
    name = "of a user"
    per_token = True

    def mask(self, x, kept, role):
        return rules.largest(x, kept, 3)


def test_a_rule_of_the_user_s_own_and_the_share_of_both(rng):
    press = ElementPress(rule=Largest(), window=0)
    press.compression_ratio = 0.75
    assert (press.key_sparsity, press.value_sparsity, press.compression_ratio) == (0.75, 0.75, 0.75)
    model, ids = make(), context(1, TILE)
    dense, pressed = read(model, ids), read(model, ids, press)
    for before, after in zip(dense.layers, pressed.layers):
        top = before.keys.topk(4, dim=3)
        expected = torch.zeros_like(before.keys).scatter(3, top.indices, top.values)
        assert torch.equal(after.keys, expected)
    assert ElementPress(0.5).compression_ratio == 0.25


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"key_sparsity": 1.0}, ValueError, "key_sparsity must be from 0 to below 1, got 1.0"),
        ({"value_sparsity": "0.5"}, TypeError, "value_sparsity must be a real number, got str"),
        ({"rule": "smallest"}, ValueError, "rule must be one of 'magnitude'"),
        ({"rule": ("thinv", "thinv")}, ValueError, "rule: think prunes keys and thinv values"),
        ({"rule": ("magnitude",)}, ValueError, r"a tuple of two, .keys, values., got 1"),
        ({"window": -1}, ValueError, "window must be at least 0, got -1"),
        ({"window": 1.5}, TypeError, "window must be an integer, got float"),
    ],
    ids=str,
)
def test_wrong_arguments_of_the_press(arguments, error, message):
    with pytest.raises(error, match=message):
        ElementPress(**arguments)
    press = ElementPress()
    with pytest.raises(ValueError, match="compression_ratio must be from 0 to below 1, got 1"):
        press.compression_ratio = 1


# ---- prefill: any press, then a compressed cache ---------------------------------------------------------------------

PRESSES = {
    "none": lambda: None,
    "knorm": lambda: KnormPress(compression_ratio=0.4),
    "snapkv": lambda: SnapKVPress(compression_ratio=0.4, window_size=8),
    "streaming": lambda: StreamingLLMPress(compression_ratio=0.4),
    "pyramid": lambda: PyramidKVPress(compression_ratio=0.4, window_size=8, beta=2),
    "rerotation": lambda: KeyRerotationPress(KnormPress(compression_ratio=0.4)),
    "elements": lambda: ElementPress(0.5, 0.5, window=WINDOW),
    "composed": lambda: ComposedPress([KnormPress(compression_ratio=0.4), ElementPress(0.5, 0.5, window=WINDOW)]),
}


@pytest.mark.parametrize("name", PRESSES)
@pytest.mark.parametrize("question", [1, 50])
def test_what_a_press_leaves_goes_on_compressed(rng, name, question):
    """Logits of a question, which attends to every token left, and of an answer after it, beside kvpress's dense cache
    in float64."""
    model, ids, more = make(), context(2), torch.randint(1, 89, (2, question + 20))
    dense = read(model, ids, PRESSES[name]())
    lengths = [layer.keys.shape[2] for layer in dense.layers]
    cache = prefill(model, ids, PRESSES[name](), **KEPT)
    assert [layer.kv.lengths.tolist() for layer in cache.layers] == [[length] * 2 for length in lengths]
    assert (len(set(lengths)) > 1) == (name == "pyramid")
    start = lengths[0] if name == "rerotation" else CONTEXT
    assert cache.get_seq_length() == start

    oracle_model = copy.deepcopy(model).double()
    for layer in dense.layers:
        layer.keys, layer.values = layer.keys.half().double(), layer.values.half().double()
    with torch.no_grad():
        got = [model(more[:, :question], past_key_values=cache).logits]
        got += [model(more[:, i : i + 1], past_key_values=cache).logits for i in range(question, more.shape[1])]
        oracle_model.config._attn_implementation = "sdpa"
        expected = [
            oracle_model(more[:, i : i + 1], past_key_values=dense, position_ids=torch.full((2, 1), start + i)).logits
            for i in range(more.shape[1])
        ]
    got, expected = torch.cat(got, dim=1).double(), torch.cat(expected, dim=1)
    assert (got - expected).norm() / expected.norm() < 5e-3


def test_generate_after_a_press(rng):
    model, ids, question = make(dtype=torch.bfloat16), context(2), torch.randint(1, 89, (2, 7))
    cache = prefill(model, ids, SnapKVPress(compression_ratio=0.5, window_size=8), sparsity=0.5, window=WINDOW)
    answer = model.generate(torch.cat([ids, question], dim=1), past_key_values=cache, max_new_tokens=90)
    assert answer.shape == (2, CONTEXT + 97) and cache.get_seq_length() == CONTEXT + 96
    assert cache.layers[1].kv.lengths.tolist() == [CONTEXT // 2 + 96] * 2


def test_heavy_hitters_of_eager_attention(rng):
    """H2O wants attention weights, which sdpa does not give: the prompt is read eagerly, what follows is not."""
    model, ids, question = make(), context(2), torch.randint(1, 89, (2, 9))
    model.set_attn_implementation("eager")
    dense = read(model, ids, ObservedAttentionPress(compression_ratio=0.5))
    model.set_attn_implementation("sdpa")
    cache = SparseKVCache.from_cache(dense, model, seq_length=CONTEXT, **KEPT)
    with torch.no_grad():
        got = model(question, past_key_values=cache).logits
        positions = torch.arange(CONTEXT, CONTEXT + 9)[None]
        expected = model(question, past_key_values=dense, position_ids=positions).logits
    assert cache.layers[1].kv.lengths.tolist() == [CONTEXT // 2 + 9] * 2
    assert (got - expected).norm() / expected.norm() < 5e-3


def test_kvpress_may_be_imported_last(rng, monkeypatch):
    """It then wraps the attention function of SparseKVCache too."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, NAME, attention_patch(ALL_ATTENTION_FUNCTIONS[NAME]))
    model, ids = make(), context()
    cache = SparseKVCache.from_cache(read(model, ids, KnormPress(0.5)), model, seq_length=CONTEXT, **KEPT)
    new = torch.randint(1, 89, (1, 3))
    with torch.no_grad():
        assert model(new, past_key_values=cache).logits.isfinite().all()
    assert cache.layers[0].kv.lengths.tolist() == [CONTEXT // 2 + 3]


def test_eviction_and_sparsity_multiply(rng):
    model = make(dtype=torch.bfloat16, head_dim=64, num_key_value_heads=4, max_position_embeddings=4096)
    ids = context(1, 2048)
    dense = sum(x.nbytes for layer in read(model, ids).layers for x in (layer.keys, layer.values))
    evicting = KnormPress(compression_ratio=0.75)
    evicted = sum(x.nbytes for layer in read(model, ids, evicting).layers for x in (layer.keys, layer.values))
    both = prefill(model, ids, evicting, sparsity=0.7, window=0, capacity=512).nbytes()
    assert evicted == dense // 4 and both < 0.7 * evicted


@pytest.mark.parametrize(
    "press, arguments, error, message",
    [
        (lambda: AdaKVPress(KnormPress(0.5)), {}, ValueError, "masked_key_indices masks tokens head by head"),
        (lambda: DecodingPress(KnormPress(0.5)), {}, ValueError, "DecodingPress compresses while decoding"),
        (lambda: "snapkv", {}, TypeError, "press must be a kvpress BasePress or None, got str"),
        (lambda: None, {"sparsity": 1.5}, ValueError, "sparsity must be from 0 to 1, got 1.5"),
        (lambda: None, {"dtype": None}, ValueError, "computes in float32"),
        (lambda: None, {"input_ids": torch.ones(5, dtype=torch.long)}, ValueError, r"shape \(B, T\) with tokens"),
        (lambda: None, {"model": torch.nn.Linear(1, 1)}, TypeError, "model must be a Transformers model, got Linear"),
    ],
    ids=["adakv", "decoding", "a name", "sparsity", "float32", "1-D", "no model"],
)
def test_what_prefill_refuses(press, arguments, error, message, rng):
    options = {"model": make(), "input_ids": context(), "dtype": torch.float16} | arguments
    with pytest.raises(error, match=message):
        prefill(options.pop("model"), options.pop("input_ids"), press(), **options)


def test_another_attention_implementation_is_refused_before_the_prompt_is_read(rng):
    model = make()
    model.set_attn_implementation("eager")
    model.forward = model.model.forward = None
    with pytest.raises(ValueError, match="'sdpa' attention, the model has 'eager'"):
        prefill(model, context(), KnormPress(0.5), dtype=torch.float16)


def test_presses_that_mask_heads_still_work_on_dense_caches(rng):
    """After a SparseKVCache was made of the model."""
    model, ids, new = make(), context(), torch.randint(1, 89, (1, 5))
    press = AdaKVPress(KnormPress(0.5))

    def logits():
        cache = read(model, ids, press)
        with torch.no_grad():
            positions = torch.arange(CONTEXT, CONTEXT + 5)[None]
            return model(new, past_key_values=cache, position_ids=positions).logits

    before = logits()
    SparseKVCache(model, dtype=torch.float16)
    assert model.config._attn_implementation == "sparse_kv"
    assert torch.equal(logits(), before)
    with torch.no_grad():
        unmasked = model(new, past_key_values=read(model, ids)).logits
    assert not torch.allclose(unmasked, before, atol=1e-3)


# ---- The pipeline ----------------------------------------------------------------------------------------------------

TEXT = "In a small town by the sea there lived a keeper of the light. " * 3
QUESTIONS = ["Who lived there?", "Where was the town? Tell me all that you know about it.", "Why?"]


@pytest.fixture
def talker():
    model = make(vocab_size=len(tiny_tokenizer.CHARACTERS), pad_token_id=None, initializer_range=0.5)
    return model, tiny_tokenizer.make()


# kvpress's own makes one mask for all layers, which the layers of "pyramid" do not fit.
@pytest.mark.parametrize("name", ["none", "knorm", "snapkv", "rerotation", "composed"])
def test_answers_are_those_of_kvpress_where_all_is_kept(rng, name, rounding, talker):
    model, tokenizer = talker
    ours = SparseKVPressPipeline(model=model, tokenizer=tokenizer, keep=HEAD_DIM, window=WINDOW)
    theirs = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    arguments = {"questions": QUESTIONS, "max_new_tokens": 80}
    compared = 0
    for attempt in range(10):  # an answer that hangs on the last bits of a near tie is not compared
        text = f"{attempt} {TEXT}"
        expected = theirs(text, press=PRESSES[name](), **arguments)["answers"]
        rounding.noise = 5e-4
        shaken = theirs(text, press=PRESSES[name](), **arguments)["answers"]
        rounding.noise = 0.0
        found = ours(text, press=PRESSES[name](), dtype=torch.float16, **arguments)["answers"]
        stable = [i for i in range(len(QUESTIONS)) if shaken[i] == expected[i]]
        compared += len(stable)
        assert [found[i] for i in stable] == [expected[i] for i in stable]
        if compared >= 3:
            return
    pytest.fail("every answer hung on a near tie")


def test_answers_do_not_depend_on_the_question_before(rng, talker):
    model, tokenizer = talker
    pipe = pipeline("sparse-kv-press-text-generation", model=model, tokenizer=tokenizer)
    assert type(pipe) is SparseKVPressPipeline
    options = {"press": KnormPress(0.3), "sparsity": 0.7, "window": 0, "dtype": torch.float16, "max_new_tokens": 70}
    together = pipe(TEXT, questions=QUESTIONS, **options)["answers"]
    assert together == [pipe(TEXT, question=question, **options)["answer"] for question in QUESTIONS]
    assert pipe(TEXT, questions=QUESTIONS[::-1], **options)["answers"] == together[::-1]


def test_what_the_pipeline_refuses(talker):
    model, tokenizer = talker
    pipe = SparseKVPressPipeline(model=model, tokenizer=tokenizer)
    with pytest.raises(TypeError, match="SparseKVPressPipeline has no option sparsty"):
        pipe(TEXT, question="Who?", sparsty=0.7)
    with pytest.raises(ValueError, match="cache is made here"):
        pipe(TEXT, question="Who?", cache=DynamicCache())
    with pytest.raises(ValueError, match="DecodingPress compresses while decoding"):
        pipe(TEXT, question="Who?", press=DecodingPress(KnormPress(0.5)), dtype=torch.float16)


# ---- Versions --------------------------------------------------------------------------------------------------------


def test_an_older_kvpress_is_refused():
    with pytest.raises(ImportError, match=r"serves kvpress 0\.5\.5 and later, found 0\.5\.4"):
        check_found("0.5.4")


@pytest.mark.parametrize("found", ["0.5.6", "0.6.0", "1.0rc1", "of unknown version"])
def test_another_kvpress_is_tried_with_a_warning(found):
    with pytest.warns(UserWarning, match=f"tested with kvpress 0.5.5, found {found}"):
        check_found(found)
