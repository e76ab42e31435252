"""Sequences with different numbers of queries in one call: `cu_seqlens_q` of KVCache.attend and paged.attend."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels import paged
from tests.cache.test_paged import TOLERANCE, make_engine, tokens_of
from tests.support import oracle

COUNTS = [
    [1, 1, 1],
    [3, 0, 1],  # few rows: decoding kernels
    [2, 4, 3],
    [40, 1, 0],  # many: the prefill kernel, whose blocks of rows some sequences do not have
    [0, 0, 70],
    [1, 130, 33],
]


def starts_of(counts: list[int], device="cpu") -> torch.Tensor:
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return torch.tensor(starts, dtype=torch.int32, device=device)


def filled(backend, rng, head_dim=64, dtype=torch.float16, window=32):
    """An engine with three sequences of different lengths, all of at least 130 tokens."""
    engine = make_engine(backend.device, head_dim=head_dim, dtype=dtype, window=window, page_tokens=64)
    for sequence in range(3):
        engine.extend(sequence, tokens_of(engine, rng.randint(130, 250)))
    return engine


def check(engine, counts, sequences, out, lse, q, causal) -> None:
    """Every sequence's part against float64, and against a call of its own."""
    begin = 0
    for count, sequence in zip(counts, sequences, strict=True):
        part = slice(begin, begin + count)
        begin += count
        if not count:
            continue
        expected, sums = engine.expected(sequence, q[:, :, part], 0.2, causal)
        assert oracle.relative_error(out[:, :, part], expected) <= TOLERANCE[engine.config.dtype]
        torch.testing.assert_close(lse[:, :, part].cpu().double(), sums, atol=3e-3, rtol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_paged(backend, counts, causal, rng):
    dtype, head_dim = rng.choice(oracle.DTYPES), rng.choice([64, 80, 128, 256])
    engine = filled(backend, rng, head_dim, dtype, rng.choice([0, 32, 70]))
    sequences = rng.sample(range(3), k=3)
    heads = rng.choice([2, 6, 8])
    q = oracle.gaussian(1, heads, sum(counts), head_dim, dtype=dtype)
    starts = starts_of(counts, rng.choice(["cpu", backend.device]))
    most = None if starts.device.type == "cpu" else max(counts) + rng.choice([0, 1, 20])
    view = q.transpose(1, 2).contiguous().transpose(1, 2) if rng.random() < 0.5 else q  # (total, Hq, D)
    out, lse = paged.attend(
        view.to(backend.device),
        engine.pool,
        engine.windows,
        engine.lengths,
        engine.index(sequences),
        scale=0.2,
        causal=causal,
        return_lse=True,
        cu_seqlens_q=starts,
        max_seqlen_q=most,
        backend=backend.name,
    )
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    check(engine, counts, sequences, out, lse, q, causal)
    engine.check_memory()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_kv_cache(backend, counts, rng):
    """The same as a call of each sequence's own."""
    cache = ck.KVCache(max_batch=4, kv_heads=2, head_dim=64, capacity=512, keep=20, device=backend.device)
    lengths = [rng.randint(130, 400) for _ in range(3)]
    k, v = oracle.gaussian(2, 3, 2, 400, 64).to(backend.device)
    cache.prefill(k, v, lengths=lengths)
    q = oracle.gaussian(1, 6, sum(counts), 64).to(backend.device)
    rows = rng.sample(range(3), k=3)
    for sequences in (None, rows):
        out, lse = cache.attend(
            q, sequences=sequences, cu_seqlens_q=starts_of(counts), return_lse=True, backend=backend.name
        )
        begin = 0
        for row, count in enumerate(counts):
            part = slice(begin, begin + count)
            begin += count
            if not count:
                continue
            sequence = row if sequences is None else rows[row]
            one, sums = cache.attend(q[:, :, part], sequences=[sequence], return_lse=True, backend=backend.name)
            assert oracle.relative_error(out[:, :, part], one.double().cpu()) <= 2e-3
            torch.testing.assert_close(lse[:, :, part], sums, atol=3e-3, rtol=1e-3)


def test_more_queries_than_tokens_see_nothing(backend, rng):
    """On the device numbers are not checked: the oldest of too many queries see no token."""
    engine = make_engine(backend.device, window=32)
    engine.extend(0, tokens_of(engine, 10))
    engine.extend(1, tokens_of(engine, 90))
    q = oracle.gaussian(1, 2, 42, 64).to(backend.device)
    arguments = q, engine.pool, engine.windows, engine.lengths
    if backend.device.type == "cpu":
        with pytest.raises(ValueError, match="cu_seqlens_q must give a row no more queries"):
            paged.attend(*arguments, cu_seqlens_q=starts_of([12, 30]))
        return
    starts = starts_of([12, 30], backend.device)
    out, lse = paged.attend(*arguments, return_lse=True, cu_seqlens_q=starts, max_seqlen_q=30, backend=backend.name)
    assert (out[:, :, :2] == 0).all() and (lse[:, :, :2] == float("-inf")).all()
    assert lse[:, :, 2:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("starts", [[-5, 3, 9], [0, 900, 3], [7, 2, -(2**31)], [2**31 - 1, -(2**31), 9], [0, 3, 6]])
def test_any_numbers_on_the_device_stay_in_bounds(backend, starts, rng):
    """Nothing is written around out and lse, and what rows have is right wherever they are in order."""
    if not backend.name.startswith("sm"):
        pytest.skip("numbers on the host are checked")
    for most in (4, 100):
        engine = filled(backend, rng)
        memory = torch.full((4096 + 2 * 9 * 64,), 7.0, dtype=torch.float16, device=backend.device)
        out = memory[2048 : 2048 + 2 * 9 * 64].view(1, 2, 9, 64)
        q = oracle.gaussian(1, 2, 9, 64)
        paged.attend(
            q.to(backend.device),
            engine.pool,
            engine.windows,
            engine.lengths,
            cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=backend.device),
            max_seqlen_q=most,
            scale=0.2,
            out=out,
            backend=backend.name,
        )
        assert (memory[:2048] == 7).all() and (memory[-2048:] == 7).all()
        if starts == [0, 3, 6]:
            for sequence, part in enumerate((slice(0, 3), slice(3, 6))):
                expected, _ = engine.expected(sequence, q[:, :, part], 0.2)
                assert oracle.relative_error(out[:, :, part], expected) <= 2e-3


def test_refused(device, rng):
    cache = ck.KVCache(max_batch=2, kv_heads=2, head_dim=64, capacity=512, keep=20, device=device)
    k, v = oracle.gaussian(2, 2, 2, 40, 64).to(device)
    cache.prefill(k, v, lengths=[40, 3])
    q = oracle.gaussian(1, 4, 6, 64).to(device)

    def starts(*numbers, dtype=torch.int32):
        return torch.tensor(numbers, dtype=dtype)

    for numbers in ((0, 3, 5), (1, 3, 6), (0, 7, 6), (0, -1, 6), (0, 3, 7)):
        with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0 to q's 6 tokens"):
            cache.attend(q, cu_seqlens_q=starts(*numbers))
    with pytest.raises(ValueError, match=r"no more queries than its sequence holds tokens, got 4 for row 1"):
        cache.attend(q, cu_seqlens_q=starts(0, 2, 6))
    with pytest.raises(ValueError, match="max_seqlen_q must be at least the 4 tokens"):
        cache.attend(q, cu_seqlens_q=starts(0, 4, 6), max_seqlen_q=3)
    with pytest.raises(ValueError, match="max_seqlen_q goes with cu_seqlens_q"):
        cache.attend(q, max_seqlen_q=3)
    with pytest.raises(ValueError, match=r"q must have shape \(1, Hq, total, D\)"):
        cache.attend(q.expand(2, -1, -1, -1), cu_seqlens_q=starts(0, 6))
    with pytest.raises(TypeError, match="cu_seqlens_q must be int32"):
        cache.attend(q, cu_seqlens_q=starts(0, 3, 6, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"cu_seqlens_q must be a torch\.Tensor"):
        cache.attend(q, cu_seqlens_q=[0, 3, 6])
    with pytest.raises(ValueError, match="cu_seqlens_q must be contiguous"):
        cache.attend(q, cu_seqlens_q=starts(0, 0, 3, 3, 6, 6)[::2])
    with pytest.raises(ValueError, match="cu_seqlens_q must have at most batch = 2 rows, got 3"):
        cache.attend(q, cu_seqlens_q=starts(0, 3, 6, 6))
    with pytest.raises(TypeError, match="max_seqlen_q must be an integer"):
        cache.attend(q, cu_seqlens_q=starts(0, 3, 6), max_seqlen_q=3.0)


@pytest.mark.gpu
def test_numbers_on_the_device_need_their_maximum(rng):
    cache = ck.KVCache(max_batch=2, kv_heads=2, head_dim=64, capacity=512, keep=20, device="cuda")
    q = oracle.gaussian(1, 4, 6, 64).cuda()
    with pytest.raises(ValueError, match="max_seqlen_q must be given"):
        cache.attend(q, cu_seqlens_q=torch.tensor([0, 3, 6], dtype=torch.int32, device="cuda"))


def test_no_queries(device, rng):
    cache = ck.KVCache(max_batch=2, kv_heads=2, head_dim=64, capacity=512, keep=20, device=device)
    cache.prefill(*oracle.gaussian(2, 2, 2, 40, 64).to(device))
    q = oracle.gaussian(1, 4, 0, 64).to(device)
    assert cache.attend(q, cu_seqlens_q=torch.zeros(3, dtype=torch.int32)).shape == (1, 4, 0, 64)


def test_compiled(device, rng):
    """One graph, with numbers of queries that change from call to call."""
    if not torch._dynamo.is_dynamo_supported():
        pytest.skip("torch.compile does not support this Python")
    cache = ck.KVCache(max_batch=2, kv_heads=2, head_dim=64, capacity=512, keep=20, device=device)
    cache.prefill(*oracle.gaussian(2, 2, 2, 140, 64).to(device))

    @torch.compile(fullgraph=True, backend="eager")
    def attend(q, starts):
        return cache.attend(q, cu_seqlens_q=starts, max_seqlen_q=5)

    for counts in ([1, 5], [4, 2]):
        q = oracle.gaussian(1, 4, 6, 64).to(device)
        starts = starts_of(counts, device)
        expected = cache.attend(q, cu_seqlens_q=starts, max_seqlen_q=5)
        assert oracle.same_bits(attend(q, starts), expected)


@pytest.mark.gpu
def test_captured_in_a_graph(rng):
    """Replays serve other numbers of queries, as long as they are on the device."""
    cache = ck.KVCache(max_batch=3, kv_heads=2, head_dim=64, capacity=512, keep=20, device="cuda")
    cache.prefill(*oracle.gaussian(2, 3, 2, 300, 64).cuda())
    q = oracle.gaussian(1, 8, 60, 64).cuda()
    starts = starts_of([20, 20, 20], "cuda")
    arguments = {"cu_seqlens_q": starts, "max_seqlen_q": 60}
    cache.attend(q, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cache.attend(q, **arguments)
    for counts in ([1, 40, 19], [60, 0, 0]):
        starts.copy_(starts_of(counts))
        graph.replay()
        expected = cache.attend(q, cu_seqlens_q=starts_of(counts))
        assert oracle.relative_error(out, expected.double().cpu()) <= 2e-3
