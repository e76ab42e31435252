"""Calls of sparse_attention like the one before, which are checked by comparison, and what they must notice."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import cute_kernels as ck
from cute_kernels._attention.memo import AttentionCall
from cute_kernels.sparse_kv import from_storage, storage_of
from tests.support import oracle
from tests.support.op_recorder import Recorder

B, HQ, HKV, T, W, D = 2, 4, 2, 100, 9, 64


@pytest.fixture
def known(monkeypatch) -> list[AttentionCall]:
    """The call that served each of those that were like one before."""
    calls, run = [], AttentionCall.run

    def counted(self, *arguments):
        calls.append(self)
        return run(self, *arguments)

    monkeypatch.setattr(AttentionCall, "run", counted)
    return calls


def caches(device="cpu", dtype=torch.float16) -> tuple[ck.SparseKV, ck.SparseKV]:
    return ck.compress_kv(*(oracle.gaussian(B, HKV, T, D, dtype=dtype).to(device) for _ in range(2)), keep=20)


def strangers(*kvs: ck.SparseKV) -> list[ck.SparseKV]:
    """The same storage, of which no call is known."""
    return [ck.SparseKV.from_state_dict(kv.state_dict()) for kv in kvs]


def results(q, k, v, **options) -> tuple[Tensor, ...]:
    found = ck.sparse_attention(q, k, v, **options)
    return found if isinstance(found, tuple) else (found,)


def other_ways_to_lie(x: Tensor) -> list[Tensor]:
    """Equal to x (B, H, S, D)."""
    wide = torch.cat([x, x], dim=3)
    return [
        x.transpose(1, 2).contiguous().transpose(1, 2),
        wide[..., :D],
        torch._neg_view(-x),
        torch.nn.Parameter(x, requires_grad=False),
        x.clone().requires_grad_(),
    ]


@torch.no_grad()
def test_any_call_after_any_other(backend, rng, known):
    """The same bits as from caches of which nothing is known."""
    k, v = caches(backend.device)
    queries = [oracle.gaussian(B, HQ, 2, D).to(backend.device), oracle.gaussian(B, HKV, 1, D).to(backend.device)]
    tokens = [oracle.gaussian(B, HKV, 2 * W, D).to(backend.device) for _ in range(2)]
    windows = [tuple(x[:, :, first:last] for x in tokens) for first, last in ((0, W), (0, 0), (0, W + 1), (3, W))]
    lengths = torch.tensor([T, T, 3, 3], dtype=torch.int32, device=backend.device)
    choices = {
        "q": [x for q in queries for x in (q, *other_ways_to_lie(q))],
        "window": [None, *windows, list(windows[0]), windows[0][::-1], *zip(*map(other_ways_to_lie, windows[0]))],
        "seq_lens": [None, lengths[::2], lengths[1:3].contiguous(), torch._neg_view(-lengths)[1:3]],
        "scale": [None, 1, 1.0, 0.5],
        "causal": [True, False],
        "return_lse": [True, False],
        "num_splits": [None, 1, 2],
        "out": [False, True],
    }
    call = {name: values[0] for name, values in choices.items()}
    for _ in range(200):
        name = rng.choice(list(choices))
        call[name] = rng.choice(choices[name])
        arguments = {**call, "backend": backend.name}
        expected = results(arguments.pop("q"), *strangers(k, v), **{**arguments, "out": None})
        arguments["out"] = torch.empty_like(expected[0]) if call["out"] else None
        actual = results(call["q"], k, v, **arguments)
        assert all(oracle.same_bits(a, b) for a, b in zip(actual, expected, strict=True))
        assert arguments["out"] is None or actual[0] is arguments["out"]
        assert [(x.stride(), x.requires_grad) for x in actual] == [(x.stride(), x.requires_grad) for x in expected]
    for _ in range(2):
        results(queries[0], k, v, backend=backend.name)
    assert bool(known) == (backend.name != "reference")


def test_what_is_in_the_storage_may_change(backend, rng, known):
    """A preallocated pair is compressed into; storage moves to memory that processes share."""
    k, v = (
        ck.SparseKV.preallocate((B, HKV, T, D), role=role, keep=20, device=backend.device) for role in ("key", "value")
    )
    q = oracle.gaussian(B, HQ, 1, D).to(backend.device)
    for _ in range(4):
        ck.compress_kv(*(oracle.gaussian(B, HKV, T, D).to(backend.device) for _ in range(2)), keep=20, out=(k, v))
        expected = ck.sparse_attention(q, *strangers(k, v), backend=backend.name)
        assert oracle.same_bits(ck.sparse_attention(q, k, v, backend=backend.name), expected)
    assert len(known) == (0 if backend.name == "reference" else 3)
    if backend.device.type == "cuda":
        return
    for tensor in (storage_of(k, "k").blocks, v.token_order, v.channel_order):
        tensor.share_memory_()
        for _ in range(2):
            assert oracle.same_bits(ck.sparse_attention(q, k, v, backend=backend.name), expected)
    assert len(known) == (0 if backend.name == "reference" else 6)


def test_values_of_another_pair(backend, rng, known):
    (k, v), (_, w) = caches(backend.device), caches(backend.device)
    q = oracle.gaussian(B, HQ, 1, D).to(backend.device)
    for values in (v, v, w, w, copy.deepcopy(w), v):
        expected = ck.sparse_attention(q, *strangers(k, values), backend=backend.name)
        assert oracle.same_bits(ck.sparse_attention(q, k, values, backend=backend.name), expected)
    assert len(known) == (0 if backend.name == "reference" else 2)


def test_nothing_is_kept_alive(rng):
    k, v = caches()
    q, window = oracle.gaussian(B, HQ, 1, D), oracle.gaussian(B, HKV, W, D)
    lengths = torch.tensor([T, 3], dtype=torch.int32)
    for _ in range(3):
        ck.sparse_attention(q, k, v, window=(window, window), seq_lens=lengths)
    assert storage_of(k, "k").last_call is not None and storage_of(copy.deepcopy(k), "k").last_call is None
    seen = [weakref.ref(each) for each in (v, q, window, lengths)]
    gc.disable()  # no cycles either
    try:
        del q, window, lengths, v
        assert not any(reference() for reference in seen)
        seen.append(weakref.ref(k))
        del k
        assert seen[-1]() is None
    finally:
        gc.enable()


def test_threads_take_turns(rng):
    """Each with a window of its own, on the same caches."""
    k, v = caches()
    q = oracle.gaussian(B, HQ, 1, D)
    windows = [(oracle.gaussian(B, HKV, room, D),) * 2 for room in (W, W, 1, 20)]

    def call(window):
        return ck.sparse_attention(q, k, v, window=window)

    expected = list(map(call, windows))
    with ThreadPoolExecutor(len(windows)) as pool:
        for _ in range(50):
            assert all(map(oracle.same_bits, pool.map(call, windows), expected))


@pytest.mark.filterwarnings("error:Accessing the data pointer of FakeTensor")
def test_whoever_watches_sees_the_operation(rng, known):
    k, v = caches()
    q = oracle.gaussian(B, HQ, 1, D)

    def call(q, v=v, out=None):
        return ck.sparse_attention(q, k, v, out=out)

    expected = call(q)
    assert oracle.same_bits(call(q), expected) and len(known) == 1
    with Recorder() as recorder:
        assert oracle.same_bits(call(q), expected)
    assert recorder.names == ["sparse_attention"]
    with torch.profiler.profile() as profile:
        call(q)
    assert any(event.key == "cute_kernels::sparse_attention" for event in profile.key_averages())
    torch._dynamo.reset()
    assert oracle.same_bits(torch.compile(call, backend="aot_eager", fullgraph=True)(q), expected)
    assert oracle.same_bits(torch.func.functionalize(call)(q), expected)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        assert call(mode.from_tensor(q)).shape == q.shape
    values = storage_of(v, "v")
    fake = {name: mode.from_tensor(tensor) for name, tensor in values.tensors().items()}
    fake_v = from_storage(dataclasses.replace(values, **fake))
    assert isinstance(call(q, fake_v), FakeTensor)
    subclass = type("Subclass", (Tensor,), {})
    assert type(call(q.as_subclass(subclass))) is subclass
    assert type(call(q, out=torch.empty_like(q).as_subclass(subclass))) is subclass
    assert len(known) == 1
