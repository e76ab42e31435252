"""Codecs that round: what they store and give back, what multiplies with it, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

import cute_kernels as ck
from cute_kernels._runtime.extension import codecs_of
from cute_kernels._storage.tile_reader import decompress as decompress_reference
from cute_kernels._storage.tile_reader import operand
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle

ROLES = ("key", "value")
NARROW = tuple(oracle.NARROW)
ON_THE_CPU = ("reference", "cpu")
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal, NaN to NaN."""
    return torch.equal(actual.double().nan_to_num(nan=1e9), expected.double().nan_to_num(nan=1e9))


def check_stored(kv: ck.SparseKV, exact: torch.Tensor) -> None:
    """By the reference's reader, exactly, and by decompression, rounded once."""
    assert torch.equal(operand(storage_of(kv, "kv")).double().nan_to_num(1e9), exact.nan_to_num(1e9))
    assert same(ck.decompress(kv), oracle.to_dtype(exact, kv.dtype))
    assert oracle.same_bits(ck.decompress(kv), decompress_reference(storage_of(kv, "kv")))
    kv.validate()


def caches(dtype=torch.float16, keep=20, shape=(2, 2, 150, 80), **codecs) -> tuple[ck.SparseKV, ck.SparseKV]:
    k, v = (oracle.gaussian(*shape, dtype=dtype, scale=3.0) for _ in range(2))
    return ck.compress_kv(k, v, keep=keep, **codecs)


def test_the_oracle_is_torchs_own_rounding(rng):
    patterns = torch.randperm(1 << 16).to(torch.int32).to(torch.int16).view(torch.bfloat16).float()
    bounded = patterns.clamp(-448, 448)  # torch's conversion does not saturate
    assert same(bounded.to(torch.float8_e4m3fn).half() + 0.0, oracle.e4m3(patterns.double()))


@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_every_finite_value_is_rounded(dtype, role, codec, rng):
    """All magnitudes in one cache, from subnormal ones to the largest: scales at their bounds, saturation, zeros."""
    patterns = torch.randperm(1 << 16).to(torch.int32).to(torch.int16).view(1, 2, 512, 64)
    x = torch.where(patterns.view(dtype).isfinite(), patterns, 0).view(dtype)
    kv = ck.compress(x, role=role, codec=codec)
    check_stored(kv, oracle.narrow(x, None, codec))
    assert kv.nnz == oracle.nonzeros(x)  # what rounds to zero keeps its place


