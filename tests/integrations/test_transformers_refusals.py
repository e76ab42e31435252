"""What SparseKVCache does not serve: refused when it is made where the config tells, else with the first tokens."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers import AttentionInterface, DynamicCache

from cute_kernels.integrations.transformers import SparseKVCache, _padding, _support
from tests.support.tiny_llama import config, model, run


def asking_for_a_static_cache():
    found = model()
    found.generation_config.cache_implementation = "static"
    return found


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: config("Mistral", sliding_window=16), r"sliding_attention: layers 0-1 \(sliding_window=16\)"),
        (
            lambda: config("Gemma3Text", layer_types=["sliding_attention", "full_attention"]),
            "sliding_attention: layers 0",
        ),
        (
            lambda: config(
                "Qwen2", num_hidden_layers=4, use_sliding_window=True, sliding_window=8, max_window_layers=1
            ),
            "sliding_attention: layers 1-3",
        ),
        (lambda: config("Gemma2", layer_types=["full_attention"] * 2), "attn_logit_softcapping"),
        (lambda: config("DeepseekV3"), "kv_lora_rank"),
        (lambda: config(head_dim=12), "head_dim must be a multiple of 8, from 8 to 256, got 12"),
        (lambda: config(head_dim=264), "head_dim must be a multiple of 8, from 8 to 256, got 264"),
        (lambda: config(num_attention_heads=4, num_key_value_heads=3), "multiple of num_key_value_heads, got 4 and 3"),
        (lambda: transformers.T5Config(), "t5 is an encoder-decoder model"),
        (lambda: config(dtype="float32"), "computes in float32.*dtype=torch.bfloat16"),
        (lambda: config(attn_implementation="eager"), "'sdpa' attention, the model has 'eager'"),
        (lambda: config(attn_implementation="flash_attention_2"), "the model has 'flash_attention_2'"),
        (lambda: model(torch.float32), "computes in float32"),
        (lambda: asking_for_a_static_cache(), "cache_implementation='static', which generate"),
        (
            lambda: transformers.BloomForCausalLM(
                transformers.BloomConfig(vocab_size=17, hidden_size=32, n_layer=1, n_head=2)
            ),
            "does not choose its attention function",
        ),
    ],
    ids=[
        "mistral",
        "gemma3",
        "qwen2",
        "gemma2",
        "deepseek",
        "small heads",
        "large heads",
        "head ratio",
        "t5",
        "float32",
        "eager",
        "flash",
        "float32 model",
        "static",
        "bloom",
    ],
)
def test_models_that_are_not_served(make, message):
    with pytest.raises(ValueError, match=message):
        SparseKVCache(make(), keep=4)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"window": -1}, ValueError, "window must be at least 0, got -1"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
        ({"keep": 17}, ValueError, "keep"),
        ({"keep": None, "sparsity": 1.5}, ValueError, "sparsity"),
        ({"keep": 4, "sparsity": 0.5}, ValueError, "sparsity"),
        ({"keep": None, "key_keep": 0, "value_keep": 3}, ValueError, "key_keep"),
        ({"dtype": torch.float32}, TypeError, "dtype must be torch.float16 or torch.bfloat16, got torch.float32"),
        ({"dtype": np.array([1, 2])}, TypeError, "dtype must be torch.float16 or torch.bfloat16"),
        ({"backend": "gpu"}, ValueError, "backend"),
        ({"backend": 1}, TypeError, "backend must be a str"),
        ({"dtype": torch.float16}, ValueError, "asked to store float16, the model computes in bfloat16"),
    ],
    ids=str,
)
def test_options_are_checked_when_the_cache_is_made(options, error, message):
    with pytest.raises(error, match=message):
        SparseKVCache(config(), **{"keep": 4} | options)


def test_only_a_config_or_a_model_will_do():
    with pytest.raises(TypeError, match=r"config must be a Transformers config .* got dict"):
        SparseKVCache({}, keep=4)


def test_models_on_other_devices():
    devices = map(torch.device, ("cuda:1", "cpu", "xpu:0", "meta", "mps"))
    parameters = [types.SimpleNamespace(device=device) for device in devices]
    elsewhere = types.SimpleNamespace(_supports_attention_backend=True, parameters=lambda: parameters)
    with pytest.raises(ValueError, match="cpu and cuda devices, SimpleNamespace is on mps, xpu"):
        _support.check_model(elsewhere)


def test_a_backend_that_the_model_s_device_does_not_have():
    with pytest.raises(RuntimeError, match="backend 'sm80' takes tensors on a cuda device, these are on cpu"):
        SparseKVCache(model(), keep=4, backend="sm80")
    SparseKVCache(model(), keep=4, backend="reference")


def test_a_device_without_kernels(monkeypatch):
    def none(device):
        raise RuntimeError(f"there are no kernels for {device}: extension built without CUDA")

    monkeypatch.setattr(_support, "compression_kernels", none)
    with pytest.raises(RuntimeError, match="there are no kernels for cpu"):
        SparseKVCache(model(), keep=4)
    SparseKVCache(model().to("meta"), keep=4)  # offloaded


def test_a_refused_cache_leaves_the_model_alone():
    refused = config("Mistral", sliding_window=16, attn_implementation="sdpa")
    with pytest.raises(ValueError, match="sliding_window=16"):
        SparseKVCache(refused, keep=4)
    assert refused._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "cast, options, message",
    [
        (torch.float32, {}, "stores float16 or bfloat16, the model computes in float32"),
        (torch.float16, {"dtype": torch.bfloat16}, "asked to store bfloat16, the model computes in float16"),
        (torch.float64, {"dtype": torch.bfloat16}, "the model computes in float64"),
    ],
    ids=str,
)
def test_the_dtype_of_a_model_that_was_cast(cast, options, message):
    served = model()
    cache = SparseKVCache(served.config, keep=4, **options)
    with pytest.raises(ValueError, match=message):
        run(served.to(cast), cache)


def test_an_attention_function_that_does_not_know_the_cache():
    served = model()
    cache = SparseKVCache(config(), keep=4)  # of another config object
    with pytest.raises(RuntimeError, match=r"SparseKVCache\(model, \.\.\.\)"):
        run(served, cache)
    assert cache.get_seq_length() == 0
    served.set_attn_implementation("sparse_kv")
    run(served, cache)
    assert cache.get_seq_length() == 5


def test_masks_that_the_cache_cannot_follow():
    served = model()
    cache = SparseKVCache(served.config, keep=4)
    with pytest.raises(ValueError, match=r"a ready mask \(a tensor of shape \(1, 1, 5, 5\)"):
        run(served, cache, mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"a column for each of the 5 new tokens, got shape \(1, 4\)"):
        run(served, cache, mask=torch.ones(1, 4))
    run(served, cache, mask=torch.tensor([[0, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="masked when they came, in rows 0"):
        run(served, cache, tokens=1, mask=torch.ones(1, 6))
    with pytest.raises(ValueError, match="masks cached tokens that are followed by others, in rows 0"):
        run(served, cache, tokens=1, mask=torch.tensor([[0, 0, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="attention_mask has 2 rows, the cache holds 1"):
        run(served, cache, tokens=1, batch=2, mask=torch.ones(2, 6))
    assert cache.get_seq_length() == 5


def test_more_tokens_than_a_fixed_capacity():
    served = model()
    cache = SparseKVCache(served.config, keep=4, capacity=8)
    with pytest.raises(ValueError, match="9 tokens exceed capacity = 8"):
        run(served, cache, tokens=9)
    run(served, cache, tokens=8)
    with pytest.raises(ValueError, match="9 tokens exceed capacity = 8"):
        run(served, cache, tokens=1)
    assert cache.layers[0].get_max_length() == cache.layers[0].get_max_cache_shape() == 8


@pytest.mark.parametrize(
    "options, message",
    [
        ({"softcap": 30.0}, "passes softcap=30.0"),
        ({"sliding_window": 8}, "passes sliding_window=8"),
        ({"s_aux": torch.zeros(2)}, "passes s_aux=a tensor of shape .2,."),
        ({"is_causal": False}, "passes is_causal=False"),
        ({"output_attentions": True}, "passes output_attentions=True"),
        ({"dropout": 0.1}, "has no dropout"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attention_of_another_kind(options, message):
    """What a model's config did not tell, its attention module may still ask for."""
    served = model()
    cache = SparseKVCache(served.config, keep=4)
    attention = AttentionInterface._global_mapping["sparse_kv"]
    step = AttentionInterface()["sparse_kv"]
    assert step is attention
    seen = {}

    def peculiar(module, *args, **kwargs):
        seen.update(kwargs)
        return attention(module, *args, **kwargs | options)

    AttentionInterface._global_mapping["sparse_kv"] = peculiar
    try:
        with pytest.raises(ValueError, match=message):
            run(served, cache)
    finally:
        AttentionInterface._global_mapping["sparse_kv"] = attention
    assert "scaling" in seen


