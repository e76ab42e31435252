"""KVCache at its limits: memory, pages that run out, what is refused; nothing changes where it raises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cute_kernels as ck
from tests.support.exact_kv_cache import check, make, pair
from tests.support.oracle import bits

# ---- Memory and limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_bytes_at_38_of_128(kv_heads):
    cache = ck.KVCache(max_batch=2, kv_heads=kv_heads, head_dim=128, capacity=16384, keep=38, device="cpu")
    dense = 2 * 2 * kv_heads * 16384 * 128 * 2
    assert cache.nbytes() <= 0.45 * dense
    cache.prefill(*pair(2, kv_heads, 16384, 128))  # and it is really enough for that many
    assert cache.lengths.tolist() == [16384, 16384]
    statistics = cache.statistics()
    tiles = 2 * 2 * kv_heads * 255
    assert statistics["key_tiles_trimmed"] + statistics["value_tiles_trimmed"] <= max(2, tiles / 1000)


def test_pool_bytes_and_pool_tokens():
    by_tokens = make(pool_tokens=1000, page_tokens=128)
    assert by_tokens.statistics()["pages"] == 8
    page_bytes = by_tokens.statistics()["page_bytes"]
    by_bytes = make(pool_bytes=8 * page_bytes + 1, page_tokens=128)
    assert by_bytes.statistics()["pages"] == 8 and by_bytes.nbytes() == by_tokens.nbytes()
    larger = make(pool_tokens=1024 + 128, page_tokens=128)
    assert larger.nbytes() - by_tokens.nbytes() == page_bytes
    with pytest.raises(ValueError, match=f"pool_bytes must be at least {page_bytes}"):
        make(pool_bytes=page_bytes - 1, page_tokens=128)


def state(cache: ck.KVCache) -> tuple:
    rows = [[bits(x) for x in cache.dense(row)] for row in range(cache.batch)]
    return cache.statistics(), cache.lengths.tolist(), [x.tolist() for row in rows for x in row]


def test_out_of_pages_changes_nothing(device, rng):
    cache = make(device, max_batch=4, pool_tokens=320)  # 5 pages
    k, v = pair(2, 2, 160, 16, device=device)
    cache.prefill(k, v)  # 2 each
    before = state(cache)
    with pytest.raises(RuntimeError, match=r"out of pages: 2 more of 64 tokens are needed, 1 of 5 are free.*pool_tok"):
        cache.append(*pair(2, 2, 64, 16, device=device))
    with pytest.raises(RuntimeError, match="out of pages: 4 more"):
        cache.append(*pair(4, 2, 100, 16, device=device))
    with pytest.raises(RuntimeError, match="out of pages"):
        cache.reserve(128)
    with pytest.raises(RuntimeError, match="sequence 0 holds 160 tokens, 841 more exceed capacity = 1000"):
        cache.append(*pair(1, 2, 841, 16, device=device))
    added = cache.add()
    with pytest.raises(RuntimeError, match="out of pages: 4 more"):
        cache.prefill(*pair(1, 2, 300, 16, device=device), sequences=[added])
    cache.free(added)
    after = state(cache)
    assert after == before
    more_k, more_v = pair(1, 2, 64, 16, device=device)
    cache.append(more_k, more_v)  # one more page is there
    check(cache, 0, torch.cat([k[0], more_k[0]], dim=1), torch.cat([v[0], more_v[0]], dim=1))
    cache.crop(40, sequences=[0])
    cache.append(*pair(2, 2, 64, 16, device=device))
    assert cache.lengths.tolist() == [104, 224]


def test_every_token_of_the_capacity_can_be_used(rng):
    for window, capacity, page_tokens in ((32, 160, 64), (32, 95, 64), (0, 128, 128), (100, 230, 64), (1000, 70, 64)):
        cache = make(window=window, capacity=capacity, page_tokens=page_tokens, max_batch=2)
        k, v = pair(2, 2, capacity, 16)
        for i in range(capacity):
            cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        check(cache, 1, k[1], v[1])
        with pytest.raises(RuntimeError, match=f"exceed capacity = {capacity}"):
            cache.append(k[:, :, :1], v[:, :, :1])


def test_a_window_takes_no_more_than_the_capacity(rng):
    """Whatever it is asked to be; it has its size again where the capacity grows."""
    small = make(window=64, capacity=64)
    for window in (10**6, 2**63 - 1):
        cache = make(window=window, capacity=64)
        assert cache.nbytes() == small.nbytes() and cache.window == window
        k, v = pair(2, 2, 300, 16)
        cache.prefill(k[:, :, :60], v[:, :, :60])
        cache.append(k[:, :, 60:64], v[:, :, 60:64])
        cache.grow(capacity=300)
        cache.append(k[:, :, 64:], v[:, :, 64:])
        check(cache, 1, k[1], v[1])
        assert cache.statistics()["pages_free"] == cache.statistics()["pages"]


def test_reserved_pages_are_there(rng):
    cache = make(max_batch=2, pool_tokens=640)
    cache.append(*pair(1, 2, 1, 16))
    cache.reserve(500)
    with pytest.raises(RuntimeError, match="out of pages"):
        cache.append(*pair(2, 2, 400, 16))
    cache.append(*pair(1, 2, 500, 16))
    assert cache.lengths.tolist() == [501]


# ---- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"max_batch": 0}, ValueError, "max_batch must be at least 1, got 0"),
        ({"max_batch": 2.0}, TypeError, "max_batch must be an integer, got float"),
        ({"kv_heads": 0}, ValueError, "kv_heads must be at least 1"),
        ({"head_dim": 20}, ValueError, "head_dim must be a multiple of 8, from 8 to 256, got 20"),
        ({"head_dim": 264}, ValueError, "head_dim must be a multiple of 8, from 8 to 256, got 264"),
        ({"dtype": torch.float32}, TypeError, "dtype must be torch.float16 or torch.bfloat16, got torch.float32"),
        ({"dtype": "float16"}, TypeError, "dtype must be torch.float16 or torch.bfloat16, got 'float16'"),
        ({"dtype": np.array([1, 2])}, TypeError, "dtype must be torch.float16 or torch.bfloat16"),
        ({"max_batch": 2**63}, ValueError, "max_batch must be from"),
        ({"capacity": 10**5000}, ValueError, "capacity must be from"),
        ({"value_rule": np.array([1, 2])}, ValueError, "value_rule must be one of"),
        ({"capacity": 0}, ValueError, "capacity must be at least 1"),
        ({"keep": 17}, ValueError, "keep must be from 1 to D = 16, got 17"),
        ({"key_keep": 0}, ValueError, "key_keep must be from 1 to D = 16, got 0"),
        ({"sparsity": 0.5}, ValueError, "pass one of them"),
        ({"window": -1}, ValueError, "window must be at least 0"),
        ({"page_tokens": 96}, ValueError, "page_tokens must be a multiple of 64, got 96"),
        ({"page_tokens": 0}, ValueError, "page_tokens must be at least 64, got 0"),
        ({"pool_tokens": 64, "pool_bytes": 10**6}, ValueError, "pool_tokens and pool_bytes say the same thing"),
        ({"pool_tokens": 0}, ValueError, "pool_tokens must be at least 1"),
        (
            {"max_batch": 2**20, "capacity": 2**20},
            ValueError,
            "at most 47721858 tiles .* ask for .*: lower max_batch or capacity",
        ),
        ({"pool_tokens": 2**40}, ValueError, "at most 47721858 tiles .* ask for 34359738368: lower pool_tokens"),
        ({"capacity": 2**31}, ValueError, "capacity must be at most 2147483519, got 2147483648"),
        ({"window": 2**63}, ValueError, "window must be from .* to 9223372036854775807"),
        (
            {"max_batch": 2**20, "kv_heads": 20, "head_dim": 256, "capacity": 2**31 - 200, "window": 2**63 - 1},
            ValueError,
            "ask for dense windows of .* bytes: lower window or capacity",
        ),
        ({"device": "meta"}, ValueError, "device must be a cpu or cuda device, got meta"),
    ],
)
def test_construction_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        make(**arguments)


def _tokens(batch: int = 2, heads: int = 2, n: int = 3, dim: int = 16, dtype=torch.float16):
    x = torch.zeros(batch, heads, n, dim, dtype=dtype)
    return x, x


def _parameters():
    """What goes through torch.library."""
    return (torch.nn.Parameter(x, requires_grad=False) for x in _tokens())


REFUSED = [
    (lambda c: c.append(None, None), TypeError, "k must be a torch.Tensor, got NoneType"),
    (lambda c: c.append(*_tokens(dtype=torch.bfloat16)), TypeError, "k must be float16 like the cache, got bfloat16"),
    (
        lambda c: c.append(*_tokens(heads=3)),
        ValueError,
        r"k must have shape .* Hkv = 2 and D = 16, got \(2, 3, 3, 16\)",
    ),
    (lambda c: c.append(*_tokens(dim=32)), ValueError, "D = 16, got"),
    (lambda c: c.append(_tokens()[0], _tokens(n=2)[0]), ValueError, "v must have the shape of k"),
    (lambda c: c.append(_tokens()[0][0], _tokens()[0][0]), ValueError, "k must have shape"),
    (lambda c: c.append(*_tokens(n=0)), ValueError, "k must have at least 1 token"),
    (lambda c: c.append(*_tokens(batch=5)), ValueError, "k must have at most max_batch = 4 rows, got 5"),
    (lambda c: c.append(*_tokens(), sequences=[0]), ValueError, "sequences must name one row for each of k's 2, got 1"),
    (lambda c: c.append(*_tokens(), sequences=[0, 0]), ValueError, "sequences must be distinct"),
    (lambda c: c.append(*_tokens(), sequences=[0, 3]), ValueError, "sequences must be in use, 3 is not"),
    (
        lambda c: c.append(*_tokens(), sequences=[0, 4]),
        ValueError,
        "sequences must be from 0 to max_batch - 1 = 3, got 4",
    ),
    (lambda c: c.append(*_tokens(), sequences=[0.0, 1.0]), TypeError, "element of sequences must be an integer"),
    (lambda c: c.append(*_parameters(), sequences=[0, None]), TypeError, "element of sequences must be an integer"),
    (lambda c: c.append(*_parameters(), sequences=range(2**40)), ValueError, "sequences must name at most"),
    (lambda c: c.append(*_tokens(), sequences=torch.zeros(2)), TypeError, "sequences must hold integers"),
    (lambda c: c.select(torch.zeros(1).to(torch.complex64)), TypeError, "indices must hold integers"),
    (lambda c: c.select(torch.quantize_per_tensor(torch.zeros(1), 1, 0, torch.qint8)), TypeError, "must hold integers"),
    (lambda c: c.append(*_tokens(), sequences="01"), TypeError, "sequences must be a sequence of integers"),
    (
        lambda c: c.append(_tokens(dim=32)[0][..., ::2], _tokens(dim=32)[0][..., ::2]),
        ValueError,
        "k must have stride 1 in its last dimension",
    ),
    (lambda c: c.prefill(*_tokens()), ValueError, "prefill takes empty sequences, sequence 0 holds 100 tokens"),
    (lambda c: c.prefill(*_tokens(), lengths=[1]), ValueError, "lengths must have one integer for each of 2"),
    (lambda c: c.prefill(*_tokens(), lengths=[1, 4]), ValueError, "lengths must be from 0 to T = 3, got 4"),
    (lambda c: c.prefill(*_tokens(), lengths=3), TypeError, "lengths must be a sequence of integers"),
    (lambda c: c.prefill(*_tokens(), lengths=torch.ones(2)), TypeError, "lengths must hold integers"),
    (
        lambda c: c.prefill(*_tokens(), lengths=torch.ones(2, dtype=torch.int32, device="meta")),
        ValueError,
        "lengths must be on a cpu or cuda device, got meta",
    ),
    (lambda c: c.prefill(*_tokens(), lengths=range(2**40)), ValueError, "lengths must have one integer for each of 2"),
    (lambda c: c.attend(_tokens()[0], sequences=range(2**40)), ValueError, "sequences must name at most max_batch = 4"),
    (lambda c: c.reorder(torch.zeros((), dtype=torch.int32).expand(2**40)), ValueError, "beam_idx must name at most"),
    (lambda c: c.crop(torch.tensor(5, device="meta")), ValueError, "length must be on a cpu or cuda device, got meta"),
    (lambda c: c.reserve(10**5000), ValueError, "tokens must be from"),
    (lambda c: c.append(*[torch.nested.nested_tensor([_tokens()[0]])] * 2), TypeError, "k must be a dense"),
    (lambda c: c.attend(_tokens()[0][0]), ValueError, r"q must have shape \(B, Hq, Sq, D\)"),
    (lambda c: c.attend(_tokens(heads=3)[0]), ValueError, "multiple of kv_heads = 2, got 3"),
    (lambda c: c.attend(_tokens(batch=3)[0]), ValueError, "q must have at most batch = 2 rows, got 3"),
    (lambda c: c.attend(_tokens(dtype=torch.float32)[0]), TypeError, "q must be float16"),
    (lambda c: c.attend(_tokens()[0], scale="1"), TypeError, "scale must be a real number"),
    (lambda c: c.attend(_tokens()[0], scale=float("nan")), ValueError, "scale must be finite"),
    (lambda c: c.attend(_tokens()[0], causal=1), TypeError, "causal must be a bool"),
    (lambda c: c.attend(_tokens()[0], backend="gpu"), ValueError, "backend must be one of"),
    (lambda c: c.attend(_tokens()[0], backend="sm80"), RuntimeError, "backend 'sm80' takes tensors on a cuda device"),
    (lambda c: c.attend(_tokens()[0], out=_tokens(n=2)[0]), ValueError, "out must have shape"),
    (lambda c: c.attend(_tokens()[0], sequences=[3, 2]), ValueError, "sequences must be in use, 3 is not"),
    (lambda c: c.crop("3"), TypeError, "length must be an integer"),
    (lambda c: c.crop([1, 2, 3]), ValueError, "length must have one integer for each of 2 sequences, got 3"),
    (lambda c: c.crop(-101), ValueError, "length -101 drops more tokens than sequence 0 holds, 100"),
    (lambda c: c.crop([5, -101]), ValueError, "length -101 drops more tokens than sequence 1 holds, 100"),
    (lambda c: c.reorder([0]), ValueError, "beam_idx must name one row for each of batch = 2, got 1"),
    (lambda c: c.reorder([0, 2]), ValueError, "beam_idx must be from 0 to batch - 1 = 1, got 2"),
    (lambda c: c.reorder(torch.zeros(2, 1, dtype=torch.int64)), ValueError, "beam_idx must have 1 dimension"),
    (lambda c: c.repeat_interleave(3), ValueError, "repeats must be from 1 to max_batch / batch = 4 / 2, got 3"),
    (lambda c: c.repeat_interleave(0), ValueError, "repeats must be from 1"),
    (lambda c: c.select([0, 1, 0, 1, 0]), ValueError, "indices must name at most max_batch = 4 rows, got 5"),
    (lambda c: c.select([-1]), ValueError, "indices must be from 0 to batch - 1 = 1, got -1"),
    (lambda c: c.select(0), TypeError, "indices must be a sequence of integers"),
    (lambda c: c.free(2), ValueError, "sequence must be in use, 2 is not"),
    (lambda c: c.fork(-1), ValueError, "sequence must be from 0 to max_batch - 1 = 3, got -1"),
    (lambda c: c.fork(True), TypeError, "sequence must be an integer, got bool"),
    (lambda c: c.dense(3), ValueError, "sequence must be in use, 3 is not"),
    (lambda c: c.reserve(-1), ValueError, "tokens must be at least 0, got -1"),
    (lambda c: c.reserve(1.5), TypeError, "tokens must be an integer, got float"),
]


@pytest.mark.parametrize("call, error, message", REFUSED)
def test_bad_input_raises_and_changes_nothing(rng, call, error, message):
    cache = make()
    cache.prefill(*pair(2, 2, 100, 16))
    before = state(cache)
    with pytest.raises(error, match=message):
        call(cache)
    assert state(cache) == before