@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 2, 150, 80), (1, 3, 64, 64), (1, 1, 1, 8), (1, 1, 700, 128), (1, 1, 70, 256)])
def test_what_is_stored_is_the_pruned_cache_rounded(shape, dtype, role, codec, rng):
    """What is kept does not depend on the codec: pruning is by the exact magnitudes."""
    make = rng.choice([oracle.gaussian, oracle.lognormal_channels])
    x = (make(*shape, dtype=dtype) * rng.choice([1e-2, 1.0, 300.0])).clamp(-6e4, 6e4)
    keep = rng.choice([None, 1, shape[3] // 3 or 1, shape[3]])
    kv, whole = (ck.compress(x, role=role, keep=keep, codec=name) for name in (codec, None))
    exact = oracle.narrow(x, keep, codec)
    check_stored(kv, exact)
    if x.numel() < 1 << 16:
        assert torch.equal(oracle.decode(kv.state_dict()), exact)
    assert (kv.dtype, kv.codec, kv.tile_format) == (dtype, codec, "bitmap") and f"codec={codec}" in repr(kv)
    assert kv.nnz == whole.nnz and torch.equal(kv.token_order, whole.token_order)


@pytest.mark.parametrize("codec", NARROW)
def test_numbers_of_the_codec_are_stored_exactly(codec, rng):
    """Where the scales are 1: every channel's magnitudes are 1 but one token's, whose largest is the codec's. Halves
    are ties and go to the even number."""
    largest, rounded = oracle.NARROW[codec]
    x = torch.ones(1, 1, 600, 128, dtype=torch.float16)
    row = (torch.linspace(-largest, largest, 127, dtype=torch.float64) * 2).round() / 2
    x[0, 0, 599, 0], x[0, 0, 599, 1:] = largest, row.half()
    for role in ROLES:
        kv = ck.compress(x, role=role, codec=codec)
        assert bool((kv.channel_scale == 1).all())
        assert same(ck.decompress(kv)[0, 0, 599, 1:], rounded(row.half().double()))


@pytest.mark.parametrize("codec", NARROW)
def test_error_is_that_of_the_codec(codec, rng):
    """Relative to what is kept, on Gaussian data with channels of very different size."""
    x = oracle.lognormal_channels(1, 2, 1024, 128)
    pruned = ck.prune(x, keep=64)
    error = oracle.relative_error(ck.decompress(ck.compress(pruned, role="key", codec=codec)), pruned.double())
    assert error < {"fp8": 0.03, "int8": 0.01, "int4": 0.12}[codec]


@pytest.mark.parametrize("codec", NARROW)
def test_tokens_and_channels_of_zeros(codec, rng):
    x = oracle.gaussian(1, 2, 200, 64)
    x[:, :, 10:20] = 0
    x[:, :, :, 5] = 0
    x[:, :, 600:, 7] = 0
    x[:, 1] = 0
    check_stored(ck.compress(x, role="key", codec=codec), oracle.narrow(x, None, codec))


@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("shape", [(1, 2, 1, 64), (2, 2, 150, 80), (1, 1, 70, 256)])
def test_quiet_channels(shape, codec, rng, device):
    """Their scales are no less than 2^-10 of the largest of their head, whatever a head beside theirs has."""
    x = oracle.gaussian(*shape)
    quiet = rng.sample(range(shape[3]), shape[3] // 3)
    x[..., quiet] *= 2.0 ** -torch.randint(8, 16, (len(quiet),))
    x[:, -1] *= 2.0**-6
    kv = ck.compress(x.to(device), role=rng.choice(ROLES), codec=codec)
    check_stored(kv.to("cpu"), oracle.narrow(x, None, codec))
    scale = kv.channel_scale.double()[..., : shape[3]]
    assert bool((scale >= 2.0**-10 * scale.amax(-1, keepdim=True)).all())


def test_what_a_codec_cannot_store(rng):
    for number, refused in ((float("inf"), NARROW), (float("-inf"), NARROW), (float("nan"), ("int8", "int4"))):
        x = oracle.gaussian(1, 2, 150, 64)
        x[0, rng.randrange(2), rng.randrange(150), rng.randrange(64)] = number
        for codec in NARROW:
            out = ck.SparseKV.preallocate(x.shape, role="key", codec=codec, device="cpu")
            if codec not in refused:
                check_stored(ck.compress(x, role="key", codec=codec), oracle.narrow(x, None, codec))
                assert bool(ck.decompress(ck.compress(x, role="key", out=out)).isnan().any())
                continue
            for options in ({"codec": codec}, {"out": out}):
                with pytest.raises(ValueError, match=f"holds 1 values that are infinite.* codec '{codec}' cannot"):
                    ck.compress(x, role="key", **options)
            with pytest.raises(ValueError, match=f"v holds 1 values.* codec '{codec}'"):
                ck.compress_kv(torch.zeros_like(x), x, codec=codec)
            x_pruned = torch.where(x.isfinite(), x, 0.0)
            ck.compress(x_pruned, role="key", out=out)
            out.validate()
            before = ck.decompress(out)
            values = ck.SparseKV.preallocate(x.shape, role="value", codec=codec, device="cpu")
            with pytest.raises(ValueError, match="k holds 1 values"):
                ck.compress(2 * x, role="key", out=out)
            with pytest.raises(ValueError, match="v holds 1 values"):
                ck.compress_kv(2 * x_pruned, x, out=(out, values))
            assert same(ck.decompress(out), before)
            out.validate()


def test_it_takes_less_memory(rng):
    bits = {
        codec: caches(keep=40, shape=(2, 2, 512, 128), codec=codec)[0].bits_per_element for codec in (*NARROW, None)
    }
    assert max(bits["fp8"], bits["int8"]) < 0.68 * bits[None] and bits["int4"] < 0.72 * bits["int8"]


@pytest.mark.parametrize("rule", ["channel-magnitude", "thinv", "random"])
def test_other_rules(rule, rng):
    x = oracle.gaussian(2, 2, 150, 80)
    pruned = ck.prune(x, keep=20, method=rule, role="value")
    codec = rng.choice(NARROW)
    kv = ck.compress(x, role="value", keep=20, method=rule, codec=codec)
    check_stored(kv, oracle.narrow(pruned, None, codec))


def test_empty_caches(rng):
    for shape, codec in zip(((0, 2, 10, 64), (2, 2, 0, 64)), rng.sample(NARROW, 2)):
        kv = ck.compress(torch.zeros(shape, dtype=torch.float16), role="key", codec=codec)
        assert kv.codec == codec and ck.decompress(kv).shape == shape and kv.nnz == 0
        kv.validate()


def test_a_codec_for_each_of_a_pair(rng):
    k, v = (oracle.gaussian(2, 2, 150, 80) for _ in range(2))
    for options, expected in (
        ({"codec": "fp8"}, ("fp8", "fp8")),
        ({"key_codec": "fp8"}, ("fp8", "fp16")),
        ({"key_codec": "int8", "value_codec": "int4"}, ("int8", "int4")),
        ({"value_codec": "int4", "codec": "fp16"}, ("fp16", "int4")),
        ({}, ("fp16", "fp16")),
    ):
        pair = ck.compress_kv(k, v, keep=20, **options)
        assert tuple(kv.codec for kv in pair) == expected
        for kv, x in zip(pair, (k, v)):
            pruned = oracle.prune(x, 20)
            if kv.codec == "fp16":
                assert same(ck.decompress(kv), pruned.double())
            else:
                check_stored(kv, oracle.narrow(x, 20, kv.codec))
        assert torch.equal(pair[0].token_order, pair[1].token_order)


@pytest.mark.parametrize("name", ON_THE_CPU)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("codecs", [("fp8", "fp8"), ("int8", "int8"), ("int4", "int4"), ("fp8", None), (None, "int4")])
def test_products_and_attention(codecs, dtype, name, rng):
    shape = (2, 2, rng.choice([1, 64, 150, 333]), rng.choice([64, 80, 128, 256]))
    k, v = caches(dtype, keep=shape[3] // 3, shape=shape, key_codec=codecs[0], value_codec=codecs[1])
    keys, values = (operand(storage_of(kv, "kv")).double() for kv in (k, v))
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


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_attention_to_numbers_beyond_the_dtype(name, rng):
    """A code times its scales may be larger than float16 holds, where `decompress` ends."""
    x = torch.rand(1, 1, 64, 64).mul(7e4).clamp(1, 65504) * torch.randn(1, 1, 64, 64).sign()
    values = ck.compress(x.half(), role="value", codec="int4")
    numbers = operand(storage_of(values, "v")).double()
    assert numbers.abs().max() > 65504
    keys, q = ck.compress(torch.zeros_like(x).half(), role="key"), oracle.gaussian(1, 2, 1, 64)
    out = ck.sparse_attention(q, keys, values, backend=name)
    assert oracle.relative_error(out, oracle.attention(q, torch.zeros_like(x), numbers, 0.125)[0]) <= 2e-3


def test_operations_that_compile(rng):
    torch._dynamo.reset()
    k, v = caches(codec=rng.choice(NARROW))
    q = oracle.gaussian(2, 4, 1, 80)
    whole = torch.compile(lambda q: ck.sparse_attention(q, k, v), backend="aot_eager", fullgraph=True)
    assert oracle.same_bits(whole(q), ck.sparse_attention(q, k, v))
    logits = torch.compile(lambda q: ck.sparse_qk(q, k), backend="aot_eager", fullgraph=True)
    assert torch.equal(logits(q), ck.sparse_qk(q, k))


@pytest.mark.parametrize("codec", NARROW)
@pytest.mark.parametrize("role", ROLES)
def test_memory_that_was_preallocated(role, codec, rng):
    shape = (2, 2, 150, 80)
    out = ck.SparseKV.preallocate(shape, role=role, keep=20, codec=codec, device="cpu")
    assert out.codec == codec and not ck.decompress(out).any()
    out.validate()
    for asked in (None, codec):
        x, keep = oracle.gaussian(*shape), rng.choice([3, 20])
        assert ck.compress(x, role=role, keep=keep, codec=asked, out=out) is out
        check_stored(out, oracle.narrow(x, keep, codec))
        fresh = ck.compress(x, role=role, keep=keep, codec=codec)
        assert torch.equal(out.blocks, fresh.blocks) and out.nnz == fresh.nnz and out.nbytes == fresh.nbytes
        out.to_exact_size().validate()
        assert oracle.same_bits(ck.decompress(copy.deepcopy(out)), ck.decompress(out))


def test_saved_and_read(rng):
    for codec in NARROW:
        kv, _ = caches(codec=codec)
        state = kv.state_dict()
        assert state["metadata"]["version"] == 5 and state["channel_scale"].dtype == torch.bfloat16
        assert (state["metadata"]["codec"], state["metadata"]["tile_format"]) == (codec, "bitmap")
        assert kv.nbytes == sum(x.nbytes for name, x in state.items() if name != "metadata")
        state["metadata"] = json.loads(json.dumps(state["metadata"]))
        for other in (ck.SparseKV.from_state_dict(state), copy.deepcopy(kv), pickle.loads(pickle.dumps(kv))):
            assert other.codec == codec and oracle.same_bits(ck.decompress(other), ck.decompress(kv))
        del state["channel_scale"]
        with pytest.raises(ValueError, match=r"missing: .'channel_scale'"):
            ck.SparseKV.from_state_dict(state)
    assert "channel_scale" not in caches()[0].state_dict()


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


def test_a_file_of_version_4(rng):
    kv, _ = caches()
    state = kv.state_dict()
    state["metadata"]["version"] = 4
    assert oracle.same_bits(ck.decompress(ck.SparseKV.from_state_dict(state)), ck.decompress(kv))
    state["metadata"]["codec"] = "e4m3"
    with pytest.raises(ValueError, match="codec 'e4m3' of format version 4 has no scales and is not read any more"):
        ck.SparseKV.from_state_dict(state)


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"codec": "int3"}, "codec must be one of"),
        ({"codec": 2}, "codec must be one of"),
        ({"codec": "bf16"}, "codec 'bf16' does not store float16"),
        ({"codec": "fp16"}, "not known: .*channel_scale"),
        ({"codec": "int4"}, "blocks|row_offsets"),
        ({"tile_format": "2of4"}, "tile_format must be one of bitmap"),
        ({"tile_format": None}, "tile_format must be one of bitmap"),
        ({"version": 2}, "version must be from 3 to 5"),
        ({"version": "4"}, "version must be from 3 to 5"),
    ],
)
def test_metadata_that_is_wrong(entries, message, rng):
    state = caches(codec="fp8")[0].state_dict()
    state["metadata"].update(entries)
    with pytest.raises(ValueError, match=message):
        ck.SparseKV.from_state_dict(state)


