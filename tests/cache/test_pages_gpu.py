"""The pool of pages on a GPU: the bits of the CPU, graphs, no waiting, little memory."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels._cache import page_pool
from cute_kernels._cache.slot_rows import SlotRows
from cute_kernels._runtime.extension import _C
from tests.support import gpu_memory, oracle
from tests.support.page_pools import TILE, History, check_tiles, index, make_pool, same_state, state
from tests.support.synchronisation import no_synchronisation


def portions(rng) -> list[int]:
    """Tokens of eight appends, enough that every sequence stores a tile beside 32 recent tokens: a GPU orders channels
    when their first tile is complete, a CPU when it is stored."""
    while True:
        tokens = [rng.randrange(1, 65) for _ in range(8)]
        if sum(tokens) >= 32 + TILE:
            return tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, keep", [(64, 5), (64, 40), (96, 38), (128, 38), (128, 0), (256, 30), (256, 200)])
def test_gpu_writes_the_bits_of_the_cpu(head_dim, keep, dtype, rng):
    """Data and slots for which many tiles are fitted and trimmed, and blocks exceed what a CTA stages."""
    bitmap_rows = _C.format.bitmap_rows(_C.format.padded_head_dim(head_dim))
    rows = bitmap_rows + max(1, keep - 1)
    slot_rows = None if keep == 0 else SlotRows(rows, rows + 5, 2 * rows + 3)
    histories = [
        History.start(
            make_pool(
                torch.device(device),
                sequences=5,
                pages_per_sequence=4,
                tiles_per_page=2,
                head_dim=head_dim,
                dtype=dtype,
                key_keep=keep,
                value_keep=keep,
                slot_rows=slot_rows,
            ),
            32,
        )
        for device in ("cpu", "cuda")
    ]
    x = torch.stack(
        [
            oracle.lognormal_channels(4, 2, 3 * TILE, head_dim).to(dtype),
            oracle.random_bits(4, 2, 3 * TILE, head_dim, dtype=dtype),
        ]
    )
    for history in histories:
        pool, device = history.pool, history.pool.device
        for new_order in (True, None, False):
            page_pool.store(
                pool,
                x[0].to(device),
                x[1].to(device),
                index(1, -1, 0, 3, device=device),
                index(0, 0, 1, 7, device=device),
                new_order,
            )
        history.lengths[:2] = index(3 * TILE, 4 * TILE).to(device)
    assert int(histories[1].pool.error) == 1
    for tokens in portions(rng):
        new = oracle.gaussian(2, 5, 2, tokens, head_dim, dtype=dtype)
        for history in histories:
            history.append(new, None)
    first, second = (state(history.pool, history.windows) for history in histories)
    same_state(first, second)
    assert torch.equal(histories[0].lengths, histories[1].lengths.cpu())
    assert keep == 0 or int(histories[0].pool.dropped[0, 1]) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("codecs", [("fp8", "fp8"), ("int8", "int4"), ("int4", "fp8")], ids="-".join)
@pytest.mark.parametrize("head_dim, keep", [(64, 5), (96, 38), (128, 0), (256, 200)])
def test_narrow_codecs_have_the_bits_of_the_cpu(head_dim, keep, codecs, dtype, rng):
    """The same, with scales; keys and values differ in codec, which storing serves."""
    padded = _C.format.padded_head_dim(head_dim)
    whole = SlotRows.holding(padded, keep, keep, *codecs)
    tight = SlotRows(max(whole.keys - 6, padded // 16 + 2), whole.values, whole.both - 6)
    histories = [
        History.start(
            make_pool(
                torch.device(device),
                sequences=5,
                tiles_per_page=2,
                head_dim=head_dim,
                dtype=dtype,
                key_keep=keep,
                value_keep=keep,
                key_codec=codecs[0],
                value_codec=codecs[1],
                slot_rows=tight if keep else whole,
            ),
            32,
        )
        for device in ("cpu", "cuda")
    ]
    x = torch.stack(
        [
            oracle.lognormal_channels(4, 2, 3 * TILE, head_dim).to(dtype),
            oracle.random_bits(4, 2, 3 * TILE, head_dim, dtype=dtype),
        ]
    )
    x[:, (1, 3)] = x[:, (1, 3)].nan_to_num()  # of rows that are left out a GPU counts what cannot be stored, too
    for history in histories:
        pool, device = history.pool, history.pool.device
        for new_order in (True, None, False):
            places = index(1, -1, 0, 3, device=device), index(0, 0, 1, 7, device=device)
            page_pool.store(pool, x[0].to(device), x[1].to(device), *places, new_order)
        history.lengths[:2] = index(3 * TILE, 4 * TILE).to(device)
    for tokens in portions(rng):
        new = oracle.gaussian(2, 5, 2, tokens, head_dim, dtype=dtype)
        for history in histories:
            history.append(new, None)
    same_state(*(state(history.pool, history.windows) for history in histories))
    for sequence in (0, 1, 4):
        loaded = [page_pool.load(history.pool, sequence, 0, 2) for history in histories]
        for on_cpu, on_gpu in zip(*loaded):
            assert oracle.same_bits(on_cpu.nan_to_num(), on_gpu.cpu().nan_to_num())
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
        page_pool.append(replayed.pool, replayed.windows, replayed.lengths, new[0], new[1])
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
    windows, lengths = page_pool.Windows.allocate(pool, 32), torch.zeros(3, dtype=torch.int32, device=device)
    k = oracle.gaussian(3, 2, TILE, 128, device=device)
    places = index(0, 1, 2, device=device), index(0, 0, 0, device=device)
    torch.cuda.synchronize()
    with no_synchronisation():
        page_pool.store(pool, k, k, *places)
        for _ in range(3):
            page_pool.append(pool, windows, lengths, k, k)
        page_pool.load(pool, 1, 0, 2)
    assert int(pool.error) == 0 and lengths.tolist() == [TILE * 2] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim, keep", [(128, 38), (128, 8), (96, 38), (256, 0)])
def test_peak_memory_of_store(head_dim, keep):
    """At most 5 % of k, v and what they become."""
    device = torch.device("cuda")
    pool = make_pool(
        device,
        sequences=2,
        pages_per_sequence=128,
        spare=0,
        kv_heads=8,
        head_dim=head_dim,
        key_keep=keep,
        value_keep=keep,
    )
    k, v = (torch.randn(2, 8, 128 * TILE, head_dim, dtype=torch.float16, device=device) for _ in range(2))
    places = index(0, 1, device=device), index(0, 0, device=device)
    scratch = gpu_memory.peak(lambda: page_pool.store(pool, k, v, *places, True))
    assert 0 < scratch <= 0.05 * (k.nbytes + v.nbytes + pool.blocks.nbytes)
    for sequence in range(2):
        check_tiles(pool, sequence, 0, k[sequence, :, : 2 * TILE], v[sequence, :, : 2 * TILE])
        loaded = page_pool.load(pool, sequence, 0, 128)
        for x, actual in ((k, loaded[0]), (v, loaded[1])):
            differ = oracle.bits(actual) != oracle.bits(ck.prune(x[sequence : sequence + 1], keep=keep or None)[0])
            assert int(differ.sum()) == int(pool.dropped[0 if x is k else 1, 1]) == 0 or keep
