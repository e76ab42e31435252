"""SparseKVCache.from_cache: what a dense cache holds, with tokens evicted or not, goes on as a SparseKVCache."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from tests.support.oracle import prune, same_bits

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cute_kernels.integrations.transformers import SparseKVCache
from tests.support.tiny_models import (
    CONFIGS,
    HEAD_DIM,
    NEW,
    PROMPT,
    assert_same_tokens,
    forward,
    make,
    prompts,
    tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread", "attention")

TILE = 64
KEPT = {"keep": HEAD_DIM, "window": 8, "dtype": torch.float16}


def read_by(model, cache, inputs):
    """The cache once it has read all columns but the last."""
    ids, mask = (inputs[name][:, :-1].to(model.device) for name in ("input_ids", "attention_mask"))
    with torch.no_grad():
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        model.model(ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache)
    return cache


def converted(model, inputs, **options):
    dense = read_by(model, DynamicCache(config=model.config), inputs)
    mask = inputs["attention_mask"][:, :-1].to(model.device)
    return SparseKVCache.from_cache(dense, model, attention_mask=mask, **KEPT | options)


def evict(cache, counts, rng):
    """Of layer i all but counts[i] tokens, others in every head and sequence."""
    for layer, count in zip(cache.layers, counts):
        batch, heads, length, _ = layer.keys.shape
        chosen = torch.rand(batch, heads, length).argsort(2)[:, :, :count].sort(2).values[..., None]
        chosen = chosen.to(layer.keys.device)
        layer.keys, layer.values = (x.take_along_dim(chosen, dim=2) for x in (layer.keys, layer.values))
        if rng.random() < 0.5:  # as presses that slice leave them
            layer.keys = layer.keys.transpose(2, 3).contiguous().transpose(2, 3)
    return cache


def assert_same_content(a, b):
    assert a.get_seq_length() == b.get_seq_length()
    for one, other in zip(a.layers, b.layers):
        assert torch.equal(one.kv.lengths, other.kv.lengths)
        for row in range(one.kv.batch):
            assert all(same_bits(x.cpu(), y.cpu()) for x, y in zip(one.kv.dense(row), other.kv.dense(row)))


# ---- Nothing evicted -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pruned", [False, True], ids=["all kept", "pruned"])
def test_goes_on_like_a_cache_that_was_sparse_from_the_start(rng, name, pruned, place):
    model, inputs = make(name, device=place), prompts((PROMPT, rng.randrange(2, PROMPT), 2))
    options = {"keep": None, "key_keep": 6, "value_keep": 9} if pruned else {}
    expected = read_by(model, SparseKVCache(model, **KEPT | options), inputs)
    cache = converted(model, inputs, **options)
    assert_same_content(cache, expected)
    assert torch.equal(tokens(model, inputs, cache), tokens(model, inputs, expected))
    assert_same_content(cache, expected)


@pytest.mark.parametrize(
    "copies, options",
    [(1, {}), (3, {"num_beams": 3}), (2, {"do_sample": True, "num_return_sequences": 2})],
    ids=["greedy", "beams", "sampled"],
)
def test_answers_are_those_of_the_dense_cache(rng, attention, copies, options, place):
    draw = lambda: (make(device=place), prompts((PROMPT, 30)))  # noqa: E731
    seed = rng.randrange(2**31)

    def run(drawn, cache):
        cache.batch_repeat_interleave(copies)
        return tokens(*drawn, cache, seed, **options)

    caches = (
        lambda drawn: read_by(drawn[0], DynamicCache(config=drawn[0].config), drawn[1]),
        lambda drawn: converted(*drawn),
    )
    _, cache = assert_same_tokens(attention, draw, run, caches)
    assert cache.get_seq_length() == PROMPT + NEW - 1


def test_several_turns_with_padding_between_them(rng, attention):
    """Dense until the third turn: a row that ended early was fed padding, the next prompt is padded on its left."""

    def draw():
        turns = [prompts((PROMPT, 60)), prompts((30, 20)), prompts((3, 2))]
        turns[0]["attention_mask"][1, -rng.randrange(1, 9) :] = 0
        joined = {name: torch.cat([turn[name] for turn in turns], dim=1) for name in turns[0]}
        return make(), joined

    def run(drawn, cache):
        return tokens(*drawn, cache)

    caches = lambda drawn: read_by(drawn[0], DynamicCache(), drawn[1]), lambda drawn: converted(*drawn)
    (_, inputs), cache = assert_same_tokens(attention, draw, run, caches)
    expected = inputs["attention_mask"].sum(1) + NEW - 1
    assert cache.layers[1].kv.lengths.tolist() == expected.tolist()
    cache.crop(-(NEW - 1 + 3))  # answer and last turn
    assert cache.layers[1].kv.lengths.tolist() == inputs["attention_mask"][:, :-3].sum(1).tolist()


# ---- Evicted: float64 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [None, 6], ids=["all kept", "pruned"])
@pytest.mark.parametrize("question", [1, 9, 45])
def test_evicted_tokens_stay_out_and_positions_go_on(rng, kept, question, place, monkeypatch):
    """Logits of a question and of an answer after it, against dense tensors pruned by the tests in a model of
    float64."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    model = make(device=place)
    oracle_model = copy.deepcopy(model).double()
    window, seen = 32, 200
    ids = torch.randint(1, 89, (2, seen + question + 10), device=place)
    dense = DynamicCache(config=model.config)
    with torch.no_grad():
        model.model(ids[:, :seen], past_key_values=dense)
    counts = [window + 2 * TILE, window + TILE + rng.randrange(9)]  # no other tile gets full before the end
    evict(dense, counts, rng)

    cache = SparseKVCache.from_cache(
        dense, model, seq_length=seen, window=window, keep=kept or HEAD_DIM, dtype=torch.float16
    )
    assert cache.get_seq_length() == seen
    assert [layer.kv.lengths.tolist() for layer in cache.layers] == [[count] * 2 for count in counts]

    oracle = DynamicCache(config=model.config)
    for number, layer in enumerate(dense.layers):
        end = (counts[number] - window) // TILE * TILE
        held = (
            torch.cat([prune(x[:, :, :end].half(), kept or HEAD_DIM), x[:, :, end:].half()], dim=2).double()
            for x in (layer.keys.cpu(), layer.values.cpu())
        )
        oracle.update(*(x.to(place) for x in held), number)
    with torch.no_grad():
        got = [model(ids[:, seen : seen + question], past_key_values=cache).logits]
        for column in range(seen + question, ids.shape[1]):
            got.append(model(ids[:, column : column + 1], past_key_values=cache).logits)
        expected = [
            oracle_model(
                ids[:, column : column + 1],
                past_key_values=oracle,
                position_ids=torch.full((2, 1), column, device=place),
            ).logits
            for column in range(seen, ids.shape[1])
        ]
    got, expected = torch.cat(got, dim=1).double(), torch.cat(expected, dim=1)
    assert (got - expected).norm() / expected.norm() < 3e-3
    assert [layer.kv.lengths.tolist() for layer in cache.layers] == [[count + question + 10] * 2 for count in counts]


