"""Codecs that round: what they store and give back, what multiplies with it, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import cute_kernels as ck
from cute_kernels._runtime.extension import codecs_of
from cute_kernels._storage.tile_reader import decompress as decompress_reference
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle
from tests.support.oracle import e4m3

ROLES = ("key", "value")
ON_THE_CPU = ("reference", "cpu")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """(1, 2, 512, 64) of all bit patterns, in an order that mixes magnitudes."""
    patterns = torch.randperm(1 << 16).to(torch.int32).to(torch.int16)
    return patterns.view(1, 2, 512, 64).view(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, NaN to NaN, and every zero +0."""
    assert not (actual.view(torch.int16) == torch.iinfo(torch.int16).min).any(), "-0.0"
    return torch.equal(actual.double().nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


def caches(dtype=torch.float16, keep=20, shape=(2, 2, 150, 80), **codecs) -> tuple[ck.SparseKV, ck.SparseKV]:
    k, v = (oracle.gaussian(*shape, dtype=dtype, scale=3.0) for _ in range(2))
    return ck.compress_kv(k, v, keep=keep, **codecs)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_the_oracle_is_torchs_own_rounding(dtype, rng):
    x = every_value(dtype)
    bounded = x.float().clamp(-448, 448)  # torch's conversion does not saturate
    assert same(bounded.to(torch.float8_e4m3fn).to(dtype) + 0.0, e4m3(x))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_every_value_is_rounded(dtype, role, rng):
    x = every_value(dtype)
    kv = ck.compress(x, role=role, codec="e4m3")
    expected = e4m3(x)
    assert same(ck.decompress(kv), expected) and same(decompress_reference(storage_of(kv, "kv")), expected)
    assert kv.nnz == int((expected != 0).sum())
    kv.validate()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 150, 80), (1, 3, 64, 64), (1, 1, 1, 8), (2, 1, 200, 128), (1, 1, 70, 256)])
