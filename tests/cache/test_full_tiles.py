"""Windows whose tiles are stored when their 64th token arrives, as serving engines count full pages."""

from __future__ import annotations

import pytest
import torch

from cute_kernels._cache import page_pool
from tests.support import oracle
from tests.support.page_pools import TILE, History, index, make_pool, same_state, state, tokens_of


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("recent", [0, 1, 32, 64, 130])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_append(device, head_dim, recent, dtype, rng):
    shares = rng.random() < 0.5
    pool = make_pool(device, head_dim=head_dim, dtype=dtype, key_keep=20, value_keep=16, shares_orders=shares)
    history = History.start(pool, recent, stores_full=True)
    for _ in range(6):
        sequences = rng.sample([0, 1, 2, -1], k=3)
        most = 4 * TILE - max(x.shape[2] for x in history.tokens)
        if most:
            history.append(tokens_of(pool, 3, rng.randint(1, min(most, TILE))), sequences)
        history.check()


def test_chunks_do_not_matter(device, rng):
    """The same tiles, windows and lengths for tokens that arrive one by one and in chunks."""
    pools = [make_pool(device, key_keep=38, value_keep=38, shares_orders=True) for _ in range(2)]
    one, chunks = (History.start(pool, 40, stores_full=True) for pool in pools)
    tokens = tokens_of(pools[0], 3, 200)
    for i in range(200):
        one.append(tokens[:, :, :, i : i + 1], None)
    first = 0
    while first < 200:
        size = rng.randint(1, TILE)
        chunks.append(tokens[:, :, :, first : first + size], None)
        first += size
    expected = state(one.pool, one.windows)
    for history in (one, chunks):
        history.check()
        for w in (history.windows.keys, history.windows.values):  # what is beyond the lengths does not count
            w[:, :, int(history.windows.lengths[0]) :] = 0
    expected = state(one.pool, one.windows)
    same_state(state(chunks.pool, chunks.windows), expected)


def test_without_a_page(device, rng):
    """The token that fills a tile without a page is left out; the tokens before are not."""
    pool = make_pool(device, key_keep=38, value_keep=38)
    pool.page_table[1, 0] = -1
    history = History.start(pool, 32, stores_full=True)
    history.append(tokens_of(pool, 3, 63), None)
    history.check()
    before = state(pool, history.windows)
    k = tokens_of(pool, 1, 1).to(device)
    page_pool.append(pool, history.windows, history.lengths, k[0], k[1], index(1, device=device))
    assert int(pool.error) == 1
    pool.error.zero_()
    same_state(state(pool, history.windows), before)
    assert not history.lengths.any() and torch.equal(history.windows.lengths, index(63, 63, 63, device=device))
