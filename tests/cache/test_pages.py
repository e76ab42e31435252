"""The pool of pages: what is stored against what pruning gives."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels._cache import page_pool
from cute_kernels._cache.slot_rows import SlotRows
from cute_kernels._runtime.extension import _C
from tests.support import oracle
from tests.support.page_pools import TILE, check_tiles, index, make_pool, same_state, state


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("keep", ["one", "some", "all", "nonzeros"])
def test_store(device, keep, head_dim, dtype, rng):
    kept = {"one": 1, "some": 38, "all": head_dim, "nonzeros": 0}[keep]
    pool = make_pool(
        device, head_dim=head_dim, dtype=dtype, key_keep=kept, value_keep=max(0, kept - 6), tiles_per_page=2
    )
    tiles = rng.randrange(2, 5)
    k, v = (oracle.gaussian(2, 2, tiles * TILE, head_dim, dtype=dtype, device=device) for _ in range(2))
    if keep == "nonzeros":
        k[0, 0, TILE:] = 0
        v[torch.rand(v.shape, device=device) < 0.4] = 0
    page_pool.store(pool, k, v, index(2, 0, device=device), index(0, 3, device=device), True)
    counts = [check_tiles(pool, *place, k[i], v[i]) for i, place in enumerate([(2, 0), (0, 3)])]
    assert pool.dropped.tolist() == np.add(*counts).tolist()
    assert int(pool.error) == 0
    assert int((pool.key_rows > _C.format.bitmap_rows(pool.key_channels.shape[-1])).sum()) <= 4 * tiles  # nothing else


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("keep", [0, 20])
def test_store_any_bits(device, keep, dtype, rng):
    pool = make_pool(device, dtype=dtype, key_keep=keep, value_keep=keep)
    k, v = (oracle.random_bits(1, 2, 3 * TILE, 128, dtype=dtype).to(device) for _ in range(2))
    k[0, 1, :TILE, ::3] = -0.0
    page_pool.store(pool, k, v, index(1, device=device), index(1, device=device), True)
    assert check_tiles(pool, 1, 1, k[0], v[0]) == pool.dropped.tolist()


@pytest.mark.parametrize("head_dim", [40, 128])
def test_store_of_views(device, head_dim, rng):
    x = oracle.gaussian(2, 2, 2 * TILE, head_dim, device=device)
    odd = torch.zeros(*x.shape[:3], head_dim + 3, dtype=x.dtype, device=device)
    odd[..., 3:] = x
    tokens_first = x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    expected = make_pool(device, head_dim=head_dim, key_keep=16, value_keep=16)
    places = index(0, 1, device=device), index(0, 1, device=device)
    page_pool.store(expected, x, x, *places, True)
    for view in (odd[..., 3:], tokens_first, x.repeat_interleave(2, dim=2)[:, :, ::2], x.clone()):
        pool = make_pool(device, head_dim=head_dim, key_keep=16, value_keep=16)
        page_pool.store(pool, view, view, *places, True)
        same_state(state(pool), state(expected))


def test_new_orders(device, rng):
    """Sequences keep their channel orders unless told otherwise; new ones are those of `compress`."""
    pool = make_pool(device, key_keep=38, value_keep=38)
    k, v = (oracle.lognormal_channels(3, 2, 2 * TILE, 128).to(device) for _ in range(2))
    identity = pool.key_channels[0].clone()
    sequences, first_tiles = index(0, 1, 2, device=device), index(0, 1, 0, device=device)
    page_pool.store(pool, k, v, sequences, first_tiles, False)
    assert (pool.key_channels == identity).all() and (pool.value_channels == identity).all()
    page_pool.store(pool, k, v, sequences, first_tiles)
    expected = ck.compress(k, role="key", keep=38).channel_order, ck.compress(v, role="value", keep=38).channel_order
    for channels, order in zip((pool.key_channels, pool.value_channels), expected):
        assert torch.equal(channels[[0, 2]], order[[0, 2]]) and torch.equal(channels[1], identity)
    page_pool.store(pool, k, v, sequences, first_tiles, True)
    assert torch.equal(pool.key_channels, expected[0]) and torch.equal(pool.value_channels, expected[1])
    for i in range(3):
        check_tiles(pool, i, int(first_tiles[i]), k[i], v[i])


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gaussian", "ties", "bits", "one class"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_trim(device, head_dim, kind, dtype, rng):
    """Slots with less room than tiles need."""
    keep = rng.randrange(8, head_dim)
    bitmap_rows = _C.format.bitmap_rows(head_dim)
    rows = [bitmap_rows + max(1, int(keep * fraction)) for fraction in (rng.uniform(0.3, 0.9), rng.uniform(0.8, 1.1))]
    rows = [min(r, bitmap_rows + head_dim) for r in rows]
    slot_rows = SlotRows(*rows, rng.randint(rows[0] + bitmap_rows + 1, sum(rows)))
    pool = make_pool(device, head_dim=head_dim, dtype=dtype, key_keep=keep, value_keep=keep, slot_rows=slot_rows)
    shape = (1, 2, 2 * TILE, head_dim)
    make = {
        "gaussian": lambda: oracle.gaussian(*shape, dtype=dtype),
        "ties": lambda: torch.randint(-3, 4, shape).to(dtype),
        "bits": lambda: oracle.random_bits(*shape, dtype=dtype),
        "one class": lambda: oracle.gaussian(*shape, dtype=dtype) * (torch.arange(head_dim) % 8 == 5),
    }[kind]
    k, v = make().to(device), make().to(device)
    page_pool.store(pool, k, v, index(0, device=device), index(2, device=device), kind != "one class")
    counts = check_tiles(pool, 0, 2, k[0], v[0])
    assert pool.dropped.tolist() == counts and counts[0][1] > 0


def test_fitting_avoids_trimming(rng):
    """Of the tiles that `compress_kv` makes longer than a slot, few are trimmed.

    Measured over 60 draws of 2048 tiles: 4.65 % of them (standard error 0.06 %) are longer and 0.17 % (0.012 %) are
    trimmed, with no more variance than independent tiles have. Of 8192 that is 381 +- 19 and 14 +- 4. Below 250 of the
    former is 6.8 standard deviations away; more of the latter, a Poisson variable, than a ninth of the former has a
    probability of 10^-7 even if the measured rate was two standard errors too low.
    """
    tiles = 2048  # of each of two heads, keys and values
    k, v = (oracle.gaussian(1, 2, tiles * TILE, 128) for _ in range(2))
    bitmap_rows, bound = _C.format.bitmap_rows(128), 44
    unfitted = [kv.row_offsets.diff() - bitmap_rows for kv in ck.compress_kv(k, v, keep=38)]
    longer = sum(int((rows > bound).sum()) for rows in unfitted)
    slot_rows = SlotRows(bitmap_rows + bound, bitmap_rows + bound, 2 * (bitmap_rows + bound))
    pool = make_pool(sequences=1, pages_per_sequence=tiles, key_keep=38, value_keep=38, slot_rows=slot_rows)
    page_pool.store(pool, k, v, index(0), index(0), True)
    assert longer >= 250
    assert int(pool.dropped[:, 0].sum()) <= longer / 9


def test_fitting_keys_and_values_that_are_too_long_together(rng):
    """Of 50 176 pairs 18 % have more than 86 rows of values together, and 2.9 % are trimmed to these. Of 4096 that is
    740 +- 25 and 119 +- 11; a third of the former is more than ten standard deviations away."""
    tiles, bound = 2048, 86
    k, v = (oracle.gaussian(1, 2, tiles * TILE, 128) for _ in range(2))
    bitmap_rows = _C.format.bitmap_rows(128)
    rows = sum(kv.row_offsets.diff() - bitmap_rows for kv in ck.compress_kv(k, v, keep=38))
    longer = int((rows > bound).sum())
    slot_rows = SlotRows(bitmap_rows + 49, bitmap_rows + 49, 2 * bitmap_rows + bound)
    pool = make_pool(sequences=1, pages_per_sequence=tiles, key_keep=38, value_keep=38, slot_rows=slot_rows)
    page_pool.store(pool, k, v, index(0), index(0), True)
    assert longer >= 500
    assert 0 < int(pool.dropped[:, 0].sum()) <= longer / 3
    assert int((pool.key_rows + pool.value_rows).max()) == slot_rows.both
    assert int(pool.key_rows.max()) > 2 * bitmap_rows + bound - int(pool.value_rows.max())  # no fixed places


def test_values_have_what_keys_leave(device, rng):
    """All nonzeros in one class of channels: keys and values as long as they may be, then values beside short keys."""
    pool = make_pool(device, key_keep=38, value_keep=38)
    k, v = (oracle.gaussian(1, 2, 2 * TILE, 128, device=device) for _ in range(2))
    k[..., torch.arange(128) % 8 != 5] = v[..., torch.arange(128) % 8 != 5] = 0
    k[:, :, TILE:, 8:] = 0
    page_pool.store(pool, k, v, index(0, device=device), index(0, device=device), False)
    assert check_tiles(pool, 0, 0, k[0], v[0]) == pool.dropped.tolist()
    slots = pool.page_table[0, :2].long()[:, None] * 2 + torch.arange(2, device=device)
    keys, values, both = dataclasses.astuple(pool.slot_rows)
    assert pool.key_rows[slots].tolist()[0] == [keys] * 2 and (pool.key_rows[slots][1] < both - values).all()
    assert pool.value_rows[slots].tolist() == [[both - keys] * 2, [values] * 2]


@pytest.mark.parametrize("kind", ["gaussian", "lognormal", "outliers"])
def test_default_slots(kind, rng):
    """Rarer than one tile in 10^4 is trimmed: of 2048 hardly ever one, and never three."""
    shape = (1, 2, 512 * TILE, 128)
    k, v = (oracle.lognormal_channels(*shape) if kind == "lognormal" else oracle.gaussian(*shape) for _ in range(2))
    if kind == "outliers":  # of keys, as caches have them
        k[..., torch.randperm(128)[: rng.randrange(1, 9)]] *= 30
    pool = make_pool(sequences=1, pages_per_sequence=512, key_keep=38, value_keep=38)
    page_pool.store(pool, k, v, index(0), index(0), True)
    assert int(pool.dropped[:, 0].sum()) < 3


def test_memory():
    """Pages at 38 of 128 kept take at most 43 % of dense float16, orders and rows counted; windows the rest to 44."""
    pool = make_pool(sequences=1, pages_per_sequence=256, spare=0, kv_heads=8, key_keep=38, value_keep=38)
    dense = 2 * 256 * TILE * 8 * 128 * 2
    assert pool.nbytes <= 0.43 * dense
    assert pool.nbytes + page_pool.Windows.allocate(pool, 32).nbytes <= 0.44 * dense


@pytest.mark.parametrize("keep", [0, 128])
def test_full_slots_hold_any_tile(device, keep, rng):
    pool = make_pool(device, key_keep=keep, value_keep=keep)
    k, v = (oracle.gaussian(1, 2, 2 * TILE, 128, device=device).abs() + 1 for _ in range(2))
    page_pool.store(pool, k, v, index(1, device=device), index(0, device=device), True)
    loaded = page_pool.load(pool, 1, 0, 2)
    assert torch.equal(loaded[0], k[0]) and torch.equal(loaded[1], v[0]) and not pool.dropped.any()


def test_store_without_pages(device, rng):
    pool = make_pool(device, key_keep=38, value_keep=38)
    k = oracle.gaussian(3, 2, 2 * TILE, 128, device=device)
    page = int(pool.page_table[1, 1])
    pool.page_table[1, 1] = -1
    sequences = index(-1, 1, 2, device=device)
    page_pool.store(pool, k, k, sequences, index(0, 0, 1, device=device))
    assert int(pool.error) == 1
    check_tiles(pool, 1, 0, k[1, :, :TILE], k[1, :, :TILE])
    check_tiles(pool, 2, 1, k[2], k[2])
    assert (pool.key_rows.view(-1, 2)[page] == _C.format.bitmap_rows(128)).all()  # as it was
    pool.error.zero_()
    assert not any(x.any() for x in page_pool.load(pool, 1, 1, 1)) and int(pool.error) == 1
    pool.error.zero_()
    page_pool.store(pool, k[:1], k[:1], index(0, device=device), index(3, device=device))  # beyond the table
    assert int(pool.error) == 1
    assert not page_pool.load(pool, 0, 0, 3)[0].any()
    for call in (
        lambda *_: page_pool.store(pool, k[:1], k[:1], index(3, device=device), index(0, device=device), True),
        lambda *state: page_pool.append(pool, *state, k[:1, :, :64], k[:1, :, :64], index(3, device=device)),
    ):
        windows, lengths = page_pool.Windows.allocate(pool, 0), index(0, 0, 0, device=device)
        pool.error.zero_()
        call(windows, lengths)  # no such sequence
        assert int(pool.error) == 1 and not lengths.any() and not windows.lengths.any()


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_bad_input(rng):
    pool = make_pool(key_keep=38, value_keep=38)
    windows, lengths = page_pool.Windows.allocate(pool, 32), torch.zeros(3, dtype=torch.int32)
    k = oracle.gaussian(2, 2, TILE, 128)
    places = index(0, 1), index(0, 0)
    with pytest.raises(TypeError, match="k must be float16 like the pool, got bfloat16"):
        page_pool.store(pool, k.bfloat16(), k, *places)
    with pytest.raises(ValueError, match=r"v must have the shape of k, \(2, 2, 64, 128\), got \(1, 2, 64, 128\)"):
        page_pool.store(pool, k, k[:1], *places)
    with pytest.raises(ValueError, match=r"k must have shape \(n, 2, tokens, 128\)"):
        page_pool.store(pool, k[:, :1], k[:, :1], *places)
    with pytest.raises(ValueError, match="whole tiles"):
        page_pool.store(pool, k[:, :, 1:], k[:, :, 1:], *places)
    with pytest.raises(ValueError, match="stride 1"):
        page_pool.store(pool, k.transpose(2, 3).contiguous().transpose(2, 3), k, *places)
    with pytest.raises(TypeError, match="sequences must be int32"):
        page_pool.store(pool, k, k, places[0].long(), places[1])
    with pytest.raises(ValueError, match="first_tiles must be contiguous, of shape"):
        page_pool.store(pool, k, k, places[0], index(0))
    longer, more = torch.cat([k, k], dim=2), torch.cat([k, k])
    with pytest.raises(ValueError, match="at most 64 tokens"):
        page_pool.append(pool, windows, lengths, longer, longer)
    with pytest.raises(ValueError, match="at most a row for each of 3"):
        page_pool.append(pool, windows, lengths, more, more)
    with pytest.raises(ValueError, match="lengths must be contiguous"):
        page_pool.append(pool, windows, lengths[:2], k, k)
    with pytest.raises(ValueError, match="sequence must be"):
        page_pool.load(pool, 3, 0, 1)
    with pytest.raises(ValueError, match="within the 4"):
        page_pool.load(pool, 0, 3, 2)
    for rows, message in (
        ((8, 57, 110), "rows of a slot for keys must be from 9 to 136, got 8"),
        ((57, 137, 190), "rows of a slot for values must be from 9 to 136, got 137"),
        ((57, 57, 65), "rows of a slot for keys and values must be from 66 to 114, got 65"),
        ((57, 57, 115), "rows of a slot for keys and values must be from 66 to 114, got 115"),
    ):
        with pytest.raises(ValueError, match=message):
            make_pool(slot_rows=SlotRows(*rows))
    page_pool.append(pool, windows, lengths, k[:, :, :0], k[:, :, :0])
    page_pool.store(pool, k[:0], k[:0], index()[:0].int(), index()[:0].int())
    assert page_pool.load(pool, 0, 1, 0)[0].shape == (2, 0, 128)
    assert not pool.error and not pool.blocks.any() and not windows.lengths.any()
