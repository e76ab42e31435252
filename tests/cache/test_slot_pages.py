"""Pools of pages in the tile format of at most two of four."""

from __future__ import annotations

import pytest
import torch

from cute_kernels._cache import page_pool
from cute_kernels._cache.slot_rows import SlotRows
from tests.support import oracle
from tests.support.page_pools import CPU, TILE, index, make_pool, same_state, state
from tests.support.two_of_four import channel_order, two_of_four

FORMAT = "two_of_four_bitmap"


def slot_pool(device, codec: str, keep: int, rows: SlotRows | None = None, head_dim: int = 128) -> page_pool.Pool:
    codecs = {"key_codec": codec, "value_codec": codec}
    padded = 64 if head_dim <= 64 else 128 if head_dim <= 128 else 256
    rows = rows or SlotRows.of_slots(padded, keep, keep, codec, codec)
    options = {"key_keep": keep, "value_keep": keep, "slot_rows": rows, "tile_format": FORMAT, **codecs}
    return make_pool(device, head_dim=head_dim, tiles_per_page=2, **options)


def stored(pool: page_pool.Pool, k: torch.Tensor, v: torch.Tensor) -> page_pool.Pool:
    places = index(2, 0, device=pool.device), index(0, 1, device=pool.device)
    page_pool.store(pool, k.to(pool.device), v.to(pool.device), *places, True)
    return pool


@pytest.mark.parametrize("codec", oracle.NARROW)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_store(head_dim, codec, device, rng):
    keep = rng.randint(1, head_dim // 3)
    k, v = (oracle.lognormal_channels(2, 2, 3 * TILE, head_dim).clamp(-6e4, 6e4) for _ in range(2))
    pool = stored(slot_pool(device, codec, keep, head_dim=head_dim), k, v)
    for row, (sequence, first) in enumerate(((2, 0), (0, 1))):
        for role, x, got in zip(("key", "value"), (k, v), page_pool.load(pool, sequence, first, 3)):
            x = x[row : row + 1]
            pruned = two_of_four(x, role, keep, limit=True, order=channel_order(x, keep))
            exact = oracle.to_dtype(oracle.narrow(x, None, codec, TILE, pruned=pruned), torch.float16)
            assert oracle.same_bits(got[None], exact + 0.0)
    assert not pool.dropped.any() and not pool.refused.any() and int(pool.error) == 0


@pytest.mark.parametrize("codec", oracle.NARROW)
def test_trimming(codec, device, rng):
    """Slots that are too short: what is left is what was stored otherwise, and every lost value is counted."""
    k, v = (oracle.lognormal_channels(2, 2, 3 * TILE, 128).clamp(-6e4, 6e4) for _ in range(2))
    before, values = 13, {"fp8": 19, "int8": 19, "int4": 9}[codec]
    rows = SlotRows(before + values, before + values, 2 * before + 2 * values - 1)
    whole, short = (stored(slot_pool(device, codec, 38, of), k, v) for of in (None, rows))
    lost = [0, 0]
    for sequence, first in ((2, 0), (0, 1)):
        pairs = zip(page_pool.load(whole, sequence, first, 3), page_pool.load(short, sequence, first, 3))
        for i, (all_of_it, left) in enumerate(pairs):
            assert oracle.same_bits(torch.where(left != 0, all_of_it, 0).cpu(), left.cpu() + 0.0)
            lost[i] += int(((all_of_it != 0) & (left == 0)).sum())
            assert oracle.relative_error(left, all_of_it.cpu().double()) < 0.5
    assert not whole.dropped.any()
    tiles, dropped = short.dropped.T.tolist()
    assert all(0 < n <= 12 for n in tiles) and all(n >= m > 0 for n, m in zip(dropped, lost))
    assert int(short.key_rows.max()) == rows.keys and int((short.key_rows + short.value_rows).max()) == rows.both


@pytest.mark.gpu
@pytest.mark.parametrize("codec", oracle.NARROW)
@pytest.mark.parametrize("trims", [False, True])
def test_gpus_store_the_same(trims, codec, rng):
    k, v = (oracle.gaussian(2, 2, 3 * TILE, 128) for _ in range(2))
    rows = (SlotRows(23, 23, 44) if codec == "int4" else SlotRows(30, 31, 58)) if trims else None
    on_cpu, on_gpu = (stored(slot_pool(on, codec, 38, rows), k, v) for on in (CPU, torch.device("cuda")))
    for pool in (on_cpu, on_gpu):  # beyond a tile's rows anything may lie
        used = (pool.key_rows + pool.value_rows)[:, None] > torch.arange(pool.blocks.shape[1], device=pool.device)
        pool.blocks.mul_(used[:, :, None])
    assert bool(on_cpu.dropped.any()) == trims
    same_state(state(on_gpu), state(on_cpu))