def test_static_caches_are_refused_beside_it():
    served = model()
    with pytest.raises(ValueError, match="cache_implementation"):
        served.generate(
            torch.ones(1, 4, dtype=torch.long),
            past_key_values=SparseKVCache(served.config, keep=4),
            cache_implementation="static",
        )


def test_what_the_cache_cannot_do_says_so():
    cache = SparseKVCache(config(), keep=4)
    for call in (
        cache.layers[0].offload,
        cache.layers[0].prefetch,
        lambda: cache.layers[0].crop(-1),
        lambda: cache.early_initialization(1, 1, 16, torch.bfloat16, torch.device("cpu")),
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert not cache.is_compileable and cache.is_sliding == [False, False] and len(cache) == 2


@pytest.mark.parametrize("version, error", [("4.57.1", ImportError), ("5.99.0", UserWarning), ("5.17.0", None)])
def test_the_version_of_transformers(version, error, monkeypatch, recwarn):
    monkeypatch.setitem(__import__("sys").modules, "transformers", types.SimpleNamespace(__version__=version))
    if error is ImportError:
        with pytest.raises(ImportError, match=r"5\.0 to 5\.17, found 4\.57\.1"):
            _support.check_version()
    else:
        _support.check_version()
        assert [w.category for w in recwarn] == ([error] if error else [])


def test_padding_against_a_loop(rng):
    """Random histories of masks: what is kept and what is new, row by row."""
    for _ in range(200):
        rows, valid, seen = rng.randrange(1, 4), None, 0
        history = torch.zeros(rows, 0, dtype=torch.bool)
        for _ in range(rng.randrange(1, 5)):
            new = rng.randrange(1, 6)
            fresh = torch.rand(rows, new) < rng.choice([0.5, 2])
            fresh[:, -1] |= fresh.any(1)  # no padding on the right
            before = history.clone()
            if rng.random() < 0.5:
                for row in range(rows):
                    cached = history[row].nonzero().flatten()
                    history[row, cached[rng.randrange(len(cached) + 1) :]] = False
            history = torch.cat([history, fresh], dim=1)
            columns = _padding.arrive(valid, history, seen, new)
            kept = [int(history[row, :seen].sum()) for row in range(rows)]
            held = [int(before[row].sum()) for row in range(rows)]
            assert (columns.keep or held) == kept
            assert (columns.counts() or [new] * rows) == fresh.sum(1).tolist()
            valid, seen = columns.valid, seen + new
            state = torch.ones(rows, seen, dtype=torch.bool)
            if valid is not None:
                state[:, : valid.shape[1]] = valid
            assert torch.equal(state, history)
            for column in range(seen + 1):
                assert (_padding.tokens_until(valid, column) or [column] * rows) == history[:, :column].sum(1).tolist()


def test_a_dynamic_cache_after_a_refusal_works():
    served = model()
    cache = SparseKVCache(served.config, keep=4)
    with pytest.raises(ValueError, match="a column for each of the 5 new tokens"):
        run(served, cache, mask=torch.ones(1, 4))
    run(served, DynamicCache(config=served.config))
