"""What models and users ask of a SparseKVCache besides generation: crops, rows moved, further batches, other caches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers import DynamicCache

from cute_kernels.integrations.transformers import SparseKVCache
from tests.support.tiny_models import (
    HEAD_DIM,
    PROMPT,
    assert_same_tokens,
    dense,
    forward,
    ids_and_mask,
    make,
    prompts,
    sparse,
    tokens,
)

pytestmark = pytest.mark.usefixtures("one_thread", "attention")


def test_crop_takes_back_the_newest_tokens(rng):
    model = make()
    ids = torch.randint(1, 89, (2, 180))
    for removed in (1, 8, 9, 75, 179):
        cache = sparse(model)
        forward(model, cache, ids)
        cache.crop(torch.tensor(-removed))
        assert cache.get_seq_length() == 180 - removed
        got = forward(model, cache, ids[:, 180 - removed : 180 - removed + 1])
        expected = forward(model, DynamicCache(config=model.config), ids[:, : 180 - removed + 1])
        assert torch.allclose(got, expected, atol=1e-2, rtol=1e-2)
    cache.crop(2)  # all but two, as it is before Transformers 5.18
    assert cache.get_seq_length() == 2
    cache.crop(0)
    assert cache.get_seq_length() == 2


def test_crop_of_padded_rows(rng):
    model, inputs = make(), prompts((PROMPT, 10))
    cache = sparse(model)
    forward(model, cache, **ids_and_mask(inputs))
    cache.crop(-95)  # the second row's tokens all go, and 85 columns of padding
    assert cache.layers[0].kv.lengths.tolist() == [5, 0]
    mask = inputs["attention_mask"][:, :6].clone()
    mask[:, 5] = 1
    got = forward(model, cache, inputs["input_ids"][:, -1:], mask)
    whole = torch.cat([inputs["input_ids"][:, :5], inputs["input_ids"][:, -1:]], dim=1)
    expected = forward(model, DynamicCache(config=model.config), whole, mask)
    assert torch.allclose(got, expected, atol=1e-2, rtol=1e-2)


def test_rows_are_repeated_and_selected(rng):
    """A prompt's cache made once, copied and used for several answers."""
    model, inputs = make(), prompts((PROMPT, 40))
    shared = sparse(model)
    forward(model, shared, **ids_and_mask(inputs))
    new = torch.randint(1, 89, (6, 1))
    cache = copy.deepcopy(shared)
    cache.batch_repeat_interleave(3)
    rows = torch.arange(2).repeat_interleave(3)
    mask = torch.cat([inputs["attention_mask"][rows], torch.ones(6, 1, dtype=torch.long)], dim=1)
    got = forward(model, cache, new, mask)
    whole = torch.cat([inputs["input_ids"][rows], new], dim=1)
    assert torch.allclose(got, forward(model, DynamicCache(config=model.config), whole, mask), atol=1e-2, rtol=1e-2)

    for picked in (torch.tensor([4, 0, 3]), torch.arange(6) == 5):
        chosen = copy.deepcopy(cache)
        chosen.batch_select_indices(picked)
        ones = torch.ones(len(mask[picked]), 1, dtype=torch.long)
        got = forward(model, chosen, new[picked], torch.cat([mask[picked], ones], dim=1))
        longer = torch.cat([whole[picked], new[picked]], dim=1)
        expected = forward(model, DynamicCache(config=model.config), longer, torch.cat([mask[picked], ones], dim=1))
        assert torch.allclose(got, expected, atol=1e-2, rtol=1e-2)
    assert shared.layers[0].kv.lengths.tolist() == [PROMPT, 40]


def test_reset_makes_room_for_another_batch(rng, attention):
    model = make()
    cache = sparse(model)

    def emptied(drawn):
        cache.reset()
        assert cache.get_seq_length() == 0
        return cache

    def run(drawn, cache):
        return tokens(*drawn, cache, max_new_tokens=10)

    for lengths in ((PROMPT, 30), (20, 10), (5,), (PROMPT + 300, 1, 2)):
        assert_same_tokens(attention, lambda lengths=lengths: (model, prompts(lengths)), run, (dense, emptied))


def test_heads_are_counted_in_the_tensors(rng, attention):
    """A tensor parallel model has a share of its config's heads."""

    def of_a_whole(drawn):
        config = copy.deepcopy(drawn[0].config)
        config.num_attention_heads, config.num_key_value_heads = 16, 8
        cache = SparseKVCache(config, keep=HEAD_DIM, window=8, dtype=torch.float16)
        drawn[0].config._attn_implementation = config._attn_implementation
        return cache

    def run(drawn, cache):
        return tokens(*drawn, cache)

    _, cache = assert_same_tokens(attention, lambda: (make(), prompts((PROMPT, 3))), run, (dense, of_a_whole))
    assert cache.layers[0].kv.kv_heads == 2