def test_what_is_stored_is_the_pruned_cache_rounded(shape, dtype, role, rng):
    """What is kept does not depend on the codec: pruning is by the exact magnitudes."""
    x = oracle.gaussian(*shape, dtype=dtype, scale=rng.choice([1e-2, 1.0, 300.0]))
    keep = rng.choice([None, 1, shape[3] // 3 or 1, shape[3]])
    kv, whole = (ck.compress(x, role=role, keep=keep, codec=codec) for codec in ("e4m3", None))
    assert same(ck.decompress(kv), e4m3(oracle.prune(x, keep)))
    assert oracle.same_bits(ck.decompress(kv), decompress_reference(storage_of(kv, "kv")))
    assert (kv.dtype, kv.codec, kv.tile_format) == (dtype, "e4m3", "bitmap") and "codec=e4m3" in repr(kv)
    assert kv.nbytes <= whole.nbytes and kv.max_tile_rows <= whole.max_tile_rows
    kv.validate()


def test_it_takes_less_memory(rng):
    small, whole = (caches(keep=80, codec=codec)[0].bits_per_element for codec in ("e4m3", None))
    assert small < 0.65 * whole


@pytest.mark.parametrize("rule", ["channel-magnitude", "thinv", "random"])
def test_other_rules(rule, rng):
    x = oracle.gaussian(2, 2, 150, 80)
    pruned = ck.prune(x, keep=20, method=rule, role="value")
    kv = ck.compress(x, role="value", keep=20, method=rule, codec="e4m3")
    assert same(ck.decompress(kv), e4m3(pruned))


def test_empty_caches(rng):
    for shape in ((0, 2, 10, 64), (2, 2, 0, 64)):
        kv = ck.compress(torch.zeros(shape, dtype=torch.float16), role="key", codec="e4m3")
        assert kv.codec == "e4m3" and ck.decompress(kv).shape == shape and kv.nnz == 0


def test_a_codec_for_each_of_a_pair(rng):
    k, v = (oracle.gaussian(2, 2, 150, 80) for _ in range(2))
    for options, expected in (
        ({"codec": "e4m3"}, ("e4m3", "e4m3")),
        ({"key_codec": "e4m3"}, ("e4m3", "fp16")),
        ({"value_codec": "e4m3", "codec": "fp16"}, ("fp16", "e4m3")),
        ({}, ("fp16", "fp16")),
    ):
        pair = ck.compress_kv(k, v, keep=20, **options)
        assert tuple(kv.codec for kv in pair) == expected
        for kv, x in zip(pair, (k, v)):
            pruned = oracle.prune(x, 20)
            assert same(ck.decompress(kv), e4m3(pruned) if kv.codec == "e4m3" else pruned.double())
            kv.validate()
        assert torch.equal(pair[0].token_order, pair[1].token_order)


@pytest.mark.parametrize("name", ON_THE_CPU)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("codecs", [("e4m3", "e4m3"), ("e4m3", None), (None, "e4m3")])
def test_products_and_attention(codecs, dtype, name, rng):
    shape = (2, 2, rng.choice([1, 64, 150, 333]), rng.choice([64, 80, 128, 256]))
    k, v = caches(dtype, keep=shape[3] // 3, shape=shape, key_codec=codecs[0], value_codec=codecs[1])
    keys, values = ck.decompress(k), ck.decompress(v)
    q = oracle.gaussian(2, 2 * rng.choice([1, 4]), rng.choice([1, 3, 20]), shape[3], dtype=dtype)
    logits = ck.sparse_qk(q, k, scale=0.2, backend=name)
    assert oracle.relative_error(logits, oracle.qk(q, keys, 0.2)) <= 1e-3
    p = torch.rand(*q.shape[:3], shape[2])
    assert oracle.relative_error(ck.sparse_av(p, v, backend=name), oracle.av(p, values)) <= TOLERANCE[dtype]
    window = tuple(oracle.gaussian(2, 2, 9, shape[3], dtype=dtype) for _ in range(2))
    lengths = torch.tensor([shape[2], shape[2] // 2], dtype=torch.int32)
    for _ in range(2):  # the second is like the one before
        out, lse = ck.sparse_attention(
            q, k, v, scale=0.1, window=window, seq_lens=lengths, return_lse=True, backend=name
        )
        expected, expected_lse = oracle.attention(q, keys, values, 0.1, window, lengths.tolist())
        assert oracle.relative_error(out, expected) <= TOLERANCE[dtype]
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-3)


def test_operations_that_compile(rng):
    torch._dynamo.reset()
    k, v = caches(codec="e4m3")
    q = oracle.gaussian(2, 4, 1, 80)
    whole = torch.compile(lambda q: ck.sparse_attention(q, k, v), backend="aot_eager", fullgraph=True)
    assert oracle.same_bits(whole(q), ck.sparse_attention(q, k, v))
    logits = torch.compile(lambda q: ck.sparse_qk(q, k), backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(q), ck.sparse_qk(q, k))


@pytest.mark.parametrize("role", ROLES)
def test_memory_that_was_preallocated(role, rng):
    shape = (2, 2, 150, 80)
    out = ck.SparseKV.preallocate(shape, role=role, keep=20, codec="e4m3", device="cpu")
    assert out.codec == "e4m3" and not ck.decompress(out).any()
    out.validate()
    for codec in (None, "e4m3"):
        x = oracle.gaussian(*shape)
        filled = ck.compress(x, role=role, keep=rng.choice([3, 20]), codec=codec, out=out)
        assert filled is out
        fresh = ck.compress(ck.decompress(out), role=role, codec="e4m3")
        assert torch.equal(out.blocks, fresh.blocks) and out.nnz == fresh.nnz
        out.validate()
        out.to_exact_size().validate()
    dense = every_value(torch.float16)
    out = ck.SparseKV.preallocate(dense.shape, role=role, codec="e4m3", device="cpu")
    assert same(ck.decompress(ck.compress(dense, role=role, out=out)), e4m3(dense))


def test_saved_and_read(rng):
    kv, _ = caches(codec="e4m3")
    state = kv.state_dict()
    assert state["metadata"]["version"] == 4
    assert (state["metadata"]["codec"], state["metadata"]["tile_format"]) == ("e4m3", "bitmap")
    state["metadata"] = json.loads(json.dumps(state["metadata"]))
    for other in (ck.SparseKV.from_state_dict(state), copy.deepcopy(kv)):
        assert other.codec == "e4m3" and oracle.same_bits(ck.decompress(other), ck.decompress(kv))


@pytest.mark.parametrize("dtype, codec", [(torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_a_file_of_version_3(dtype, codec, rng):
    """Which had neither codec nor tile format."""
    kv, _ = caches(dtype)
    state = kv.state_dict()
    state["metadata"]["version"] = 3
    with pytest.raises(ValueError, match="codec"):
        ck.SparseKV.from_state_dict(state)
    del state["metadata"]["codec"], state["metadata"]["tile_format"]
    other = ck.SparseKV.from_state_dict(state)
    assert other.codec == codec and oracle.same_bits(ck.decompress(other), ck.decompress(kv))


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"codec": "int3"}, "codec must be one of"),
        ({"codec": 2}, "codec must be one of"),
        ({"codec": "bf16"}, "codec 'bf16' does not store float16"),
        ({"codec": "fp16"}, "blocks|row_offsets"),
        ({"tile_format": "2of4"}, "tile_format must be one of bitmap"),
        ({"tile_format": None}, "tile_format must be one of bitmap"),
        ({"version": 2}, "version must be from 3 to 4"),
        ({"version": "4"}, "version must be from 3 to 4"),
    ],
)
def test_metadata_that_is_wrong(entries, message, rng):
    state = caches(codec="e4m3")[0].state_dict()
    state["metadata"].update(entries)
    with pytest.raises(ValueError, match=message):
        ck.SparseKV.from_state_dict(state)


def damaged(change) -> None:
    """Reads a cache of one tile, 64 x 64 without a zero but one, whose blocks `change` was applied to, as bytes."""
    x = torch.ones(1, 1, 64, 64, dtype=torch.float16)
    x[0, 0, 0, 0] = 0
    state = ck.compress(x, role="key", codec="e4m3").state_dict()
    state["blocks"] = state["blocks"].clone()
    change(state["blocks"].view(torch.uint8).view(-1, 32, 4))
    ck.SparseKV.from_state_dict(state)


def test_blocks_that_are_wrong(rng):
    damaged(lambda blocks: None)

    def set_values(number):
        def change(blocks):
            blocks[-2, rng.randrange(32), rng.randrange(4)] = number

        return change

    damaged(set_values(0x7F))  # a NaN is a value
    for zero in (0x00, 0x80):
        with pytest.raises(ValueError, match="a bit for a value that is zero"):
            damaged(set_values(zero))

    def fill_behind_the_last(blocks):
        """The stream with one element less ends with an unused value."""
        assert int((blocks[-1] == 0).sum()) == 1
        blocks[-1][blocks[-1] == 0] = 1

    with pytest.raises(ValueError, match="values must be followed by zeros"):
        damaged(fill_behind_the_last)

    def clear_a_bit(blocks):
        words = blocks.view(torch.int32)
        words[0, rng.randrange(32)] &= ~(1 << rng.randrange(32))

    with pytest.raises(ValueError, match=r"values must be followed by zeros|value that is zero|nnz"):
        damaged(clear_a_bit)


@pytest.mark.parametrize(
    "codec, error, message",
    [
        ("int3", ValueError, "codec must be one of 'fp16', 'bf16', 'e4m3' or None, got 'int3'"),
        (torch.float16, TypeError, "codec must be a str or None"),
        ("bf16", ValueError, "codec must be one of 'fp16', 'e4m3' for float16, got 'bf16'"),
    ],
)
def test_codecs_that_are_refused(codec, error, message):
    x = torch.zeros(1, 1, 10, 64, dtype=torch.float16)
    with pytest.raises(error, match=message):
        ck.compress(x, role="key", codec=codec)
    with pytest.raises(error, match=message):
        ck.SparseKV.preallocate(x.shape, role="key", codec=codec, device="cpu")
    for name in ("codec", "key_codec", "value_codec"):
        with pytest.raises(error, match=f"{name.removesuffix('codec')}{message}"):
            ck.compress_kv(x, x, **{name: codec})


def test_memory_for_another_codec(rng):
    x = oracle.gaussian(1, 1, 10, 64)
    for made_for, asked in (("e4m3", "fp16"), ("fp16", "e4m3")):
        out = ck.SparseKV.preallocate(x.shape, role="key", codec=made_for, device="cpu")
        with pytest.raises(ValueError, match=f"codec must be '{made_for}', for which out"):
            ck.compress(x, role="key", codec=asked, out=out)
        assert not ck.decompress(out).any()


@pytest.mark.parametrize("name", ["codec", "key_codec", "value_codec"])
def test_caches_that_grow_store_values_as_they_are(name):
    sizes = {"max_batch": 1, "kv_heads": 1, "head_dim": 64, "capacity": 100, "device": "cpu"}
    for dtype, own in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        ck.KVCache(**sizes, dtype=dtype, **{name: own})
        with pytest.raises(ValueError, match=rf"{name} 'e4m3' is for caches that compress makes.*codec '{own}'"):
            ck.KVCache(**sizes, dtype=dtype, **{name: "e4m3"})
    with pytest.raises(ValueError, match=f"{name} must be one of 'fp16', 'e4m3' for float16"):
        ck.KVCache(**sizes, **{name: "bf16"})


def test_codecs_of_dtypes():
    assert codecs_of(torch.float16) == ("fp16", "e4m3") and codecs_of(torch.bfloat16) == ("bf16", "e4m3")


@pytest.mark.gpu
def test_kernels_of_a_gpu_refuse_a_codec_that_they_do_not_have(rng):
    x, q = oracle.gaussian(1, 2, 100, 64, device="cuda"), oracle.gaussian(1, 2, 1, 64, device="cuda")
    with pytest.raises(RuntimeError, match="no kernels for codec 'e4m3' on cuda"):
        ck.compress(x, role="key", codec="e4m3")
    with pytest.raises(RuntimeError, match="no kernels for codec 'e4m3' on cuda"):
        ck.SparseKV.preallocate(x.shape, role="key", codec="e4m3")
    k, v = (kv.to("cuda") for kv in ck.compress_kv(x.cpu(), x.cpu(), keep=20, codec="e4m3"))
    k.validate()
    with pytest.raises(RuntimeError, match="no kernels for codec 'e4m3' on cuda"):
        ck.decompress(k)
    for call in (
        lambda **options: ck.sparse_qk(q, k, **options),
        lambda **options: ck.sparse_av(torch.rand(1, 2, 1, 100, device="cuda"), v, **options),
        lambda **options: ck.sparse_attention(q, k, v, **options),
    ):
        with pytest.raises(RuntimeError, match=r"backend 'sm.0' has no kernels for codec 'e4m3'"):
            call()
        call(backend="reference")
