"""The tile format of exactly two of four: what is stored, read, checked and multiplied."""

from __future__ import annotations

import json
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels._storage.tile_reader import decompress as decompress_reference
from cute_kernels._storage.tile_reader import operand
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle
from tests.support.two_of_four import check_attention, two_of_four, with_word

ROLES = ("key", "value")
CODECS = (None, *oracle.NARROW)
SHAPES = [(2, 2, 130, 128), (1, 3, 64, 64), (1, 1, 1, 8), (1, 2, 70, 72), (1, 1, 66, 256)]


def exact(x: torch.Tensor, role: str, codec: str | None) -> torch.Tensor:
    pruned = two_of_four(x, role)
    return pruned if codec is None else oracle.narrow(x, None, codec, pruned=pruned)


def cache(role: str = "key", codec: str | None = None, shape=(1, 2, 150, 64), dtype=torch.float16) -> ck.SparseKV:
    return ck.compress(oracle.gaussian(*shape, dtype=dtype), role=role, method="2of4", codec=codec)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.double().nan_to_num(nan=1e9), expected.double().nan_to_num(nan=1e9))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_what_is_stored(shape, codec, role, dtype, device, rng):
    x = rng.choice([oracle.gaussian, oracle.lognormal_channels])(*shape, dtype=dtype).clamp(-6e4, 6e4)
    kv = ck.compress(x.to(device), role=role, method="2of4", codec=codec)
    kv.validate()
    expected = exact(x, role, codec)
    state = kv.to("cpu").state_dict()
    assert same(oracle.decode(state), expected)
    assert same(operand(storage_of(kv, "kv")).cpu(), expected)
    assert oracle.same_bits(ck.decompress(kv), oracle.to_dtype(expected, dtype) if codec else expected)
    assert oracle.same_bits(ck.decompress(kv), decompress_reference(storage_of(kv, "kv")))
    assert (kv.tile_format, kv.nnz) == ("two_of_four", int((expected != 0).sum()))
    rows = torch.diff(kv.row_offsets.cpu())
    assert bool((rows == kv.max_tile_rows).all())
    for again in (ck.SparseKV.from_state_dict(kv.state_dict()), pickle.loads(pickle.dumps(kv)), kv.to("cpu")):
        assert again.tile_format == "two_of_four" and oracle.same_bits(ck.decompress(again), ck.decompress(kv))
    assert json.loads(json.dumps(state["metadata"]))["tile_format"] == "two_of_four"


@pytest.mark.parametrize("codec", CODECS)
def test_size(codec):
    """Bits an element without a scale or an order: one of metadata and half of a value's."""
    width = {None: 16, "fp8": 8, "int8": 8, "int4": 4}[codec]
    kv = cache(codec=codec, shape=(1, 1, 4096, 128))
    assert 1 + width / 2 < kv.bits_per_element < 1 + width / 2 + (0.12 if codec is None else 0.25)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_every_bit_pattern(dtype, role, device, rng):
    x = oracle.random_bits(1, 2, 100, 64, dtype=dtype)
    kv = ck.compress(x.to(device), role=role, method="2of4")
    assert oracle.same_bits(ck.decompress(kv), two_of_four(x, role))
    kv.validate()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(0, 2, 10, 64), (1, 2, 0, 64)])
def test_empty(shape, codec, device):
    keys, values = ck.compress_kv(
        *(torch.zeros(shape, dtype=torch.float16, device=device),) * 2, method="2of4", codec=codec
    )
    for kv in (keys, values):
        kv.validate()
        assert ck.decompress(kv).shape == shape and kv.nnz == 0
    q = torch.zeros(shape[0], 4, 1, 64, dtype=torch.float16, device=device)
    assert not ck.sparse_attention(q, keys, values).any()


@pytest.mark.parametrize("role", ROLES)
def test_promised_pattern(role, device, rng):
    """A cache with two of four in memory is stored as it is; one more nonzero is refused by name."""
    x = oracle.gaussian(1, 2, 100, 72)
    dim = 3 if role == "key" else 2
    keep = torch.rand(x.unflatten(dim, (-1, 4)).shape).argsort(dim + 1).flatten(dim, dim + 1) < 2
    x = torch.where(keep, x, 0).to(device)
    kv = ck.compress(x, role=role, tile_format="two_of_four")
    assert oracle.same_bits(ck.decompress(kv), x) and torch.equal(
        kv.channel_order[..., :72].cpu().int(), torch.arange(72).int().expand(1, 2, 72)
    )
    x[0, 1, :4, :4] = 1
    with pytest.raises(
        ValueError, match="k must have at most two nonzeros" if role == "key" else "v must have at most two"
    ):
        ck.compress(x, role=role, tile_format="two_of_four")
    assert oracle.same_bits(ck.decompress(ck.compress(x, role=role, tile_format="bitmap")), x + 0.0)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 200, 128), (1, 1, 65, 72), (2, 1, 129, 256)])
