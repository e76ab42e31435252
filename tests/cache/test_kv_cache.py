"""KVCache against dense tensors: what it holds, what attention gives, long random use."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_kernels import _C
from cute_kernels._cache.rows import core_of
from cute_kernels._cache.slot_rows import SlotRows
from profiling.soak import run
from profiling.soak_driver import SHAPES, Soak
from profiling.soak_model import DenseCache, attention
from tests.support.exact_kv_cache import EXACT, check, make, pair
from tests.support.oracle import same_bits

# ---- What it holds ---------------------------------------------------------------------------------------------------


def test_slots_of_these_tests_hold_any_tile():
    rows, needed = SlotRows.holding(64, EXACT["keep"], EXACT["keep"]), _C.format.bitmap_rows(64) + 2 * 8
    assert min(rows.keys, rows.values) >= needed and rows.both >= 2 * needed


@pytest.mark.parametrize("tokens", [0, 1, 63, 64, 95, 96, 97, 160, 300])
@pytest.mark.parametrize("page_tokens", [64, 192])
def test_prefill_prunes_all_but_the_window(device, rng, tokens, page_tokens):
    cache = make(device, page_tokens=page_tokens)
    k, v = pair(3, 2, tokens, 16, device=device)
    cache.prefill(k, v)
    assert cache.batch == 3 and cache.lengths.tolist() == [tokens] * 3 and cache.lengths.device == cache.device
    for row in range(3):
        check(cache, row, k[row], v[row])


@given(
    data=st.data(),
    window=st.sampled_from([0, 1, 32, 100]),
    page_tokens=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    keeps=st.sampled_from([(12, 12), (14, 16), (None, None), (12, None)]),
)
def test_portions_make_no_difference(data, window, page_tokens, dtype, keeps):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    portions = data.draw(st.lists(st.one_of(st.integers(1, 64), st.integers(65, 250)), min_size=1, max_size=8))
    cache = make(
        window=window,
        page_tokens=page_tokens,
        dtype=dtype,
        keep=None,
        key_keep=keeps[0],
        value_keep=keeps[1],
        capacity=2000,
    )
    k, v = pair(2, 2, sum(portions), 16, dtype=dtype)
    for one_k, one_v in zip(k.split(portions, dim=2), v.split(portions, dim=2)):
        cache.append(one_k, one_v)
    assert cache.lengths.tolist() == [sum(portions)] * 2
    for row in range(2):
        check(cache, row, k[row], v[row])


def test_views_are_read_where_they_are(device, rng):
    cache = make(device)
    whole = torch.randn(2, 500, 2, 2, 3, 24).half().to(device)  # (B, T, Hkv, kv, ., D)
    k, v = whole[:, :, :, 0, 1, 4:20].transpose(1, 2), whole[:, :, :, 1, 2, :16].transpose(1, 2)
    cache.prefill(k[:, :, :333], v[:, :, :333])
    cache.append(k[:, :, 333:334], v[:, :, 333:334])
    cache.append(k[:, :, 334:384], v[:, :, 334:384])
    cache.append(k[:, :, 384:], v[:, :, 384:])
    for row in range(2):
        check(cache, row, k[row], v[row])


@pytest.mark.parametrize("kind", ["list", "int32", "int64"])
def test_left_padding(device, rng, kind):
    cache = make(device)
    k, v = pair(4, 2, 290, 16, device=device)
    k[:, :, 0] = float("nan")  # padding is never read
    lengths = [289, 0, 64, rng.randint(1, 289)]
    given_lengths = lengths if kind == "list" else torch.tensor(lengths, dtype=getattr(torch, kind), device=device)
    cache.prefill(k, v, lengths=given_lengths)
    assert cache.lengths.tolist() == lengths
    new_k, new_v = pair(4, 2, 100, 16, device=device)
    cache.append(new_k, new_v)
    for row, n in enumerate(lengths):
        check(
            cache,
            row,
            torch.cat([k[row, :, 290 - n :], new_k[row]], dim=1),
            torch.cat([v[row, :, 290 - n :], new_v[row]], dim=1),
        )


def test_patterns_and_special_values(device, rng):
    cache = make(device, keep=None, head_dim=64, capacity=2000)
    k, v = pair(2, 2, 700, 64, device=device)
    k[:, :, :64], v[:, :, 64:128] = 0.0, -0.0
    k[0, 0, 130::7], v[0, 1, 131::5, ::3] = float("nan"), float("inf")
    k[1, 1, 200:400, 5:] = 0.0
    cache.prefill(k[:, :, :600], v[:, :, :600])
    for i in range(600, 700):
        cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    for row in range(2):
        check(cache, row, k[row], v[row])


@given(data=st.data(), page_tokens=st.sampled_from([64, 128, 256]))
def test_crop_then_append(data, page_tokens):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    cache, model = make(page_tokens=page_tokens), DenseCache(4, 2, 16, torch.float16, (12, 12), 32)
    for _ in range(data.draw(st.integers(1, 5))):
        n = data.draw(st.integers(1, 200))
        k, v = pair(2, 2, n, 16)
        if int(cache.lengths.max() if cache.batch else 0) + n <= cache.max_length:
            cache.append(k, v)
            for row in range(2):
                model.append(row, k[row], v[row])
        keep = data.draw(st.integers(-min(model.tokens(0), model.tokens(1)), model.tokens(0) + 1))
        cache.crop(keep)
        for row in range(2):
            model.crop(row, keep)
            for got, want in zip(cache.dense(row), (model.rows[row].keys, model.rows[row].values)):
                assert same_bits(got, want)


def test_crop_lengths(rng):
    cache = make()
    k, v = pair(3, 2, 300, 16)
    cache.prefill(k, v, lengths=[300, 200, 10])
    cache.crop(250)
    assert cache.lengths.tolist() == [250, 200, 10]
    cache.crop(-10)
    assert cache.lengths.tolist() == [240, 190, 0]
    cache.crop([-40, 180], sequences=[0, 1])
    assert cache.lengths.tolist() == [200, 180, 0]
    cache.crop(torch.tensor([7, 150]), sequences=torch.tensor([1, 0]))
    assert cache.lengths.tolist() == [150, 7, 0]
    cache.crop(0)
    assert cache.lengths.tolist() == [0, 0, 0] and cache.statistics()["pages_free"] == cache.statistics()["pages"]
    assert cache.batch == 3


def test_moving_rows(device, rng):
    cache = make(device, max_batch=6)
    k, v = pair(3, 2, 300, 16, device=device)
    cache.prefill(k, v, lengths=[300, 100, 0])
    rows = [(k[0], v[0]), (k[1, :, 200:], v[1, :, 200:]), (k[2, :, 300:], v[2, :, 300:])]

    def expect(order: list[int]) -> None:
        assert cache.batch == len(order) and cache.lengths.tolist() == [rows[i][0].shape[1] for i in order]
        for row, i in enumerate(order):
            check(cache, row, *rows[i])

    cache.reorder(torch.tensor([1, 0, 0], device=device))
    expect([1, 0, 0])
    cache.repeat_interleave(2)
    expect([1, 1, 0, 0, 0, 0])
    cache.select([5, 0])
    expect([0, 1])
    cache.repeat_interleave(3)
    expect([0, 0, 0, 1, 1, 1])
    cache.select([])
    assert cache.batch == 0 and cache.statistics()["pages_free"] == cache.statistics()["pages"]


def test_copies_share_pages_and_part_when_written_to(device, rng):
    cache = make(device, page_tokens=128)
    k, v = pair(1, 2, 96 + 64 * 2, 16, device=device)  # 3 tiles, 1 1/2 pages
    cache.prefill(k, v)
    used = cache.statistics()["pages"] - cache.statistics()["pages_free"]
    twin = cache.fork(0)
    assert twin == 1 and cache.statistics()["pages"] - cache.statistics()["pages_free"] == used == 2
    assert cache.statistics()["pages_shared"] == 2
    more_k, more_v = pair(2, 2, 128, 16, device=device)
    for i in range(128):
        cache.append(more_k[:, :, i : i + 1], more_v[:, :, i : i + 1], sequences=[0, 1])
    statistics = cache.statistics()
    assert statistics["pages_shared"] == 1 and statistics["pages"] - statistics["pages_free"] == 5
    for row in range(2):
        check(cache, row, torch.cat([k[0], more_k[row]], dim=1), torch.cat([v[0], more_v[row]], dim=1))
    cache.free(0)
    check(cache, 1, torch.cat([k[0], more_k[1]], dim=1), torch.cat([v[0], more_v[1]], dim=1))
    assert cache.statistics()["pages_shared"] == 0 and cache.statistics()["sequences"] == 1


def test_rows_for_a_server(rng):
    cache = make(max_batch=3)
    assert [cache.add() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(RuntimeError, match="all max_batch = 3 sequences are in use"):
        cache.add()
    with pytest.raises(RuntimeError, match="all max_batch = 3 sequences are in use"):
        cache.fork(0)
    k, v = pair(2, 2, 70, 16)
    cache.prefill(k, v, sequences=[2, 0])
    check(cache, 2, k[0], v[0])
    check(cache, 0, k[1], v[1])
    cache.free(1)
    assert cache.batch == 3 and cache.fork(2) == 1
    cache.free(2)
    assert cache.batch == 2
    check(cache, 1, k[0], v[0])


def test_reset_makes_it_as_new(rng):
    cache = make()
    cache.prefill(*pair(4, 2, 500, 16))
    cache.reset()
    assert cache.batch == 0 and cache.lengths.shape == (0,)
    assert cache.statistics()["pages_free"] == cache.statistics()["pages"]
    k, v = pair(2, 2, 100, 16)
    cache.prefill(k, v)
    for row in range(2):
        check(cache, row, k[row], v[row])


# ---- Attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim, group", [(64, 1), (128, 7), (40, 5), (256, 2)])
def test_attend(backend, rng, dtype, head_dim, group):
    cache = make(backend.device, head_dim=head_dim, keep=head_dim // 3, dtype=dtype, page_tokens=128)
    k, v = pair(4, 2, 400, head_dim, device=backend.device, dtype=dtype)
    cache.prefill(k, v, lengths=[400, 0, 20, rng.randint(1, 399)])
    for sequences in (None, [3, 1, 2, 0]):
        for queries, causal in ((1, True), (3, False), (70, True)):
            rows = sequences or [0, 1, 2, 3]
            q = torch.randn(len(rows), queries, 2 * group, head_dim).to(dtype).to(backend.device).transpose(1, 2)
            scale = rng.choice([None, 0.1])
            out, lse = cache.attend(
                q, scale=scale, causal=causal, return_lse=True, sequences=sequences, backend=backend.name
            )
            assert out.dtype == dtype and lse.dtype == torch.float32
            for i, row in enumerate(rows):
                keys, values = (x.cpu() for x in cache.dense(row))
                want, want_lse = attention(q[i].cpu(), keys, values, scale or head_dim**-0.5, causal)
                error = (out[i].cpu().double() - want).norm()
                assert error <= (2e-3 if dtype == torch.float16 else 1e-2) * want.norm()
                torch.testing.assert_close(lse[i].cpu().double(), want_lse, rtol=1e-3, atol=1e-3)


def test_attend_into_out(backend, rng):
    cache = make(backend.device)
    cache.append(*pair(2, 2, 50, 16, device=backend.device))
    q = pair(2, 6, 1, 16, device=backend.device)[0]
    out = torch.full_like(q, float("nan"))
    assert cache.attend(q, out=out, backend=backend.name) is out
    assert same_bits(out, cache.attend(q, backend=backend.name))


def test_modes_of_autograd_make_no_difference(rng):
    """A cache made in inference mode serves outside of it, and nothing that it holds takes part in autograd."""
    with torch.inference_mode():
        cache = make()
        cache.prefill(*pair(2, 2, 200, 16))
    k, v = (x.requires_grad_() for x in pair(2, 2, 30, 16))
    cache.append(k, v)
    cache.crop(150)
    cache.reorder([1, 0])
    q = pair(2, 4, 1, 16)[0]
    assert not cache.attend(q).requires_grad and not cache.dense(0)[0].requires_grad
    with torch.inference_mode():
        cache.append(k.detach(), v.detach())
        assert same_bits(cache.attend(q, backend="reference"), cache.attend(q.detach(), backend="reference"))
    assert cache.lengths.tolist() == [180, 180]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_that_inference_mode_makes(copied, rng):
    """They are written to outside of it, as the cache is."""
    cache = make()
    cache.prefill(*pair(2, 2, 200, 16))
    with torch.inference_mode():
        other = copied(cache)
    k, v = pair(2, 2, 100, 16)
    q = pair(2, 4, 1, 16)[0]
    for one in (cache, other):
        one.append(k, v)
        one.crop(250)
        one.fork(0)
    assert same_bits(cache.attend(q, sequences=[0, 2]), other.attend(q, sequences=[0, 2]))
    assert other.statistics() == cache.statistics()
    other.reset()


def test_one_sequence_never_reaches_another(backend, rng):
    """NaN in one row, in pages and windows that it leaves behind, and in padding."""

    def drive(poison: float) -> torch.Tensor:
        torch.manual_seed(7)
        cache = make(backend.device, max_batch=3, pool_tokens=640)
        k, v = pair(3, 2, 200, 16, device=backend.device)
        k[1], v[1] = poison, poison
        cache.prefill(k, v, lengths=[200, 200, 150])
        q = pair(3, 4, 2, 16, device=backend.device)[0]
        first = cache.attend(q, backend=backend.name)
        cache.free(1)
        row = cache.add()
        cache.append(*pair(1, 2, 5, 16, device=backend.device), sequences=[row])
        cache.append(*pair(3, 2, 1, 16, device=backend.device))
        second = cache.attend(q, backend=backend.name)
        cache.append(*pair(3, 2, 60, 16, device=backend.device))
        return torch.cat([first[[0, 2]], second, cache.attend(q, backend=backend.name)])

    clean, poisoned = drive(1.0), drive(float("nan"))
    assert clean.isfinite().all() and same_bits(clean, poisoned)


def test_a_decode_loop_is_the_same_however_it_is_batched(backend, rng):
    """Rows of one cache, and caches of one row."""
    together = make(backend.device, max_batch=3)
    alone = [make(backend.device, max_batch=1) for _ in range(3)]
    k, v = pair(3, 2, 155, 16, device=backend.device)
    together.prefill(k, v)
    for i, cache in enumerate(alone):
        cache.prefill(k[i : i + 1], v[i : i + 1])
    for _ in range(15):
        k, v = pair(3, 2, 1, 16, device=backend.device)
        q = pair(3, 4, 1, 16, device=backend.device)[0]
        together.append(k, v)
        out = together.attend(q, backend=backend.name)
        for i, cache in enumerate(alone):
            cache.append(k[i : i + 1], v[i : i + 1])
            torch.testing.assert_close(cache.attend(q[i : i + 1], backend=backend.name), out[i : i + 1])


# ---- Soak ------------------------------------------------------------------------------------------------------------


def test_soak(rng, capsys):
    assert sum(run(2400, rng.randrange(2**31), "cpu").values()) >= 2400


@pytest.mark.gpu
def test_soak_on_a_gpu(rng):
    run(1200, rng.randrange(2**31), "cuda")


def test_soak_as_after_a_capture(rng):
    """Lengths are read from the device and partly filled pages are never shared."""
    soak = Soak(SHAPES[1], rng, "cpu")
    core_of(soak.cache).captured = True
    for _ in range(400):
        soak.step()
        table = core_of(soak.cache).table
        assert all(table.is_private(row) for row in range(table.batch))


def test_soak_with_hardly_a_page(rng):
    """What needs more pages than there are is refused, be it the first sequence or a copy, and changes nothing."""
    soak = Soak(replace(SHAPES[1], pool_tokens=2 * SHAPES[1].page_tokens), rng, "cpu")
    core_of(soak.cache).captured = True
    for _ in range(400):
        soak.step()
    assert soak.counts["refused"]
