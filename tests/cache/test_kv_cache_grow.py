"""KVCache.grow, and copies of a cache: what was cached stays, and goes on alike."""

from __future__ import annotations

import copy

import pytest
import torch

import cute_kernels as ck
from cute_kernels._cache.rows import core_of
from tests.support import oracle


def make(max_batch=2, capacity=100, device="cpu", **options):
    return ck.KVCache(
        max_batch=max_batch, kv_heads=2, head_dim=64, capacity=capacity, keep=20, window=8, device=device, **options
    )


def new(batch, tokens):
    return [oracle.gaussian(batch, 2, tokens, 64) for _ in range(2)]


def same(a, b, rows):
    return all(oracle.same_bits(x, y) for row in range(rows) for x, y in zip(a.dense(row), b.dense(row)))


def test_a_grown_cache_holds_what_one_made_larger_does(rng):
    small, large = make(), make(max_batch=5, capacity=500)
    portions = [new(2, 90), new(2, 10), new(2, 150)]
    for cache in (small, large):
        cache.prefill(*portions[0])
    small.grow(capacity=400)
    assert small.capacity == small.max_length == 400 and small.max_batch == 2
    for cache in (small, large):
        cache.append(*portions[1])
        cache.append(*portions[2])
    small.grow(max_batch=5)
    small.grow(capacity=500)
    assert small.nbytes() == large.nbytes()
    for cache in (small, large):
        cache.repeat_interleave(2)
    step = new(4, 70)
    for cache in (small, large):
        cache.append(*step)
        core_of(cache).table.check()
    assert small.lengths.tolist() == [320] * 4
    assert same(small, large, 4)
    q = oracle.gaussian(4, 4, 1, 64)
    assert torch.equal(small.attend(q), large.attend(q))
    assert small.statistics() == large.statistics()


def test_pages_that_were_asked_for_apart_stay_enough():
    cache = make(pool_tokens=10_000)
    pages = cache.statistics()["pages"]
    cache.grow(capacity=200)
    assert cache.statistics()["pages"] == pages


@pytest.mark.parametrize(
    "sizes, error, message",
    [
        ({"capacity": 99}, ValueError, "capacity must be at least 100, got 99"),
        ({"max_batch": 1}, ValueError, "max_batch must be at least 2, got 1"),
        ({"capacity": 2.5}, TypeError, "capacity must be an integer"),
        ({"capacity": 2**62}, ValueError, "capacity must be at most 2147483519"),
        ({"capacity": 2**31 - 200}, ValueError, "tiles"),
    ],
    ids=str,
)
def test_wrong_sizes_change_nothing(sizes, error, message):
    cache = make()
    before = cache.nbytes()
    with pytest.raises(error, match=message):
        cache.grow(**sizes)
    assert (cache.nbytes(), cache.capacity, cache.max_batch) == (before, 100, 2)


def test_a_copy_goes_its_own_way(rng):
    cache = make(capacity=400)
    cache.prefill(*new(2, 200))
    q = oracle.gaussian(2, 4, 1, 64)
    expected = cache.attend(q)
    twin = copy.deepcopy(cache)
    twin.append(*new(2, 100))
    assert torch.equal(cache.attend(q), expected) and cache.lengths.tolist() == [200, 200]
    assert twin.lengths.tolist() == [300, 300]
    fresh = copy.deepcopy(cache)
    assert same(cache, fresh, 2)
    del cache
    assert torch.equal(fresh.attend(q), expected)


@pytest.mark.gpu
def test_growing_after_a_capture_is_refused():
    cache = make(capacity=400, device="cuda")
    k, v = (x.cuda() for x in new(2, 1))
    cache.append(k, v)
    cache.reserve(10)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k, v)
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        cache.grow(capacity=500)


@pytest.mark.parametrize("max_append", [1, 7])
def test_windows_with_room_for_short_appends(rng, max_append):
    """What is cached is the same; only memory differs."""
    slim, wide = make(capacity=500, max_append=max_append), make(capacity=500)
    row = 2 * 2 * 2 * 64 * 2  # K and V, sequences, heads, D, bytes
    assert wide.nbytes() - slim.nbytes() == (64 - max_append) * row
    while (length := int(wide.lengths.sum()) // 2 if wide.batch else 0) < 400:
        k, v = new(2, rng.choice([1, 1, 1, 2, 7, 8, 30, 64, 65]))
        for cache in (slim, wide):
            cache.append(k, v)
        if rng.random() < 0.1 and length:
            for cache in (slim, wide):
                cache.crop(-rng.randrange(1) - min(length, 20))
        core_of(slim).table.check()
        assert same(slim, wide, 2)
    q = oracle.gaussian(2, 4, 3, 64)
    assert torch.equal(slim.attend(q), wide.attend(q))


@pytest.mark.parametrize("max_append, error", [(0, ValueError), (65, ValueError), (1.5, TypeError)])
def test_max_append_is_checked(max_append, error):
    with pytest.raises(error, match="max_append"):
        make(max_append=max_append)