def test_products_and_attention(shape, dtype, codec, backend, rng):
    batch, kv_heads, tokens, head_dim = shape
    group, queries = rng.choice([1, 3, 4, 8]), rng.choice([1, 2, 5])
    k, v = (oracle.lognormal_channels(*shape, dtype=dtype).clamp(-50, 50) for _ in range(2))
    q = oracle.gaussian(batch, kv_heads * group, queries, head_dim, dtype=dtype)
    keys, values = ck.compress_kv(k.to(backend.device), v.to(backend.device), method="2of4", codec=codec)
    dense_k, dense_v = (exact(x, role, codec).double() for x, role in ((k, "key"), (v, "value")))
    tolerance = 2e-3 if dtype == torch.float16 else 1e-2
    to = {"backend": backend.name}
    logits = ck.sparse_qk(q.to(backend.device), keys, scale=0.1, **to)
    assert oracle.relative_error(logits, oracle.qk(q, dense_k, 0.1)) < (1e-3 if dtype == torch.float16 else 1e-2)
    p = torch.rand(batch, kv_heads * group, queries, tokens)
    out = ck.sparse_av(p.to(backend.device), values, **to)
    assert oracle.relative_error(out, oracle.av(p, dense_v)) < tolerance
    check_attention(backend, q, keys, values, dense_k, dense_v, tolerance, rng)


def test_formats_beside_each_other(rng):
    """Keys of exactly two of four and values under a bitmap, on backends that take both."""
    k, v = (oracle.gaussian(1, 2, 150, 64) for _ in range(2))
    keys, values = ck.compress_kv(k, v, value_keep=20, method=("2of4", "magnitude"))
    assert (keys.tile_format, values.tile_format) == ("two_of_four", "bitmap")
    q = oracle.gaussian(1, 4, 1, 64)
    expected, _ = oracle.attention(q, two_of_four(k, "key"), oracle.prune(v, 20), 0.125)
    for backend in ("cpu", "reference"):
        assert oracle.relative_error(ck.sparse_attention(q, keys, values, backend=backend), expected) < 2e-3


def test_validation(rng):
    exact_kv, narrow_kv = cache(), cache(codec="int4")
    for kv, row, value, message in (
        (exact_kv, 0, 0, "two of four in order"),
        (exact_kv, 0, -1, "two of four in order"),
        (exact_kv, 4, -(2**31), "without a sign"),
        (narrow_kv, 5, 0, "no code of codec 'int4'"),
        (narrow_kv, 4, 0, "the scale of a token"),
    ):
        with pytest.raises(ValueError, match=f"blocks: .*{message}"):
            with_word(kv, row, value)
    state = exact_kv.state_dict()
    for name, change, message in (
        ("blocks", state["blocks"][:-1].clone(), "row_offsets"),
        ("row_offsets", state["row_offsets"] // 2, "takes from 36 to 36 rows"),
    ):
        changed = {**state, name: change}
        with pytest.raises(ValueError, match=message):
            ck.SparseKV.from_state_dict(changed)
    for tile_format, version, message in (
        ("bitmap", 5, "row_offsets|bitmap"),
        ("two_of_four", 4, "must be one of bitmap"),
        ("two", 5, "must be one of bitmap, two_of_four"),
    ):
        changed = {**state, "metadata": {**state["metadata"], "tile_format": tile_format, "version": version}}
        with pytest.raises(ValueError, match=message):
            ck.SparseKV.from_state_dict(changed)
    last_tile = ck.compress(oracle.gaussian(1, 1, 65, 64), role="key", method="2of4")  # one token
    rows = last_tile.max_tile_rows
    with pytest.raises(ValueError, match="token or channel that the cache does not have"):
        with_word(last_tile, rows + 4 + 1, 0x3C003C00)  # row 8 of A


def test_what_a_codec_cannot_store(device, rng):
    for number, refused in ((float("inf"), tuple(oracle.NARROW)), (float("nan"), ("int8", "int4"))):
        x = oracle.gaussian(1, 2, 150, 64)
        x[0, rng.randrange(2), rng.randrange(150), rng.randrange(64)] = number
        for codec in refused:
            with pytest.raises(ValueError, match=f"holds 1 values that are infinite.* codec '{codec}' cannot"):
                ck.compress(x.to(device), role="key", method="2of4", codec=codec)


X = torch.zeros(1, 2, 40, 64, dtype=torch.float16)
BAD = [
    (TypeError, "tile_format must be a str", lambda: ck.compress(X, role="key", tile_format=3)),
    (
        ValueError,
        "tile_format must be one of 'bitmap', 'two_of_four'",
        lambda: ck.compress(X, role="key", tile_format="x"),
    ),
    (ValueError, "'magnitude' that keeps 3", lambda: ck.compress(X, role="key", keep=3, tile_format="two_of_four")),
    (ValueError, "'random'", lambda: ck.compress_kv(X, X, keep=3, method="random", tile_format="two_of_four")),
]


@pytest.mark.parametrize("error, message, call", BAD, ids=range(len(BAD)))
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()
