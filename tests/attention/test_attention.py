"""sparse_attention on every backend, against a float64 loop over queries on the decompressed operands."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.support import oracle

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative Frobenius errors that the API promises
# Query heads a KV head, query tokens.
ROWS = [(g, 1) for g in (1, 2, 3, 4, 5, 6, 7, 8, 16)] + [
    (1, 2),
    (4, 2),
    (3, 7),
    (8, 7),
    (1, 16),
    (5, 16),
    (1, 70),
    (3, 64),
]


def check(
    backend,
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
    num_splits=None,
    poison=None,
):
    """Random inputs, which `poison` may change; returns (out, lse)."""
    k, v = (oracle.gaussian(batch, kv_heads, tokens, head_dim, dtype=dtype) for _ in range(2))
    q = oracle.gaussian(batch, kv_heads * groups, queries, head_dim, dtype=dtype)
    dense = None
    if window is not None:
        dense = tuple(oracle.gaussian(batch, kv_heads, window, head_dim, dtype=dtype) for _ in range(2))
    if poison:
        poison(k, v, *(dense or ()))
    keys, values = ck.compress_kv(k.to(backend.device), v.to(backend.device), keep=keep)
    out, lse = attend(backend, q, keys, values, dense, seq_lens, scale=scale, causal=causal, num_splits=num_splits)
    scale = head_dim**-0.5 if scale is None else scale
    expected = oracle.attention(q, oracle.prune(k, keep), oracle.prune(v, keep), scale, dense, seq_lens, causal)
    compare(out, lse, *expected, dtype)
    return out, lse


def attend(backend, q, keys, values, window, seq_lens, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of inputs that are wherever; seq_lens: a list or None."""
    lengths = None if seq_lens is None else torch.tensor(seq_lens, dtype=torch.int32, device=backend.device)
    return ck.sparse_attention(
        q.to(backend.device),
        keys,
        values,
        window=window and tuple(t.to(backend.device) for t in window),
        seq_lens=lengths,
        return_lse=True,
        backend=backend.name,
        **options,
    )


def compare(out, lse, expected, expected_lse, dtype) -> None:
    assert out.dtype == dtype and out.shape == expected.shape and out.is_contiguous()
    assert lse.dtype == torch.float32 and lse.shape == expected_lse.shape
    assert oracle.relative_error(out, expected) <= TOLERANCE[dtype]
    torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=2e-3, rtol=1e-3)


# ---- Shapes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups, queries", ROWS)
@pytest.mark.parametrize("causal", [True, False])
def test_rows(backend, causal, groups, queries, rng):
    """Some of the 70 queries reach back beyond the window, into the compressed tokens."""
    check(backend, groups=groups, queries=queries, causal=causal, tokens=150, window=9, dtype=rng.choice(oracle.DTYPES))


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 65, 1000])
def test_shapes(backend, tokens, head_dim, dtype, rng):
    keep = rng.choice([None, 1, head_dim // 2, head_dim])
    check(
        backend,
        batch=1,
        tokens=tokens,
        head_dim=head_dim,
        dtype=dtype,
        keep=keep,
        groups=4,
        window=rng.choice([None, 5]),
    )


@pytest.mark.parametrize("window", [0, 1, 32, 100])
@pytest.mark.parametrize("seq_lens", [None, [130, 130, 130], [37, 64, 130], [0, 1, 65]], ids=str)
@pytest.mark.parametrize("queries", [1, 7])
def test_windows_and_lengths(backend, queries, seq_lens, window, rng):
    for causal in (True, False):
        check(backend, batch=3, queries=queries, window=window, tokens=130, seq_lens=seq_lens, causal=causal)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 10**12])
def test_splits(backend, num_splits, dtype, rng):
    arguments = {"num_splits": num_splits, "dtype": dtype, "head_dim": 128, "keep": 38}
    check(backend, batch=1, groups=4, tokens=1500, window=40, **arguments)
    check(backend, batch=3, queries=3, tokens=500, window=100, seq_lens=[500, 0, 257], **arguments)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("num_splits", [None, 10**12])
