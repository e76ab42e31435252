"""The tile format of at most two of four: what is stored, read, checked and multiplied."""

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

FORMAT = "two_of_four_bitmap"
ROLES = ("key", "value")
CODECS = (None, *oracle.NARROW)
SHAPES = [(2, 2, 130, 128), (1, 3, 64, 64), (1, 1, 1, 8), (1, 2, 70, 72), (1, 1, 66, 256)]


def exact(x: torch.Tensor, role: str, keep: int, codec: str | None) -> torch.Tensor:
    pruned = two_of_four(x, role, keep, limit=True)
    return pruned if codec is None else oracle.narrow(x, None, codec, pruned=pruned)


def compressed(x: torch.Tensor, role: str, keep: int, codec: str | None = None) -> ck.SparseKV:
    return ck.compress(x, role=role, keep=keep, method="magnitude-2of4", codec=codec, tile_format=FORMAT)


def cache(role: str = "key", codec: str | None = None, shape=(1, 2, 150, 64), keep: int = 20) -> ck.SparseKV:
    return compressed(oracle.gaussian(*shape), role, keep, codec)


def skip_16_bits_on_gpus(codec: str | None, device: torch.device) -> None:
    if codec is None and device.type == "cuda":
        pytest.skip("no kernels of 16 bits")


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.double().nan_to_num(nan=1e9), expected.double().nan_to_num(nan=1e9))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_what_is_stored(shape, codec, role, dtype, device, rng):
    skip_16_bits_on_gpus(codec, device)
    x = rng.choice([oracle.gaussian, oracle.lognormal_channels])(*shape, dtype=dtype).clamp(-6e4, 6e4)
    keep = rng.randint(1, shape[3] // 2)
    on_device = compressed(x.to(device), role, keep, codec)
    on_device.validate()
    kv = on_device.to("cpu")
    assert oracle.same_bits(ck.decompress(on_device), ck.decompress(kv))
    expected, state = exact(x, role, keep, codec), kv.state_dict()
    assert same(oracle.decode(state), expected)
    assert same(operand(storage_of(kv, "kv")), expected)
    assert oracle.same_bits(ck.decompress(kv), oracle.to_dtype(expected, dtype) if codec else expected)
    assert oracle.same_bits(ck.decompress(kv), decompress_reference(storage_of(kv, "kv")))
    bitmap = ck.compress(x, role=role, keep=keep, method="magnitude-2of4", codec=codec, tile_format="bitmap")
    assert (kv.tile_format, kv.nnz) == (FORMAT, bitmap.nnz)
    for again in (ck.SparseKV.from_state_dict(state), pickle.loads(pickle.dumps(kv))):
        assert (again.tile_format, again.nnz) == (FORMAT, kv.nnz)
        assert oracle.same_bits(ck.decompress(again), ck.decompress(kv))
    assert json.loads(json.dumps(state["metadata"]))["tile_format"] == FORMAT


@pytest.mark.gpu
@pytest.mark.parametrize("codec", oracle.NARROW)
@pytest.mark.parametrize("kind", ["gaussian", "ties", "zeros", "few"])
def test_gpus_write_the_same_bytes(kind, codec, rng):
    """As the CPU, in pairs and one by one, of what has the pattern and what has not."""
    shape = rng.choice([(2, 2, 200, 128), (1, 3, 130, 64), (1, 1, 140, 256), (1, 2, 77, 72), (3, 1, 64, 200)])
    k, v = (oracle.lognormal_channels(*shape).clamp(-6e4, 6e4) for _ in range(2))
    if kind == "ties":
        k, v = (x.clamp(-2, 2).round() for x in (k, v))
    elif kind == "zeros":
        k, v = (torch.where(torch.rand(shape) < 0.9, 0, x) for x in (k, v))
    elif kind == "few":
        k[:, :, ::3], v[..., ::3] = 0, -0.0
    keep = rng.randint(1, shape[3] // 2)
    options = {"method": "magnitude-2of4", "codec": codec, "tile_format": FORMAT}
    candidates = ck.prune(v, method="magnitude-2of4", role="value")

    def all_kinds(on: str) -> list[ck.SparseKV]:
        pair = ck.compress_kv(k.to(on), v.to(on), key_keep=keep, value_keep=1 + keep // 2, **options)
        promised = ck.compress(candidates.to(on), role="value", codec=codec, tile_format=FORMAT)
        return [*pair, compressed(k.to(on), "key", keep, codec), compressed(v.to(on), "value", keep, codec), promised]

    for of_cpu, of_gpu in zip(all_kinds("cpu"), all_kinds("cuda")):
        expected, state = of_cpu.state_dict(), of_gpu.state_dict()
        assert state.pop("metadata") == expected.pop("metadata") and of_gpu.nnz == of_cpu.nnz
        for name, tensor in expected.items():
            assert torch.equal(state[name].cpu(), tensor), name


@pytest.mark.parametrize("codec, keep, most", [("fp8", 38, 4.5), ("fp8", 25, 3.7), ("int4", 38, 3.15), (None, 38, 7.5)])
def test_size(codec, keep, most):
    """Bits an element, of metadata, bitmap, values, padding, scales and orders."""
    k, v = (oracle.gaussian(1, 1, 8192, 128) for _ in range(2))
    for kv in ck.compress_kv(k, v, keep=keep, method="magnitude-2of4", codec=codec, tile_format=FORMAT):
        width = {None: 16, "fp8": 8, "int4": 4}[codec]
        assert 1.5 + width * keep / 128 < kv.bits_per_element < most


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_every_bit_pattern(dtype, role, rng):
    x, keep = oracle.random_bits(1, 2, 100, 64, dtype=dtype), rng.randint(1, 32)
    kv = compressed(x, role, keep)
    assert oracle.same_bits(ck.decompress(kv), two_of_four(x, role, keep, limit=True))
    kv.validate()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(0, 2, 10, 64), (1, 2, 0, 64)])
def test_empty(shape, codec, device):
    skip_16_bits_on_gpus(codec, device)
    x = torch.zeros(shape, dtype=torch.float16, device=device)
    keys, values = ck.compress_kv(x, x, keep=9, method="magnitude-2of4", codec=codec, tile_format=FORMAT)
    for kv in (keys, values):
        kv.validate()
        assert ck.decompress(kv).shape == shape and kv.nnz == 0 and kv.tile_format == FORMAT
    q = torch.zeros(shape[0], 4, 1, 64, dtype=torch.float16, device=device)
    assert not ck.sparse_attention(q, keys, values).any()


@pytest.mark.parametrize("codec", CODECS)
def test_zeros(codec, device):
    """Tiles without a nonzero have no value rows."""
    skip_16_bits_on_gpus(codec, device)
    kv = compressed(torch.zeros(1, 1, 130, 128, dtype=torch.float16, device=device), "value", 9, codec)
    kv.validate()
    assert kv.nnz == 0 and kv.max_tile_rows == 12 + (codec is not None) and not ck.decompress(kv).any()


@pytest.mark.parametrize("role", ROLES)
def test_promised_pattern(role, device, rng):
    """A cache with at most two of four in memory is stored as it is; one more nonzero is refused by name."""
    x = oracle.gaussian(1, 2, 100, 72)
    dim = 3 if role == "key" else 2
    keep = torch.rand(x.unflatten(dim, (-1, 4)).shape).argsort(dim + 1).flatten(dim, dim + 1) < 2
    x = torch.where(keep & (torch.rand(x.shape) < 0.7), x, 0).to(device)
    codec = None if device.type == "cpu" else "fp8"
    kv = ck.compress(x, role=role, tile_format=FORMAT, codec=codec)
    assert oracle.same_bits(ck.decompress(kv), x) if codec is None else kv.nnz == int((x != 0).sum())
    kv.validate()
    x[0, 1, :4, :4] = 1
    with pytest.raises(ValueError, match=f"{role[0]} must have at most two nonzeros .* '{FORMAT}'"):
        ck.compress(x, role=role, tile_format=FORMAT, codec=codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 200, 128), (1, 1, 65, 72), (2, 1, 129, 256), (1, 2, 300, 64)])
