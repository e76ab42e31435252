"""SparseKVCache(model, graphs=True): the answers are those without graphs, and captured steps do not run the model."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed")

from cute_kernels.integrations.transformers import SparseKVCache, _graphs
from tests.support.tiny_models import HEAD_DIM, NEW, PROMPT, assert_same_tokens, dense, make, prompts, tokens

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"keep": HEAD_DIM, "window": 8, "dtype": torch.float16}
gpu = pytest.mark.gpu


class Passes:
    """How often the model itself runs."""

    def __init__(self, model):
        self.count = 0
        model.model.register_forward_pre_hook(self.one_more)

    def one_more(self, *_):
        self.count += 1


def quiet(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return SparseKVCache(model, graphs=True, **OPTIONS | options)


def same_tokens(attention, model, draw, **options):
    """Generates with a dense cache, then with graphs."""

    def run(inputs, cache):
        return tokens(model, inputs, cache, **options)

    def captured(_):
        return SparseKVCache(model, graphs=True, **OPTIONS)

    return assert_same_tokens(attention, draw, run, (lambda _: dense((model,)), captured))


def test_forward_is_wrapped_once_and_looks_the_same():
    model = make()
    signature = inspect.signature(model.forward)
    with pytest.warns(UserWarning, match=r"without CUDA graphs: the model is on cpu, and CUDA graphs need a GPU"):
        SparseKVCache(model, graphs=True, **OPTIONS)
    wrapper = model.forward
    with pytest.warns(UserWarning, match="need a GPU"):
        SparseKVCache(model, graphs=True, **OPTIONS)
    assert model.forward is wrapper and inspect.signature(wrapper) == signature
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    ids = torch.ones(1, 3, dtype=torch.long)
    assert not copied(ids).logits.any() and model(ids).logits.any()


def test_a_cpu_runs_as_without_graphs(attention):
    model, inputs = make(), prompts((PROMPT, 60))
    with pytest.warns(UserWarning, match="need a GPU"):
        cache = SparseKVCache(model, graphs=True, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        found = tokens(model, inputs, cache)
    assert torch.equal(found, tokens(model, inputs, SparseKVCache(model, **OPTIONS)))


def test_wrong_arguments():
    model = make()
    with pytest.raises(TypeError, match="graphs must be a bool, got int"):
        SparseKVCache(model, graphs=1, **OPTIONS)
    with pytest.raises(TypeError, match="graphs=True takes the model as config, got LlamaConfig"):
        SparseKVCache(model.config, graphs=True, **OPTIONS)


@gpu
@pytest.mark.parametrize("capacity", [None, PROMPT + NEW])
def test_steps_are_replays(attention, capacity):
    model = make(device="cuda")
    passes = Passes(model)

    def run(inputs, cache):
        passes.count = 0
        return tokens(model, inputs, cache)

    caches = (lambda _: dense((model,)), lambda _: quiet(model, capacity=capacity))
    _, cache = assert_same_tokens(attention, lambda: prompts((PROMPT, 37, 80)), run, caches)
    assert passes.count == 3  # the prompts, a step, the capture
    assert cache.get_seq_length() == PROMPT + NEW - 1
    assert cache.layers[0].kv.lengths.tolist() == [length + NEW - 1 for length in (PROMPT, 37, 80)]
    assert not cache.unfinished


@gpu
def test_pages_of_a_graph_are_used_up(attention, monkeypatch):
    monkeypatch.setattr(_graphs, "LEAST_STEPS", 7)
    model = make(device="cuda")
    passes = Passes(model)

    def run(inputs, cache):
        passes.count = 0
        return tokens(model, inputs, cache, max_new_tokens=120)

    assert_same_tokens(attention, lambda: prompts((12, 9)), run, (lambda _: dense((model,)), lambda _: quiet(model)))
    assert 3 + 4 < passes.count < 25


@gpu
def test_logits_are_those_without_graphs_and_new_tensors(attention):
    model = make(device="cuda")
    ids = torch.randint(1, 89, (2, 200), device="cuda")
    caches = SparseKVCache(model, **OPTIONS | {"keep": 8}), quiet(model, keep=8)
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :100], past_key_values=cache)
        kept = []
        for position in range(100, 200):
            step = ids[:, position : position + 1]
            expected, got = (model(step, past_key_values=cache).logits for cache in caches)
            assert torch.allclose(got, expected, atol=2e-2, rtol=2e-2)
            kept.append((got, got.clone()))
    assert all(torch.equal(got, then) for got, then in kept)
    assert caches[1].get_seq_length() == 200


@gpu
def test_turns_crops_and_resets_between(attention):
    model = make(device="cuda")

    def run(inputs, cache):
        answers = []
        whole = dict(inputs)
        for turn in range(3):
            answer = tokens(model, whole, cache, max_new_tokens=20)
            answers.append(answer)
            more = torch.randint(1, 89, (2, 15), generator=torch.Generator().manual_seed(turn))
            ids = torch.cat([answer, more], dim=1)
            mask = torch.nn.functional.pad(
                whole["attention_mask"], (0, ids.shape[1] - whole["attention_mask"].shape[1]), value=1
            )
            whole = {"input_ids": ids, "attention_mask": mask}
        return torch.cat(answers, dim=1)

    caches = (lambda _: dense((model,)), lambda _: quiet(model))
    _, cache = assert_same_tokens(attention, lambda: prompts((60, 44)), run, caches)
    with torch.no_grad():
        step = torch.ones(2, 1, dtype=torch.long, device="cuda")
        for _ in range(4):
            model(step, past_key_values=cache)
        seen = cache.get_seq_length()
        cache.crop(-3)
        for _ in range(3):
            model(step, past_key_values=cache)
        assert cache.get_seq_length() == seen and cache.layers[1].kv.lengths.tolist() == [seen, seen - 16]
        cache.reset()
        inputs = prompts((50, 50))
        expected = tokens(model, inputs, SparseKVCache(model, **OPTIONS))
    assert torch.equal(tokens(model, inputs, cache)[:, :60], expected[:, :60])


@gpu
def test_memory_grows_between_graphs(attention):
    """Past the memory taken at first, by steps that are captured and by some that are not."""
    model = make(device="cuda")
    passes, cache = Passes(model), quiet(model)
    ids = torch.randint(1, 89, (2, 500), device="cuda")
    whole = model(ids).logits.float()
    with torch.no_grad():
        model(ids[:, :20], past_key_values=cache)
        passes.count = 0
        for position in range(20, 450):
            got = model(ids[:, position : position + 1], past_key_values=cache).logits[:, -1].float()
            assert torch.allclose(got, whole[:, position], atol=3e-2, rtol=3e-2)
        assert passes.count == 3  # a step and two captures
        model(ids[:, 450:490], past_key_values=cache)
        for position in range(490, 500):
            got = model(ids[:, position : position + 1], past_key_values=cache).logits[:, -1].float()
            assert torch.allclose(got, whole[:, position], atol=3e-2, rtol=3e-2)
    assert not any(torch.isnan(whole).flatten())


@gpu
@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "seed": 5}, {"num_return_sequences": 2, "do_sample": True, "seed": 3}],
    ids=["sampling", "returned sequences"],
)
def test_sampling(attention, options):
    model = make(device="cuda")
    same_tokens(attention, model, lambda: prompts((50, 31)), max_new_tokens=20, **options)


@gpu
@pytest.mark.parametrize(
    "options, what",
    [({"num_beams": 3}, "reorder_cache"), ({"prompt_lookup_num_tokens": 3}, "crop")],
    ids=["beams", "prompt lookup"],
)
def test_steps_that_stay_as_they_are(attention, options, what):
    model = make(device="cuda")
    lengths = (50,) if what == "crop" else (50, 31)
    with pytest.warns(UserWarning, match=f"without CUDA graphs: {what} changes the cache between steps"):
        same_tokens(attention, model, lambda: prompts(lengths), **options)


@gpu
def test_a_forward_that_cannot_be_captured(attention):
    model = make(device="cuda")
    model.model.layers[1].register_forward_hook(lambda module, args, out: float(args[0].sum()) and None)
    inputs = prompts((PROMPT, 60))
    expected = tokens(model, inputs, SparseKVCache(model, **OPTIONS))
    cache = SparseKVCache(model, graphs=True, **OPTIONS)
    with pytest.warns(UserWarning, match="the capture failed with") as warned:
        found = tokens(model, inputs, cache)
    assert torch.equal(found, expected) and len(warned) == 1
    assert cache.get_seq_length() == PROMPT + NEW - 1 and not cache.unfinished
    assert torch.rand(3, device="cuda").isfinite().all()  # torch's generator is not left in the capture


@gpu
def test_a_full_cache_raises(attention):
    model = make(device="cuda")
    cache = quiet(model, capacity=20)
    ids = torch.ones(1, 12, dtype=torch.long, device="cuda")
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for _ in range(8):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="21 tokens exceed capacity = 20"):
            model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 20 and not cache.unfinished


@gpu
def test_gradients(attention):
    model = make(device="cuda")
    cache = SparseKVCache(model, graphs=True, **OPTIONS)
    ids = torch.ones(1, 12, dtype=torch.long, device="cuda")
    model(ids, past_key_values=cache)
    with pytest.warns(UserWarning, match="gradients are enabled"):
        model(ids[:, :1], past_key_values=cache)
    assert cache.get_seq_length() == 13
