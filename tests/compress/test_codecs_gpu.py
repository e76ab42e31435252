"""Narrow codecs on a GPU: the same storage as on the CPU, bit for bit, and products and attention over it."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels._storage.tile_reader import operand
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle
from tests.support.backends import skip_unless_ok

pytestmark = pytest.mark.gpu
NARROW = tuple(oracle.NARROW)
ROLES = ("key", "value")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
LOGITS_TOLERANCE = 1e-3


@pytest.fixture(params=["sm80", "sm90"])
def name(request) -> str:
    skip_unless_ok(request.param)
    return request.param


def exact(kv: ck.SparseKV) -> torch.Tensor:
    """Numbers times scales, float64."""
    return operand(storage_of(kv.to("cpu"), "kv")).double()


def check_alike(on_gpu: ck.SparseKV, on_cpu: ck.SparseKV) -> None:
    for field in ("row_offsets", "token_order", "channel_order", "channel_scale", "blocks"):
        ours, theirs = getattr(on_gpu, field).cpu(), getattr(on_cpu, field)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), field
    assert (on_gpu.max_tile_rows, on_gpu.nnz) == (on_cpu.max_tile_rows, on_cpu.nnz)
    assert oracle.same_bits(ck.decompress(on_gpu), ck.decompress(on_cpu))
    on_gpu.validate()


@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_compression_is_that_of_the_cpu(dtype, role, codec, rng):
    for shape in ((2, 2, 150, 80), (1, 3, 700, 128), (1, 1, 64, 64), (1, 2, 70, 256), (1, 1, 1, 8)):
        make = rng.choice([oracle.gaussian, oracle.lognormal_channels])
        x = make(*shape, dtype=dtype) * rng.choice([1e-2, 1.0, 300.0])
        x[:, :, rng.randrange(shape[2])] = 0
        x = torch.where(x.isfinite(), x, 1.0)
        keep = rng.choice([None, 1, shape[3] // 3 or 1, shape[3] // 2])
        on_cpu = ck.compress(x, role=role, keep=keep, codec=codec)
        check_alike(ck.compress(x.cuda(), role=role, keep=keep, codec=codec), on_cpu)
        strided = x.cuda().transpose(1, 2).contiguous().transpose(1, 2)[..., : shape[3]]
        check_alike(ck.compress(strided, role=role, keep=keep, codec=codec), on_cpu)


@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_every_finite_value(dtype, codec, rng):
    patterns = torch.randperm(1 << 16).to(torch.int32).to(torch.int16).view(1, 2, 512, 64)
    x = torch.where(patterns.view(dtype).isfinite(), patterns, 0).view(dtype)
    for role in ROLES:
        check_alike(ck.compress(x.cuda(), role=role, codec=codec), ck.compress(x, role=role, codec=codec))


def test_values_that_are_refused(rng):
    for number, refused in ((float("inf"), NARROW), (float("nan"), ("int8", "int4"))):
        x = oracle.gaussian(1, 2, 150, 64, device="cuda")
        x[0, rng.randrange(2), rng.randrange(150), rng.randrange(64)] = number
        for codec in NARROW:
            out = ck.SparseKV.preallocate(x.shape, role="key", codec=codec)
            ck.compress(x, role="key", out=out)  # does not wait for the device
            if codec not in refused:
                check_alike(ck.compress(x, role="key", codec=codec), ck.compress(x.cpu(), role="key", codec=codec))
                out.validate()
                continue
            with pytest.raises(ValueError, match=f"holds 1 values that are infinite.* codec '{codec}' cannot"):
                out.validate()
            with pytest.raises(ValueError, match=f"k holds 1 values that are infinite.* codec '{codec}' cannot"):
                ck.compress(x, role="key", codec=codec)
            ck.compress(torch.zeros_like(x), role="key", out=out)
            out.validate()


@pytest.mark.parametrize("codec", NARROW)
def test_a_captured_compression(codec, rng):
    x = oracle.gaussian(2, 2, 300, 128, device="cuda")
    out = tuple(ck.SparseKV.preallocate(x.shape, role=role, keep=64, codec=codec) for role in ROLES)
    ck.compress_kv(x, x, keep=64, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ck.compress_kv(x, x, keep=64, out=out)
    x.copy_(oracle.gaussian(2, 2, 300, 128, device="cuda"))
    graph.replay()
    for kv, fresh in zip(out, ck.compress_kv(x.cpu(), x.cpu(), keep=64, codec=codec)):
        check_alike(kv.to_exact_size(), fresh)


@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_products(dtype, codec, name, rng):
    for head_dim in (64, 80, 128, 256):
        tokens, group, queries = rng.choice([1, 64, 150, 700]), rng.choice([1, 4]), rng.choice([1, 2, 5])
        x = oracle.lognormal_channels(2, 2, tokens, head_dim, dtype=dtype).cuda()
        keep = rng.choice([None, head_dim // 3, head_dim // 2])
        k, v = (ck.compress(x, role=role, keep=keep, codec=codec) for role in ROLES)
        q = oracle.gaussian(2, 2 * group, queries, head_dim, dtype=dtype, device="cuda")
        logits = ck.sparse_qk(q, k, scale=0.3, backend=name)
        # By what the terms of a logit would add up to with random signs: few logits may be far smaller.
        size = oracle.qk(q.double() ** 2, exact(k) ** 2, 0.3**2).sum().sqrt()
        difference = logits.double().cpu() - oracle.qk(q, exact(k), 0.3)
        assert difference.norm() <= LOGITS_TOLERANCE * size
        for p_dtype in (torch.float32, torch.float16, torch.bfloat16):
            p = torch.rand(2, 2 * group, queries, tokens, device="cuda").to(p_dtype)
            got = ck.sparse_av(p, v, backend=name)
            assert oracle.relative_error(got, oracle.av(p, exact(v))) <= TOLERANCE[dtype], p_dtype


@pytest.mark.parametrize("codec", NARROW)
def test_weights_beside_those_of_tokens_without_nonzeros(codec, name, rng):
    """However much larger these are: the others lose nothing."""
    v = oracle.gaussian(1, 2, 300, 128, device="cuda", scale=2000)  # results are normal numbers
    empty = torch.rand(300, device="cuda") < 0.5
    v[:, :, empty] = 0
    V = ck.compress(v, role="value", keep=64, codec=codec)
    p = torch.where(empty, 1.0, (1 + torch.rand(1, 8, 3, 300, device="cuda")) * 2.0**-24)
    assert oracle.relative_error(ck.sparse_av(p, V, backend=name), oracle.av(p, exact(V))) <= TOLERANCE[v.dtype]


def test_queries_of_any_size(name, rng):
    """Rows of q, channels of keys and tokens of values whose sizes are far apart."""
    k = oracle.gaussian(1, 1, 200, 128) * 2.0 ** torch.randint(-6, 7, (128,))
    v = oracle.gaussian(1, 1, 200, 128) * 2.0 ** torch.randint(-8, 9, (200, 1))
    q = oracle.gaussian(1, 8, 1, 128) * 2.0 ** torch.randint(-9, 4, (8, 1, 1))
    for codec in NARROW:
        K, V = ck.compress_kv(k.half().cuda(), v.half().cuda(), keep=64, codec=codec)
        logits = ck.sparse_qk(q.half().cuda(), K, backend=name)
        expected = oracle.qk(q.half(), exact(K))
        for row in range(8):
            assert oracle.relative_error(logits[:, row], expected[:, row]) <= LOGITS_TOLERANCE
        out, lse = ck.sparse_attention(q.half().cuda(), K, V, scale=0.02, return_lse=True, backend=name)
        expected, expected_lse = oracle.attention(q.half(), exact(K), exact(V), 0.02)
        # q times the channels' scales is rounded to 11 bits: terms of random signs move a logit by so much, and with it
        # a probability.
        moved = 2**-11 * oracle.qk(q.half().double() ** 2, exact(K) ** 2, 0.02**2).sqrt().amax(-1).flatten()
        for row in range(8):
            assert oracle.relative_error(out[:, row], expected[:, row]) <= 2e-3 + float(moved[row])
        torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("together", [True, False], ids=["one token order", "two"])
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_attention(dtype, together, codec, name, rng):
    for head_dim in (64, 80, 128, 256):
        tokens, group, queries = rng.choice([1, 64, 150, 700]), rng.choice([1, 4, 8]), rng.choice([1, 1, 3])
        k, v = (oracle.lognormal_channels(2, 2, tokens, head_dim, dtype=dtype).cuda() for _ in ROLES)
        keep = rng.choice([None, head_dim // 3, head_dim // 2])
        if together:
            K, V = ck.compress_kv(k, v, keep=keep, codec=codec)
        else:
            K, V = (ck.compress(x, role=role, keep=keep, codec=codec) for x, role in zip((k, v), ROLES))
        q = oracle.gaussian(2, 2 * group, queries, head_dim, dtype=dtype, device="cuda")
        scale = 0.3 / head_dim**0.5
        window = tuple(oracle.gaussian(2, 2, rng.choice([1, 9, 64]), head_dim, dtype=dtype) for _ in ROLES)
        window = (window[0], window[1][:, :, : window[0].shape[2]])
        if window[1].shape != window[0].shape:
            window = None
        for w in (None, window):
            for lengths in (None, [tokens, rng.randrange(tokens + 1)]):
                on_device = None if w is None else tuple(x.cuda() for x in w)
                seq_lens = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
                options = {"scale": scale, "window": on_device, "seq_lens": seq_lens}
                out, lse = ck.sparse_attention(q, K, V, return_lse=True, backend=name, **options)
                expected, expected_lse = oracle.attention(q.cpu(), exact(K), exact(V), scale, w, lengths)
                assert oracle.relative_error(out, expected) <= TOLERANCE[dtype]
                torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=4e-3, rtol=1e-3)
                again = ck.sparse_attention(q, K, V, backend=name, **options)
                assert oracle.same_bits(again, out)


@pytest.mark.parametrize("queries", [1, 40], ids=["decoding", "prefill"])
@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_small_weights(dtype, codec, queries, name, rng):
    """Weights from 2^-14 of a row's largest on have the precision of results, smaller ones are off by 2^-24 of it at
    most. Every channel of the output is one token's."""
    k = torch.zeros(1, 1, 64, 64)
    k[..., 0] = -torch.linspace(0.25, 28, 64)[torch.randperm(64)]
    v = 300 * torch.diag(torch.randint(0, 2, (64,)) * 2.0 - 1)[None, None]
    K, V = ck.compress_kv(k.to(dtype).cuda(), v.to(dtype).cuda(), codec=codec)
    q = torch.full((1, 1, queries, 64), 0.693, dtype=dtype, device="cuda")
    options = {"scale": 1.0, "causal": False}
    out = ck.sparse_attention(q, K, V, backend=name, **options).double().cpu()
    expected, _ = oracle.attention(q.cpu(), exact(K), exact(V), 1.0, causal=False)
    weight = expected.abs() / 300
    of_largest = weight / weight.amax(-1, keepdim=True)
    logits = -oracle.qk(q.cpu(), exact(K), 1.0)
    relative = TOLERANCE[dtype] + 2 * 2.0**-11 * logits  # q times a scale is rounded to float16
    off = (out - expected).abs()
    assert bool((off <= relative * expected.abs() + 300 * 2.0**-24 * weight.amax()).all())
    assert bool((off <= relative * expected.abs())[of_largest >= 2.0**-14].all())


