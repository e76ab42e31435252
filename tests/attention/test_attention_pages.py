"""The kernels of sparse_attention on pools of pages, with windows of several lengths, and rows that pick sequences."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels._attention import reference
from cute_kernels._attention.problem import launch_problem, pack_problem, pack_window
from cute_kernels._runtime.extension import _C, CODEC_IDS, DTYPE_IDS, ROLE_IDS
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Pool:
    """The tiles of a SparseKV of keys and one of values in pages, in an order of their own; what no page uses of the
    slots, `spare` rows of each and more, is full of ones."""

    def __init__(
        self, pair: list[ck.SparseKV], tiles_per_page: int, page_table: torch.Tensor, pages: int, spare: int = 0
    ):
        self.pair, self.tiles_per_page, self.page_table = pair, tiles_per_page, page_table
        sequences, kv_heads, tokens, _ = pair[0].shape
        slots = pages * kv_heads * tiles_per_page
        self.blocks = torch.full((slots, sum(kv.max_tile_rows for kv in pair) + spare, 32), -1, dtype=torch.int32)
        self.rows = [torch.full((slots,), kv.max_tile_rows, dtype=torch.int32) for kv in pair]
        self.token_orders = [torch.arange(64, dtype=torch.uint8).repeat(slots, 1) for _ in pair]
        tiles = tokens // 64
        for s in range(sequences):
            for head in range(kv_heads):
                for tile in range(tiles):
                    index = (s * kv_heads + head) * tiles + tile
                    page = int(page_table[s, tile // tiles_per_page])
                    slot = (page * kv_heads + head) * tiles_per_page + tile % tiles_per_page
                    blocks = [kv.blocks[slice(*kv.row_offsets[index : index + 2].tolist())] for kv in pair]
                    self.blocks[slot, : sum(map(len, blocks))] = torch.cat(blocks)
                    for i, kv in enumerate(pair):
                        self.rows[i][slot] = len(blocks[i])
                        self.token_orders[i][slot] = kv.token_order[s, head, tile]

    def views(self, device) -> list[_C.SparseView]:
        """Of keys and values; page_table may have changed."""
        self.blocks, self.page_table = self.blocks.to(device), self.page_table.to(device)
        self.rows, self.token_orders = ([x.to(device) for x in tensors] for tensors in (self.rows, self.token_orders))
        self.channel_orders = [kv.channel_order.to(device) for kv in self.pair]
        views = []
        for kv, *of_role in zip(self.pair, self.rows, self.token_orders, self.channel_orders):
            sequences, kv_heads, _, head_dim = kv.shape
            views.append(
                _C.SparseView.paged(
                    self.blocks.data_ptr(),
                    *(tensor.data_ptr() for tensor in of_role),
                    0,
                    ROLE_IDS[kv.role],
                    DTYPE_IDS[kv.dtype],
                    CODEC_IDS[kv.codec],
                    sequences,
                    kv_heads,
                    head_dim,
                    kv.max_tile_rows,
                    self.page_table.data_ptr(),
                    self.page_table.shape[1],
                    self.tiles_per_page,
                    self.blocks.shape[1],
                    self.blocks.shape[0] // (kv_heads * self.tiles_per_page),
                    0 if kv.role == "key" else self.rows[0].data_ptr(),
                )
            )
        return views


def attend(keys, values, q, *, scale, backend, window=None, return_lse=False, expected=(0, 0), **pointers):
    """(out, lse or None) of the kernels; keys, values, window and expected as these take them."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], device=q.device) if return_lse else None
    problem = pack_problem(keys, values, window, q, scale=scale, expected=expected)
    launch_problem(problem, q, out, lse, backend, **pointers)
    return out, lse


