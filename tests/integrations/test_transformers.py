"""SparseKVCache in Transformers' generate: the tokens of sdpa where nothing is pruned, and where something is those of
dense tensors that were pruned by the tests' own rule."""

from __future__ import annotations

import pytest
import torch

from tests.support import oracle
from tests.support.plain_kv_cache import PlainKVCache

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cute_kernels import KVCache
from cute_kernels._cache.rows import core_of
from cute_kernels.integrations.transformers import SparseKVCache, _layer
from tests.support.tiny_models import (
    CONFIGS,
    NEW,
    PROMPT,
    assert_same_tokens,
    assert_sdpa_tokens,
    dense,
    forward,
    make,
    prompts,
    sparse,
    tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread", "attention")

# ---- Nothing pruned: the tokens of sdpa ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_sdpa(rng, attention, name, place):
    lengths = (PROMPT, rng.randrange(1, PROMPT), 1)
    _, cache = assert_sdpa_tokens(attention, lambda: (make(name, device=place), prompts(lengths)))
    assert cache.get_seq_length() == PROMPT + NEW - 1
    for layer in cache.layers:
        assert layer.kv.lengths.tolist() == [length + NEW - 1 for length in lengths]  # padding never entered


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 2, "do_sample": True, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
        {"prefill_chunk_size": 48},
        {"prefill_chunk_size": 7},
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()),
)
@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
def test_ways_to_generate_give_the_tokens_of_sdpa(rng, attention, options, padded, place):
    lengths = (PROMPT, rng.randrange(1, 90)) if padded else (PROMPT,) * 2
    draw = lambda: (make(device=place), prompts(lengths))  # noqa: E731
    assert_sdpa_tokens(attention, draw, seed=rng.randrange(2**31), **options)


@pytest.mark.parametrize("window", [0, 8, 64])
def test_prompt_lookup_gives_the_tokens_of_sdpa(rng, attention, window, place):
    def draw():
        ids = torch.randint(1, 89, (1, 20)).repeat(1, 5)  # repeats itself: candidates are found, and rejected
        return make(device=place), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    options = {"prompt_lookup_num_tokens": 5, "eos_token_id": 0}  # Transformers 5.0 looks for an end in any case
    assert_sdpa_tokens(attention, draw, kept={"window": window}, max_new_tokens=80, **options)


def test_turns_on_one_cache_give_the_tokens_of_sdpa(rng, attention, place):
    """The second turn's prompt is long and padded on its left, in the midst of what is cached."""

    def run(drawn, cache):
        model, *turns = drawn
        ids, mask = torch.zeros(2, 0, dtype=torch.long), torch.zeros(2, 0, dtype=torch.long)
        for turn in turns:
            inputs = {
                "input_ids": torch.cat([ids, turn["input_ids"]], dim=1),
                "attention_mask": torch.cat([mask, turn["attention_mask"]], dim=1),
            }
            ids = tokens(model, inputs, cache)
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, NEW, dtype=torch.long)], dim=1)
        return ids

    def draw():
        return make(device=place), prompts((PROMPT, 60)), prompts((70, rng.randrange(1, 70))), prompts((3, 2))

    assert_same_tokens(attention, draw, run, (dense, lambda drawn: sparse(drawn[0])))


def test_answers_masked_after_their_end_leave_the_cache(rng, attention):
    """A row that ended early was fed padding; the next turn's mask says so."""
    window = rng.choice([8, 64])

    def run(drawn, cache):
        model, first, more, ended = drawn
        answer = tokens(model, first, cache)
        said = torch.ones(2, NEW, dtype=torch.long)
        said[1, ended:] = 0
        inputs = {
            "input_ids": torch.cat([answer, more["input_ids"]], dim=1),
            "attention_mask": torch.cat([first["attention_mask"], said, more["attention_mask"]], dim=1),
        }
        return tokens(model, inputs, cache)

    def draw():
        return make(), prompts((PROMPT, 60)), prompts((30, 20)), rng.randrange(1, NEW)

    caches = dense, lambda drawn: sparse(drawn[0], window=window)
    (*_, ended), cache = assert_same_tokens(attention, draw, run, caches)
    assert cache.layers[0].kv.lengths.tolist() == [PROMPT + 2 * NEW + 30 - 1, 60 + ended + 20 + NEW - 1]