def test_generate_after_an_eviction(rng, attention):
    """generate takes the ids of the whole prompt; answers longer than the memory that was taken at first."""
    answer, seen = 340, PROMPT - 1

    def draw():
        model, inputs = make(max_position_embeddings=1024), prompts((PROMPT, PROMPT))
        return model, inputs, evict(read_by(model, DynamicCache(), inputs), (70, 40), rng)

    def run(drawn, cache):
        model, inputs, _ = drawn
        if isinstance(cache, SparseKVCache):
            return tokens(model, inputs, cache, max_new_tokens=answer)[:, PROMPT:]
        found, new = [], inputs["input_ids"][:, -1:]
        for column in range(seen, seen + answer):
            with torch.no_grad():
                logits = model(new, past_key_values=cache, position_ids=torch.full((2, 1), column)).logits
            new = logits[:, -1].argmax(-1, keepdim=True)
            found.append(new)
        return torch.cat(found, dim=1)

    caches = (
        lambda drawn: copy.deepcopy(drawn[2]),
        lambda drawn: SparseKVCache.from_cache(drawn[2], drawn[0], seq_length=seen, **KEPT),
    )
    _, cache = assert_same_tokens(attention, draw, run, caches)
    assert cache.get_seq_length() == seen + answer
    assert [layer.kv.lengths.tolist() for layer in cache.layers] == [[70 + answer] * 2, [40 + answer] * 2]