def test_random_walks_through_the_cache(rng):
    """Any columns masked, crops, rows picked and repeated, ends of rows masked later: logits of every new token,
    against the row's tokens alone."""
    model = make(num_hidden_layers=2)
    cache = sparse(model, window=rng.choice([0, 8, 40]))
    rows, columns = [[] for _ in range(3)], torch.zeros(3, 0, dtype=torch.bool)
    for _ in range(40):
        step = rng.choice(["feed"] * 6 + ["one"] * 6 + ["crop", "select", "repeat", "end", "reset"])
        seen = columns.shape[1]
        if step == "reset" and rng.random() < 0.5:
            cache.reset()
            rows, columns = [[] for _ in range(3)], torch.zeros(3, 0, dtype=torch.bool)
        elif step == "crop" and seen:
            left = seen - rng.randrange(min(seen, 90) + 1)
            cache.crop(left - seen)
            columns = columns[:, :left]
        elif step == "select" and seen:
            picked = torch.tensor([rng.randrange(len(rows)) for _ in range(rng.randrange(1, 5))])
            cache.batch_select_indices(picked)
            columns, rows = columns[picked], [list(rows[i]) for i in picked]
        elif step == "repeat" and seen and len(rows) < 4:
            cache.batch_repeat_interleave(2)
            columns, rows = columns.repeat_interleave(2, 0), [list(row) for row in rows for _ in range(2)]
        elif step == "end" and seen:
            columns = columns.clone()
            columns[rng.randrange(len(rows)), rng.randrange(seen) :] = False
        rows = [row[: int(count)] for row, count in zip(rows, columns.sum(1))]
        if step in ("feed", "one"):
            new = rng.choice([1, 2, 5, 20, 90]) if step == "feed" else 1
            ids = torch.randint(1, 89, (len(rows), new))
            fresh = torch.rand(len(rows), new) < (rng.choice([0.7, 2]) if step == "feed" else 2)
            fresh[:, -1] |= fresh.any(1)  # padding on the right is refused
            if rng.random() < 0.5:
                fresh = fresh.sort(1).values  # padding on the left
            columns = torch.cat([columns, fresh], dim=1)
            positions = (columns.cumsum(1) - 1).clamp(min=0)[:, -new:]
            with torch.no_grad():
                got = model(ids, attention_mask=columns.long(), position_ids=positions, past_key_values=cache).logits
                for i, row in enumerate(rows):
                    row += ids[i, fresh[i]].tolist()
                    if row:
                        expected = model(torch.tensor([row])).logits[0, len(row) - int(fresh[i].sum()) :]
                        assert torch.allclose(got[i, fresh[i]], expected, atol=1e-2, rtol=1e-2)
            for layer in cache.layers:
                assert layer.kv.lengths.tolist() == [len(row) for row in rows]
        assert cache.get_seq_length() == columns.shape[1]


def test_a_compiled_forward(rng, attention):
    """Prompt, padding and answers over a tile that gets full: the tokens of the model that is not compiled, and nothing
    is compiled again for every token."""
    torch._dynamo.reset()
    model, inputs = make(num_hidden_layers=1), prompts((PROMPT, 30))
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    expected = tokens(model, inputs, sparse(model))
    model.forward = torch.compile(model.forward, backend=counter)
    cache = sparse(model)
    tokens(model, inputs, sparse(model), max_new_tokens=3)
    compiled = counter.frame_count
    assert torch.equal(tokens(model, inputs, cache), expected)
    assert counter.frame_count == compiled > 0 and cache.layers[0].kv.lengths.tolist() == [PROMPT + 39, 69]
    torch._dynamo.reset()


def test_a_saved_model_knows_nothing_of_the_cache(rng, tmp_path):
    model = make()
    SparseKVCache(model, keep=4, dtype=torch.float16)
    model.save_pretrained(tmp_path)
    assert "sparse_kv" not in (tmp_path / "config.json").read_text()
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_other_caches_are_served_as_before(rng):
    model, inputs = make(), prompts((PROMPT, 30))
    before = tokens(model, inputs, None)
    with torch.no_grad():
        logits = model(**inputs).logits
    SparseKVCache(model, keep=4, dtype=torch.float16)
    assert model.config._attn_implementation == "sparse_kv"
    assert torch.equal(tokens(model, inputs, None), before)
    assert torch.equal(tokens(model, inputs, None, cache_implementation="static"), before)
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, logits)
    model.set_attn_implementation("sdpa")
    assert torch.equal(tokens(model, inputs, None), before)