def test_few_long_sequences(backend, num_splits, kv_heads, rng):
    """Some hundred splits of a work tile, more than a warp has lanes."""
    arguments = {"num_splits": num_splits, "dtype": rng.choice(oracle.DTYPES), "groups": rng.randint(1, 8)}
    check(backend, batch=1, kv_heads=kv_heads, tokens=70_000 // kv_heads, window=40, **arguments)


@pytest.mark.parametrize("seed", range(6))
def test_any_call(backend, seed, rng):
    """Drawn at random."""
    batch, tokens = rng.randint(1, 3), rng.randint(0, 300)
    check(
        backend,
        batch=batch,
        groups=rng.randint(1, 9),
        kv_heads=rng.randint(1, 3),
        queries=rng.choice([1, 1, 2, 5, 20]),
        tokens=tokens,
        head_dim=8 * rng.randint(1, 32),
        window=rng.choice([None, rng.randint(0, 140)]),
        seq_lens=rng.choice([None, [rng.randint(0, tokens) for _ in range(batch)]]),
        causal=rng.random() < 0.7,
        dtype=rng.choice(oracle.DTYPES),
        keep=rng.choice([None, 1, 5]),
        num_splits=rng.choice([None, rng.randint(1, 6)]),
    )


@pytest.mark.parametrize("scale", [0, 1, -0.3, 5.0])
def test_scale(backend, scale, rng):
    check(backend, scale=scale, window=7)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_logits_far_apart(backend, dtype, rng):
    """Logits of many hundreds: most weights underflow, and a tile's can all be tiny."""

    def poison(k, v, *window):
        k *= (torch.arange(k.shape[2]) % 7 * 10)[:, None].to(k.dtype)

    check(backend, tokens=500, head_dim=128, scale=1.0, window=20, queries=3, dtype=dtype, poison=poison)


@pytest.mark.parametrize("logit", [1e3, 1e6, 1e8])
def test_large_logits_that_are_equal(backend, logit, rng):
    """Weights are relative to the largest logit, not to a rounded sum."""
    x = torch.zeros(1, 1, 200, 64, device=backend.device, dtype=torch.float16)
    x[..., 0] = 8
    v = oracle.gaussian(1, 1, 200, 64).to(backend.device)
    K, V = ck.compress_kv(x, v)
    out = ck.sparse_attention(x[:, :, :1], K, V, scale=logit / 64, backend=backend.name)
    assert oracle.relative_error(out, v.double().mean(2, keepdim=True).cpu()) <= TOLERANCE[torch.float16]


def test_queries_that_see_nothing(backend, rng):
    """5 queries, 2 tokens: the first 3 see none."""
    out, lse = check(backend, queries=5, tokens=2)
    assert (out[:, :, :3] == 0).all() and (lse[:, :, :3] == float("-inf")).all() and lse[:, :, 3:].isfinite().all()
    out, lse = check(backend, batch=2, seq_lens=[0, 9])
    assert (out[0] == 0).all() and (lse[0] == float("-inf")).all() and lse[1].isfinite().all()


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
    ids=str,
)
def test_empty(backend, arguments, rng):
    check(backend, **arguments)
    check(backend, **arguments, causal=False)


def test_empty_with_more_tokens_than_memory(backend):
    """No batch row has them, so nothing may be made for each of them."""
    shape = (0, 2, 2**40, 64)
    k, v = (ck.SparseKV.preallocate(shape, role=role, device=backend.device) for role in ("key", "value"))
    q = torch.empty(0, 4, 3, 64, dtype=torch.float16, device=backend.device)
    out, lse = ck.sparse_attention(q, k, v, return_lse=True, backend=backend.name)
    assert out.shape == q.shape and lse.shape == (0, 4, 3)
    assert ck.sparse_qk(q, k, backend=backend.name).shape == (0, 4, 3, 2**40)
    p = torch.empty(0, 4, 3, 2**40, device=backend.device)
    assert ck.sparse_av(p, v, backend=backend.name).shape == q.shape