def test_products_and_attention(shape, dtype, codec, backend, rng):
    batch, kv_heads, tokens, head_dim = shape
    group, queries = rng.choice([1, 3, 4, 8]), rng.choice([1, 2, 5])
    keep = rng.randint(1, head_dim // 2)
    k, v = (oracle.lognormal_channels(*shape, dtype=dtype).clamp(-50, 50) for _ in range(2))
    q = oracle.gaussian(batch, kv_heads * group, queries, head_dim, dtype=dtype)
    if rng.random() < 0.5:  # else they have orders of their own, be these alike
        pair = ck.compress_kv(k, v, keep=keep, method="magnitude-2of4", codec=codec, tile_format=FORMAT)
    else:
        pair = compressed(k, "key", keep, codec), compressed(v, "value", keep, codec)
    keys, values = (kv.to(backend.device) for kv in pair)
    dense_k, dense_v = (exact(x, role, keep, codec).double() for x, role in ((k, "key"), (v, "value")))
    tolerance = 2e-3 if dtype == torch.float16 else 1e-2
    to = {"backend": backend.name}
    p = torch.rand(batch, kv_heads * group, queries, tokens)
    if backend.name in ("reference", "cpu"):
        logits = ck.sparse_qk(q.to(backend.device), keys, scale=0.1, **to)
        assert oracle.relative_error(logits, oracle.qk(q, dense_k, 0.1)) < (1e-3 if dtype == torch.float16 else 1e-2)
        out = ck.sparse_av(p.to(backend.device), values, **to)
        assert oracle.relative_error(out, oracle.av(p, dense_v)) < tolerance
    else:
        with pytest.raises(RuntimeError, match=f"no CUDA kernels of products for the tile format {FORMAT}"):
            ck.sparse_qk(q.to(backend.device), keys, **to)
        if codec is None:
            with pytest.raises(RuntimeError, match=f"no CUDA kernels for codec .* in the tile format {FORMAT}"):
                ck.sparse_attention(q.to(backend.device), keys, values, **to)
            return
    check_attention(backend, q, keys, values, dense_k, dense_v, tolerance, rng)


@pytest.mark.parametrize("codec", [None, "fp8"])
def test_masked_values_that_are_not_finite(codec, backend, rng):
    """Behind a sequence's end they do not count."""
    if codec is None and backend.name not in ("reference", "cpu"):
        pytest.skip("no kernels of 16 bits")
    k, v = (oracle.gaussian(1, 2, 100, 128) for _ in range(2))
    length = rng.randint(65, 95)
    end = slice(length + (-length) % 4, None)
    v[0, :, end, ::5] = float("nan")
    if codec is None:
        v[0, :, end, 1::5] = float("inf")
    keys, values = ck.compress_kv(k, v, keep=30, method="magnitude-2of4", codec=codec, tile_format=FORMAT)
    q = oracle.gaussian(1, 4, 1, 128)
    out = ck.sparse_attention(
        q.to(backend.device),
        keys.to(backend.device),
        values.to(backend.device),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=backend.device),
        backend=backend.name,
    )
    dense = [ck.decompress(kv)[:, :, :length] for kv in (keys, values)]
    expected, _ = oracle.attention(q, *dense, 128**-0.5)
    assert oracle.relative_error(out, expected) < 4e-3