def test_what_came_after_an_eviction_can_be_taken_back(rng):
    model, seen = make(), 90
    ids = torch.randint(1, 89, (2, seen))
    dense = DynamicCache()
    forward(model, dense, ids)
    evict(dense, (70, 9), rng)
    make_cache = lambda: SparseKVCache.from_cache(dense, model, seq_length=seen, **KEPT)  # noqa: E731
    new = torch.randint(1, 89, (2, 100))
    mask = torch.ones(2, seen + 100, dtype=torch.long)
    mask[1, seen : seen + 60] = 0  # a question padded on its left
    cache = make_cache()
    forward(model, cache, new, mask)
    held = [layer.kv.lengths.tolist() for layer in cache.layers]
    assert held == [[170, 110], [109, 49]]
    cache.crop(-30)
    assert [layer.kv.lengths.tolist() for layer in cache.layers] == [[140, 80], [79, 19]]

    # A mask that ends earlier in one row; what follows is as without the columns that were taken back.
    shorter = torch.cat([mask[:, : seen + 70], torch.ones(2, 1, dtype=torch.long)], dim=1)
    shorter[0, seen + 65 : seen + 70] = 0
    got = forward(model, cache, new[:, :1], shorter)
    assert [layer.kv.lengths.tolist() for layer in cache.layers] == [[136, 81], [75, 20]]
    expected = []
    for row, columns in enumerate((slice(0, 65), slice(60, 70))):
        alone = DynamicCache()
        for number, layer in enumerate(dense.layers):
            alone.update(layer.keys[row : row + 1], layer.values[row : row + 1], number)
        for position, token in enumerate([*new[row, columns], new[row, 0]]):
            with torch.no_grad():
                logits = model(
                    token.view(1, 1), past_key_values=alone, position_ids=torch.tensor([[seen + position]])
                ).logits
        expected.append(logits[0, -1])
    assert torch.allclose(got, torch.stack(expected), atol=1e-2, rtol=1e-2)

    cache = make_cache()
    for cut in (lambda: cache.crop(-1), lambda: cache.crop(seen - 1)):
        with pytest.raises(ValueError, match=r"of the first 90 columns some were evicted.*89 would be left"):
            cut()
    forward(model, cache, new[:, :3])
    mask = torch.ones(2, seen + 4, dtype=torch.long)
    mask[0, seen - 2 : seen + 3] = 0
    with pytest.raises(ValueError, match=r"some were evicted.*88 would be left"):
        forward(model, cache, new[:, :1], mask)
    cache.crop(-3)
    assert [layer.kv.lengths.tolist() for layer in cache.layers] == [[70, 70], [9, 9]]
    cache.reset()
    forward(model, cache, ids[:, :20])
    cache.crop(-19)
    assert cache.get_seq_length() == 1


# ---- Memory ----------------------------------------------------------------------------------------------------------


def test_eviction_times_sparsity_is_the_memory_of_both(rng):
    model = make(num_key_value_heads=4, head_dim=64, max_position_embeddings=4096)
    dense = DynamicCache(config=model.config)
    for number in range(2):
        dense.update(*torch.randn(2, 2, 4, 4000, 64).half(), number)
    bytes_before = 2 * 2 * 2 * 4 * 4000 * 64 * 2  # layers, keys and values, sequences, heads, tokens, channels, bytes
    whole = SparseKVCache.from_cache(dense, model, sparsity=0.7, dtype=torch.float16, capacity=4000)
    evict(dense, (1000, 1000), rng)
    tensors = [weakref.ref(x) for layer in dense.layers for x in (layer.keys, layer.values)]
    cache = SparseKVCache.from_cache(
        dense, model, seq_length=4000, sparsity=0.7, dtype=torch.float16, capacity=1000, consume=True
    )
    assert whole.nbytes() < 0.55 * bytes_before
    assert cache.nbytes() < 0.6 * 0.25 * bytes_before
    assert not any(x() is not None for x in tensors)
    assert dense.get_seq_length() == 0
    with torch.no_grad():  # it can be filled again
        model.model(torch.randint(1, 89, (1, 7)), past_key_values=dense)
    assert dense.get_seq_length() == 7


def test_the_dense_cache_stays_as_it_was(rng):
    model, inputs = make(), prompts((PROMPT,))
    dense = read_by(model, DynamicCache(), inputs)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in dense.layers]
    cache = SparseKVCache.from_cache(dense, model, sparsity=0.7, window=0, dtype=torch.float16)
    tokens(model, inputs, cache)
    for layer, (keys, values) in zip(dense.layers, before):
        assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)


# ---- Refused ---------------------------------------------------------------------------------------------------------


def filled(model, layers=2, lengths=(20, 20), kind=DynamicLayer, head_dim=HEAD_DIM, dtype=torch.float32, batch=(1, 1)):
    cache = DynamicCache()
    cache.layers = [kind() if kind is DynamicLayer else kind(sliding_window=8) for _ in range(layers)]
    for number in range(layers):
        shape = (batch[number % 2], 2, lengths[number % 2], head_dim)
        cache.update(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), number)
    return cache


class Quantized(QuantizedLayer):
    """One that needs no other package."""

    def __init__(self, **_):
        DynamicLayer.__init__(self)

    def _quantize(self, *_):
        raise NotImplementedError

    _dequantize = _quantize

    def update(self, keys, values, *_):
        return keys, values