# ---- What is not seen ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("queries", [1, 3])
def test_tokens_beyond_the_length_do_not_count(backend, queries, special, dtype, rng):
    def poison(k, v, *_):
        k[0, :, 50:] = special
        v[0, :, 50:] = special

    arguments = {"queries": queries, "dtype": dtype, "head_dim": 128, "poison": poison}
    check(backend, seq_lens=[50, 100], window=3, **arguments)
    check(backend, seq_lens=[50, 100], tokens=200, **arguments)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_sequences_are_apart(backend, special, rng):
    """Keys, values, window and queries of one batch row are poison: the other's results stay the same."""
    k, v = oracle.gaussian(2, 2, 130, 128), oracle.gaussian(2, 2, 130, 128)
    window = [oracle.gaussian(2, 2, 9, 128) for _ in range(2)]
    q = oracle.gaussian(2, 8, 2, 128)

    def run():
        keys, values = ck.compress_kv(k.to(backend.device), v.to(backend.device), keep=38)
        dense = tuple(w.to(backend.device) for w in window)
        return ck.sparse_attention(q.to(backend.device), keys, values, window=dense, backend=backend.name)

    clean = run()
    for tensor in (k, v, *window, q):
        tensor[1] = special
    poisoned = run()
    assert poisoned[1].isnan().all()
    if backend.name == "reference":  # adds up in another order once there is anything infinite
        assert torch.allclose(clean[0], poisoned[0], rtol=1e-3, atol=1e-5)
    else:
        assert oracle.same_bits(clean[0], poisoned[0])


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("compressed", [False, True])
def test_a_token_that_causality_hides(backend, compressed, special, rng):
    """The newest token, of the window or compressed, reaches the last query only."""
    if backend.name.startswith("sm"):
        pytest.skip("the GPU kernels multiply a block of queries by the values that one of them sees")
    k, v = oracle.gaussian(1, 1, 70, 64), oracle.gaussian(1, 1, 70, 64)
    window = oracle.gaussian(1, 1, 4, 64), oracle.gaussian(1, 1, 4, 64)
    q = oracle.gaussian(1, 2, 3, 64).to(backend.device)

    def run():
        keys, values = ck.compress_kv(k.to(backend.device), v.to(backend.device), keep=20)
        dense = None if compressed else tuple(t.to(backend.device) for t in window)
        return ck.sparse_attention(q, keys, values, window=dense, backend=backend.name)

    clean = run()
    for tensor in (k, v) if compressed else window:
        tensor[:, :, -1] = special
    poisoned = run()
    assert torch.allclose(clean[:, :, :2], poisoned[:, :, :2], rtol=1e-3, atol=1e-5)
    assert poisoned[:, :, 2].isnan().all()


def test_an_infinite_value_counts(backend, rng):
    """A token that is seen passes on its infinity in the channels that have it, and in no other."""
    x = oracle.gaussian(1, 1, 100, 64)
    v = x.clone()
    v[0, 0, 40, 3] = float("inf")
    keys, values = ck.compress_kv(x.to(backend.device), v.to(backend.device))
    out = ck.sparse_attention(oracle.gaussian(1, 2, 1, 64).to(backend.device), keys, values, backend=backend.name)
    assert (out[..., 3] == float("inf")).all() and out[..., :3].isfinite().all() and out[..., 4:].isfinite().all()


# ---- Arguments -------------------------------------------------------------------------------------------------------


def strided(x: torch.Tensor) -> list[torch.Tensor]:
    """x (B, H, S, N) under other strides, with 1 in the last dimension."""
    wide = torch.full((*x.shape[:3], x.shape[3] + 5), 9.0, dtype=x.dtype, device=x.device)
    wide[..., 3:-2] = x
    every_second = x.repeat_interleave(2, dim=0).repeat_interleave(2, dim=2)
    return [x.transpose(1, 2).contiguous().transpose(1, 2), wide[..., 3:-2], every_second[::2, :, 1::2]]


