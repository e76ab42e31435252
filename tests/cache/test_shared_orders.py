"""Pools whose sequences share their channel orders, so that a page may belong to any of them."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels._attention.problem import launch_problem, pack_problem, pack_window
from cute_kernels._cache import page_pool
from tests.support import oracle
from tests.support.page_pools import TILE, History, check_tiles, index, make_pool, tokens_of

KEPT = {"key_keep": 38, "value_keep": 32}


def chosen(pool: page_pool.Pool, tokens: int = 4 * TILE) -> None:
    """Gives a pool orders that are not the identity."""
    k, v = (oracle.lognormal_channels(2, pool.kv_heads, tokens, pool.head_dim) for _ in range(2))
    page_pool.choose_orders(pool, k.to(pool.device, pool.dtype), v.to(pool.device, pool.dtype))


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_choose(device, head_dim, dtype, rng):
    """The orders are those of `compress` over all rows' tokens together."""
    pool = make_pool(device, shares_orders=True, head_dim=head_dim, dtype=dtype, key_keep=20, value_keep=0)
    k, v = (oracle.lognormal_channels(4, 2, 100, head_dim).to(device, dtype) for _ in range(2))
    v[torch.rand(v.shape, device=device) < 0.3] = 0
    page_pool.choose_orders(pool, k, v)
    for x, role, keep, order in ((k, "key", 20, pool.key_channels), (v, "value", None, pool.value_channels)):
        together = x.transpose(0, 1).flatten(1, 2)[None]
        assert torch.equal(order, ck.compress(together, role=role, keep=keep).channel_order[0])


def test_pages_serve_any_sequence(device, rng):
    """What one sequence stored, another that has the page in its table reads."""
    pool = make_pool(device, shares_orders=True, tiles_per_page=2, **KEPT)
    chosen(pool)
    orders = pool.key_channels.clone()
    k, v = (oracle.gaussian(1, 2, 4 * TILE, 128, device=device) for _ in range(2))
    page_pool.store(pool, k, v, index(0, device=device), index(0, device=device))
    pool.page_table[2, 1] = pool.page_table[0, 0]
    for mine, other in zip(page_pool.load(pool, 0, 0, 2), page_pool.load(pool, 2, 2, 2)):
        assert torch.equal(mine, other)
    check_tiles(pool, 2, 2, k[0, :, : 2 * TILE], v[0, :, : 2 * TILE])
    assert torch.equal(pool.key_channels, orders)


@pytest.mark.parametrize("recent", [0, 20])
def test_append(device, recent, rng):
    pool = make_pool(device, shares_orders=True, **KEPT)
    chosen(pool)
    orders = pool.key_channels.clone(), pool.value_channels.clone()
    history = History.start(pool, recent)
    for _ in range(6):
        history.append(tokens_of(pool, 3, rng.randrange(1, 65)), None)
        history.check()
    assert torch.equal(pool.key_channels, orders[0]) and torch.equal(pool.value_channels, orders[1])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention(backend, head_dim, rng):
    if backend.name == "reference":
        pytest.skip("the reference takes dense operands")
    device, kept = backend.device, head_dim // 3
    pool = make_pool(device, shares_orders=True, head_dim=head_dim, key_keep=kept, value_keep=kept)
    chosen(pool)
    history = History.start(pool, 10)
    for tokens in (64, 64, 50):
        history.append(tokens_of(pool, 3, tokens), None)
    q = oracle.gaussian(3, 6, 2, head_dim, device=device)
    windows = history.windows
    window = pack_window(windows.keys, windows.values, windows.lengths)
    problem = pack_problem(pool.key_view, pool.value_view, window, q, scale=0.1)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=device)
    launch_problem(problem, q, out, lse, backend.name, lengths=history.lengths)
    for s in range(3):
        compressed, held = int(history.lengths[s]), int(windows.lengths[s])
        tiles = (x[None].cpu() for x in page_pool.load(pool, s, 0, compressed // TILE))
        dense = tuple(x[s : s + 1, :, :held].cpu() for x in (windows.keys, windows.values))
        expected, sums = oracle.attention(q[s : s + 1].cpu(), *tiles, 0.1, dense)
        assert oracle.relative_error(out[s : s + 1], expected) <= 2e-3
        torch.testing.assert_close(lse[s : s + 1].cpu().double(), sums, atol=2e-3, rtol=1e-3)


def test_bad_input(rng):
    pool, own = make_pool(shares_orders=True, **KEPT), make_pool(**KEPT)
    k = oracle.gaussian(1, 2, TILE, 128)
    with pytest.raises(ValueError, match="new_order must be None or False where sequences share"):
        page_pool.store(pool, k, k, index(0), index(0), True)
    with pytest.raises(ValueError, match="pool must have channel orders that all sequences share"):
        page_pool.choose_orders(own, k, k)
    with pytest.raises(TypeError, match="k must be float16 like the pool"):
        page_pool.choose_orders(pool, k.bfloat16(), k)