def test_a_longer_answer_than_there_was_room_for(rng, attention):
    answer = _layer.HEADROOM + 30

    def draw():
        return make(num_hidden_layers=1), prompts((5,))

    _, cache = assert_sdpa_tokens(attention, draw, max_new_tokens=answer)
    assert cache.get_seq_length() == 5 + answer - 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_logits_of_16_bit_models(rng, dtype, monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    model, inputs = make(dtype=dtype), prompts((PROMPT, 30))
    answer = torch.randint(1, 89, (2, NEW))
    found = []
    for cache in (DynamicCache(config=model.config), sparse(model, dtype=None)):
        logits = [forward(model, cache, inputs["input_ids"], inputs["attention_mask"])]
        for i in range(NEW):
            mask = torch.cat([inputs["attention_mask"], torch.ones(2, i + 1, dtype=torch.long)], dim=1)
            logits.append(forward(model, cache, answer[:, i : i + 1], mask))
        found.append(torch.stack(logits))
    expected, got = found
    assert (got - expected).norm() / expected.norm() < {torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_greedy_tokens_of_16_bit_models(rng, dtype, place, monkeypatch):
    """The likeliest tokens after all those before, or as likely within the rounding of 16 bits."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    model = make("qwen3", dtype=dtype, head_dim=128, device=place)
    inputs = {name: x.to(place) for name, x in prompts((200, 120, 7)).items()}
    answer = tokens(model, inputs, sparse(model, dtype=None, window=32), max_new_tokens=110).to(place)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(answer[:, 200:])], dim=1)
    with torch.no_grad():
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(answer, attention_mask=mask, position_ids=position_ids).logits[:, 199:-1].float()
    chosen = logits.gather(2, answer[:, 200:, None])[..., 0]
    assert (logits.amax(2) - chosen).max() < {torch.float16: 0.05, torch.bfloat16: 0.3}[dtype] * logits.std()
    beams = tokens(model, inputs, sparse(model, dtype=None), num_beams=3)
    assert beams.shape == (3, 200 + NEW)


def test_the_readme_s_line(rng, monkeypatch):
    """A model in 16 bits, nothing else said."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", sdpa_attention_forward)
    model, inputs = make(dtype=torch.bfloat16, head_dim=64), prompts((PROMPT, 12))
    answer = model.generate(**inputs, past_key_values=SparseKVCache(model.config, sparsity=0.7), max_new_tokens=NEW)
    assert answer.shape == (2, PROMPT + NEW)


# ---- Pruned: the tokens of dense tensors pruned by the tests ---------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"sparsity": 0.7}, {"key_keep": 12, "value_keep": 5}, {"keep": 6, "window": 0}, {"keep": 6, "window": 100}],
    ids=str,
)
def test_pruned_tokens_are_those_of_dense_pruned_tensors(rng, attention, options, monkeypatch):
    """One layer: what it caches comes from the tokens alone, so that both caches prune the same values."""
    lengths, made = (PROMPT, rng.randrange(1, PROMPT)), []

    class Plain(PlainKVCache):
        def attend(self, q, **options):
            return attention.shake(super().attend(q, **options))

    def cache_of(kind, model):
        def make_one(**sizes):
            made.append(kind(**sizes))
            return made[-1]

        monkeypatch.setattr(_layer, "KVCache", make_one)
        monkeypatch.setattr(_layer, "core_of", lambda kv: kv if kind is Plain else core_of(kv))
        return sparse(model, **{"keep": None} | options)

    def draw():
        return make(num_hidden_layers=1), prompts(lengths)

    def run(drawn, cache):
        return tokens(*drawn, cache, max_new_tokens=80)

    # Tokens that repeat themselves without end are alike in the values they keep, which no slot has room for.
    def untrimmed(cache):
        return not any(value for name, value in made[-1].statistics().items() if "trimmed" in name)

    caches = lambda drawn: cache_of(Plain, drawn[0]), lambda drawn: cache_of(KVCache, drawn[0])
    assert_same_tokens(attention, draw, run, caches, untrimmed)
    plain, tested = made[-2:]
    for row in range(2):
        assert all(oracle.same_bits(*pair) for pair in zip(tested.dense(row), plain.dense(row)))


def test_a_pruned_cache_is_smaller(rng):
    model = make(num_key_value_heads=4, head_dim=64)
    cache = sparse(model, keep=None, sparsity=0.7, capacity=2048)
    tokens(model, prompts((2000,)), cache, max_new_tokens=3)
    assert cache.nbytes() < 0.6 * 2 * 2 * 2048 * 4 * 64 * 2  # layers, keys and values, tokens, heads, channels, bytes
