"""Rules for sparse tensor cores: two of four neighbours."""

from __future__ import annotations

import re

import pytest
import torch

import cute_kernels as ck
from cute_kernels import rules
from tests.support import oracle
from tests.support.two_of_four import channel_order, two_of_four

ROLES = ("key", "value")
SHAPES = [(2, 2, 130, 128), (1, 3, 64, 64), (1, 1, 1, 8), (1, 2, 7, 72), (1, 1, 66, 256), (2, 1, 500, 80)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, rng) -> torch.Tensor:
    """Gaussian, channels of different size, ties, or every bit pattern."""
    kind = rng.choice(["gaussian", "lognormal", "ties", "bits", "zeros"])
    if kind == "bits":
        return oracle.random_bits(*shape, dtype=dtype)
    if kind == "ties":
        return torch.randint(-2, 3, shape).to(dtype)
    if kind == "zeros":
        return torch.where(torch.rand(shape) < 0.9, 0.0, torch.randn(shape)).to(dtype)
    return (oracle.gaussian if kind == "gaussian" else oracle.lognormal_channels)(*shape, dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_exactly_two_of_four(shape, role, dtype, device, rng):
    x = inputs(shape, dtype, rng)
    expected = two_of_four(x, role)
    assert oracle.same_bits(ck.prune(x.to(device), method="2of4", role=role), expected)
    kv = ck.compress(x.to(device), role=role, method="2of4")
    assert oracle.same_bits(ck.decompress(kv), expected)
    kv.validate()
    if role == "key":
        assert oracle.same_bits(ck.prune(x.to(device), method="2of4"), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_at_most_two_of_four(shape, role, dtype, device, rng):
    x, keep = inputs(shape, dtype, rng), rng.randint(1, shape[3] // 2)
    expected = two_of_four(x, role, keep, limit=True)
    assert oracle.same_bits(ck.prune(x.to(device), keep=keep, method="magnitude-2of4", role=role), expected)
    kv = ck.compress(x.to(device), role=role, keep=keep, method="magnitude-2of4")
    assert oracle.same_bits(ck.decompress(kv), expected)
    kv.validate()
    candidates = ck.prune(x.to(device), method="magnitude-2of4", role=role)
    assert oracle.same_bits(candidates, two_of_four(x, role))


def test_what_is_kept(rng):
    """Without ties or zeros: half of every token of keys, in every four channels of the order; half of every four
    tokens of values."""
    x = oracle.gaussian(2, 2, 128, 80)
    keys, values = ck.prune(x, method="2of4", role="key") != 0, ck.prune(x, method="2of4", role="value") != 0
    assert bool((keys.sum(3) == 40).all()) and bool((values.unflatten(2, (-1, 4)).sum(3) == 2).all())
    order = torch.from_numpy(channel_order(x, 40))[:, :, None].expand(x.shape)
    assert torch.equal(rules.channel_order(x, 40), order[:, :, 0])
    assert bool((keys.gather(3, order).unflatten(3, (-1, 4)).sum(4) == 2).all())


def test_few_values_are_lost(rng):
    """Where channels differ in size, their order keeps large ones apart: less is lost than by neighbours in memory."""
    x = oracle.lognormal_channels(1, 4, 1024, 128)
    exact = x.double()
    free, pruned = (ck.prune(x, keep=38, method=rule).double() for rule in ("magnitude", "magnitude-2of4"))
    groups = x.abs().unflatten(3, (-1, 4))
    neighbours = torch.where(groups >= groups.sort(4).values[..., 2:3], groups, 0).flatten(3)
    in_memory = ck.prune(neighbours, keep=38).double()
    lost, most = (exact - pruned).norm(), (exact - free).norm()
    assert lost < 1.02 * most and (exact.abs() - in_memory).norm() > 1.05 * lost


@pytest.mark.parametrize("tokens", [1024, 1025, 3100])
@pytest.mark.parametrize("tile_format", ["bitmap", "two_of_four_bitmap"])
def test_long_caches_are_ordered_by_a_part_of_their_tokens(tokens, tile_format, device, rng):
    """At most 1024 tokens a head, at equal distances, decide which channels of keys are neighbours."""
    x = oracle.lognormal_channels(1, 2, tokens, 64)
    step = -(-tokens // 1024)
    others = torch.arange(tokens) % step != 0
    x[:, :, others] = x[:, :, others].roll(17, 3)  # other channels are large there
    order = channel_order(x[:, :, ::step], 20)
    expected = two_of_four(x, "key", 20, limit=True, order=order)
    assert oracle.same_bits(ck.prune(x.to(device), keep=20, method="magnitude-2of4", role="key"), expected)
    options = {"keep": 20, "method": "magnitude-2of4", "tile_format": tile_format}
    kv = ck.compress(x.to(device), role="key", codec="int8", **options)
    assert bool(((ck.decompress(kv).cpu() != 0) <= (expected != 0)).all())
    if tile_format == "bitmap":
        assert oracle.same_bits(ck.decompress(ck.compress(x.to(device), role="key", **options)), expected)


@pytest.mark.parametrize("preallocated", [False, True])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("method", ["2of4", "magnitude-2of4"])
def test_watched_calls(method, role, preallocated, device, rng):
    """Profiled or compiled, calls keep what they keep else; storing it on a GPU, torch sorts nothing: kernels do."""
    x = oracle.lognormal_channels(1, 2, 130, 64).to(device)
    keep = {} if method == "2of4" else {"keep": 20}
    expected = two_of_four(x.cpu(), role, keep.get("keep"), limit=bool(keep))
    out = ck.SparseKV.preallocate(x.shape, x.dtype, role=role, device=device) if preallocated else None

    def compress(x):
        return ck.compress(x, role=role, method=method, tile_format="bitmap", out=out, **keep)

    with torch.profiler.profile() as profile:
        kv = compress(x)
    assert oracle.same_bits(ck.decompress(kv), expected)
    names = {event.key for event in profile.key_averages()}
    assert device.type == "cpu" or not names & {"aten::sort", "aten::argsort", "aten::topk"}
    torch._dynamo.reset()
    prune = torch.compile(lambda x: ck.prune(x, role=role, method=method, **keep), backend="aot_eager")
    assert oracle.same_bits(prune(x), expected)
    if out is not None:
        compress(torch.zeros_like(x))
        torch.compile(compress, backend="aot_eager")(x)
        assert oracle.same_bits(ck.decompress(out), expected)


@pytest.mark.parametrize("tile_format", ["bitmap", "two_of_four_bitmap"])
@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("role", ROLES)
def test_values_that_a_codec_does_not_store(role, codec, tile_format, device, rng):
    """Infinities, and NaN but in fp8, are refused where they are kept, and do not count where they are pruned."""
    x = oracle.gaussian(1, 2, 150, 64)
    options = {"role": role, "keep": 20, "method": "magnitude-2of4", "codec": codec, "tile_format": tile_format}
    clean = ck.decompress(ck.compress(x.to(device), **options))
    token, channel = rng.randrange(150), rng.randrange(64)
    x[0, 1, token, channel] = rng.choice([float("inf"), -float("inf")])
    with pytest.raises(ValueError, match=codec):
        ck.compress(x.to(device), **options)
    x[0, 1, token, channel] = float("nan")
    if codec != "fp8":
        with pytest.raises(ValueError, match=codec):
            ck.compress(x.to(device), **options)
        return
    kv = ck.decompress(ck.compress(x.to(device), **options))
    assert bool(kv[0, 1, token, channel].isnan()) and int(kv.isnan().sum()) == 1
    assert oracle.same_bits(kv[:, 0], clean[:, 0])


@pytest.mark.parametrize("codec", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("method", ["2of4", "magnitude-2of4"])
def test_pairs(method, codec, device, rng):
    k, v = (oracle.lognormal_channels(2, 2, 200, 64).clamp(-6e4, 6e4) for _ in range(2))
    keeps = {} if method == "2of4" else {"key_keep": 20, "value_keep": 30}
    pair = ck.compress_kv(k.to(device), v.to(device), method=method, codec=codec, **keeps)
    for kv, x, role, keep in zip(pair, (k, v), ROLES, (20, 30)):
        pruned = ck.prune(x.to(device), method=method, role=role, **({"keep": keep} if keeps else {}))
        if codec is None:
            assert oracle.same_bits(ck.decompress(kv), pruned)
        else:
            error = oracle.relative_error(ck.decompress(kv), pruned.cpu().double())
            assert error < {"fp8": 0.04, "int8": 0.01, "int4": 0.15}[codec]
        kv.validate()
    q = oracle.gaussian(2, 4, 1, 64)
    exact = (oracle.decode(kv.state_dict()) for kv in pair)  # decompress rounds what a narrow codec stores
    expected, _ = oracle.attention(q, *exact, 0.125)
    assert oracle.relative_error(ck.sparse_attention(q.to(device), *pair), expected) < 4e-3


def grown(method: str, device, k: torch.Tensor, v: torch.Tensor, **options) -> ck.KVCache:
    """A cache of 400 tokens of two sequences, the first 200 at once; 32 stay dense."""
    cache = ck.KVCache(
        max_batch=3,
        kv_heads=k.shape[1],
        head_dim=k.shape[3],
        dtype=k.dtype,
        capacity=600,
        window=32,
        key_rule=method,
        value_rule=method,
        device=device,
        **options,
    )
    cache.prefill(k[:, :, :200].to(device), v[:, :, :200].to(device))
    for begin in range(200, 400, 50):
        cache.append(k[:, :, begin : begin + 50].to(device), v[:, :, begin : begin + 50].to(device))
    return cache


STORED = (400 - 32) // 64 * 64


@pytest.mark.parametrize("method", ["2of4", "magnitude-2of4"])
def test_a_cache_that_grows(method, device, rng):
    """Channels of keys have the order of the first tiles that were stored, or each tile its own with a keep."""
    keep = {} if method == "2of4" else {"keep": 20}
    k, v = (oracle.gaussian(2, 2, 400, 64) for _ in range(2))
    cache = grown(method, device, k, v, **keep)
    lost = {"key": 0, "value": 0}
    firsts = []
    for row in range(2):
        for role, x, got in zip(ROLES, (k, v), cache.dense(row)):
            tiles = x[row, :, :STORED].unflatten(1, (-1, 64)).transpose(0, 1)
            order = None if keep else channel_order(x[row : row + 1, :, :128], 32).repeat(len(tiles), axis=0)
            pruned = two_of_four(tiles, role, keep.get("keep"), limit=bool(keep), order=order)
            assert oracle.same_bits(got[:, :STORED], pruned.transpose(0, 1).flatten(1, 2))
            assert oracle.same_bits(got[:, STORED:], x[row, :, STORED:])
            free = oracle.prune(tiles, keep.get("keep", 32))
            lost[role] += int(((free != 0) & (pruned == 0)).sum())
            firsts.append(got[:, :64])
    statistics = cache.statistics()
    assert {role: statistics[f"{role}_values_constrained"] for role in ROLES} == lost
    assert statistics["key_tiles_trimmed"] == statistics["value_tiles_trimmed"] == 0
    fork = cache.fork(0)
    cache.crop(100)
    for row in (0, fork):
        assert oracle.same_bits(cache.dense(row)[0][:, :64], firsts[0])
        assert oracle.same_bits(cache.dense(row)[1][:, :64], firsts[1])


@pytest.mark.parametrize("codec", [None, "fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 72])
@pytest.mark.parametrize("method", ["2of4", "magnitude-2of4"])
def test_attention_over_a_cache_that_grows(method, head_dim, dtype, codec, device, rng):
    k, v = (oracle.gaussian(2, 2, 400, head_dim, dtype=dtype) for _ in range(2))
    cache = grown(method, device, k, v, codec=codec, **({} if method == "2of4" else {"keep": head_dim // 4}))
    q = oracle.gaussian(3, 6, 1, head_dim, dtype=dtype)[:2]
    dense = [torch.stack([cache.dense(row)[i].cpu() for row in range(2)]) for i in range(2)]
    expected, _ = oracle.attention(q, *dense, head_dim**-0.5)
    tolerance = 4e-3 if dtype == torch.float16 else 2e-2  # dense is rounded
    assert oracle.relative_error(cache.attend(q.to(device)), expected) < tolerance
    new = [oracle.gaussian(2, heads, 1, head_dim, dtype=dtype) for heads in (6, 2, 2)]
    out = cache.step(*(x.to(device) for x in new))
    dense = [torch.cat([x, y], dim=2) for x, y in zip(dense, new[1:])]
    expected, _ = oracle.attention(new[0], *dense, head_dim**-0.5)
    assert oracle.relative_error(out, expected) < tolerance


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("keep", [None, 20, 3])
def test_a_narrow_cache_that_grows(keep, codec, device, rng):
    """Scales of channels are those of the first tile, orders those of the first tiles that were stored."""
    k, v = (oracle.lognormal_channels(2, 2, 400, 64).clamp(-6e4, 6e4) for _ in range(2))
    if keep is None:
        cache = grown("2of4", device, k, v, codec=codec)
    else:
        cache = grown("magnitude-2of4", device, k, v, codec=codec, keep=keep)
    lost = {"key": 0, "value": 0}
    for row in range(2):
        for role, x, got in zip(ROLES, (k, v), cache.dense(row)):
            x = x[row : row + 1, :, :STORED]
            order = channel_order(x[:, :, :128], keep or 32)
            pruned = two_of_four(x, role, keep, limit=keep is not None, order=order)
            exact = oracle.to_dtype(oracle.narrow(x, None, codec, 64, pruned=pruned), torch.float16)
            assert oracle.same_bits(got[None, :, :STORED], exact + 0.0)
            lost[role] += int(((oracle.prune(x, keep or 32) != 0) & (pruned == 0)).sum())
    statistics = cache.statistics()
    assert {role: statistics[f"{role}_values_constrained"] for role in ROLES} == lost
    assert statistics["key_tiles_trimmed"] == statistics["value_tiles_trimmed"] == 0
    fork = cache.fork(0)
    before = [x[:, :100].clone() for x in cache.dense(0)]
    cache.crop(100)
    for row in (0, fork):
        assert all(oracle.same_bits(x[:, :100], y) for x, y in zip(cache.dense(row), before))


X = torch.zeros(1, 2, 40, 64, dtype=torch.float16)
GROWS = {"max_batch": 1, "kv_heads": 1, "head_dim": 64, "capacity": 100, "device": "cpu"}
BAD = [
    ("keep must be None with method '2of4'", lambda: ck.prune(X, keep=32, method="2of4")),
    ("sparsity must be None with method '2of4'", lambda: ck.prune(X, sparsity=0.5, method="2of4")),
    ("keep must be None with method '2of4'", lambda: ck.compress(X, role="key", keep=3, method="2of4")),
    ("value_keep must be None", lambda: ck.compress_kv(X, X, value_keep=3, method="2of4")),
    ("keep must leave at most D / 2 = 32", lambda: ck.prune(X, keep=33, method="magnitude-2of4")),
    ("sparsity must leave at most D / 2", lambda: ck.compress(X, role="key", sparsity=0.4, method="magnitude-2of4")),
    ("key_keep must leave at most", lambda: ck.compress_kv(X, X, keep=8, key_keep=40, method="magnitude-2of4")),
    ("sparsity must be None", lambda: ck.KVCache(**GROWS, sparsity=0.5, key_rule="2of4", value_rule="2of4")),
    ("value_keep must leave at most", lambda: ck.KVCache(**GROWS, value_keep=40, value_rule="magnitude-2of4")),
    ("role must", lambda: ck.prune(X, method="2of4", role="keys")),
]


@pytest.mark.parametrize("message, call", BAD, ids=range(len(BAD)))
def test_errors(message, call):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
