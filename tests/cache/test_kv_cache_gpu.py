"""KVCache on a GPU: nothing waits, graphs replay what eager calls do, uploads do not race, prefill takes no copy."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels._cache.rows import core_of
from tests.support import gpu_memory
from tests.support.backends import skip_unless_ok
from tests.support.exact_kv_cache import check, make, pair
from tests.support.oracle import same_bits
from tests.support.synchronisation import no_synchronisation

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    skip_unless_ok("sm80")


@pytest.fixture(params=["sm80", "sm90"])
def fused(request) -> str:
    """A backend with attention kernels."""
    skip_unless_ok(request.param)
    return request.param


def filled(lengths: list[int], **arguments) -> tuple[ck.KVCache, torch.Tensor, torch.Tensor]:
    """A cache with so many tokens a row, and the padded K and V."""
    cache = make("cuda", **arguments)
    k, v = pair(len(lengths), 2, max(lengths), cache.head_dim, device="cuda")
    cache.prefill(k, v, lengths=lengths)
    return cache, k, v


def capture(cache: ck.KVCache, steps: int, queries: int = 1, backend: str | None = None, sequences=None):
    """A graph of append and, with a backend, attend. Returns graph, its inputs k, v, q and its output."""
    rows = len(sequences) if sequences else cache.batch
    k, v = pair(rows, 2, steps, cache.head_dim, device="cuda")
    q = pair(rows, 6, queries, cache.head_dim, device="cuda")[0]
    other = make("cuda", head_dim=cache.head_dim, keep=cache.key_keep)  # loads kernels, which a capture may not
    other.append(k[:, :, :64], v[:, :, :64])
    if backend:
        other.attend(q, backend=backend)
    graph, out = torch.cuda.CUDAGraph(), None
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        cache.append(k, v, sequences=sequences)
        if backend:
            out = cache.attend(q, backend=backend, sequences=sequences)
    return graph, k, v, q, out


def test_appends_do_not_wait(rng):
    """Over tiles, new pages, copies on write and long portions."""
    cache, k, v = filled([300, 17, 230], page_tokens=128, max_batch=5)
    assert cache.fork(0) == 3
    rows = [(k[0], v[0]), (k[1, :, 283:], v[1, :, 283:]), (k[2, :, 70:], v[2, :, 70:]), (k[0], v[0])]
    new = [pair(4, 2, n, 16, device="cuda") for n in [1] * 140 + [5, 64, 150, 1]]
    order = [2, 0, 3, 1]
    mixed = [(new_k[order], new_v[order]) for new_k, new_v in new]
    torch.cuda.synchronize()
    with no_synchronisation():
        for i in range(len(new)):
            if i % 2:
                cache.append(*mixed[i], sequences=order)
            else:
                cache.append(*new[i])
        lengths = cache.lengths
    assert lengths.tolist() == [n + 140 + 220 for n in (300, 17, 230, 300)]
    for row, (old_k, old_v) in enumerate(rows):
        check(
            cache,
            row,
            torch.cat([old_k, *(x[row] for x, _ in new)], dim=1),
            torch.cat([old_v, *(x[row] for _, x in new)], dim=1),
        )


def test_attention_does_not_wait(rng, fused):
    cache, _, _ = filled([300, 17, 230])
    q = pair(3, 4, 1, 16, device="cuda")[0]
    cache.attend(q, backend=fused)
    with no_synchronisation():
        cache.attend(q, backend=fused, return_lse=True)
        cache.attend(q[:2], backend=fused, sequences=[2, 0])


def test_what_the_host_sends_is_not_overwritten_on_its_way(rng):
    """Hundreds of page tables, lengths and row numbers queued behind a kernel that takes its time."""
    cache = make("cuda", max_batch=3, capacity=4000)
    k, v = pair(3, 2, 3500, 16, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    at = [0, 0, 0]
    for _ in range(3):
        cache.add()
    while min(at) < 3500:
        rows = [row for row in rng.sample(range(3), rng.randint(1, 3)) if at[row] < 3500]
        if not rows:
            continue
        n = rng.choice([1, 64, 64, 200])
        n = min(n, *(3500 - at[row] for row in rows))
        new = [torch.stack([x[row, :, at[row] : at[row] + n] for row in rows]) for x in (k, v)]
        cache.append(*new, sequences=rows)
        for row in rows:
            at[row] += n
        if rng.random() < 0.1 and at[rows[0]] > 50:
            cut = rng.randint(1, 31)  # of the window alone: what was pruned would stay so
            cache.crop(-cut, sequences=[rows[0]])
            at[rows[0]] -= cut
    for row in range(3):
        check_nearly(cache, row, k[row], v[row])


def check_nearly(cache: ck.KVCache, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """As `check`, for sequences that were cut: tokens that came back to the window are pruned there."""
    for got, want in zip(cache.dense(row), (k, v)):
        assert got.shape == want.shape
        pruned = ck.prune(want[None], keep=12)[0]
        same = (got == want).all(dim=-1) | (got == pruned).all(dim=-1)
        assert same.all()


@pytest.mark.parametrize("steps, replays, page_tokens", [(1, 3000, 64), (3, 400, 256), (64, 30, 64), (100, 20, 128)])
def test_replays_equal_eager_calls(rng, steps, replays, page_tokens):
    lengths = [200, 1, 333]
    arguments = {"capacity": 4000, "page_tokens": page_tokens, "max_batch": 3}
    cache, k, v = filled(lengths, **arguments)
    eager = make("cuda", **arguments)
    eager.prefill(k, v, lengths=lengths)
    cache.reserve(steps * replays)
    graph, static_k, static_v, _, _ = capture(cache, steps)
    assert cache.lengths.tolist() == lengths  # nothing ran yet
    for _ in range(replays):
        new_k, new_v = pair(3, 2, steps, 16, device="cuda")
        static_k.copy_(new_k)
        static_v.copy_(new_v)
        graph.replay()
        eager.append(new_k, new_v)
    assert cache.lengths.tolist() == eager.lengths.tolist() == [n + steps * replays for n in lengths]
    for row in range(3):
        for got, want in zip(cache.dense(row), eager.dense(row)):
            assert same_bits(got, want)
    new_k, new_v = pair(3, 2, 70, 16, device="cuda")
    cache.append(new_k, new_v)  # eager again, from the lengths that the device has
    eager.append(new_k, new_v)
    for row in range(3):
        for got, want in zip(cache.dense(row), eager.dense(row)):
            assert same_bits(got, want)
    core_of(cache).table.check()


@pytest.mark.parametrize("sequences", [None, [2, 0]])
def test_decode_steps_in_a_graph_do_what_eager_ones_do(rng, fused, sequences):
    arguments = {"capacity": 5000, "head_dim": 64, "keep": 20, "max_batch": 3}
    cache, k, v = filled([200, 1, 333], **arguments)
    eager = make("cuda", **arguments)
    eager.prefill(k, v, lengths=[200, 1, 333])
    if sequences:  # their numbers have to be on the device before a capture
        for one in (cache, eager):
            one.append(*(x[sequences][:, :, :1] for x in (k, v)), sequences=sequences)
    cache.reserve(4000)
    graph, static_k, static_v, q, out = capture(cache, 1, backend=fused, sequences=sequences)
    error = torch.zeros((), device="cuda")
    for _ in range(4000):
        for static in (static_k, static_v, q):
            static.normal_()
        graph.replay()
        eager.append(static_k, static_v, sequences=sequences)
        want = eager.attend(q, backend=fused, sequences=sequences)
        error = torch.maximum(error, (out - want).abs().max().float())  # work may be split in other ways
    assert float(error) <= 4e-3 and cache.lengths.tolist() == eager.lengths.tolist()


def test_a_graph_outlives_reset_fork_and_crop(rng):
    cache, _, _ = filled([200, 100], page_tokens=128)
    cache.reserve(10)
    graph, new_k, new_v, _, _ = capture(cache, 1)
    for _ in range(3):
        cache.reset()
        k, v = pair(2, 2, 244, 16, device="cuda")  # 3 tiles, a page and a half each
        cache.prefill(k, v)
        cache.crop(200)
        k, v = k[:, :, :200], v[:, :, :200]
        twin = cache.fork(1)
        cache.reserve(100)
        parts_k, parts_v = [k], [v]
        for _ in range(100):
            new_k.normal_()
            new_v.normal_()
            graph.replay()
            parts_k.append(new_k.clone())
            parts_v.append(new_v.clone())
        cache.append(*pair(1, 2, 90, 16, device="cuda"), sequences=[twin])
        assert cache.lengths.tolist() == [300, 300, 290]
        for row in range(2):
            check_nearly(cache, row, torch.cat(parts_k, dim=2)[row], torch.cat(parts_v, dim=2)[row])
        for got, want in zip(cache.dense(twin), (k[1], v[1])):
            assert same_bits(got[:, :192], ck.prune(want[None], keep=12)[0, :, :192])
        core_of(cache).table.check()


def test_replays_without_pages_are_reported_once(rng):
    cache, k, v = filled([90, 20], max_batch=2)
    cache.reserve(6)  # a page for the tile that the 96th token of row 0 fills; row 1 needs none so far
    graph, new_k, new_v, _, _ = capture(cache, 1)
    for _ in range(6 + 64 + 5):
        graph.replay()
    torch.cuda.synchronize()
    lengths = cache.lengths.tolist()
    assert lengths == [159, 95]
    with pytest.raises(RuntimeError, match=r"left tokens out.*reserve"):
        cache.append(new_k, new_v)
    assert cache.lengths.tolist() == lengths
    cache.append(new_k, new_v)
    assert cache.lengths.tolist() == [160, 96]
    for row, n in enumerate((90, 20)):
        repeated = 160 - 90 if row == 0 else 96 - 20
        check(
            cache,
            row,
            torch.cat([k[row, :, 90 - n :], new_k[row].expand(-1, repeated, -1)], dim=1),
            torch.cat([v[row, :, 90 - n :], new_v[row].expand(-1, repeated, -1)], dim=1),
        )


def test_what_a_capture_refuses(rng):
    cache, k, _ = filled([95, 20], max_batch=2)
    x = k[:, :, :1].contiguous()

    def captured(call) -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            call()

    for call, message in (
        (lambda: cache.append(x, x), "sequence 0 has no pages for appends in a graph: call reserve"),
        (lambda: cache.append(x, x, sequences=[1, 0]), "has no pages|call once with them before the capture"),
        (lambda: cache.prefill(x, x), "prefill cannot be captured"),
        (lambda: cache.crop(1), "crop cannot be captured"),
        (lambda: cache.reset(), "reset cannot be captured"),
        (lambda: cache.reserve(1), "reserve cannot be captured"),
    ):
        with pytest.raises(RuntimeError, match=message):
            captured(call)
        torch.cuda.synchronize()
    cache.append(x, x)
    assert cache.lengths.tolist() == [96, 21]


def test_prefill_allocates_next_to_nothing(rng):
    shape = (2, 8, 8192, 128)
    base = torch.randn(2, 8192, 8, 2, 128, device="cuda").half()  # as a fused projection leaves it
    k, v = base[:, :, :, 0].transpose(1, 2), base[:, :, :, 1].transpose(1, 2)
    assert k.shape == shape
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = ck.KVCache(max_batch=2, kv_heads=8, head_dim=128, capacity=8192, keep=38)
    held = torch.cuda.memory_allocated() - before
    assert held <= 1.01 * cache.nbytes() + 10**5
    extra = gpu_memory.peak(lambda: cache.prefill(k, v))
    assert 0 < extra <= 0.05 * (base.nbytes + held)


def test_a_cache_works_on_any_stream(rng):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        cache = make("cuda")
        k, v = pair(2, 2, 300, 16, device="cuda")
        cache.prefill(k[:, :, :200], v[:, :, :200])
        for i in range(200, 300):
            cache.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        for row in range(2):
            check(cache, row, k[row], v[row])