def ragged(model):
    cache = filled(model)
    cache.layers[1].keys = [torch.randn(5, HEAD_DIM), torch.randn(6, HEAD_DIM)]
    return cache


def unlike(model):
    cache = filled(model)
    cache.layers[1].values = cache.layers[1].values[:, :, :-1]
    return cache


def masked_by_head(model):
    index = torch.zeros(3, dtype=torch.long)
    model.model.layers[1].self_attn.masked_key_indices = (index, index, index)
    return filled(model)


@pytest.mark.parametrize(
    "cache, arguments, error, message",
    [
        (lambda m: ((torch.ones(1), torch.ones(1)),), {}, TypeError, "must be a Transformers DynamicCache, got tuple"),
        (lambda m: SparseKVCache(m, **KEPT), {}, ValueError, r"layer 0 is of another kind \(SparseLayer\)"),
        (lambda m: StaticCache(m.config, 30), {}, ValueError, r"layer 0 is of another kind \(StaticLayer\)"),
        (
            lambda m: filled(m, kind=DynamicSlidingWindowLayer),
            {},
            ValueError,
            r"layer 0 has a sliding window \(DynamicSlidingWindowLayer\)",
        ),
        (lambda m: filled(m, kind=Quantized), {}, ValueError, r"layer 0 is quantized \(Quantized\)"),
        (lambda m: filled(m, layers=3), {}, ValueError, "cache has 3 layers, the model has 2"),
        (lambda m: DynamicCache(config=m.config), {}, ValueError, "layer 0 of the cache holds no tokens"),
        (lambda m: filled(m, head_dim=24), {}, ValueError, "the model has head_dim 16, layer 0 of the cache 24"),
        (ragged, {}, ValueError, r"keys of layer 1 must be one tensor .* heads of different lengths"),
        (unlike, {}, ValueError, r"keys and values of layer 1 must be alike"),
        (lambda m: filled(m, batch=(1, 2)), {}, ValueError, "same sequences: layer 0 has 1, layer 1 2"),
        (lambda m: filled(m, dtype=torch.float64), {}, ValueError, "computes in float64"),
        (masked_by_head, {}, ValueError, r"layers.1.self_attn.masked_key_indices masks tokens head by head"),
        (lambda m: filled(m, lengths=(20, 15)), {}, ValueError, "hold 15 to 20 tokens.*pass seq_length"),
        (filled, {"seq_length": 19}, ValueError, "seq_length must be at least the 20 tokens.*got 19"),
        (filled, {"seq_length": 20.0}, TypeError, "seq_length must be an integer, got float"),
        (filled, {"capacity": 19}, ValueError, "20 tokens exceed capacity = 19"),
        (filled, {"consume": 1}, TypeError, "consume must be a bool"),
        (filled, {"sparsity": 2.0}, ValueError, "sparsity"),
        (filled, {"attention_mask": [1]}, TypeError, "attention_mask must be a tensor of bool or integers, got list"),
        (filled, {"attention_mask": torch.ones(1, 20)}, TypeError, "bool or integers"),
        (
            filled,
            {"attention_mask": torch.ones(1, 19, dtype=torch.long)},
            ValueError,
            r"attention_mask must have shape \(B, columns\) = \(1, 20\).*got \(1, 19\)",
        ),
        (
            filled,
            {"seq_length": 21, "attention_mask": torch.tensor([[0] + [1] * 20])},
            ValueError,
            "attention_mask has padding and tokens were evicted",
        ),
    ],
    ids=lambda value: None if callable(value) else str(value)[:30],
)
def test_what_cannot_be_taken_over(cache, arguments, error, message, rng):
    model = make()
    found = cache(model)
    model.config._attn_implementation = "sdpa"
    options = {"dtype": torch.float16} | arguments
    with pytest.raises(error, match=message):
        SparseKVCache.from_cache(found, model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_an_offloaded_cache(rng):
    model = make()
    cache = filled(model)
    cache.offloading = True
    with pytest.raises(ValueError, match="cache is offloaded"):
        SparseKVCache.from_cache(cache, model, dtype=torch.float16)
    assert isinstance(cache, Cache)


def test_a_dtype_that_the_cache_does_not_store(rng):
    model = make(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="asked to store bfloat16, the model computes in float16"):
        SparseKVCache.from_cache(filled(model, dtype=torch.float16), model.config, dtype=torch.bfloat16)
    assert SparseKVCache.from_cache(filled(model, dtype=torch.bfloat16), model).layers[0].kv.dtype == torch.bfloat16