def int32(values, device="cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("tiles_per_page", [1, 2])
@pytest.mark.parametrize("queries, groups", [(1, 4), (3, 1), (20, 5)])
@pytest.mark.parametrize("expects", [False, True])
def test_pages(backend, expects, queries, groups, tiles_per_page, dtype, rng):
    if backend.name == "reference":
        pytest.skip("the reference takes dense operands")
    sequences, kv_heads, tokens, head_dim, room = 4, 2, 256, 128, 70
    k, v = (oracle.gaussian(sequences, kv_heads, tokens, head_dim, dtype=dtype) for _ in range(2))
    window = [oracle.gaussian(sequences, kv_heads, room, head_dim, dtype=dtype) for _ in range(2)]
    lengths, window_lengths = [256, 64, 0, 128], [70, 1, 33, 0]
    for s in range(sequences):  # what does not count must not be looked at
        for tensor in window:
            tensor[s, :, window_lengths[s] :] = float("nan")
    pages = tokens // 64 // tiles_per_page
    table = torch.randperm(sequences * pages).view(sequences, pages).int() + 1  # page 0 is nobody's
    pair = [ck.compress(x, role=role, keep=keep) for x, role, keep in ((k, "key", 38), (v, "value", 64))]
    pool = Pool(pair, tiles_per_page, table, sequences * pages + 1, rng.randint(0, 3))
    for s in range(sequences):  # pages beyond a sequence's length need not be there
        table[s, -(-lengths[s] // (64 * tiles_per_page)) :] = -1
    rows = [*rng.choices(range(sequences), k=3), 1]
    q = oracle.gaussian(len(rows), kv_heads * groups, queries, head_dim, dtype=dtype)
    device = backend.device
    on_device = *(w.to(device) for w in window), int32(window_lengths, device)
    out, lse = attend(
        *pool.views(device),
        q.to(device),
        window=pack_window(*on_device),
        lengths=int32(lengths, device),
        sequences=int32(rows, device),
        scale=0.1,
        return_lse=True,
        backend=backend.name,
        expected=(256, sum(lengths[s] for s in rows)) if expects else (0, 0),
    )
    dense_k, dense_v = oracle.prune(k, 38), oracle.prune(v, 64)
    for row, s in enumerate(rows):
        part = tuple(w[s : s + 1, :, : window_lengths[s]] for w in window)
        expected, expected_lse = oracle.attention(
            q[row : row + 1], dense_k[s : s + 1], dense_v[s : s + 1], 0.1, part, lengths[s : s + 1]
        )
        assert oracle.relative_error(out[row : row + 1], expected) <= TOLERANCE[dtype]
        torch.testing.assert_close(lse[row : row + 1].cpu().double(), expected_lse, atol=2e-3, rtol=1e-3)


def test_lengths_of_windows_and_sequences(backend, rng):
    """Contiguous caches with windows of several lengths, and rows of q that pick sequences."""
    sequences, room, device = 3, 20, backend.device
    k, v = oracle.gaussian(sequences, 2, 130, 64), oracle.gaussian(sequences, 2, 130, 64)
    window = [oracle.gaussian(sequences, 2, room, 64) for _ in range(2)]
    lengths, window_lengths, rows = [130, 7, 65], [3, 20, 0], [2, 0, 0, 1]
    q = oracle.gaussian(len(rows), 6, 4, 64)
    keys, values = ck.compress_kv(k.to(device), v.to(device), keep=20)
    on_device = *(w.to(device) for w in window), int32(window_lengths, device)
    arguments = {
        "lengths": int32(lengths, device),
        "sequences": int32(rows, device),
        "scale": 0.2,
    }
    if backend.name == "reference":
        dense = ck.decompress(keys), ck.decompress(values)
        dense_window = {"window": on_device[:2], "window_lengths": on_device[2]}
        out, lse = reference.attend(*dense, q.to(device), **dense_window, **arguments)
    else:
        views = storage_of(keys, "k").view(), storage_of(values, "v").view()
        window_view = pack_window(*on_device)
        out, lse = attend(*views, q.to(device), window=window_view, **arguments, return_lse=True, backend=backend.name)
    for row, s in enumerate(rows):
        part = tuple(w[s : s + 1, :, : window_lengths[s]] for w in window)
        dense = oracle.prune(k, 20)[s : s + 1], oracle.prune(v, 20)[s : s + 1]
        expected, expected_lse = oracle.attention(q[row : row + 1], *dense, 0.2, part, lengths[s : s + 1])
        assert oracle.relative_error(out[row : row + 1], expected) <= 2e-3
        torch.testing.assert_close(lse[row : row + 1].cpu().double(), expected_lse, atol=2e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("queries", [1, 7])
def test_any_lengths_may_have_been_expected(backend, queries, head_dim, rng):
    """The device's lengths count, however even or ragged: the host's only decide how the work is split."""
    if backend.device.type != "cuda" or backend.name == "reference":
        pytest.skip("kernels of a GPU")
    device, kv_heads, groups, room = backend.device, rng.choice([1, 2, 8]), rng.choice([1, 4, 8]), rng.choice([1, 95])
    sequences, tokens = rng.choice([1, 3, 40]), rng.choice([64, 1000, 4000])
    k, v = (oracle.gaussian(sequences, kv_heads, tokens, head_dim, device=device) for _ in range(2))
    window = [oracle.gaussian(sequences, kv_heads, room, head_dim, device=device) for _ in range(2)]
    even = [rng.randint(tokens * 3 // 4, tokens) for _ in range(sequences)]
    ragged = [rng.choice([0, 1, rng.randint(0, tokens), tokens]) for _ in range(sequences)]
    keys, values = ck.compress_kv(k, v, keep=head_dim * 3 // 10)
    dense = ck.decompress(keys).cpu(), ck.decompress(values).cpu()
    views = storage_of(keys, "k").view(), storage_of(values, "v").view()
    q = oracle.gaussian(sequences, kv_heads * groups, queries, head_dim, device=device)
    for lengths in (even, ragged):
        window_lengths = [rng.randint(0, room) for _ in range(sequences)]
        runs = {}
        for expected in ((0, 0), (max(lengths), sum(lengths)), (tokens, tokens * sequences), (1, 1), (2**30, 2**40)):
            on_device = window[0], window[1], int32(window_lengths, device)
            run = {"scale": 0.1, "backend": backend.name, "return_lse": True, "expected": expected}
            out, lse = attend(*views, q, window=pack_window(*on_device), lengths=int32(lengths, device), **run)
            runs[expected] = out.cpu(), lse.cpu()
        for row in rng.sample(range(sequences), min(3, sequences)):
            part = tuple(w[row : row + 1, :, : window_lengths[row]].cpu() for w in window)
            of_row = (x[row : row + 1] for x in (q.cpu(), *dense))
            want, want_lse = oracle.attention(*of_row, 0.1, part, lengths[row : row + 1])
            for out, lse in runs.values():
                assert oracle.relative_error(out[row : row + 1], want) <= 2e-3
                torch.testing.assert_close(lse[row : row + 1].double(), want_lse, atol=2e-3, rtol=1e-3)


def test_lengths_out_of_range_are_clamped_by_kernels(backend, rng):
    if backend.name == "reference":
        pytest.skip("the reference takes lengths as they are")
    x = oracle.gaussian(2, 1, 100, 64)
    keys, values = ck.compress_kv(x.to(backend.device), x.to(backend.device), keep=20)
    window = (oracle.gaussian(2, 1, 5, 64).to(backend.device),) * 2
    q = oracle.gaussian(2, 2, 1, 64).to(backend.device)

    def run(lengths, window_lengths):
        views = storage_of(keys, "k").view(), storage_of(values, "v").view()
        counts = int32(window_lengths, backend.device)
        return attend(
            *views,
            q,
            window=pack_window(*window, counts),
            lengths=int32(lengths, backend.device),
            scale=0.1,
            backend=backend.name,
        )[0]

    assert oracle.same_bits(run([-5, 2**30], [2**30, -1]), run([0, 100], [5, 0]))


def test_the_cpu_names_a_sequence_or_page_that_is_not_there(rng):
    x = oracle.gaussian(2, 1, 128, 64)
    keys, values = ck.compress_kv(x, x, keep=20)
    q = oracle.gaussian(1, 2, 1, 64)
    views = storage_of(keys, "k").view(), storage_of(values, "v").view()
    for bad in (-1, 2):
        with pytest.raises(IndexError, match=r"sequences\[0\]"):
            attend(*views, q, sequences=int32([bad]), scale=1.0, backend="cpu")
    pool = Pool([keys, values], 1, int32([[0, 1], [2, 3]]), 4)
    pool.page_table[1, 1] = -1
    views = pool.views("cpu")
    with pytest.raises(ValueError, match="page 1 for sequence 1"):
        attend(*views, q, sequences=int32([1]), scale=1.0, backend="cpu")
    attend(*views, q, sequences=int32([1]), lengths=int32([128, 64]), scale=1.0, backend="cpu")
