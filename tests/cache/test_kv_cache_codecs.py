"""KVCache in narrow codecs: what it holds, whatever happens to its sequences, and attention over it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels import paged
from tests.support import oracle
from tests.support.exact_kv_cache import make, pair

NARROW = tuple(oracle.NARROW)
TILE = 64
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def stored(
    x: torch.Tensor, keep: int | None, codec: str, window: int, first: torch.Tensor | None = None
) -> torch.Tensor:
    """(Hkv, T, D) as a cache holds it, float64. Scales of channels are those of the tile `first`, else of its own."""
    compressed = max(0, (x.shape[1] - window) // TILE) * TILE
    if codec in NARROW:
        first = x[:, :TILE] if first is None else first
        chosen = torch.cat([first, x[:, :compressed]], dim=1)
        tiles = oracle.narrow(chosen[None], keep, codec, first.shape[1])[0][:, first.shape[1] :]
    else:
        tiles = oracle.prune(x[:, :compressed], keep).double()
    return torch.cat([tiles, x[:, compressed:].double()], dim=1)


def check(cache: ck.KVCache, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """The row holds (Hkv, T, D)."""
    sides = (k, cache.key_keep, cache.key_codec), (v, cache.value_keep, cache.value_codec)
    for got, (x, keep, codec) in zip(cache.dense(row), sides):
        exact = stored(x.cpu(), keep or None, codec, cache.window)
        assert oracle.same_bits(got.cpu(), oracle.to_dtype(exact, cache.dtype))


def append_in_chunks(cache: ck.KVCache, k: torch.Tensor, v: torch.Tensor, rng) -> None:
    first = 0
    while first < k.shape[2]:
        chunk = slice(first, first + rng.choice([1, 5, 40, 64, 200]))
        cache.append(k[:, :, chunk], v[:, :, chunk])
        first = chunk.stop


@pytest.mark.parametrize("codec", NARROW)
def test_a_sequence_does_not_depend_on_its_chunks(device, codec, rng):
    k, v = (oracle.lognormal_channels(2, 2, 700, 16).to(device) for _ in range(2))
    caches = [make(device, codec=codec, window=rng.choice([0, 20, 64])) for _ in range(2)]
    caches[0].prefill(k, v)
    append_in_chunks(caches[1], k, v, rng)
    for cache in caches:
        for row in range(2):
            check(cache, row, k[row], v[row])


@pytest.mark.parametrize("codec", NARROW)
def test_channels_that_are_quiet_in_the_first_tile(device, codec, rng):
    """It decides their scales, which are at least 2^-10 of their head's largest, in whatever chunks tokens come."""
    k, v = (oracle.gaussian(2, 2, 300, 16) for _ in range(2))
    for x in (k, v):
        x[:, :, :TILE, rng.sample(range(16), 6)] *= 2.0 ** -torch.randint(8, 15, (6,))
        x[:, 1] *= 2.0**-5
    k, v = k.to(device), v.to(device)
    caches = [make(device, codec=codec, window=rng.choice([0, 20])) for _ in range(2)]
    caches[0].prefill(k, v)
    append_in_chunks(caches[1], k, v, rng)
    for cache in caches:
        for row in range(2):
            check(cache, row, k[row], v[row])


