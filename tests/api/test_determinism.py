"""Results on one device and backend are bit-identical from run to run."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.support import oracle

# Query heads, KV heads, query tokens, cached tokens, head dim.
SHAPES = [(8, 2, 1, 5000, 128), (4, 4, 3, 777, 80), (8, 1, 5, 2049, 256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_products(backend, shape, dtype, rng):
    q_heads, kv_heads, queries, tokens, head_dim = shape
    x = oracle.gaussian(2, kv_heads, tokens, head_dim, dtype=dtype).to(backend.device)
    k, v = ck.compress_kv(x, x, sparsity=0.7)
    q = oracle.gaussian(2, q_heads, queries, head_dim, dtype=dtype).to(backend.device)
    p = (torch.randn(2, q_heads, queries, tokens) * 3).softmax(-1).to(backend.device)

    def run():
        return [
            ck.sparse_qk(q, k, backend=backend.name),
            ck.sparse_av(p, v, backend=backend.name),
            ck.sparse_av(p.to(dtype), v, backend=backend.name),
        ]

    first = run()
    for _ in range(100 if backend.name.startswith("sm") else 3):
        for once, again in zip(first, run()):
            assert torch.equal(once, again)


def test_compression(device, rng):
    x = oracle.gaussian(2, 2, 1000, 128).to(device)
    first = ck.compress(x, role="key", keep=38).state_dict()
    for _ in range(100 if device.type == "cuda" else 3):
        again = ck.compress(x, role="key", keep=38).state_dict()
        assert first["metadata"] == again["metadata"]
        assert all(torch.equal(first[name], again[name]) for name in first if name != "metadata")


def test_compression_does_not_depend_on_threads(rng):
    x = oracle.gaussian(1, 3, 300, 128)
    states = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            states.append(ck.compress(x, role="value", keep=38).state_dict())
    finally:
        torch.set_num_threads(threads)
    for state in states[1:]:
        assert all(torch.equal(states[0][name], state[name]) for name in state if name != "metadata")


def test_beside_many_stores(backend, rng):
    """Logits of rows that start anywhere are stored one by one, which holds loads from shared memory up: they must be
    done before a stage is filled again."""
    if not backend.name.startswith("sm"):
        pytest.skip("kernels of a GPU")
    x = torch.randint(-4, 5, (4, 8, 6007, 64), device=backend.device).half()
    q = torch.randint(-4, 5, (4, 40, 16, 64), device=backend.device).half()
    k = ck.compress(x, role="key", keep=20)
    busy, elsewhere = torch.cuda.Stream(), torch.empty(2**27, device=backend.device)
    first = ck.sparse_qk(q, k, out_dtype=torch.float32, backend=backend.name)
    assert torch.equal(first, q.float() @ ck.decompress(k).float().repeat_interleave(5, dim=1).mT)  # integers: exact
    for _ in range(300):
        with torch.cuda.stream(busy):
            elsewhere.fill_(1)
        assert torch.equal(ck.sparse_qk(q, k, out_dtype=torch.float32, backend=backend.name), first)


def test_concurrent_streams(backend, rng):
    """Calls on other streams change no bits: three streams that the device runs side by side, other inputs on each."""
    if backend.device.type != "cuda":
        pytest.skip("streams of a GPU")
    calls = []
    for tokens in (1500, 777, 3000):
        x = oracle.gaussian(1, 2, tokens, 128).to(backend.device)
        k, v = ck.compress_kv(x, x, sparsity=0.7)
        q = oracle.gaussian(1, 8, 1, 128).to(backend.device)
        p = torch.randn(1, 8, 1, tokens).softmax(-1).to(backend.device)
        calls.append(
            (
                lambda q=q, k=k: ck.sparse_qk(q, k, backend=backend.name),
                lambda p=p, v=v: ck.sparse_av(p, v, backend=backend.name),
                lambda q=q, k=k, v=v: ck.sparse_attention(q, k, v, backend=backend.name),
            )
        )
    alone = [[call() for call in each] for each in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    together: list[list[list[torch.Tensor]]] = [[] for _ in calls]
    for _ in range(100 if backend.name.startswith("sm") else 3):
        for stream, each, results in zip(streams, calls, together):
            with torch.cuda.stream(stream):
                results.append([call() for call in each])
    torch.cuda.synchronize()
    for expected, results in zip(alone, together):
        assert all(torch.equal(a, b) for result in results for a, b in zip(expected, result))
