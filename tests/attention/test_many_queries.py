"""sparse_attention of many query tokens: the cases that differ between a prefill kernel and a decoding one."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels._attention.problem import launch_problem
from cute_kernels.attention import run as run_attention
from tests.attention.test_attention import check, compare
from tests.support import oracle


@pytest.fixture(params=["any", "decoding"])
def kernels(request, monkeypatch):
    """Few query rows over few tiles have a choice of kernels; with a pipeline of a given depth it is a decoding one."""
    if request.param == "decoding":
        for launch in (launch_problem, run_attention):
            monkeypatch.setitem(launch.__kwdefaults__, "stages_ahead", 2)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("rows", [9, 16, 17, 25, 32, 33, 64, 65, 128, 129, 193, 256, 257, 385, 700])
def test_blocks_of_query_rows(backend, rows, head_dim, rng):
    """Around the ends of a warpgroup's rows, of a CTA's and of a cluster's, with one and with several query heads."""
    arguments = {"head_dim": head_dim, "dtype": rng.choice(oracle.DTYPES), "keep": head_dim // 3}
    check(backend, batch=1, kv_heads=1, groups=1, queries=rows, tokens=300, window=rng.choice([None, 30]), **arguments)
    groups = rng.choice([2, 3, 7])
    check(backend, batch=1, groups=groups, queries=-(-rows // groups), tokens=200, causal=False, **arguments)


@pytest.mark.parametrize("offset", range(0, 64, 3))
def test_causality_at_every_offset_in_a_tile(backend, offset, rng):
    """The newest of 64 and more queries is token 128 + offset, so every query's diagonal lies elsewhere in a tile."""
    queries = rng.randint(60, 90)
    check(backend, batch=1, kv_heads=1, queries=queries, tokens=128 + offset + rng.choice([0, 1, 2]), head_dim=64)
    check(backend, batch=1, kv_heads=1, queries=queries, tokens=128 + offset, window=rng.randint(1, 70), head_dim=64)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("offset", range(0, 64, 7))
def test_causality_of_few_query_rows(backend, offset, head_dim, kernels, rng):
    """17 to 32 rows a KV head, with windows, lengths and rows that see nothing."""
    groups, queries = rng.choice([(1, rng.randint(17, 32)), (4, rng.randint(5, 8)), (3, rng.randint(6, 10))])
    arguments = {"groups": groups, "queries": queries, "head_dim": head_dim, "dtype": rng.choice(oracle.DTYPES)}
    check(backend, batch=2, tokens=128 + offset, **arguments)
    check(
        backend, batch=2, tokens=64 + offset, window=rng.randint(1, 70), causal=rng.choice([True, False]), **arguments
    )
    check(backend, batch=3, tokens=500, seq_lens=[offset, 0, 500], window=rng.choice([None, 33]), **arguments)


@pytest.mark.parametrize("tokens", [1, 100, 200])
def test_more_work_tiles_than_sms(backend, tokens, kernels, rng):
    """So many short sequences that a CTA has several work tiles, and writes the results of one after another."""
    arguments = {
        "head_dim": rng.choice([64, 128]),
        "dtype": rng.choice(oracle.DTYPES),
        "causal": rng.choice([True, False]),
    }
    check(backend, batch=50, kv_heads=3, groups=4, queries=rng.randint(5, 8), tokens=tokens, **arguments)


def test_more_queries_than_tokens(backend, rng):
    out, lse = check(backend, batch=1, groups=3, queries=90, tokens=50, window=20)
    assert (out[:, :, :20] == 0).all() and (lse[:, :, :20] == float("-inf")).all() and lse[:, :, 20:].isfinite().all()


@pytest.mark.parametrize("num_splits", [None, 1, 2, 5, 1000])
def test_splits_and_lengths(backend, num_splits, rng):
    """Sequences of no token, of less than a tile, and of all tokens beside one another."""
    arguments = {"num_splits": num_splits, "dtype": rng.choice(oracle.DTYPES), "head_dim": 128, "keep": 38}
    for causal in (True, False):
        check(
            backend, batch=4, groups=4, queries=70, tokens=900, seq_lens=[900, 0, 17, 640], causal=causal, **arguments
        )
        check(
            backend,
            batch=3,
            queries=40,
            groups=4,
            tokens=400,
            window=100,
            seq_lens=[0, 400, 64],
            causal=causal,
            **arguments,
        )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_splits", range(2, 9))
def test_splits_that_a_cluster_merges(backend, num_splits, head_dim, rng):
    """A cluster has all splits of a work tile: whole and ragged blocks of rows, and splits without tokens."""
    arguments = {
        "num_splits": num_splits,
        "dtype": rng.choice(oracle.DTYPES),
        "head_dim": head_dim,
        "keep": head_dim // 3,
    }
    for groups, queries in ((4, 16), (4, 27), (1, 65)):
        check(backend, batch=1, groups=groups, queries=queries, tokens=64 * num_splits + 7, causal=True, **arguments)
    check(
        backend, batch=3, groups=4, queries=20, tokens=700, window=70, seq_lens=[0, 65, 700], causal=False, **arguments
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [4, 7, 30, 200])
def test_keys_and_values_with_token_orders_of_their_own(backend, queries, head_dim, rng):
    """Compressed one without the other."""
    dtype = rng.choice(oracle.DTYPES)
    k, v = oracle.lognormal_channels(1, 2, 500, head_dim, dtype), oracle.lognormal_channels(1, 2, 500, head_dim, dtype)
    q = oracle.gaussian(1, 8, queries, head_dim, dtype=dtype)
    keys = ck.compress(k.to(backend.device), role="key", keep=head_dim // 3)
    values = ck.compress(v.to(backend.device), role="value", keep=head_dim // 4)
    lengths = torch.tensor([450], dtype=torch.int32, device=backend.device)
    for seq_lens in (None, lengths):
        out, lse = ck.sparse_attention(
            q.to(backend.device), keys, values, seq_lens=seq_lens, return_lse=True, backend=backend.name
        )
        pruned = oracle.prune(k, head_dim // 3), oracle.prune(v, head_dim // 4)
        counted = None if seq_lens is None else seq_lens.tolist()
        compare(out, lse, *oracle.attention(q, *pruned, head_dim**-0.5, None, counted, True), dtype)


@pytest.mark.parametrize("queries", [4, 7, 40, 300])
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_tokens_beyond_the_length_do_not_count(backend, special, queries, rng):
    """Within the last tile that counts, and in tiles behind it."""

    def poison(k, v, *_):
        k[0, :, 70:] = special
        v[0, :, 70:] = special

    arguments = {"queries": queries, "groups": 4, "head_dim": 128, "tokens": 300, "poison": poison}
    check(backend, seq_lens=[70, 300], **arguments)
    check(backend, seq_lens=[70, 100], window=5, causal=False, **arguments)


@pytest.mark.parametrize("queries", [4, 8, 80])
def test_a_query_row_of_nan_stays_alone(backend, queries, rng):
    k = oracle.gaussian(1, 1, 300, 128).to(backend.device)
    keys, values = ck.compress_kv(k, k, keep=38)
    q, row = oracle.gaussian(1, 4, queries, 128).to(backend.device), queries // 3
    clean = ck.sparse_attention(q, keys, values, backend=backend.name)
    q[0, 1, row] = float("nan")
    poisoned = ck.sparse_attention(q, keys, values, backend=backend.name)
    assert poisoned[0, 1, row].isnan().all()
    poisoned[0, 1, row] = clean[0, 1, row]
    if backend.name.startswith("sm"):
        assert oracle.same_bits(poisoned, clean)
    else:
        torch.testing.assert_close(poisoned, clean)


@pytest.mark.parametrize("queries", [8, 30, 300])
def test_unaligned_queries(backend, queries, rng):
    """Rows of q that begin at odd elements give what aligned ones give."""
    k = oracle.gaussian(2, 2, 200, 80).to(backend.device)
    keys, values = ck.compress_kv(k, k, keep=20)
    q = oracle.gaussian(2, 6, queries, 80).to(backend.device)
    wide = torch.full((2, 6, queries, 85), 9.0, dtype=q.dtype, device=backend.device)
    wide[..., 3:-2] = q
    expected = ck.sparse_attention(q, keys, values, backend=backend.name)
    assert oracle.same_bits(ck.sparse_attention(wide[..., 3:-2], keys, values, backend=backend.name), expected)


def test_the_same_bits_from_call_to_call(backend, rng):
    k = oracle.gaussian(2, 2, 1000, 128).to(backend.device)
    keys, values = ck.compress_kv(k, k, keep=38)
    q = oracle.gaussian(2, 8, 200, 128).to(backend.device)
    first = ck.sparse_attention(q, keys, values, backend=backend.name)
    for _ in range(5):
        assert oracle.same_bits(ck.sparse_attention(q, keys, values, backend=backend.name), first)


def test_dense_tiles(backend, rng):
    """Nothing pruned: blocks as long as they get."""
    check(backend, batch=1, groups=4, queries=100, tokens=200, head_dim=128, keep=None)
    for queries in (10, 40):  # the fewer rows, the more decoders have a block
        check(backend, batch=1, groups=4, queries=queries, tokens=200, head_dim=256, keep=None)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [20, 150])
def test_maxima_that_rise_from_tile_to_tile(backend, queries, head_dim, rng):
    """Every tile's logits are larger than those before, by a little or by far, with negative scales too."""

    def poison(k, *_):
        k *= torch.linspace(0.1, rng.choice([2, 8, 40]), k.shape[2]).to(k.dtype)[:, None]

    for scale in (None, -(head_dim**-0.5)):
        arguments = {"scale": scale, "head_dim": head_dim, "dtype": rng.choice(oracle.DTYPES), "keep": head_dim // 3}
        check(backend, batch=1, groups=4, queries=queries, tokens=1100, causal=False, poison=poison, **arguments)
