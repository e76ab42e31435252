"""KVCache.step, a layer's part of a decoding step: append and attend in one, many of them alike."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels._cache.rows import core_of
from cute_kernels._cache.step import DecodingStep
from tests.support.exact_kv_cache import make, pair
from tests.support.oracle import same_bits
from tests.support.synchronisation import no_synchronisation


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """Batches of the steps that were launched whole."""
    batches, run = [], DecodingStep.run

    def counted(self, storage, k, *others):
        batches.append(k.shape[0])
        return run(self, storage, k, *others)

    monkeypatch.setattr(DecodingStep, "run", counted)
    return batches


def tokens(batch: int, count: int = 1, *, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k, v and q, lying in memory as a model's projections do."""
    k, v = (x.transpose(1, 2) for x in pair(batch, count, 2, 16, device=device))
    return k, v, pair(batch, count, 6, 16, device=device)[0].transpose(1, 2)


def append_and_attend(cache, k, v, q, *, scale, backend):
    cache.append(k, v)
    return cache.attend(q, scale=scale, backend=backend)


def take_step(cache, k, v, q, **options):
    return cache.step(q, k, v, **options)


class Intercepts(TorchDispatchMode):
    """Sees every operation, and changes none."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("intercepted", [False, True])
def test_a_step_appends_and_attends(backend, rng, intercepted):
    batch, step, apart = rng.randint(1, 3), *(make(backend.device, window=5, max_append=4) for _ in range(2))
    for _ in range(80):
        count = rng.choice([1, 1, 1, 2, 7])
        k, v, q = tokens(batch, count, device=backend.device)
        options = {"scale": rng.choice([None, 0.3]), "backend": backend.name}
        with Intercepts() if intercepted else nullcontext():
            out = step.step(q, k, v, **options)
        assert same_bits(out, append_and_attend(apart, k, v, q, **options))
    assert step.lengths.tolist() == apart.lengths.tolist() and step.lengths.min() > 5 + 63


def test_steps_alike_notice_what_happens_between(backend, rng, launched):
    """What changes rows, memory or lengths, and copies of the cache."""
    step, apart = (make(backend.device, window=5, max_append=1, max_batch=3, capacity=1000) for _ in range(2))
    between = [
        lambda cache: cache.grow(capacity=cache.capacity + 64),
        lambda cache: cache.crop(-2),
        lambda cache: cache.reorder(list(range(cache.batch))[::-1]),
        lambda cache: cache.select([cache.batch - 1]),
        lambda cache: cache.repeat_interleave(3 // cache.batch),
        lambda cache: cache.fork(0) if cache.batch < 3 else cache.free(2),
        lambda cache: cache.append(*tokens(cache.batch, device=backend.device)[:2]),
        lambda cache: cache.reset(),
        lambda cache: None,
    ]
    batch, steps = 2, 0
    for _ in range(30):
        for _ in range(rng.choice([3, 20])):
            k, v, q = tokens(batch, device=backend.device)
            options = {"scale": 0.25, "backend": backend.name}
            assert same_bits(step.step(q, k, v, **options), append_and_attend(apart, k, v, q, **options))
            steps += 1
        chosen, seed = rng.choice(between), rng.randint(0, 2**31)
        for cache in (step, apart):
            torch.manual_seed(seed)
            chosen(cache)
        if rng.random() < 0.2:
            step, apart = copy.deepcopy(step), copy.deepcopy(apart)
        batch = step.batch or 2
        assert step.lengths.tolist() == apart.lengths.tolist()
        core_of(step).table.check()
    assert not launched if backend.name == "reference" else len(launched) > steps // 3


def test_tensors_that_lie_or_count_otherwise(backend, rng, launched):
    """After a step that would fit them but for that."""
    device = backend.device
    step, apart = (make(device, window=30) for _ in range(2))
    k, v, q = tokens(2, device=device)
    alike = [
        (k, v, q),
        (k.contiguous(), v.contiguous(), q.contiguous()),
        (torch.nn.Parameter(k, False), v, q),
        (torch._neg_view(k), v, torch._neg_view(q)),
        (k, torch._neg_view(v), q),
        (torch.cat([k, k], 1)[:, ::2], v, q),
        (k[:1], v[:1], q[:1]),
    ]
    for k, v, q in [pick for _ in range(8) for pick in rng.sample(alike, len(alike))]:
        options = {"scale": rng.choice([None, 0.25, 1.0]), "backend": backend.name}
        assert same_bits(step.step(q, k, v, **options), append_and_attend(apart, k, v, q, **options))
    assert step.lengths.tolist() == apart.lengths.tolist()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "spoil, error, message",
    [
        (lambda k, v, q: (k[..., :8], v, q, 1.0), ValueError, "k must have shape"),
        (lambda k, v, q: (k, v.float(), q, 1.0), TypeError, "v must be float16 like the cache"),
        (lambda k, v, q: (k, v, q.view(torch.bfloat16), 1.0), TypeError, "q must be float16 like the cache"),
        (lambda k, v, q: (k[:, :, :0], v[:, :, :0], q, 1.0), ValueError, "at least 1 token"),
        (lambda k, v, q: (k, v[:1], q, 1.0), ValueError, "v must have the shape of k"),
        (lambda k, v, q: (k, v, q[:, :1], 1.0), ValueError, "multiple of kv_heads"),
        (lambda k, v, q: (k, v, q.to("meta"), 1.0), ValueError, "q must be on the device of the cache"),
        (lambda k, v, q: (k, v, q.to_sparse(), 1.0), TypeError, "q must be a dense"),
        (lambda k, v, q: (k.to_sparse(), v, q, 1.0), TypeError, "k must be a dense"),
        (lambda k, v, q: (k, v.tolist(), q, 1.0), TypeError, "v must be a torch.Tensor"),
        (lambda k, v, q: (k, v, q, float("inf")), ValueError, "scale must be finite"),
        (lambda k, v, q: (k, v, q, True), TypeError, "scale must be a real number, got bool"),
        (lambda k, v, q: (k, v, q[:1], 1.0), ValueError, "q must have shape .* with B = 2 and n = 1 as in k"),
        (lambda k, v, q: (k, v, q.repeat(1, 1, 2, 1), 1.0), ValueError, "q must have shape .* with B = 2 and n = 1"),
    ],
)
def test_a_step_that_is_refused_changes_nothing(known, spoil, error, message):
    cache = make()
    cache.append(*pair(2, 2, 9, 16))
    k, v, q = tokens(2, device="cpu")
    if known:
        cache.step(q, k, v, scale=1.0, backend="auto")
    *tensors, scale = spoil(k, v, q)
    with pytest.raises(error, match=message):
        cache.step(tensors[2], *tensors[:2], scale=scale, backend="auto")
    assert cache.lengths.tolist() == [9 + known] * 2


@pytest.mark.parametrize(
    "options", [{"scale": np.array([1.0, 2.0])}, {"scale": torch.ones(2)}, {"backend": np.array(["cpu", "cpu"])}]
)
def test_options_that_do_not_compare(options):
    cache = make()
    k, v, q = tokens(2, device="cpu")
    cache.step(q, k, v)
    with pytest.raises(TypeError, match=next(iter(options))):
        cache.step(q, k, v, **options)
    assert cache.lengths.tolist() == [1, 1]


@pytest.mark.parametrize("name, error", [("cuda", ValueError), (None, TypeError), ("sm90", RuntimeError)])
def test_a_backend_that_cannot_serve_changes_nothing(name, error):
    """Nor where the step is two operations."""
    torch._dynamo.reset()
    cache = make()
    k, v, q = tokens(2, device="cpu")

    def step() -> torch.Tensor:
        return cache.step(q, k, v, backend=name)

    with pytest.raises(error, match="backend"):
        step()
    with pytest.raises(error, match="backend"), torch.profiler.profile():
        step()
    if isinstance(name, str) and error is RuntimeError:
        with pytest.raises(error, match="backend"):
            torch.compile(step, backend="eager")()
    assert cache.lengths.tolist() == []


def test_a_compiled_step(device, rng):
    """torch.compile takes it whole, as the operations of append and attend."""
    torch._dynamo.reset()
    compiled, apart = (make(device, window=5, max_append=1) for _ in range(2))
    step = torch.compile(lambda q, k, v: compiled.step(q, k, v, scale=0.25), backend="aot_eager", fullgraph=True)
    for _ in range(80):
        k, v, q = tokens(2, device=device)
        assert same_bits(step(q, k, v), append_and_attend(apart, k, v, q, scale=0.25, backend="auto"))
    assert compiled.lengths.tolist() == apart.lengths.tolist()


def test_tokens_first_is_the_same_result(backend, rng):
    """As models take it on: (B, n, Hq, D)."""
    first, second = (make(backend.device, window=5) for _ in range(2))
    for count in (1, 1, 2, 2, 1):
        k, v, q = tokens(2, count, device=backend.device)
        out = core_of(first).step(q, k, v, None, backend.name, tokens_first=True)
        assert same_bits(out, second.step(q, k, v, backend=backend.name).transpose(1, 2).contiguous())
        assert count > 1 or out.is_contiguous()


@pytest.mark.gpu
def test_steps_in_graphs_and_on_streams(backend, launched):
    """Eager steps, then the same captured and replayed, then eager ones again; no step waits for the device."""
    if backend.device.type != "cuda" or backend.name == "reference":
        pytest.skip("kernels of a GPU")
    options = {"scale": None, "backend": backend.name}
    step, apart = (make("cuda", window=5, max_append=1) for _ in range(2))
    inputs = [tokens(3, device="cuda") for _ in range(100)]
    for cache in (step, apart):
        cache.prefill(*pair(3, 2, 40, 16, device="cuda"))
        cache.reset()
        cache.append(*(x.repeat(1, 1, 40, 1) for x in inputs[0][:2]))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        take_step(step, *inputs[0], **options)
        with no_synchronisation():
            got = [take_step(step, *each, **options) for each in inputs[1:30]]
    torch.cuda.current_stream().wait_stream(side)
    append_and_attend(apart, *inputs[0], **options)
    assert all(
        same_bits(out, append_and_attend(apart, *each, **options)) for out, each in zip(got, inputs[1:30], strict=True)
    )
    assert len(launched) >= 25
    step.reserve(71)
    k, v, q = (x.clone() for x in inputs[30])
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = step.step(q, k, v, **options)
    for each in inputs[30:90]:
        for to, of in zip((k, v, q), each, strict=True):
            to.copy_(of)
        graph.replay()  # whose splits of the work suit all that it may come to hold
        torch.testing.assert_close(out, append_and_attend(apart, *each, **options), atol=4e-3, rtol=4e-3)
    for each in inputs[90:]:
        assert same_bits(take_step(step, *each, **options), append_and_attend(apart, *each, **options))
    assert step.lengths.tolist() == apart.lengths.tolist() == [140] * 3