def test_views(backend, rng):
    """q, the window and seq_lens under any strides; all of them with a pending negation."""
    x = oracle.gaussian(2, 2, 100, 80).to(backend.device)
    k, v = ck.compress_kv(x, x, keep=20)
    q, window = oracle.gaussian(2, 4, 3, 80).to(backend.device), oracle.gaussian(2, 2, 30, 80).to(backend.device)
    lengths = torch.tensor([64, 0, 99, 0], dtype=torch.int32, device=backend.device)
    expected = ck.sparse_attention(
        q, k, v, window=(window, window), seq_lens=lengths[::2].contiguous(), backend=backend.name
    )
    for q_view in strided(q):
        for k_win, v_win in zip(strided(window), reversed(strided(window))):
            arguments = {"window": (k_win, v_win), "seq_lens": lengths[::2], "backend": backend.name}
            assert oracle.same_bits(ck.sparse_attention(q_view, k, v, **arguments), expected)
    negated, negated_window, negated_lengths = (torch._neg_view(-x) for x in (q, window, lengths))
    arguments = {"window": (window, negated_window), "seq_lens": negated_lengths[::2], "backend": backend.name}
    assert oracle.same_bits(ck.sparse_attention(negated, k, v, **arguments), expected)


def test_one_query_token_of_a_batch_first_tensor(backend, rng):
    """(B, Sq, Hq, D) as models have it, with strides of a size-1 dimension that mean nothing."""
    x = oracle.gaussian(2, 2, 100, 64).to(backend.device)
    k, v = ck.compress_kv(x, x, keep=20)
    q = oracle.gaussian(2, 1, 8, 64).to(backend.device)
    expected = ck.sparse_attention(q.transpose(1, 2).contiguous(), k, v, backend=backend.name)
    assert oracle.same_bits(ck.sparse_attention(q.transpose(1, 2), k, v, backend=backend.name), expected)


def test_return_value_and_out(backend, rng):
    x = oracle.gaussian(1, 2, 70, 64).to(backend.device)
    k, v = ck.compress_kv(x, x, keep=20)
    q = oracle.gaussian(1, 4, 2, 64).to(backend.device)
    plain = ck.sparse_attention(q, k, v, backend=backend.name)
    assert isinstance(plain, torch.Tensor)
    out, lse = ck.sparse_attention(q, k, v, return_lse=True, backend=backend.name)
    assert oracle.same_bits(out, plain)
    given = torch.full_like(plain, float("nan"))
    assert ck.sparse_attention(q, k, v, out=given, backend=backend.name) is given
    assert oracle.same_bits(given, plain)
    given.fill_(float("nan"))
    also, lse_also = ck.sparse_attention(q, k, v, out=given, return_lse=True, backend=backend.name)
    assert also is given and oracle.same_bits(given, plain) and oracle.same_bits(lse_also, lse)


@pytest.mark.parametrize("name", ["row_offsets", "token_order", "channel_order", "channel_scale", "seq_lens", "blocks"])
def test_out_in_the_memory_of_an_input(name, rng):
    """Whatever tensor it is, in the first call and in one like the one before."""
    x = oracle.gaussian(1, 2, 70, 64)
    q = oracle.gaussian(1, 4, 2, 64)
    K, V = ck.compress_kv(x, x, keep=20, codec="int8")
    seq_lens = torch.tensor([70], dtype=torch.int32)
    tensors = {**K.state_dict(), "seq_lens": seq_lens}
    memory = torch.zeros(max(tensors[name].nbytes, q.nbytes) + 64, dtype=torch.uint8)
    moved = memory[64 : 64 + tensors[name].nbytes].view(tensors[name].dtype).view(tensors[name].shape)
    moved.copy_(tensors[name])
    if name == "seq_lens":
        seq_lens = moved
    else:
        K = ck.SparseKV.from_state_dict({**K.state_dict(), name: moved})
    out = memory[: q.nbytes].view(q.dtype).view(q.shape)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"out must not share memory with .*{name}"):
            ck.sparse_attention(q, K, V, seq_lens=seq_lens, out=out)
        ck.sparse_attention(q, K, V, seq_lens=seq_lens, out=torch.empty_like(q))


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_caches_that_were_not_compressed_together(backend, dtype, rng):
    x, y = (oracle.lognormal_channels(2, 2, 200, 128, dtype=dtype) for _ in range(2))
    q = oracle.gaussian(2, 8, 2, 128, dtype=dtype, scale=0.3)
    k = ck.compress(x.to(backend.device), role="key", keep=38)
    v = ck.compress(y.to(backend.device), role="value", keep=70)
    actual = ck.sparse_attention(q.to(backend.device), k, v, return_lse=True, backend=backend.name)
    expected = oracle.attention(q, oracle.prune(x, 38), oracle.prune(y, 70), 128**-0.5)
    compare(*actual, *expected, dtype)