def damaged(codec: str, change) -> None:
    """Reads a cache of one tile, 64 x 64 without a zero but one, after change(state, bytes of blocks)."""
    x = torch.ones(1, 1, 64, 64, dtype=torch.float16)
    x[0, 0, 0, 0] = 0
    state = ck.compress(x, role="key", codec=codec).state_dict()
    state["blocks"], state["channel_scale"] = state["blocks"].clone(), state["channel_scale"].clone()
    change(state, state["blocks"].view(torch.uint8).view(-1, 32, 4))
    ck.SparseKV.from_state_dict(state)


def test_blocks_that_are_wrong(rng):
    for codec in NARROW:
        damaged(codec, lambda state, blocks: None)

    def set_byte(number):
        def change(state, blocks):
            blocks[-3, rng.randrange(32), rng.randrange(4)] = number

        return change

    damaged("fp8", set_byte(0x7F))  # a NaN is a value
    damaged("int8", set_byte(0x80))  # and so is a zero
    damaged("fp8", set_byte(0x80))
    for codec, number in (("fp8", 0xFF), ("int8", 0), ("int4", 0x30), ("int4", 0x03)):
        with pytest.raises(ValueError, match=f"no code of codec '{codec}'"):
            damaged(codec, set_byte(number))

    def fill_behind_the_last(state, blocks):
        """The stream with one element less ends with an unused value."""
        assert int((blocks[-2:] == 0).sum()) == 1
        blocks[-2:][blocks[-2:] == 0] = 0x38

    with pytest.raises(ValueError, match="values must be followed by zeros"):
        damaged("fp8", fill_behind_the_last)

    def clear_a_bit(state, blocks):
        words = state["blocks"]
        words[0, rng.randrange(32)] &= ~(1 << rng.randrange(32))

    with pytest.raises(ValueError, match=r"values must be followed by zeros|no code|nnz"):
        damaged(rng.choice(NARROW), clear_a_bit)

    def set_token_scale(number):
        def change(state, blocks):
            scales = state["blocks"][4].view(torch.bfloat16)  # behind the four rows of the bitmap
            scales[rng.randrange(64)] = number

        return change

    damaged("int8", set_token_scale(2.0**48))
    for number in (0.0, -1.0, float("nan"), float("inf"), 2.0**49, 2.0**-49):
        with pytest.raises(ValueError, match="the scale of a token must be from"):
            damaged(rng.choice(NARROW), set_token_scale(number))

    def set_channel_scale(number):
        def change(state, blocks):
            state["channel_scale"][0, 0, rng.randrange(64)] = number

        return change

    damaged("int4", set_channel_scale(2.0**-100))
    for number in (0.0, -1.0, float("nan"), float("inf"), 2.0**101, 2.0**-101):
        with pytest.raises(ValueError, match="channel_scale: every scale must be from"):
            damaged(rng.choice(NARROW), set_channel_scale(number))


@pytest.mark.parametrize(
    "codec, error, message",
    [
        ("int3", ValueError, "codec must be one of 'fp16', 'bf16', 'fp8', 'int8', 'int4' or None, got 'int3'"),
        (torch.float16, TypeError, "codec must be a str or None"),
        ("bf16", ValueError, "codec must be one of 'fp16', 'fp8', 'int8', 'int4' for float16, got 'bf16'"),
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
    for made_for, asked in (("fp8", "fp16"), ("fp16", "int8"), ("int4", "int8")):
        out = ck.SparseKV.preallocate(x.shape, role="key", codec=made_for, device="cpu")
        with pytest.raises(ValueError, match=f"codec must be '{made_for}', for which out"):
            ck.compress(x, role="key", codec=asked, out=out)
        assert not ck.decompress(out).any()


def test_codecs_of_dtypes():
    assert codecs_of(torch.float16) == ("fp16", *NARROW) and codecs_of(torch.bfloat16) == ("bf16", *NARROW)