def test_nan_of_tokens_that_do_not_count(name, rng):
    k, v = (oracle.gaussian(1, 2, 200, 128, device="cuda") for _ in ROLES)
    v[0, 0, 150] = float("nan")  # of which pruning keeps the first channels
    K, V = ck.compress_kv(k, v, keep=64, codec="fp8")
    q = oracle.gaussian(1, 4, 1, 128, device="cuda")
    lengths = torch.tensor([140], dtype=torch.int32, device="cuda")
    out = ck.sparse_attention(q, K, V, seq_lens=lengths, backend=name)
    expected, _ = oracle.attention(q.cpu(), exact(K), exact(V), 128**-0.5, None, [140])
    assert oracle.relative_error(out, expected) <= 2e-3
    out = ck.sparse_attention(q, K, V, backend=name)
    assert out[:, :2, :, :64].isnan().all() and not out[:, :2, :, 64:].isnan().any() and not out[:, 2:].isnan().any()


def test_codecs_of_keys_and_values_that_differ(name, rng):
    k, v = (oracle.gaussian(1, 2, 100, 64, device="cuda") for _ in ROLES)
    q = oracle.gaussian(1, 2, 1, 64, device="cuda")
    K, V = ck.compress_kv(k, v, keep=20, key_codec="fp8", value_codec="int4")
    with pytest.raises(RuntimeError, match=rf"'{name}' has no kernels of sparse_attention for keys in codec 'fp8'"):
        ck.sparse_attention(q, K, V, backend=name)
    expected, _ = oracle.attention(q.cpu(), exact(K), exact(V), 64**-0.5)
    assert oracle.relative_error(ck.sparse_attention(q, K, V, backend="reference"), expected) <= 2e-3