def test_a_preallocated_pair(backend, rng):
    x, y = (oracle.gaussian(2, 2, 130, 128) for _ in range(2))
    q = oracle.gaussian(2, 4, 1, 128)
    k, v = (
        ck.SparseKV.preallocate((2, 2, 130, 128), role=role, keep=64, device=backend.device)
        for role in ("key", "value")
    )
    ck.compress_kv(x.to(backend.device), y.to(backend.device), keep=38, out=(k, v))
    actual = ck.sparse_attention(q.to(backend.device), k, v, return_lse=True, backend=backend.name)
    compare(*actual, *oracle.attention(q, oracle.prune(x, 38), oracle.prune(y, 38), 128**-0.5), torch.float16)


# ---- Equivalences ----------------------------------------------------------------------------------------------------


def test_everything_kept_is_dense_attention(backend, rng):
    q, k, v = (oracle.gaussian(2, 2, 20, 64).to(backend.device) for _ in range(3))
    keys, values = ck.compress_kv(k, v)
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    out = ck.sparse_attention(q, keys, values, backend=backend.name)
    assert oracle.relative_error(out, expected.cpu().double()) <= 2e-3


def test_products_make_attention(backend, rng):
    """softmax between the two products is what sparse_attention does."""
    x, y = oracle.gaussian(1, 2, 130, 128).to(backend.device), oracle.gaussian(1, 2, 130, 128).to(backend.device)
    k, v = ck.compress_kv(x, y, keep=38)
    q = oracle.gaussian(1, 8, 1, 128).to(backend.device)
    p = torch.softmax(ck.sparse_qk(q, k, scale=128**-0.5, backend=backend.name), dim=-1)
    expected = ck.sparse_av(p, v, backend=backend.name)
    out = ck.sparse_attention(q, k, v, backend=backend.name)
    assert oracle.relative_error(out, expected.cpu().double()) <= 4e-3


def test_lse_puts_parts_together(backend, rng):
    """Attention over two halves of the tokens, weighted by their lse, is attention over all."""
    x, y = (oracle.gaussian(1, 2, 256, 64).to(backend.device) for _ in range(2))
    q = oracle.gaussian(1, 4, 2, 64).to(backend.device)

    def run(first, last):
        k, v = ck.compress_kv(x[:, :, first:last], y[:, :, first:last], keep=20)
        out, lse = ck.sparse_attention(q, k, v, causal=False, return_lse=True, backend=backend.name)
        return out.double(), lse.double()[..., None]

    (a, lse_a), (b, lse_b), (whole, lse) = run(0, 100), run(100, 256), run(0, 256)
    torch.testing.assert_close(torch.logaddexp(lse_a, lse_b), lse, atol=2e-3, rtol=1e-3)
    parts = a * (lse_a - lse).exp() + b * (lse_b - lse).exp()
    assert oracle.relative_error(whole, parts.cpu()) <= 4e-3


@pytest.mark.parametrize("shape", [(8, 2, 1, 3000, 128), (4, 4, 3, 777, 80), (8, 1, 20, 1100, 256)], ids=str)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_same_bits_from_run_to_run(backend, shape, dtype, rng):
    q_heads, kv_heads, queries, tokens, head_dim = shape
    x = oracle.gaussian(2, kv_heads, tokens, head_dim, dtype=dtype).to(backend.device)
    k, v = ck.compress_kv(x, x, sparsity=0.7)
    q = oracle.gaussian(2, q_heads, queries, head_dim, dtype=dtype).to(backend.device)
    window = (oracle.gaussian(2, kv_heads, 40, head_dim, dtype=dtype).to(backend.device),) * 2

    def run():
        return ck.sparse_attention(q, k, v, window=window, return_lse=True, backend=backend.name)

    first = run()
    threads = torch.get_num_threads()
    try:
        for count in [1, 5, 2] if backend.name == "cpu" else [threads] * (20 if backend.name.startswith("sm") else 1):
            torch.set_num_threads(count)
            assert all(oracle.same_bits(once, again) for once, again in zip(first, run()))
    finally:
        torch.set_num_threads(threads)