def test_formats_beside_each_other(rng):
    """Keys of at most two of four and values of other formats, on backends that take both."""
    k, v = (oracle.gaussian(1, 2, 150, 64) for _ in range(2))
    keys, q = compressed(k, "key", 20), oracle.gaussian(1, 4, 1, 64)
    for values, pruned in (
        (ck.compress(v, role="value", keep=20), oracle.prune(v, 20)),
        (ck.compress(v, role="value", method="2of4"), two_of_four(v, "value")),
    ):
        expected, _ = oracle.attention(q, two_of_four(k, "key", 20, limit=True), pruned, 0.125)
        for backend in ("cpu", "reference"):
            assert oracle.relative_error(ck.sparse_attention(q, keys, values, backend=backend), expected) < 2e-3


def test_validation(rng):
    """Of head_dim 64: 4 rows of metadata, 2 of the bitmap, one of scales, values."""
    exact_kv, narrow_kv = cache(), cache(codec="int4")
    last = int(exact_kv.row_offsets[1]) - 1
    for kv, row, value, message in (
        (exact_kv, 0, 0, "two of four in order"),
        (exact_kv, 3, -1, "two of four in order"),
        (exact_kv, 4, -1, "more bits than its tile holds|value that is zero"),
        (exact_kv, 5, 0, "followed by zeros"),
        (exact_kv, 6, -(2**31), "value that is zero"),
        (exact_kv, last, -1, "followed by zeros"),
        (narrow_kv, 6, 0, "the scale of a token"),
        (narrow_kv, 7, 0, "no code of codec 'int4'"),
        (narrow_kv, 4, 0, "followed by zeros"),
    ):
        with pytest.raises(ValueError, match=f"blocks: .*({message})"):
            with_word(kv, row, value)
    state = exact_kv.state_dict()
    for name, change, message in (
        ("blocks", state["blocks"][:-1].clone(), "row_offsets"),
        ("row_offsets", state["row_offsets"] * 0, "row_offsets: a tile of head dim 64 takes from 6 to 38 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            ck.SparseKV.from_state_dict({**state, name: change})
    for tile_format, version in (("bitmap", 5), ("two_of_four", 5), (FORMAT, 4)):
        changed = {**state, "metadata": {**state["metadata"], "tile_format": tile_format, "version": version}}
        with pytest.raises(ValueError, match=r"blocks|row_offsets|metadata: tile_format"):
            ck.SparseKV.from_state_dict(changed)
    last_tile = compressed(oracle.gaussian(1, 1, 65, 64), "key", 20)  # one token
    row = int(last_tile.row_offsets[1]) + 4
    with pytest.raises(ValueError, match=r"more bits|token or channel that the cache does not have"):
        with_word(last_tile, row, -1)


def test_what_a_codec_cannot_store(device, rng):
    for number, refused in ((float("inf"), tuple(oracle.NARROW)), (float("nan"), ("int8", "int4"))):
        x = oracle.gaussian(1, 2, 150, 64)
        x[0, rng.randrange(2), rng.randrange(150), rng.randrange(64)] = number
        for codec in refused:
            with pytest.raises(ValueError, match=f"holds 1 values that are infinite.* codec '{codec}' cannot"):
                compressed(x.to(device), "key", 20, codec)


X = torch.zeros(1, 2, 40, 64, dtype=torch.float16)
BAD = [
    ("'magnitude' that keeps 3", lambda: ck.compress(X, role="key", keep=3, tile_format=FORMAT)),
    ("goes with method 'magnitude-2of4'", lambda: ck.compress(X, role="key", method="2of4", tile_format=FORMAT)),
    ("'random'", lambda: ck.compress_kv(X, X, keep=3, method="random", tile_format=FORMAT)),
    (
        "'bitmap' or None with out",
        lambda: ck.compress(
            X,
            role="key",
            keep=3,
            method="magnitude-2of4",
            tile_format=FORMAT,
            out=ck.SparseKV.preallocate(X.shape, X.dtype, role="key", device="cpu"),
        ),
    ),
]


@pytest.mark.parametrize("message, call", BAD, ids=range(len(BAD)))
def test_errors(message, call):
    with pytest.raises(ValueError, match=message):
        call()
