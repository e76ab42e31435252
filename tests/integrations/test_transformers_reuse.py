"""A SparseKVCache that is used again: after other prompts, by other models, after passes that failed midway."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

import cute_kernels as ck
from cute_kernels._cache.core import CacheCore
from cute_kernels.integrations.transformers import SparseKVCache, _layer
from tests.support.tiny_llama import config, model, run


def prompt(tokens: int, rows: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 17, (rows, tokens))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def test_a_cache_that_still_holds_tokens():
    """Of the calls that DynamicCache takes, those with a meaning work: a mask that counts what is held, or none."""
    served, options = model(), {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    cache = SparseKVCache(served, keep=16)
    first = served.generate(**prompt(9), past_key_values=cache, **options)
    held = r"still holds 12 tokens of earlier calls.* for another prompt or model call cache\.reset\(\)"
    for other, inputs in ((served, prompt(7)), (served, prompt(9)), (served, prompt(6, rows=2)), (model(), prompt(9))):
        other.set_attn_implementation("sparse_kv")
        with pytest.raises(ValueError, match=held):
            other.generate(**inputs, past_key_values=cache, **options)
    with pytest.raises(ValueError, match=held + r".*; generate\(use_cache=False\) takes none"):
        run(served, cache, mask=torch.ones(1, 5))
    more = torch.cat([first, prompt(3)["input_ids"]], dim=1)
    every = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    assert served.generate(**every, past_key_values=cache, **options).shape == (1, 9 + 4 + 3 + 4)
    run(served, cache, tokens=2)
    assert cache.get_seq_length() == 9 + 4 + 3 + 3 + 2
    cache.reset()
    with pytest.raises(ValueError, match=r"still holds 6 tokens .*use_cache=False\) takes none"):
        served.generate(**prompt(6), past_key_values=cache, use_cache=False, **options)
    cache.reset()
    assert served.generate(**prompt(6, rows=2), past_key_values=cache, **options).shape == (2, 10)


def test_padding_on_the_right():
    served = model()
    cache = SparseKVCache(served, keep=4)
    with pytest.raises(ValueError, match=r"behind the new tokens of rows 1: .* tokenizer\.padding_side = 'left'"):
        run(served, cache, batch=2, mask=torch.tensor([[1] * 5, [1, 1, 1, 0, 0]]))
    assert cache.get_seq_length() == 0
    run(served, cache, batch=2, mask=torch.tensor([[1] * 5, [0] * 5]))  # a chunk of left padding
    with pytest.raises(ValueError, match="behind the new tokens of rows 0, 1:"):
        run(served, cache, batch=2, tokens=2, mask=torch.tensor([[1] * 6 + [0], [0] * 5 + [1, 0]]))
    run(served, cache, batch=2, tokens=2, mask=torch.tensor([[1] * 7, [0] * 5 + [0, 1]]))
    assert cache.layers[0].kv.lengths.tolist() == [7, 1]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 3}, r"made for a model of 3 layers, this one has 2: .* SparseKVCache\(model, \.\.\.\)"),
        ({"num_hidden_layers": 1}, "made for a model of 1 layers, this one has 2"),
        ({"head_dim": 32}, r"made for head_dim 32, got keys of 16: .* SparseKVCache\(model, \.\.\.\)"),
    ],
    ids=str,
)
def test_a_cache_of_another_model_s_config(changes, message):
    served = model()
    SparseKVCache(served, keep=4)  # switches the model
    cache = SparseKVCache(config(**changes), keep=4)
    with pytest.raises(ValueError, match=message):
        run(served, cache)
    assert cache.get_seq_length() == 0 and all(layer.kv is None for layer in cache.layers)


def test_a_pass_that_failed_halfway():
    served = model()
    cache = SparseKVCache(served.config, keep=4)

    def fail(*_):
        raise KeyboardInterrupt

    hook = served.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        run(served, cache)
    hook.remove()
    for call in (
        lambda: run(served, cache, tokens=1),
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
    ):
        with pytest.raises(RuntimeError, match=r"failed midway, and its layers may differ: reset\(\) it"):
            call()
    cache.reset()
    run(served, cache)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("method", ["prefill", "step", "append", "crop", "reorder"])
def test_an_interrupt_inside_a_layer_s_cache(method, late, monkeypatch):
    """Before the layer's cache has changed, or after: the integration cannot know which, and does not go on."""
    served = model()
    cache = SparseKVCache(served, keep=4)
    of = CacheCore if method == "step" else ck.KVCache
    plain = getattr(of, method)

    def interrupted(*args, **kwargs):
        if late:
            plain(*args, **kwargs)
        raise KeyboardInterrupt

    calls = {
        "append": lambda: run(served, cache, batch=2, tokens=40),
        "crop": lambda: cache.crop(-2),
        "reorder": lambda: cache.reorder_cache(torch.tensor([1, 0])),
    }
    call = calls.get(method, lambda: run(served, cache, batch=2))
    if method != "prefill":
        run(served, cache, batch=2)
    monkeypatch.setattr(of, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        call()
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="failed midway"):
        run(served, cache, tokens=1, batch=2)
    cache.reset()
    run(served, cache)
    assert cache.get_seq_length() == 5 and cache.layers[1].kv.lengths.tolist() == [5]


def test_a_prompt_that_took_too_much_memory_can_be_cut(monkeypatch):
    """Where the model's own attention fails in the first layer, nothing has changed."""

    def too_much(*_, **__):
        raise MemoryError

    served = model()
    cache = SparseKVCache(served, keep=4)
    monkeypatch.setattr(_layer, "dense_attention", too_much)
    with pytest.raises(MemoryError):
        run(served, cache, batch=4)
    monkeypatch.undo()
    run(served, cache, batch=2)
    assert cache.get_seq_length() == 5


def test_another_batch_on_a_cache_in_use():
    served = model()
    cache = SparseKVCache(served.config, keep=4)
    run(served, cache, batch=2)
    with pytest.raises(ValueError, match="the cache holds 2 sequences of 5 tokens, got keys of 3"):
        run(served, cache, batch=3)
