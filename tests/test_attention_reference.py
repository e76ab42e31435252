"""sparse_attention on the reference backend, against a float64 loop over queries."""

from __future__ import annotations

import itertools

import oracle
import pytest
import torch

import cute_kernels as ck

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check(
    device,
    *,
    batch=2,
    groups=2,
    kv_heads=2,
    queries=1,
    tokens=100,
    head_dim=64,
    window=None,
    seq_lens=None,
    scale=None,
    causal=True,
    dtype=torch.float16,
    keep=20,
    poison=None,
):
    k, v = (oracle.gaussian(batch, kv_heads, tokens, head_dim, dtype=dtype) for _ in range(2))
    q = oracle.gaussian(batch, kv_heads * groups, queries, head_dim, dtype=dtype)
    dense = window and tuple(oracle.gaussian(batch, kv_heads, window, head_dim, dtype=dtype) for _ in range(2))
    if poison:
        poison(k, v, *(dense or ()))
    keys, values = ck.compress_kv(k.to(device), v.to(device), keep=keep)
    lengths = None if seq_lens is None else torch.tensor(seq_lens, dtype=torch.int32, device=device)
    on_device = dense and tuple(t.to(device) for t in dense)
    out, lse = ck.sparse_attention(
        q.to(device),
        keys,
        values,
        scale=scale,
        window=on_device,
        seq_lens=lengths,
        causal=causal,
        return_lse=True,
        backend="reference",
    )
    expected, expected_lse = oracle.attention(
        q,
        oracle.prune(k, keep),
        oracle.prune(v, keep),
        head_dim**-0.5 if scale is None else scale,
        dense,
        seq_lens,
        causal,
    )
    assert out.shape == q.shape and out.dtype == dtype and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    assert oracle.relative_error(out, expected) <= TOLERANCE[dtype]
    torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=1e-4, rtol=1e-4)
    return out, lse


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("groups, queries", list(itertools.product([1, 3, 8], [1, 2, 5])))
@pytest.mark.parametrize("causal", [True, False])
def test_rows(device, causal, groups, queries, dtype, rng):
    check(device, groups=groups, queries=queries, causal=causal, dtype=dtype)


@DEVICES
@pytest.mark.parametrize("window", [None, 1, 32])
@pytest.mark.parametrize("seq_lens", [None, [100, 100], [37, 64], [0, 1]])
@pytest.mark.parametrize("queries", [1, 4])
def test_windows_and_lengths(device, queries, seq_lens, window, rng):
    check(device, queries=queries, window=window, seq_lens=seq_lens)
    check(device, queries=queries, window=window, seq_lens=seq_lens, causal=False)


@DEVICES
@pytest.mark.parametrize("scale", [0, 1, -0.3, 5.0])
def test_scale(device, scale, rng):
    check(device, scale=scale, window=7)


@DEVICES
def test_queries_that_see_nothing(device, rng):
    """5 queries, 2 tokens: the first 3 see none."""
    out, lse = check(device, queries=5, tokens=2)
    assert (out[:, :, :3] == 0).all() and (lse[:, :, :3] == float("-inf")).all() and lse[:, :, 3:].isfinite().all()
    out, lse = check(device, batch=2, seq_lens=[0, 9])
    assert (out[0] == 0).all() and (lse[0] == float("-inf")).all() and lse[1].isfinite().all()


@DEVICES
@pytest.mark.parametrize(
    "arguments",
    [
        {"tokens": 0},
        {"tokens": 0, "window": 5},
        {"batch": 0},
        {"queries": 0},
        {"tokens": 0, "window": 2, "queries": 4},
        {"kv_heads": 0},
        {"groups": 0},
    ],
)
def test_empty(device, arguments, rng):
    check(device, **arguments)
    check(device, **arguments, causal=False)


@DEVICES
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_not_seen_does_not_count(device, special, rng):
    def poison(k, v, *_):
        k[0, :, 50:] = special
        v[0, :, 50:] = special

    check(device, seq_lens=[50, 100], window=3, queries=3, poison=poison)


@DEVICES
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_the_newest_token_reaches_the_last_query_only(device, special, rng):
    k, v = oracle.gaussian(1, 1, 70, 64), oracle.gaussian(1, 1, 70, 64)
    window = oracle.gaussian(1, 1, 4, 64), oracle.gaussian(1, 1, 4, 64)
    q = oracle.gaussian(1, 2, 3, 64).to(device)
    keys, values = ck.compress_kv(k.to(device), v.to(device), keep=20)
    dense = tuple(t.to(device) for t in window)
    clean = ck.sparse_attention(q, keys, values, window=dense, backend="reference")
    for tensor in dense:
        tensor[:, :, -1] = special
    poisoned = ck.sparse_attention(q, keys, values, window=dense, backend="reference")
    assert torch.allclose(clean[:, :, :2], poisoned[:, :, :2], rtol=1e-3, atol=1e-5)
    assert poisoned[:, :, 2].isnan().all()


@DEVICES
def test_return_value_and_out(device, rng):
    x = oracle.gaussian(1, 2, 70, 64).to(device)
    k, v = ck.compress_kv(x, x, keep=20)
    q = oracle.gaussian(1, 4, 2, 64).to(device).requires_grad_()
    plain = ck.sparse_attention(q, k, v, backend="reference")
    assert isinstance(plain, torch.Tensor) and not plain.requires_grad
    out, lse = ck.sparse_attention(q, k, v, return_lse=True, backend="reference")
    assert oracle.same_bits(out, plain)
    given = torch.full_like(plain, float("nan"))
    assert ck.sparse_attention(q, k, v, out=given, backend="reference") is given
    assert oracle.same_bits(given, plain)
    separate = ck.compress(x, role="key", keep=20), ck.compress(x, role="value", keep=20)
    assert torch.allclose(
        ck.sparse_attention(q, *separate, num_splits=3, backend="reference"), plain, rtol=1e-3, atol=1e-4
    )


@DEVICES
def test_everything_kept_is_dense_attention(device, rng):
    q, k, v = (oracle.gaussian(2, 2, 20, 64).to(device) for _ in range(3))
    keys, values = ck.compress_kv(k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    out = ck.sparse_attention(q, keys, values, backend="reference")
    assert oracle.relative_error(out, expected.cpu().double()) <= 2e-3


@DEVICES
def test_products_make_attention(device, rng):
    """softmax between the two products is what sparse_attention does."""
    x, y = oracle.gaussian(1, 2, 130, 128).to(device), oracle.gaussian(1, 2, 130, 128).to(device)
    k, v = ck.compress_kv(x, y, keep=38)
    q = oracle.gaussian(1, 8, 1, 128).to(device)
    p = torch.softmax(ck.sparse_qk(q, k, scale=128**-0.5), dim=-1)
    expected = ck.sparse_attention(q, k, v, backend="reference")
    assert oracle.relative_error(ck.sparse_av(p, v), expected.cpu().double()) <= 4e-3
