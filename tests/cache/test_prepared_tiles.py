"""Tiles that a GPU prepares before they are stored: the bits of those stored at once, and nothing of tokens that are
no longer there. On a CPU nothing is prepared; what a cache must hold is the same."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels._cache import page_pool
from cute_kernels._cache.rows import core_of
from tests.support import oracle
from tests.support.exact_kv_cache import check, make, pair
from tests.support.page_pools import TILE, History, make_pool, same_state, state, tokens_of

PORTIONS = 7
WINDOW = 32


class Tokens:
    """A cache, and what its rows have been given."""

    def __init__(self, device, **arguments) -> None:
        self.device = device
        self.cache = make(device, window=WINDOW, **arguments)
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def new(self, rows: list[int], tokens: int) -> list[torch.Tensor]:
        new = pair(len(rows), self.cache.kv_heads, tokens, self.cache.head_dim, device=self.device)
        for i, row in enumerate(rows):
            old = self.rows.get(row)
            self.rows[row] = tuple(x[i] if old is None else torch.cat([y, x[i]], 1) for y, x in zip(old or new, new))
        return list(new)

    def prefill(self, rows: list[int], tokens: int) -> None:
        for row in rows:
            self.rows.pop(row, None)
        self.cache.prefill(*self.new(rows, tokens), sequences=rows)

    def append(self, rows: list[int], tokens: int, at_a_time: int = 1) -> None:
        for _ in range(0, tokens, at_a_time):
            self.cache.append(*self.new(rows, at_a_time), sequences=rows)

    def crop(self, row: int, tokens: int) -> None:
        self.cache.crop(tokens, sequences=[row])
        self.rows[row] = tuple(x[:, :tokens] for x in self.rows[row])

    def check(self) -> None:
        for row, (k, v) in self.rows.items():
            check(self.cache, row, k, v)


def tokens_with(device, portions: int, rows: int = 2, **arguments) -> Tokens:
    """Rows whose windows hold a tile of which so many portions are prepared."""
    tokens = Tokens(device, **arguments)
    for _ in range(rows):
        tokens.cache.add()
    tokens.prefill(list(range(rows)), TILE - 4)
    tokens.append(list(range(rows)), 3 + portions)
    if device.type == "cuda":
        prepared = core_of(tokens.cache).storage.windows.prepared
        assert prepared[:rows].tolist() == [min(portions, PORTIONS)] * rows
    return tokens


@pytest.mark.parametrize("portions", range(PORTIONS + 2))
@pytest.mark.parametrize("left", [0, 1, TILE - 1, TILE])
def test_cut_back_then_other_tokens(device, portions, left, rng):
    """Row 1 gets other tokens in place of those that were prepared, row 0 goes on."""
    tokens = tokens_with(device, max(1, portions))
    tokens.crop(1, left)
    tokens.append([1], TILE + WINDOW - left)
    tokens.append([0, 1], TILE)
    tokens.check()


def test_cut_back_into_a_tile(device, rng):
    """Tokens of a tile that was stored return to the window, as they were pruned."""
    tokens = Tokens(device)
    tokens.cache.add()
    tokens.prefill([0], 2 * TILE + WINDOW + 5)
    tokens.append([0], TILE - 3)
    tokens.crop(0, TILE + 40)
    k, v = (oracle.prune(x.cpu(), 12).to(device) for x in tokens.rows[0])
    tokens.rows[0] = tuple(torch.cat([x[:, : 2 * TILE], y[:, 2 * TILE :]], 1) for x, y in zip((k, v), tokens.rows[0]))
    tokens.append([0], TILE + WINDOW)
    tokens.check()


@pytest.mark.parametrize("portions", [1, 2, 4, PORTIONS])
@pytest.mark.parametrize("prompt", [0, TILE - 1, TILE, TILE + 20])
def test_a_row_that_is_freed_and_used_again(device, portions, prompt, rng):
    tokens = tokens_with(device, portions)
    tokens.cache.free(1)
    del tokens.rows[1]
    assert tokens.cache.add() == 1
    if prompt:
        tokens.prefill([1], prompt)
    tokens.append([1], 2 * TILE)
    tokens.append([0, 1], TILE)
    tokens.check()


@pytest.mark.parametrize("portions", [1, 2, 4, PORTIONS])
def test_prefill_of_a_row_that_was_emptied(device, portions, rng):
    tokens = tokens_with(device, portions)
    tokens.cache.crop(0, sequences=[1])
    tokens.prefill([1], TILE + 20)
    tokens.append([0, 1], TILE)
    tokens.check()


@pytest.mark.parametrize("portions", [1, 2, 4, PORTIONS])
def test_fork_of_a_row(device, portions, rng):
    """Both go on with other tokens."""
    tokens = tokens_with(device, portions)
    twin = tokens.cache.fork(1)
    tokens.rows[twin] = tokens.rows[1]
    for _ in range(2 * TILE):
        tokens.append([1, twin, 0], 1)
    tokens.check()


@pytest.mark.parametrize("portions", [1, 2, 4, PORTIONS])
def test_rows_that_move(device, portions, rng):
    """Onto one that has prepared another tile."""
    tokens = tokens_with(device, portions, rows=3)
    tokens.append([0], 1)
    tokens.cache.reorder([2, 0, 1])
    tokens.rows = {0: tokens.rows[2], 1: tokens.rows[0], 2: tokens.rows[1]}
    tokens.append([0, 1, 2], 2 * TILE)
    tokens.check()
    tokens.cache.select([1])
    tokens.rows = {0: tokens.rows[1]}
    tokens.append([0], 2 * TILE)
    tokens.check()


@pytest.mark.parametrize("portions", [1, 2, 4, PORTIONS])
@pytest.mark.parametrize("at_a_time", [2, 5, WINDOW, TILE, 3 * TILE])
def test_several_tokens_a_call(device, portions, at_a_time, rng):
    tokens = tokens_with(device, portions)
    tokens.append([0, 1], 4 * TILE, at_a_time)
    tokens.append([0, 1], 5)
    tokens.check()


def test_growing_and_copies(device, rng):
    tokens = tokens_with(device, 3)
    tokens.cache.grow(capacity=1200, max_batch=6)
    tokens.append([0, 1], 2)
    tokens.append([0], 30)
    tokens.append([0, 1], TILE)
    tokens.check()


def test_resets(device, rng):
    tokens = tokens_with(device, 3)
    tokens.cache.reset()
    tokens.rows = {}
    for _ in range(2):
        tokens.cache.add()
    tokens.append([0, 1], 2 * TILE)
    tokens.check()


# ---- On a GPU --------------------------------------------------------------------------------------------------------


def portions_left(windows: page_pool.Windows, sequence: int) -> int:
    assert windows.prepared is not None
    return PORTIONS - int(windows.prepared[sequence])


@pytest.mark.gpu
@pytest.mark.parametrize("recent", [1, 3, 7, 32, 64, 100])
def test_a_portion_a_call(recent, rng):
    pool = make_pool(torch.device("cuda"), sequences=1, key_keep=38, value_keep=38)
    history = History.start(pool, recent)
    for total in range(1, 2 * TILE + recent + 2):
        history.append(tokens_of(pool, 1, 1), None)
        held, prepared = int(history.windows.lengths[0]), PORTIONS - portions_left(history.windows, 0)
        assert held == (total if total < recent + TILE else recent + (total - recent) % TILE)
        # The calls that saw the tile that the window begins with complete.
        calls = held - TILE + 1 if total < recent + TILE else min(held - TILE + 1, (total - recent) % TILE)
        assert prepared == min(max(0, calls), PORTIONS)
    history.check()
    assert int(history.lengths[0]) == 2 * TILE


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, codec", [
    (torch.float16, None), (torch.bfloat16, None), (torch.float16, "fp8"), (torch.bfloat16, "int8"),
    (torch.float16, "int4"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("head_dim, keep", [(64, 20), (128, 38), (128, 0), (256, 76)])
@pytest.mark.parametrize("shares_orders", [False, True])
def test_the_bits_of_tiles_that_are_stored_at_once(head_dim, keep, dtype, codec, shares_orders, rng):
    """And of the CPU. Sequences out of phase, some calls with several tokens; values that a codec refuses are counted
    once."""
    options = {
        "sequences": 4,
        "pages_per_sequence": 5,
        "head_dim": head_dim,
        "dtype": dtype,
        "key_keep": keep,
        "value_keep": keep,
        "key_codec": codec,
        "value_codec": codec,
        "shares_orders": shares_orders,
    }
    recent = rng.choice([2, 20, 32, 70])
    spread, at_once, on_cpu = (
        History.start(make_pool(torch.device(device), **options), recent, prepares=prepares)
        for device, prepares in (("cuda", True), ("cuda", False), ("cpu", False))
    )
    assert spread.windows.prepared is not None and at_once.windows.prepared is None
    lengths, seen = [0] * 4, set()
    while min(lengths) < 3 * TILE:
        rows = [row for row in rng.sample(range(4), rng.randint(1, 4)) if lengths[row] < 4 * TILE]
        tokens = rng.choice([1] * 12 + [2, 9, 40])
        rows = [row for row in rows if lengths[row] + tokens <= 5 * TILE]
        if not rows:
            continue
        new = oracle.lognormal_channels(2 * len(rows), 2, tokens, head_dim).to(dtype)
        new = new.reshape(2, len(rows), 2, tokens, head_dim)
        if max(lengths) == 0 or rng.random() < 0.1:  # at least in a first tile, which is stored
            new[0, 0, 0, 0, 0] = float("inf")
        for history in (spread, at_once, on_cpu):
            history.append(new, rows)
        for row in rows:
            lengths[row] += tokens
        seen |= set(spread.windows.prepared.tolist())
    assert recent == 2 or len(seen) > 1  # some were prepared; calls of several tokens pass a window of two by
    states = [state(history.pool, history.windows) for history in (spread, at_once, on_cpu)]
    for other in states[1:]:
        same_state(other, {name: states[0][name] for name in other})
    assert spread.lengths.tolist() == at_once.lengths.tolist() == on_cpu.lengths.tolist()
    assert int(spread.pool.error) == 0 and not spread.windows.arrivals.any()
    assert codec is None or int(spread.pool.refused[0]) > 0


@pytest.mark.gpu
def test_a_tile_that_has_no_page_when_it_is_due(rng):
    """Nothing changes until it has one, nor is what was prepared lost."""
    device = torch.device("cuda")
    pool, other = (make_pool(device, key_keep=38, value_keep=38) for _ in range(2))
    spread, at_once = History.start(pool, WINDOW), History.start(other, WINDOW, prepares=False)
    new = tokens_of(pool, 3, TILE + WINDOW)
    page = int(pool.page_table[1, 0])
    pool.page_table[1, 0] = -1
    for i in range(TILE + WINDOW):
        spread.append(new[..., i : i + 1, :], None)
    assert int(pool.error) == 1
    pool.error.zero_()
    assert spread.windows.lengths.tolist() == [WINDOW, TILE + WINDOW - 1, WINDOW] and spread.lengths[1] == 0
    assert portions_left(spread.windows, 1) == 0
    pool.page_table[1, 0] = page
    spread.append(new[:, 1:2, :, -1:], [1])
    spread.tokens[1] = new[:, 1]
    at_once.append(new[..., :TILE, :], None)
    at_once.append(new[..., TILE:, :], None)
    spread.check()
    states = [state(history.pool, history.windows) for history in (spread, at_once)]
    same_state(states[1], states[0])


@pytest.mark.gpu
@pytest.mark.parametrize("left", [10, TILE - 1])
def test_replays_after_a_cut(left, rng):
    """Lengths on the device alone: a graph's calls prepare a tile, which is then cut, and prepare another."""
    tokens = tokens_with(torch.device("cuda"), 1)
    tokens.cache.reserve(4 * TILE)
    k, v = (x.clone() for x in tokens.new([0, 1], 1))
    tokens.cache.append(k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens.cache.append(k, v)

    def replay(times: int) -> None:
        for _ in range(times):
            for static, new in zip((k, v), tokens.new([0, 1], 1)):
                static.copy_(new)
            graph.replay()

    replay(3)
    tokens.crop(0, TILE)
    tokens.crop(1, left)
    replay(2 * TILE)
    tokens.check()


@pytest.mark.gpu
def test_where_nothing_is_prepared():
    """Caches whose tiles are not pruned in `append`."""
    assert core_of(make("cuda", window=0)).storage.windows.prepared is None
    rules = {"key_rule": "2of4", "value_rule": "2of4"}
    cache = ck.KVCache(max_batch=1, kv_heads=2, head_dim=64, capacity=500, device="cuda", **rules)
    assert core_of(cache).storage.windows.prepared is None
