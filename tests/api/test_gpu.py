"""What only a GPU can show: the same storage as on the CPU, streams, graphs, very large caches."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.support import oracle
from tests.support.backends import skip_unless_ok
from tests.support.synchronisation import no_waiting

pytestmark = pytest.mark.gpu
GIB = 1 << 30


@pytest.fixture(autouse=True)
def gpu_kernels():
    skip_unless_ok("sm80")


def same_storage(a: ck.SparseKV, b: ck.SparseKV) -> bool:
    first, second = a.state_dict(), b.state_dict()
    names = [name for name in first if name != "metadata"]
    return first["metadata"] == second["metadata"] and all(torch.equal(first[n].cpu(), second[n].cpu()) for n in names)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("kind", ["gaussian", "lognormal", "bits", "ties"])
def test_storage_is_that_of_the_cpu(kind, head_dim, dtype, rng):
    shape = (2, 3, rng.randrange(1, 700), head_dim)
    x = {
        "gaussian": lambda: oracle.gaussian(*shape, dtype=dtype),
        "lognormal": lambda: oracle.lognormal_channels(*shape, dtype=dtype),
        "bits": lambda: oracle.random_bits(*shape, dtype=dtype),
        "ties": lambda: torch.randint(-2, 3, shape).to(dtype),
    }[kind]()
    for keep in (None, 1, rng.randrange(1, head_dim + 1), head_dim):
        assert oracle.same_bits(ck.prune(x.cuda(), keep=keep), ck.prune(x, keep=keep))
        for role in ("key", "value"):
            assert same_storage(ck.compress(x.cuda(), role=role, keep=keep), ck.compress(x, role=role, keep=keep)), (
                role,
                keep,
            )
        on_gpu, on_cpu = ck.compress_kv(x.cuda(), x.flip(2).cuda(), keep=keep), ck.compress_kv(x, x.flip(2), keep=keep)
        assert all(same_storage(a, b) and a.nnz == b.nnz for a, b in zip(on_gpu, on_cpu)), keep


@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("keep", [None, 20])
def test_storage_of_strided_views_is_that_of_the_cpu(head_dim, keep, rng):
    x = oracle.gaussian(2, 3, rng.randrange(1, 300), head_dim)
    odd = torch.zeros(*x.shape[:3], head_dim + 3, dtype=x.dtype, device="cuda")
    odd[..., 3:] = x.cuda()
    batch_last = x.cuda().permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    expected = {role: ck.compress(x, role=role, keep=keep) for role in ("key", "value")}
    for view in (odd[..., 3:], batch_last, x.cuda().repeat_interleave(2, dim=2)[:, :, 1::2]):
        assert oracle.same_bits(ck.prune(view, keep=keep), ck.prune(x, keep=keep))
        for role in expected:
            assert same_storage(ck.compress(view, role=role, keep=keep), expected[role])


@pytest.mark.parametrize("pattern", ["one class", "same channels", "few dense tiles"])
def test_storage_of_uneven_caches_is_that_of_the_cpu(pattern, rng):
    """Blocks much longer than the average, which is what memory is allocated for at first."""
    x = oracle.gaussian(1, 2, 1000, 128) * 1e-2
    if pattern == "one class":
        x[:, :, :, ::8] += 10
    elif pattern == "same channels":
        x[:, :, :, :38] += 10
    for keep in (16, 38, 100, None):
        if pattern == "few dense tiles":
            x[:, :, 64:] = 0
        for role in ("key", "value"):
            on_gpu, on_cpu = ck.compress(x.cuda(), role=role, keep=keep), ck.compress(x, role=role, keep=keep)
            assert same_storage(on_gpu, on_cpu), (role, keep)
            assert on_gpu.blocks.untyped_storage().nbytes() <= 1.2 * on_gpu.blocks.nbytes


def test_filling_a_preallocated_cache_does_not_synchronise(rng):
    x = oracle.gaussian(1, 2, 1000, 128).cuda()
    out = tuple(ck.SparseKV.preallocate(x.shape, role=role, keep=38) for role in ("key", "value"))
    ck.compress_kv(x, x, keep=38, out=out)  # the first calls may load modules
    with no_waiting():
        ck.compress_kv(x, x, keep=38, out=out)
        ck.compress(x, role="key", keep=38, out=out[0])


@pytest.mark.parametrize("together", [False, True], ids=["compress", "compress_kv"])
def test_compression_in_a_cuda_graph(together, rng):
    x = [oracle.gaussian(2, 2, 1000, 128) for _ in range(3)]
    k, v = x[0].cuda(), x[1].cuda()
    q, p = oracle.gaussian(2, 8, 1, 128).cuda(), torch.rand(2, 8, 1, 1000).cuda()
    keys, values = (ck.SparseKV.preallocate(k.shape, role=role, keep=38) for role in ("key", "value"))

    def step():
        if together:
            ck.compress_kv(k, v, keep=38, out=(keys, values))
        else:
            ck.compress(k, role="key", keep=38, out=keys)
            ck.compress(v, role="value", keep=38, out=values)
        return ck.sparse_qk(q, keys), ck.sparse_av(p, values)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, out = step()
    for new_k, new_v in ((x[1], x[2]), (x[2] * 0, x[0]), (x[0], x[1])):
        k.copy_(new_k)
        v.copy_(new_v)
        graph.replay()
        torch.cuda.synchronize()
        expected = (
            ck.compress_kv(new_k, new_v, keep=38)
            if together
            else (ck.compress(new_k, role="key", keep=38), ck.compress(new_v, role="value", keep=38))
        )
        assert same_storage(keys, expected[0]) and same_storage(values, expected[1])
        assert keys.nnz == expected[0].nnz
        assert oracle.relative_error(logits, oracle.qk(q, oracle.prune(new_k, 38))) <= 1e-3 or not new_k.any()
        assert oracle.relative_error(out, oracle.av(p, oracle.prune(new_v, 38))) <= 2e-3


def test_caches_compressed_elsewhere(rng):
    x = oracle.gaussian(2, 2, 300, 128)
    k, v = (kv.to("cuda") for kv in ck.compress_kv(x, x, keep=38))
    q, p = oracle.gaussian(2, 8, 1, 128), torch.rand(2, 8, 1, 300)
    assert oracle.relative_error(ck.sparse_qk(q.cuda(), k), oracle.qk(q, oracle.prune(x, 38))) <= 1e-3
    assert oracle.relative_error(ck.sparse_av(p.cuda(), v), oracle.av(p, oracle.prune(x, 38))) <= 2e-3


def test_other_streams(rng):
    """Work is queued on the current stream, behind what is there already."""
    stream = torch.cuda.Stream()
    x = oracle.gaussian(1, 4, 4096, 128)
    q, p = oracle.gaussian(1, 16, 1, 128), torch.rand(1, 16, 1, 4096)
    late = [torch.zeros_like(t, device="cuda") for t in (x, q, p)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for target, source in zip(late, (x, q, p)):
            target.copy_(source.pin_memory(), non_blocking=True)
        k, v = ck.compress_kv(late[0], late[0], keep=38)
        torch.cuda._sleep(200_000_000)
        late[1].mul_(2)
        late[2].mul_(2)
        logits, out = ck.sparse_qk(late[1], k), ck.sparse_av(late[2], v)
    stream.synchronize()
    dense = oracle.prune(x, 38)
    assert oracle.relative_error(logits, oracle.qk(2 * q, dense)) <= 1e-3
    assert oracle.relative_error(out, oracle.av(2 * p, dense)) <= 2e-3


def test_products_do_not_synchronise(rng):
    x = oracle.gaussian(1, 2, 1000, 128).cuda()
    k, v = ck.compress_kv(x, x, keep=38)
    q, p = oracle.gaussian(1, 8, 1, 128).cuda(), torch.rand(1, 8, 1, 1000).cuda()
    ck.sparse_qk(q, k)
    ck.sparse_av(p, v)  # the first calls may load modules
    with no_waiting():
        ck.sparse_qk(q, k)
        ck.sparse_av(p, v)


def test_cuda_graph(rng):
    x = oracle.gaussian(2, 2, 1000, 128).cuda()
    k, v = ck.compress_kv(x, x, keep=38)
    q, p = oracle.gaussian(2, 8, 1, 128).cuda(), torch.rand(2, 8, 1, 1000).cuda()
    logits, out = ck.sparse_qk(q, k), ck.sparse_av(p, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ck.sparse_qk(q, k, out=logits)
        ck.sparse_av(p, v, out=out)
    q.normal_()
    p.uniform_()
    graph.replay()
    torch.cuda.synchronize()
    dense = oracle.prune(x.cpu(), 38)
    assert oracle.relative_error(logits, oracle.qk(q, dense)) <= 1e-3
    assert oracle.relative_error(out, oracle.av(p, dense)) <= 2e-3


def test_another_device_than_the_current(rng):
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    x = oracle.gaussian(1, 2, 300, 128)
    with torch.cuda.device(0):
        k, v = ck.compress_kv(x.to("cuda:1"), x.to("cuda:1"), keep=38)
        q, p = oracle.gaussian(1, 8, 1, 128), torch.rand(1, 8, 1, 300)
        logits, out = ck.sparse_qk(q.to("cuda:1"), k), ck.sparse_av(p.to("cuda:1"), v)
    assert logits.device == out.device == torch.device("cuda:1")
    assert oracle.relative_error(logits, oracle.qk(q, oracle.prune(x, 38))) <= 1e-3
    assert oracle.relative_error(out, oracle.av(p, oracle.prune(x, 38))) <= 2e-3


@pytest.mark.slow
def test_more_than_two_to_the_31_elements(rng):
    """4.3e9 elements: offsets of the dense cache, of logits and weights, all beyond 32 bits."""
    batch, heads, tokens, head_dim, keep = 8, 8, 524_288, 128, 38
    if torch.cuda.mem_get_info()[0] < 48 * GIB:
        pytest.skip("needs 48 GiB of free GPU memory")
    x = torch.randn(batch, heads, tokens, head_dim, dtype=torch.float16, device="cuda")
    pruned = ck.prune(x, keep=keep)
    assert int((pruned[-1, -1, -1000:] != 0).sum()) == 1000 * keep
    assert torch.equal(pruned[-1, -1, -1000:], ck.prune(x[-1:, -1:, -1000:], keep=keep)[0, 0])
    dense = pruned[-1, -1].double()
    q = oracle.gaussian(batch, heads, 1, head_dim).cuda()
    p = torch.rand(batch, heads, 1, tokens, device="cuda")

    kv = ck.compress(x, role="key", keep=keep)
    assert kv.nnz == batch * heads * tokens * keep
    assert torch.equal(ck.decompress(kv), pruned)
    logits = ck.sparse_qk(q, kv)
    assert oracle.relative_error(logits[-1, -1, 0], (dense @ q[-1, -1, 0].double()).cpu()) <= 1e-3
    del kv, logits

    kv = ck.compress(x, role="value", keep=keep)
    assert torch.equal(ck.decompress(kv), pruned)
    out = ck.sparse_av(p, kv)
    assert oracle.relative_error(out[-1, -1, 0], (p[-1, -1, 0].double() @ dense).cpu()) <= 2e-3


@pytest.mark.slow
def test_more_than_two_to_the_31_logits(rng):
    batch, heads, queries, tokens = 1, 16, 16, 2**31 // (16 * 16) + 64
    if torch.cuda.mem_get_info()[0] < 32 * GIB:
        pytest.skip("needs 32 GiB of free GPU memory")
    x = torch.randn(batch, 1, tokens, 8, dtype=torch.float16, device="cuda")
    q = oracle.gaussian(batch, heads, queries, 8).cuda()
    logits = ck.sparse_qk(q, ck.compress(x, role="key"), scale=5e-4, out_dtype=torch.float16)
    expected = 5e-4 * x[0, 0, -1000:].double() @ q[0, -1, -1].double()
    assert oracle.relative_error(logits[0, -1, -1, -1000:], expected.cpu()) <= 2e-3
    out = ck.sparse_av(logits, ck.compress(x, role="value"))
    assert oracle.relative_error(out[0, -1, -1], (logits[0, -1, -1].double() @ x[0, 0].double()).cpu()) <= 2e-3
