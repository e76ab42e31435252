"""Windows over a pool of pages: what append leaves in them and in the pool against the history of their sequences."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels._cache import page_pool
from cute_kernels._cache.slot_rows import SlotRows
from tests.support import oracle
from tests.support.page_pools import TILE, History, index, make_pool, tokens_of


@pytest.mark.parametrize("head_dim, keep, dtype, recent", [
    (64, 20, torch.float16, 32), (96, 30, torch.bfloat16, 0), (128, 38, torch.float16, 32),
    (128, 0, torch.bfloat16, 100), (256, 70, torch.float16, 7), (40, 1, torch.float16, 64),
])  # fmt: skip
def test_append(device, head_dim, keep, dtype, recent, rng):
    """Ragged lengths, sequences at different phases, one or many tokens at a time."""
    pool = make_pool(
        device,
        sequences=4,
        pages_per_sequence=5,
        tiles_per_page=2,
        head_dim=head_dim,
        dtype=dtype,
        key_keep=keep,
        value_keep=keep,
    )
    history = History.start(pool, recent)
    for _ in range(40):
        rows = rng.sample(range(4), rng.randrange(1, 5))
        if rng.random() < 0.2:
            rows[0] = -1
        tokens = rng.choice([1, 1, 2, rng.randrange(1, 65), 64])
        rows = [row for row in rows if row < 0 or history.tokens[row].shape[2] + tokens <= 10 * TILE] or [-1]
        history.append(tokens_of(pool, len(rows), tokens), rows)
    for _ in range(3):
        if max(x.shape[2] for x in history.tokens) < 10 * TILE:
            history.append(tokens_of(pool, 4, 1), None)
    history.check()


def test_append_after_store(device, rng):
    """Tiles of an appended sequence keep the order that bulk compression chose."""
    pool = make_pool(device, key_keep=38, value_keep=38)
    history = History.start(pool, 32)
    x = oracle.lognormal_channels(2, 2, 2 * TILE, 128)
    page_pool.store(pool, x[:1].to(device), x[1:].to(device), index(1, device=device), index(0, device=device))
    order = pool.key_channels.clone()
    history.lengths[1] = 2 * TILE
    history.tokens[1] = x
    for _ in range(3):
        history.append(tokens_of(pool, 1, 40), [1])
    history.check()
    assert int(history.lengths[1]) == 3 * TILE and torch.equal(pool.key_channels, order)


def test_append_chooses_orders(device, rng):
    pool = make_pool(device, key_keep=38, value_keep=20)
    history = History.start(pool, 0)
    k, v = (oracle.lognormal_channels(3, 2, TILE, 128) for _ in range(2))
    history.append(torch.stack([k, v]), None)
    history.check()
    assert torch.equal(pool.key_channels.cpu(), ck.compress(k, role="key", keep=38).channel_order)
    assert torch.equal(pool.value_channels.cpu(), ck.compress(v, role="value", keep=20).channel_order)


def test_append_any_bits_and_views(device, rng):
    pool = make_pool(device, head_dim=64, key_keep=11, value_keep=0)
    history = History.start(pool, 3)
    for _ in range(6):
        new = oracle.random_bits(2, 3, 2, rng.randrange(1, 65), 64)
        odd = torch.zeros(*new.shape[:-1], 67, dtype=new.dtype)
        odd[..., 1:65] = new
        history.append(
            rng.choice([new, odd[..., 1:65], new.permute(3, 0, 1, 2, 4).contiguous().permute(1, 2, 3, 0, 4)]), None
        )
    history.check()


def test_append_trims(device, rng):
    slot_rows = SlotRows(8 + 30, 8 + 40, 8 + 30 + 8 + 36)
    pool = make_pool(device, key_keep=38, value_keep=38, slot_rows=slot_rows)
    history = History.start(pool, 0)
    for _ in range(8):
        history.append(tokens_of(pool, 3, 20), None)
    history.check()
    assert int(pool.dropped[0, 1]) > 100 and int(pool.dropped[1, 1]) > 100


@pytest.mark.parametrize("why", ["page", "table", "room"])
def test_append_that_cannot(device, why, rng):
    """Nothing of the sequence changes; the others go on."""
    pool = make_pool(device, pages_per_sequence=2, key_keep=38, value_keep=38)
    history = History.start(pool, 32)
    for _ in range(2):
        history.append(tokens_of(pool, 3, 45), None)
    before = [tensor[1].clone() for tensor in (history.windows.keys, history.windows.lengths, history.lengths)]
    page = int(pool.page_table[1, 0])
    if why == "page":
        pool.page_table[1] = -1
    elif why == "table":
        history.lengths[1] = before[2][...] = 2 * TILE
    else:
        history.windows.lengths[1] = before[1][...] = history.windows.capacity - 5
    stored = pool.blocks.view(-1, 2, *pool.blocks.shape[1:])[page].clone()
    tokens = history.tokens[1]
    history.append(tokens_of(pool, 3, 30), None)
    assert int(pool.error) == 1 and not history.windows.arrivals.any()
    after = [tensor[1] for tensor in (history.windows.keys, history.windows.lengths, history.lengths)]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert torch.equal(stored, pool.blocks.view(-1, 2, *pool.blocks.shape[1:])[page])
    pool.error.zero_()
    history.tokens[1] = tokens[:, :, :0]
    history.lengths[1] = history.windows.lengths[1] = 0
    history.check()
