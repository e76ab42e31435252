"""The pool of pages: what is stored against what pruning gives, windows against the history of their sequences."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import numpy as np
import oracle
import pytest
import torch

import cute_kernels as ck
from cute_kernels import _pages
from cute_kernels._extension import _C

TILE = _pages.TILE_TOKENS
CPU = torch.device("cpu")


# ---- Pools and what they must hold -----------------------------------------------------------------------------------


def make_pool(device=CPU, *, sequences=3, pages_per_sequence=4, spare=3, seed=0, **options) -> _pages.Pool:
    """Every sequence has all its pages, scattered over the pool."""
    options = {"kv_heads": 2, "head_dim": 128, "dtype": torch.float16, "tiles_per_page": 1, **options}
    pages = sequences * pages_per_sequence
    pool = _pages.Pool.allocate(
        pages=pages + spare, sequences=sequences, pages_per_sequence=pages_per_sequence, device=device, **options
    )
    order = torch.randperm(pages + spare, generator=torch.Generator().manual_seed(seed))[:pages]
    pool.page_table.copy_(order.view(sequences, pages_per_sequence))
    return pool


def index(*values: int, device=CPU) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@lru_cache(maxsize=None)
def stream_positions(role: str, padded: int) -> np.ndarray:
    """(32 lanes, 2 streams, elements of a stream): token position * padded + channel position, in stream order."""
    positions = np.array(
        [
            [oracle.element_position(role, padded, lane, e) for e in range(TILE * padded // 32)]
            for lane in range(32)
        ]
    )
    flat = positions[..., 0] * padded + positions[..., 1]
    return flat.reshape(32, -1, 2).transpose(0, 2, 1)


def trimmed(tile: torch.Tensor, role: str, token_order, channel_order, most: int) -> tuple[torch.Tensor, int]:
    """A pruned tile (64, D) after the rule of the slots, and how many nonzeros that dropped."""
    padded = len(channel_order)
    dense = np.zeros((TILE, padded), dtype=np.int16)
    dense[:, : tile.shape[1]] = oracle.bits(tile).numpy()
    positions = stream_positions(role, padded)
    tokens, channels = token_order[positions // padded], channel_order[positions % padded]
    streams = dense[tokens, channels]
    dropped = 0
    keys = np.minimum(streams.astype(np.int32) & 0x7FFF, oracle.INFINITY_BITS[tile.dtype] + 1)
    for lane, stream in zip(*np.nonzero((streams != 0).sum(-1) > most)):
        values = keys[lane, stream]
        present = [e for e in range(len(values)) if streams[lane, stream, e]]
        present.sort(key=lambda e: (values[e], -e))  # least magnitude first, of equal ones the later
        for e in present[: len(present) - most]:
            dense[tokens[lane, stream, e], channels[lane, stream, e]] = 0
            dropped += 1
    return torch.from_numpy(dense[:, : tile.shape[1]].copy()).view(tile.dtype), dropped


def check_tiles(pool: _pages.Pool, sequence: int, first_tile: int, k: torch.Tensor, v: torch.Tensor) -> list[list[int]]:
    """Holds stored tiles against k, v (Hkv, 64 c, D) before pruning; the expected growth of `pool.dropped`."""
    tiles = k.shape[1] // TILE
    counts = [[0, 0], [0, 0]]
    loaded = _pages.load(pool, sequence, first_tile, tiles)
    slots = pool.page_table.cpu().long()
    for i, (x, role, keep, actual) in enumerate(
        ((k, "key", pool.key_keep, loaded[0]), (v, "value", pool.value_keep, loaded[1]))
    ):
        blocks, rows = (pool.key_blocks, pool.key_rows) if i == 0 else (pool.value_blocks, pool.value_rows)
        channels = pool.key_channels if i == 0 else pool.value_channels
        bitmap_rows = _C.format.bitmap_rows(channels.shape[-1])
        most = blocks.shape[1] - bitmap_rows
        pruned = oracle.prune(x.cpu(), keep or None)
        for head in range(pool.kv_heads):
            channel_order = channels[sequence, head].cpu().numpy()
            assert sorted(channel_order) == list(range(len(channel_order)))
            for tile in range(tiles):
                page, in_page = divmod(first_tile + tile, pool.tiles_per_page)
                slot = (int(slots[sequence, page]) * pool.kv_heads + head) * pool.tiles_per_page + in_page
                token_order = pool.token_order[slot].cpu().numpy()
                assert sorted(token_order) == list(range(TILE))
                part = slice(tile * TILE, (tile + 1) * TILE)
                expected, lost = trimmed(pruned[head, part], role, token_order, channel_order, most)
                assert oracle.same_bits(actual[head, part].contiguous(), expected), (role, head, tile)
                assert bitmap_rows <= int(rows[slot]) <= blocks.shape[1]
                counts[i][0] += lost > 0
                counts[i][1] += lost
    return counts


def state(pool: _pages.Pool, windows: _pages.Windows | None = None) -> dict[str, torch.Tensor]:
    return {
        field.name + type(part).__name__: getattr(part, field.name).cpu().clone()
        for part in (pool, windows)
        if part is not None
        for field in dataclasses.fields(part)
        if isinstance(getattr(part, field.name), torch.Tensor)
    }


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, tensor in a.items():
        view = tensor.view(torch.int16) if tensor.is_floating_point() else tensor
        other = b[name].view(torch.int16) if tensor.is_floating_point() else b[name]
        assert torch.equal(view, other), name


# ---- Store -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("keep", ["one", "some", "all", "nonzeros"])
def test_store(device, keep, head_dim, dtype, rng):
    kept = {"one": 1, "some": 38, "all": head_dim, "nonzeros": 0}[keep]
    pool = make_pool(device, head_dim=head_dim, dtype=dtype, key_keep=kept, value_keep=max(0, kept - 6), tiles_per_page=2)
    tiles = rng.randrange(2, 5)
    k, v = (oracle.gaussian(2, 2, tiles * TILE, head_dim, dtype=dtype, device=device) for _ in range(2))
    if keep == "nonzeros":
        k[0, 0, TILE:] = 0
        v[torch.rand(v.shape, device=device) < 0.4] = 0
    _pages.store(pool, k, v, index(2, 0, device=device), index(0, 3, device=device), True)
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
    _pages.store(pool, k, v, index(1, device=device), index(1, device=device), True)
    assert check_tiles(pool, 1, 1, k[0], v[0]) == pool.dropped.tolist()


@pytest.mark.parametrize("head_dim", [40, 128])
def test_store_of_views(device, head_dim, rng):
    x = oracle.gaussian(2, 2, 2 * TILE, head_dim, device=device)
    odd = torch.zeros(*x.shape[:3], head_dim + 3, dtype=x.dtype, device=device)
    odd[..., 3:] = x
    tokens_first = x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    expected = make_pool(device, head_dim=head_dim, key_keep=16, value_keep=16)
    places = index(0, 1, device=device), index(0, 1, device=device)
    _pages.store(expected, x, x, *places, True)
    for view in (odd[..., 3:], tokens_first, x.repeat_interleave(2, dim=2)[:, :, ::2], -(-x)):
        pool = make_pool(device, head_dim=head_dim, key_keep=16, value_keep=16)
        _pages.store(pool, view, view, *places, True)
        same_state(state(pool), state(expected))


def test_new_orders(device, rng):
    """Sequences keep their channel orders unless told otherwise; new ones are those of `compress`."""
    pool = make_pool(device, key_keep=38, value_keep=38)
    k, v = (oracle.lognormal_channels(3, 2, 2 * TILE, 128).to(device) for _ in range(2))
    identity = pool.key_channels[0].clone()
    sequences, first_tiles = index(0, 1, 2, device=device), index(0, 1, 0, device=device)
    _pages.store(pool, k, v, sequences, first_tiles, False)
    assert (pool.key_channels == identity).all() and (pool.value_channels == identity).all()
    _pages.store(pool, k, v, sequences, first_tiles)
    expected = ck.compress(k, role="key", keep=38).channel_order, ck.compress(v, role="value", keep=38).channel_order
    for channels, order in zip((pool.key_channels, pool.value_channels), expected):
        assert torch.equal(channels[[0, 2]], order[[0, 2]]) and torch.equal(channels[1], identity)
    _pages.store(pool, k, v, sequences, first_tiles, True)
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
    pool = make_pool(
        device, head_dim=head_dim, dtype=dtype, key_keep=keep, value_keep=keep, key_slot_rows=rows[0],
        value_slot_rows=rows[1],
    )
    shape = (1, 2, 2 * TILE, head_dim)
    make = {
        "gaussian": lambda: oracle.gaussian(*shape, dtype=dtype),
        "ties": lambda: torch.randint(-3, 4, shape).to(dtype),
        "bits": lambda: oracle.random_bits(*shape, dtype=dtype),
        "one class": lambda: oracle.gaussian(*shape, dtype=dtype) * (torch.arange(head_dim) % 8 == 5),
    }[kind]
    k, v = make().to(device), make().to(device)
    _pages.store(pool, k, v, index(0, device=device), index(2, device=device), kind != "one class")
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
    pool = make_pool(
        sequences=1, pages_per_sequence=tiles, key_keep=38, value_keep=38, key_slot_rows=bitmap_rows + bound,
        value_slot_rows=bitmap_rows + bound,
    )
    _pages.store(pool, k, v, index(0), index(0), True)
    assert longer >= 250
    assert int(pool.dropped[:, 0].sum()) <= longer / 9


@pytest.mark.parametrize("kind", ["gaussian", "lognormal", "outliers"])
def test_default_slots(kind, rng):
    """Rarer than one tile in 10^4 is trimmed: of 2048 hardly ever one, and never three."""
    shape = (1, 2, 512 * TILE, 128)
    k, v = (oracle.lognormal_channels(*shape) if kind == "lognormal" else oracle.gaussian(*shape) for _ in range(2))
    if kind == "outliers":  # of keys, as caches have them
        k[..., torch.randperm(128)[: rng.randrange(1, 9)]] *= 30
    pool = make_pool(sequences=1, pages_per_sequence=512, key_keep=38, value_keep=38)
    _pages.store(pool, k, v, index(0), index(0), True)
    assert int(pool.dropped[:, 0].sum()) < 3


def test_memory():
    """Pages at 38 of 128 kept take at most 44 % of dense float16, orders and rows counted; windows the rest to 45."""
    pool = make_pool(sequences=1, pages_per_sequence=256, spare=0, kv_heads=8, key_keep=38, value_keep=38)
    dense = 2 * 256 * TILE * 8 * 128 * 2
    assert pool.nbytes <= 0.44 * dense
    assert pool.nbytes + _pages.Windows.allocate(pool, 32).nbytes <= 0.45 * dense


@pytest.mark.parametrize("keep", [0, 128])
def test_full_slots_hold_any_tile(device, keep, rng):
    pool = make_pool(device, key_keep=keep, value_keep=keep)
    k, v = (oracle.gaussian(1, 2, 2 * TILE, 128, device=device).abs() + 1 for _ in range(2))
    _pages.store(pool, k, v, index(1, device=device), index(0, device=device), True)
    loaded = _pages.load(pool, 1, 0, 2)
    assert torch.equal(loaded[0], k[0]) and torch.equal(loaded[1], v[0]) and not pool.dropped.any()


def test_store_without_pages(device, rng):
    pool = make_pool(device, key_keep=38, value_keep=38)
    k = oracle.gaussian(3, 2, 2 * TILE, 128, device=device)
    page = int(pool.page_table[1, 1])
    pool.page_table[1, 1] = -1
    sequences = index(-1, 1, 2, device=device)
    _pages.store(pool, k, k, sequences, index(0, 0, 1, device=device))
    assert int(pool.error) == 1
    check_tiles(pool, 1, 0, k[1, :, :TILE], k[1, :, :TILE])
    check_tiles(pool, 2, 1, k[2], k[2])
    assert (pool.key_rows.view(-1, 2)[page] == _C.format.bitmap_rows(128)).all()  # as it was
    pool.error.zero_()
    assert not any(x.any() for x in _pages.load(pool, 1, 1, 1)) and int(pool.error) == 1
    pool.error.zero_()
    _pages.store(pool, k[:1], k[:1], index(0, device=device), index(3, device=device))  # beyond the table
    assert int(pool.error) == 1
    assert not _pages.load(pool, 0, 0, 3)[0].any()
    for call in (
        lambda: _pages.store(pool, k[:1], k[:1], index(3, device=device), index(0, device=device), True),
        lambda: _pages.append(pool, windows, lengths, k[:1, :, :64], k[:1, :, :64], index(3, device=device)),
    ):
        windows, lengths = _pages.Windows.allocate(pool, 0), index(0, 0, 0, device=device)
        pool.error.zero_()
        call()  # no such sequence
        assert int(pool.error) == 1 and not lengths.any() and not windows.lengths.any()


# ---- Append ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class History:
    """What has been appended to the sequences of a pool."""

    pool: _pages.Pool
    windows: _pages.Windows
    lengths: torch.Tensor
    tokens: list[torch.Tensor]  # of each sequence (2, Hkv, tokens, D): keys and values

    @classmethod
    def start(cls, pool: _pages.Pool, recent: int) -> History:
        nothing = torch.zeros(2, pool.kv_heads, 0, pool.head_dim, dtype=pool.dtype)
        lengths = torch.zeros(pool.sequences, dtype=torch.int32, device=pool.device)
        return cls(pool, _pages.Windows.allocate(pool, recent), lengths, [nothing] * pool.sequences)

    def append(self, new: torch.Tensor, sequences: list[int] | None) -> None:
        """new: (2, n, Hkv, m, D), on the CPU."""
        k, v = new.to(self.pool.device)
        where = None if sequences is None else index(*sequences, device=self.pool.device)
        _pages.append(self.pool, self.windows, self.lengths, k, v, where)
        for row, sequence in enumerate(range(new.shape[1]) if sequences is None else sequences):
            if sequence >= 0:
                self.tokens[sequence] = torch.cat([self.tokens[sequence], new[:, row]], dim=2)

    def check(self) -> None:
        assert int(self.pool.error) == 0 and not self.windows.arrivals.any()
        counts = np.zeros((2, 2), dtype=int)
        for sequence, (k, v) in enumerate(self.tokens):
            held, compressed = int(self.windows.lengths[sequence]), int(self.lengths[sequence])
            assert held + compressed == k.shape[1] and compressed % TILE == 0
            assert held < self.windows.recent + TILE and (not compressed or held >= self.windows.recent)
            for window, x in ((self.windows.keys, k), (self.windows.values, v)):
                assert oracle.same_bits(window[sequence, :, :held].contiguous(), x[:, compressed:].contiguous())
            if compressed:
                counts += check_tiles(self.pool, sequence, 0, k[:, :compressed], v[:, :compressed])
        assert self.pool.dropped.tolist() == counts.tolist()


def tokens_of(pool: _pages.Pool, rows: int, tokens: int) -> torch.Tensor:
    return oracle.gaussian(2, rows, pool.kv_heads, tokens, pool.head_dim, dtype=pool.dtype)


@pytest.mark.parametrize("head_dim, keep, dtype, recent", [
    (64, 20, torch.float16, 32), (96, 30, torch.bfloat16, 0), (128, 38, torch.float16, 32),
    (128, 0, torch.bfloat16, 100), (256, 70, torch.float16, 7), (40, 1, torch.float16, 64),
])  # fmt: skip
def test_append(device, head_dim, keep, dtype, recent, rng):
    """Ragged lengths, sequences at different phases, one or many tokens at a time."""
    pool = make_pool(
        device, sequences=4, pages_per_sequence=5, tiles_per_page=2, head_dim=head_dim, dtype=dtype, key_keep=keep,
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
    _pages.store(pool, x[:1].to(device), x[1:].to(device), index(1, device=device), index(0, device=device))
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
        history.append(rng.choice([new, odd[..., 1:65], new.permute(3, 0, 1, 2, 4).contiguous().permute(1, 2, 3, 0, 4)]), None)
    history.check()


def test_append_trims(device, rng):
    pool = make_pool(device, key_keep=38, value_keep=38, key_slot_rows=8 + 30, value_slot_rows=8 + 40)
    history = History.start(pool, 0)
    for _ in range(8):
        history.append(tokens_of(pool, 3, 20), None)
    history.check()
    assert int(pool.dropped[0, 1]) > 100


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
        history.windows.lengths[1] = before[1][...] = history.windows.room - 5
    stored = pool.key_blocks.view(-1, 2, *pool.key_blocks.shape[1:])[page].clone()
    tokens = history.tokens[1]
    history.append(tokens_of(pool, 3, 30), None)
    assert int(pool.error) == 1 and not history.windows.arrivals.any()
    after = [tensor[1] for tensor in (history.windows.keys, history.windows.lengths, history.lengths)]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    assert torch.equal(stored, pool.key_blocks.view(-1, 2, *pool.key_blocks.shape[1:])[page])
    pool.error.zero_()
    history.tokens[1] = tokens[:, :, :0]
    history.lengths[1] = history.windows.lengths[1] = 0
    history.check()


# ---- Bad input -------------------------------------------------------------------------------------------------------


def test_bad_input(rng):
    pool = make_pool(key_keep=38, value_keep=38)
    windows, lengths = _pages.Windows.allocate(pool, 32), torch.zeros(3, dtype=torch.int32)
    k = oracle.gaussian(2, 2, TILE, 128)
    places = index(0, 1), index(0, 0)
    with pytest.raises(TypeError, match="k must be float16 like the pool, got bfloat16"):
        _pages.store(pool, k.bfloat16(), k, *places)
    with pytest.raises(ValueError, match=r"v must have the shape of k, \(2, 2, 64, 128\), got \(1, 2, 64, 128\)"):
        _pages.store(pool, k, k[:1], *places)
    with pytest.raises(ValueError, match=r"k must have shape \(n, 2, tokens, 128\)"):
        _pages.store(pool, k[:, :1], k[:, :1], *places)
    with pytest.raises(ValueError, match="whole tiles"):
        _pages.store(pool, k[:, :, 1:], k[:, :, 1:], *places)
    with pytest.raises(ValueError, match="stride 1"):
        _pages.store(pool, k.transpose(2, 3).contiguous().transpose(2, 3), k, *places)
    with pytest.raises(TypeError, match="sequences must be int32"):
        _pages.store(pool, k, k, places[0].long(), places[1])
    with pytest.raises(ValueError, match="first_tiles must be contiguous, of shape"):
        _pages.store(pool, k, k, places[0], index(0))
    with pytest.raises(ValueError, match="at most 64 tokens"):
        x = torch.cat([k, k], dim=2)
        _pages.append(pool, windows, lengths, x, x)
    with pytest.raises(ValueError, match="at most a row for each of 3"):
        x = torch.cat([k, k])
        _pages.append(pool, windows, lengths, x, x)
    with pytest.raises(ValueError, match="lengths must be contiguous"):
        _pages.append(pool, windows, lengths[:2], k, k)
    with pytest.raises(ValueError, match="sequence must be"):
        _pages.load(pool, 3, 0, 1)
    with pytest.raises(ValueError, match="within the 4"):
        _pages.load(pool, 0, 3, 2)
    with pytest.raises(ValueError, match="rows of a slot"):
        make_pool(key_slot_rows=8)
    _pages.append(pool, windows, lengths, k[:, :, :0], k[:, :, :0])
    _pages.store(pool, k[:0], k[:0], index()[:0].int(), index()[:0].int())
    assert _pages.load(pool, 0, 1, 0)[0].shape == (2, 0, 128)
    assert not pool.error and not pool.key_blocks.any() and not windows.lengths.any()


# ---- Only a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, keep", [(64, 5), (64, 40), (96, 38), (128, 38), (128, 0), (256, 30), (256, 200)])
def test_gpu_writes_the_bits_of_the_cpu(head_dim, keep, dtype, rng):
    """Data and slots for which many tiles are fitted and trimmed, and blocks exceed what a CTA stages."""
    bitmap_rows = _C.format.bitmap_rows(_C.format.padded_head_dim(head_dim))
    rows = None if keep == 0 else bitmap_rows + max(1, keep - 1)
    histories = [
        History.start(
            make_pool(
                torch.device(device), sequences=5, pages_per_sequence=4, tiles_per_page=2, head_dim=head_dim, dtype=dtype,
                key_keep=keep, value_keep=keep, key_slot_rows=rows, value_slot_rows=rows and rows + 3,
            ),
            32,
        )
        for device in ("cpu", "cuda")
    ]  # fmt: skip
    x = torch.stack([
        oracle.lognormal_channels(4, 2, 3 * TILE, head_dim).to(dtype),
        oracle.random_bits(4, 2, 3 * TILE, head_dim, dtype=dtype),
    ])  # fmt: skip
    for history in histories:
        pool, device = history.pool, history.pool.device
        for new_order in (True, None, False):
            _pages.store(pool, x[0].to(device), x[1].to(device), index(1, -1, 0, 3, device=device),
                         index(0, 0, 1, 7, device=device), new_order)  # fmt: skip
        history.lengths[:2] = index(3 * TILE, 4 * TILE).to(device)
    assert int(histories[1].pool.error) == 1
    for _ in range(8):
        new = oracle.gaussian(2, 5, 2, rng.randrange(1, 65), head_dim, dtype=dtype)
        for history in histories:
            history.append(new, None)
    first, second = (state(history.pool, history.windows) for history in histories)
    same_state(first, second)
    assert torch.equal(histories[0].lengths, histories[1].lengths.cpu())
    assert keep == 0 or int(histories[0].pool.dropped[0, 1]) > 0


@pytest.mark.gpu
def test_append_in_a_graph(rng):
    """A captured append, replayed while lengths grow, does what eager calls do."""
    device = torch.device("cuda")
    options = {"sequences": 3, "pages_per_sequence": 10, "key_keep": 38, "value_keep": 38}
    eager, replayed = (History.start(make_pool(device, **options), 32) for _ in range(2))
    new = torch.zeros(2, 3, 2, 1, 128, dtype=torch.float16, device=device)
    for history in (eager, replayed):
        history.append(torch.ones(2, 1, 2, 50, 128, dtype=torch.float16), [2])  # another phase
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        _pages.append(replayed.pool, replayed.windows, replayed.lengths, new[0], new[1])
    for _ in range(500):
        new.copy_(torch.randn(new.shape, device=device))
        graph.replay()
        eager.append(new.cpu(), None)
    same_state(state(eager.pool, eager.windows), state(replayed.pool, replayed.windows))
    eager.check()
    assert eager.lengths.tolist() == replayed.lengths.tolist() == [7 * TILE, 7 * TILE, 8 * TILE]


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu(rng):
    device = torch.device("cuda")
    pool = make_pool(device, key_keep=38, value_keep=38)
    windows, lengths = _pages.Windows.allocate(pool, 32), torch.zeros(3, dtype=torch.int32, device=device)
    k = oracle.gaussian(3, 2, TILE, 128, device=device)
    places = index(0, 1, 2, device=device), index(0, 0, 0, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _pages.store(pool, k, k, *places)
        for _ in range(3):
            _pages.append(pool, windows, lengths, k, k)
        _pages.load(pool, 1, 0, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert int(pool.error) == 0 and lengths.tolist() == [TILE * 2] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, keep", [(128, 38), (128, 8), (96, 38), (256, 0)])
def test_peak_memory_of_store(head_dim, keep):
    """At most 5 % of k, v and what they become."""
    device = torch.device("cuda")
    pool = make_pool(device, sequences=2, pages_per_sequence=128, spare=0, kv_heads=8, head_dim=head_dim, key_keep=keep,
                     value_keep=keep)  # fmt: skip
    k, v = (torch.randn(2, 8, 128 * TILE, head_dim, dtype=torch.float16, device=device) for _ in range(2))
    places = index(0, 1, device=device), index(0, 0, device=device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _pages.store(pool, k, v, *places, True)
    scratch = torch.cuda.max_memory_allocated() - before
    result = pool.key_blocks.nbytes + pool.value_blocks.nbytes
    assert scratch <= 0.05 * (k.nbytes + v.nbytes + result)
    for sequence in range(2):
        check_tiles(pool, sequence, 0, k[sequence, :, : 2 * TILE], v[sequence, :, : 2 * TILE])
        loaded = _pages.load(pool, sequence, 0, 128)
        for x, actual in ((k, loaded[0]), (v, loaded[1])):
            differ = oracle.bits(actual) != oracle.bits(ck.prune(x[sequence : sequence + 1], keep=keep or None)[0])
            assert int(differ.sum()) == int(pool.dropped[0 if x is k else 1, 1]) == 0 or keep