@pytest.mark.parametrize("codec", [*NARROW, ("int8", "int4"), ("fp16", "fp8")], ids=str)
def test_attention(backend, codec, rng):
    codecs = (codec, codec) if isinstance(codec, str) else codec
    options = {"key_codec": codecs[0], "value_codec": codecs[1]}
    if backend.device.type == "cuda" and codecs[0] != codecs[1]:
        with pytest.raises(RuntimeError, match=r"key_codec .* and value_codec .*: GPU kernels"):
            make(backend.device, **options)
        return
    dtype = torch.float16 if "fp16" in codecs else rng.choice(oracle.DTYPES)
    for head_dim, keep in ((128, None), (72, 20), (256, None)):
        cache = ck.KVCache(
            max_batch=2,
            kv_heads=2,
            head_dim=head_dim,
            capacity=700,
            dtype=dtype,
            keep=keep,
            device=backend.device,
            **options,
        )
        k, v = (oracle.gaussian(2, 2, 330, head_dim, dtype=dtype, device=backend.device) for _ in range(2))
        cache.prefill(k[:, :, :300], v[:, :, :300], lengths=[300, 190])
        cache.append(k[:, :, 300:], v[:, :, 300:])
        queries = rng.choice([1, 1, 3, 20])
        q = oracle.gaussian(2, 8, queries, head_dim, dtype=dtype, device=backend.device)
        out = cache.attend(q, backend=backend.name)
        if cache.statistics()["key_values_dropped"] + cache.statistics()["value_values_dropped"]:
            continue  # a tile that was too long for its slot
        for row, length in enumerate((330, 220)):
            exact = [stored(x[row, :, 330 - length :].cpu(), keep, c, 32)[None] for x, c in zip((k, v), codecs)]
            expected, _ = oracle.attention(q[row : row + 1].cpu(), *exact, head_dim**-0.5)
            assert oracle.relative_error(out[row : row + 1], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("codec", NARROW)
def test_rows_move_with_their_scales(device, codec, rng):
    k, v = (oracle.lognormal_channels(4, 2, 400, 16).to(device) for _ in range(2))
    cache = make(device, codec=codec, window=10, max_batch=4, capacity=450)
    cache.prefill(k[:3], v[:3])
    assert cache.fork(1) == 3
    cache.append(k[:, :, :30], v[:, :, :30])
    cache.reorder([2, 0, 1, 3])
    cache.grow(capacity=600)
    held = [[torch.cat([x[source], x[row, :, :30]], dim=1) for x in (k, v)] for row, source in enumerate([0, 1, 2, 1])]
    held = [held[row] for row in (2, 0, 1, 3)]
    for other in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        for row in range(4):
            check(other, row, *held[row])
    cache.append(k[:, :, 30:200], v[:, :, 30:200])
    for row in range(4):
        check(cache, row, *(torch.cat([x, new[row, :, 30:200]], dim=1) for x, new in zip(held[row], (k, v))))


@pytest.mark.parametrize("codec", NARROW)
def test_cut_back_and_filled_again(device, codec, rng):
    """What is cut out of a tile stays in the window as it was stored; a first tile then chooses its scales anew."""
    k, v = (oracle.lognormal_channels(1, 2, 300, 16).to(device) for _ in range(2))
    cache = make(device, codec=codec, window=0)
    cache.prefill(k, v)
    before = cache.dense(0)
    cache.crop(rng.choice([20, 100, 200]))
    kept = int(cache.lengths[0])
    for now, then in zip(cache.dense(0), before):
        assert oracle.same_bits(now.contiguous(), then[:, :kept].contiguous())
    cache.append(k, v)
    full = kept // TILE * TILE
    for now, then, x in zip(cache.dense(0), before, (k, v)):
        assert oracle.same_bits(now[:, :full].contiguous(), then[:, :full].contiguous())
        held = torch.cat([then[:, :kept], x[0]], dim=1).cpu()
        first = (x[0] if full else held)[:, :TILE].cpu()
        exact = oracle.to_dtype(stored(held, 12, codec, 0, first), cache.dtype)
        assert oracle.same_bits(now[:, full:].cpu().contiguous(), exact[:, full:].contiguous())


@pytest.mark.parametrize("codec", NARROW)
def test_steps_are_append_and_attend(backend, codec, rng):
    caches = [make(backend.device, codec=codec, window=5, max_append=1) for _ in range(2)]
    for _ in range(150):
        k, v = pair(2, 2, 1, 16, device=backend.device)
        q = pair(2, 6, 1, 16, device=backend.device)[0]
        out = caches[0].step(q, k, v, backend=backend.name)
        caches[1].append(k, v)
        assert oracle.same_bits(out, caches[1].attend(q, backend=backend.name))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", NARROW)
def test_graphs(codec, rng):
    k, v = pair(2, 2, 400, 16, device="cuda")
    q = pair(2, 8, 1, 16, device="cuda")[0]
    graphed, eager = (make("cuda", codec=codec, window=8, max_batch=2) for _ in range(2))
    for cache in (graphed, eager):
        cache.prefill(k[:, :, :200], v[:, :, :200])
    new = [x[:, :, :1].clone() for x in (k, v)]
    graphed.reserve(200)
    graphed.attend(q)
    graph, out = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        graphed.append(*new)
        out = graphed.attend(q)
    for t in range(200, 400):
        for x, source in zip(new, (k, v)):
            x.copy_(source[:, :, t : t + 1])
        graph.replay()
        eager.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert oracle.relative_error(out, eager.attend(q).double().cpu()) < 1e-3
    for row in range(2):
        check(graphed, row, k[row], v[row])


@pytest.mark.parametrize("codec", NARROW)
def test_what_cannot_be_stored_is_counted(device, codec, rng):
    k, v = pair(1, 2, 128, 16, device=device)
    k[0, 1, 70, 3], v[0, 0, 5, 2], v[0, 0, 5, 7] = float("inf"), float("nan"), float("-inf")
    for prefills in (True, False):
        cache = make(device, codec=codec, window=0)
        if prefills:
            cache.prefill(k, v)
        else:
            append_in_chunks(cache, k, v, rng)
        statistics = cache.statistics()
        assert statistics["key_values_refused"] == 1
        assert statistics["value_values_refused"] == (1 if codec == "fp8" else 2)
        dense = cache.dense(0)
        assert bool(dense[0].isfinite().all()) and bool(dense[1].isnan().any()) == (codec == "fp8")


@pytest.mark.parametrize("codec", NARROW)
def test_pages_of_a_caller(backend, codec, rng):
    """Orders and scales that all sequences share, chosen once from more tokens than a tile."""
    device = backend.device
    config = paged.configure(kv_heads=2, head_dim=64, codec=codec, keep=64, window=8)
    pool = paged.make_pool(config, {n: s.empty(device) for n, s in config.pool_tensors(20, 3, 6).items()})
    windows = paged.make_windows(config, {n: s.empty(device) for n, s in config.window_tensors(3).items()})
    lengths = torch.zeros(3, dtype=torch.int32, device=device)
    pool.initialize()
    windows.initialize()
    pool.page_table.copy_(torch.arange(18, dtype=torch.int32).view(3, 6))
    k, v = (oracle.lognormal_channels(1, 2, 300, 64).to(device) for _ in range(2))
    paged.choose_orders(pool, k, v)
    paged.extend(pool, windows, lengths, k, v, sequence=2, compressed=0, window=0)
    q = oracle.gaussian(1, 4, 1, 64, device=device) / 4  # large channels: rounded keys move large logits by more
    number = torch.tensor([2], dtype=torch.int32, device=device)
    out = paged.attend(q, pool, windows, lengths, number, backend=backend.name)
    scaled = [oracle.narrow(x[:, :, :300].cpu(), None, codec) for x in (k, v)]
    exact = [torch.cat([s[:, :, :256], x[:, :, 256:].cpu().double()], dim=2) for s, x in zip(scaled, (k, v))]
    assert int(lengths[2]) == 256
    expected, _ = oracle.attention(q.cpu(), *exact, 64**-0.5)
    assert oracle.relative_error(out, expected) < 2e-3


def test_it_takes_less_memory():
    sizes = {c: make(codec=c, head_dim=128, keep=64, window=0, max_append=1).nbytes() for c in (None, *NARROW)}
    assert sizes["fp8"] == sizes["int8"] < 0.66 * sizes[None] and sizes["int4"] < 0.46 * sizes[None]


@pytest.mark.parametrize("name", ["codec", "key_codec", "value_codec"])
def test_bad_codecs(name):
    with pytest.raises(ValueError, match=f"{name} must be one of 'fp16', 'fp8', 'int8', 'int4' for float16"):
        make(**{name: "bf16"})
    with pytest.raises(ValueError, match=f"{name} must be one of .* or None, got 'fp4'"):
        make(**{name: "fp4"})
    with pytest.raises(TypeError, match=f"{name} must be a str or None"):
        make(**{name: 8})
