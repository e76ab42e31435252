"""KVCache.append and attend in torch.ops.cute_kernels: what torch.compile, opcheck and fake tensors make of them."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels as ck
from cute_kernels._cache.rows import core_of
from tests.support import oracle

OPS = torch.ops.cute_kernels
ROWS, HEADS, HEAD_DIM = 2, 2, 64


def make(device="cpu", held: int = 90, capacity: int = 2000) -> ck.KVCache:
    cache = ck.KVCache(max_batch=3, kv_heads=HEADS, head_dim=HEAD_DIM, capacity=capacity, keep=20, device=device)
    cache.prefill(*new(held, device))
    return cache


def new(tokens: int, device="cpu") -> tuple[Tensor, Tensor]:
    k, v = (oracle.gaussian(ROWS, HEADS, tokens, HEAD_DIM).to(device) for _ in range(2))
    return k, v


def queries(tokens: int = 1, device="cpu") -> Tensor:
    return oracle.gaussian(ROWS, 2 * HEADS, tokens, HEAD_DIM).to(device)


def twins(device="cpu", **sizes) -> tuple[ck.KVCache, ck.KVCache]:
    cache = make(device, **sizes)
    return cache, copy.deepcopy(cache)


def step(cache: ck.KVCache, k: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor, ...]:
    """Appends and attends in turn, on what a compiler fuses and lays out as it likes."""
    cache.append(k * 2, v + 1)
    first = cache.attend(q * 0.5)
    cache.append(v.transpose(0, 1).contiguous().transpose(0, 1), k * 3)
    second, lse = cache.attend(q, return_lse=True, causal=False, scale=0.2)
    out = torch.empty_like(q)
    cache.attend(q.detach(), out=out, sequences=[1, 0])
    return first + 1, second, lse, out * 2


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize("grad", [False, True])
def test_steps_compile_whole_and_once(device, grad, rng):
    """Over tiles that get full; the same bits as without a compiler."""
    eager, compiled = twins(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled_step = torch.compile(step, backend=counter, fullgraph=True)
    for _ in range(80):
        arguments = *new(1, device), queries(device=device)
        if grad:
            arguments = tuple(x.requires_grad_() for x in arguments)
        assert_same(compiled_step(compiled, *arguments), step(eager, *arguments))
    assert counter.frame_count == 1
    assert torch.equal(compiled.lengths, eager.lengths) and int(eager.lengths[0]) == 250
    core_of(compiled).table.check()
    for row in range(ROWS):
        assert_same(compiled.dense(row), eager.dense(row))


def test_graphs_do_not_grow_with_layers_and_tokens(rng):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled_step = torch.compile(step, backend=counter, fullgraph=True)
    for _ in range(16):
        eager, compiled = twins()
        for tokens in (1, 3, 1, 7):
            arguments = *new(tokens), queries(tokens)
            assert_same(compiled_step(compiled, *arguments), step(eager, *arguments))
    assert counter.frame_count <= 6


def test_a_model_of_layers(device, rng):
    """Caches that a module holds, all in one graph."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.caches = [make(device) for _ in range(3)]

        def forward(self, x):
            for cache in self.caches:
                cache.append(x[:, :HEADS] * 0.5, x[:, HEADS:])
                x = x + cache.attend(x)
            return x

    eager = Model()
    compiled = copy.deepcopy(eager)
    call = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(5):
            x = queries(device=device)
            assert_same((call(x),), (eager(x),))


def test_sequences(device, rng):
    eager, compiled = twins(device)

    def function(cache, k, v, q, named):
        cache.append(k[:1], v[:1], sequences=[1])
        cache.append(k, v, sequences=named)
        return (cache.attend(q, sequences=named),)

    compiled_function = torch.compile(function, backend="aot_eager", fullgraph=True)
    for named in ([1, 0], torch.tensor([1, 0]), torch.tensor([0, 1])):
        arguments = *new(2, device), queries(2, device), named
        assert_same(compiled_function(compiled, *arguments), function(eager, *arguments))
    assert torch.equal(compiled.lengths, eager.lengths)


def test_one_graph_for_all_sequences(rng):
    cache, counter = make(), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    cache.add()
    torch._dynamo.reset()
    attend = torch.compile(lambda q, rows: cache.attend(q, sequences=rows), backend=counter, fullgraph=True)
    q = queries()
    for rows in ([0, 1], [1, 0], [2, 1], [0, 2], [2, 0]):
        assert oracle.same_bits(attend(q, rows), cache.attend(q, sequences=rows))
    assert counter.frame_count <= 2  # the second one learns that rows differ


def test_what_cannot_be_done_raises_and_changes_nothing(rng):
    cache = make(capacity=100)
    compiled = torch.compile(lambda k, v: cache.append(k, v), backend="aot_eager", fullgraph=True)
    compiled(*new(9))
    with pytest.raises(RuntimeError, match="2 more exceed capacity = 100"):
        compiled(*new(2))
    assert cache.lengths.tolist() == [99, 99]
    compiled(*new(1))
    assert cache.lengths.tolist() == [100, 100]
    attend = torch.compile(lambda q, backend: cache.attend(q, backend=backend), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="backend 'sm90'"):
        attend(queries(), "sm90")
    for bad in (lambda: cache.append(*(x.float() for x in new(1))), lambda: cache.attend(queries()[..., :-8])):
        with pytest.raises((TypeError, ValueError), match="must"):
            torch.compile(bad, backend="eager")()


def test_backends(rng):
    cache = make()
    q = queries(3)
    attend = torch.compile(lambda backend: cache.attend(q, backend=backend), backend="aot_eager", fullgraph=True)
    for backend in ("reference", "cpu", "auto"):
        assert torch.equal(attend(backend), cache.attend(q, backend=backend))


def calls(cache: ck.KVCache, device) -> dict[str, tuple]:
    q, content, number = queries(2, device), core_of(cache).storage.content, core_of(cache).number
    rows, lse = torch.tensor([1, 0], device=device), torch.empty(q.shape[:3], device=device)
    return {
        "kv_cache_append": (content, number, *new(2, device), None, None),
        "kv_cache_attend": (content, number, q, None, rows, None, None, 0.125, True, "auto", torch.empty_like(q), lse),
    }


@pytest.mark.parametrize("name", ["kv_cache_append", "kv_cache_attend"])
def test_opcheck(name, device, rng):
    cache = make(device)
    torch.library.opcheck(getattr(OPS, name).default, calls(cache, device)[name])


def test_whoever_watches_sees_the_operations(device, rng):
    eager, watched = twins(device)
    arguments = *new(1, device), queries(device=device)
    with torch.profiler.profile() as profile:
        actual = step(watched, *arguments)
    assert_same(actual, step(eager, *arguments))
    assert {f"cute_kernels::{name}" for name in calls(eager, device)} <= {event.key for event in profile.key_averages()}


def test_fake_tensors(rng):
    """Nothing is appended."""
    cache = make()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        k, v, q = (mode.from_tensor(x) for x in (*new(1), queries()))
        cache.append(k, v)
        out, lse = cache.attend(q, return_lse=True)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    assert cache.lengths.tolist() == [90, 90]


def test_a_cache_that_is_gone_is_not_kept(rng):
    cache, twin = twins()
    arguments = calls(cache, "cpu")["kv_cache_append"]
    OPS.kv_cache_append(*arguments)
    assert (cache.lengths.tolist(), twin.lengths.tolist()) == ([92, 92], [90, 90])
    del cache
    gc.collect()
    with pytest.raises(RuntimeError, match="no longer there"):
        OPS.kv_cache_append(*arguments)
