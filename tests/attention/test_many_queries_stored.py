"""sparse_attention of many query tokens over two of four and over narrow codecs."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import cute_kernels as ck
from cute_kernels._runtime.extension import _C, CODEC_IDS, TILE_FORMATS
from cute_kernels._storage.tile_reader import operand
from cute_kernels.sparse_kv import storage_of
from tests.attention.test_attention import TOLERANCE, attend, compare, strided
from tests.support import oracle


@dataclass(frozen=True)
class Stored:
    """How a cache is stored: by which pruning rule, in which codec."""

    method: str
    codec: str | None

    def __str__(self) -> str:
        return f"{self.method}-{self.codec or 'half'}"

    def options(self, head_dim: int) -> dict:
        keep = {} if self.method == "2of4" else {"keep": head_dim // 3}
        return {"method": self.method, "codec": self.codec, **keep}

    def compress_kv(self, k: torch.Tensor, v: torch.Tensor) -> tuple[ck.SparseKV, ck.SparseKV]:
        return ck.compress_kv(k, v, **self.options(k.shape[3]))


NARROW = tuple(oracle.NARROW)
TWO_OF_FOUR = [Stored("2of4", codec) for codec in (None, *NARROW)]
BITMAP = [Stored("magnitude", codec) for codec in NARROW]
STORED = [*TWO_OF_FOUR, *BITMAP, Stored("magnitude-2of4", "fp8"), Stored("magnitude-2of4", "int4")]

each_stored = pytest.mark.parametrize("stored", STORED, ids=str)


def exact(kv: ck.SparseKV) -> torch.Tensor:
    """What is stored, not rounded to the cache's dtype."""
    return operand(storage_of(kv.to("cpu"), "kv")).double()


def check(
    backend,
    stored: Stored,
    *,
    batch=1,
    groups=2,
    kv_heads=2,
    queries=40,
    tokens=200,
    head_dim=64,
    window=None,
    seq_lens=None,
    scale=None,
    causal=True,
    dtype=torch.float16,
    num_splits=None,
    change=None,
    together=True,
    magnitude=1.0,
):
    """Random inputs, which `change` may change. magnitude: of what is cached, and of queries the reciprocal."""
    k, v = (oracle.gaussian(batch, kv_heads, tokens, head_dim, dtype=dtype) for _ in range(2))
    q = oracle.gaussian(batch, kv_heads * groups, queries, head_dim, dtype=dtype)
    dense = None
    if window is not None:
        dense = tuple(oracle.gaussian(batch, kv_heads, window, head_dim, dtype=dtype) for _ in range(2))
    if change:
        change(k, v)
    for x in (k, v, *(dense or ())):
        x *= magnitude
    q /= magnitude
    k, v = k.to(backend.device), v.to(backend.device)
    if together:
        keys, values = stored.compress_kv(k, v)
    else:
        options = stored.options(head_dim)
        keys, values = (ck.compress(x, role=role, **options) for x, role in ((k, "key"), (v, "value")))
    scale = head_dim**-0.5 if scale is None else scale
    out, lse = attend(backend, q, keys, values, dense, seq_lens, scale=scale, causal=causal, num_splits=num_splits)
    expected = oracle.attention(q, exact(keys), exact(values), scale, dense, seq_lens, causal)
    compare_stored(out, lse, *expected, stored, q, keys, scale)


def compare_stored(out, lse, expected, expected_lse, stored: Stored, q, keys, scale) -> None:
    if stored.codec is None:
        compare(out, lse, expected, expected_lse, q.dtype)
        return
    assert oracle.relative_error(out, expected) <= TOLERANCE[q.dtype]
    # Numbers or queries times scales are rounded to fp16: terms of random signs move a logit by so much.
    moved = 2**-10 * float(oracle.qk(q.double() ** 2, exact(keys).nan_to_num() ** 2, scale**2).sqrt().max())
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=2e-3 + moved, rtol=1e-3)


@each_stored
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("rows", [9, 17, 33, 65, 129, 257, 385])
def test_blocks_of_query_rows(backend, rows, head_dim, stored, rng):
    """Around the ends of a warpgroup's rows, of a CTA's and of a cluster's."""
    arguments = {"head_dim": head_dim, "dtype": rng.choice(oracle.DTYPES), "tokens": rng.choice([64, 130, 200])}
    groups = rng.choice([1, 2, 7])
    check(backend, stored, kv_heads=1, groups=groups, queries=-(-rows // groups), causal=False, **arguments)
    check(backend, stored, kv_heads=1, groups=1, queries=rows, window=rng.choice([None, 30]), **arguments)


@pytest.mark.parametrize("stored", [Stored("magnitude", None), *STORED], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("layout", range(4))
def test_windows_of_any_layout(backend, layout, head_dim, stored, rng):
    """Of less than a tile, of whole ones and of several; contiguous and under other strides."""
    dtype, causal = rng.choice(oracle.DTYPES), rng.choice([True, False])
    k, v = (oracle.gaussian(2, 2, 130, head_dim, dtype=dtype).to(backend.device) for _ in range(2))
    keys, values = stored.compress_kv(k, v)
    for tokens in (rng.randint(1, 63), rng.choice([64, 128]), rng.randint(129, 300)):
        q = oracle.gaussian(2, 6, 30, head_dim, dtype=dtype)
        window = tuple(oracle.gaussian(2, 2, tokens, head_dim, dtype=dtype) for _ in range(2))
        out, lse = ck.sparse_attention(
            q.to(backend.device),
            keys,
            values,
            window=tuple([x, *strided(x)][layout] for x in (x.to(backend.device) for x in window)),
            causal=causal,
            num_splits=rng.choice([None, 1, 3]),
            return_lse=True,
            backend=backend.name,
        )
        scale = head_dim**-0.5
        expected = oracle.attention(q, exact(keys), exact(values), scale, window, None, causal)
        compare_stored(out, lse, *expected, stored, q, keys, scale)


@each_stored
@pytest.mark.parametrize("offset", range(0, 64, 7))
def test_causality_at_every_offset_in_a_tile(backend, offset, stored, rng):
    queries, dtype = rng.randint(60, 90), rng.choice(oracle.DTYPES)
    check(backend, stored, kv_heads=1, queries=queries, tokens=128 + offset + rng.choice([0, 1, 2]), dtype=dtype)
    check(backend, stored, kv_heads=1, queries=queries, tokens=128 + offset, window=rng.randint(1, 70), dtype=dtype)


@each_stored
@pytest.mark.parametrize("num_splits", [None, 1, 5])
def test_splits_and_lengths(backend, num_splits, stored, rng):
    """Sequences of no token, of less than a tile, and of all tokens beside one another."""
    arguments = {"num_splits": num_splits, "dtype": rng.choice(oracle.DTYPES), "head_dim": 128, "groups": 4}
    for causal in (True, False):
        check(backend, stored, batch=4, queries=30, tokens=500, seq_lens=[500, 0, 17, 300], causal=causal, **arguments)
    check(backend, stored, batch=3, queries=40, tokens=400, window=100, seq_lens=[0, 400, 64], **arguments)


@pytest.mark.parametrize("stored", BITMAP, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_and_values_with_token_orders_of_their_own(backend, head_dim, stored, rng):
    for queries, seq_lens in ((30, None), (100, [250])):
        dtype = rng.choice(oracle.DTYPES)
        check(
            backend,
            stored,
            queries=queries,
            tokens=300,
            head_dim=head_dim,
            seq_lens=seq_lens,
            dtype=dtype,
            together=False,
        )


@each_stored
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_channels_and_tokens_of_different_sizes(backend, dtype, stored, rng):
    def change(k, v):
        k *= 2.0 ** torch.randint(-4, 5, (k.shape[3],))
        v *= 2.0 ** torch.randint(-4, 5, (v.shape[3],))
        v *= 2.0 ** torch.randint(-6, 7, (v.shape[2], 1))

    check(backend, stored, queries=50, tokens=300, head_dim=128, dtype=dtype, scale=0.01, change=change)


@each_stored
@pytest.mark.parametrize("exponent", [-40, 40])
def test_magnitudes_beyond_float16(backend, exponent, stored, rng):
    """Of keys, values and windows of bfloat16, whatever multiplies them."""
    arguments = {"tokens": 300, "head_dim": 128, "dtype": torch.bfloat16, "magnitude": 2.0**exponent}
    check(backend, stored, queries=60, **arguments)
    check(backend, stored, queries=60, window=50, **arguments)


@pytest.mark.parametrize("stored", [s for s in STORED if s.codec], ids=str)
def test_values_far_above_their_channels_mean_stay_finite(backend, stored, rng):
    k, v = (oracle.gaussian(1, 1, 640, 128, dtype=torch.bfloat16) for _ in range(2))
    v[:, :, 600] *= 2.0**30
    k, v = k.to(backend.device), v.to(backend.device)
    keys, values = stored.compress_kv(k, v)
    q = oracle.gaussian(1, 1, 60, 128, dtype=torch.bfloat16).to(backend.device)
    window = k[:, :, :1], v[:, :, 600:601]
    out, lse = ck.sparse_attention(q, keys, values, window=window, return_lse=True, backend=backend.name)
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize("stored", [s for s in STORED if s.codec in (None, "fp8")], ids=str)
@pytest.mark.parametrize("queries", [40, 150])
def test_nan_of_tokens_that_do_not_count(backend, queries, stored, rng):
    """Within the last tile that counts, and in tiles behind it. Their own sequence sees them, in some channels."""

    def change(k, v):
        k[0, :, 70:] = float("nan")
        v[0, :, 70:] = float("nan")

    arguments = {"batch": 2, "queries": queries, "groups": 4, "head_dim": 128, "tokens": 300, "change": change}
    check(backend, stored, seq_lens=[70, 300], **arguments)
    check(backend, stored, seq_lens=[70, 100], window=5, causal=False, **arguments)


@each_stored
def test_a_query_row_of_nan_stays_alone(backend, stored, rng):
    k = oracle.gaussian(1, 1, 300, 128).to(backend.device)
    keys, values = stored.compress_kv(k, k)
    q = oracle.gaussian(1, 4, 80, 128).to(backend.device)
    clean = ck.sparse_attention(q, keys, values, backend=backend.name)
    q[0, 1, 20] = float("nan")
    poisoned = ck.sparse_attention(q, keys, values, backend=backend.name)
    assert poisoned[0, 1, 20].isnan().all()
    poisoned[0, 1, 20] = clean[0, 1, 20]
    torch.testing.assert_close(poisoned, clean)


@each_stored
def test_the_same_bits_from_call_to_call(backend, stored, rng):
    k = oracle.gaussian(2, 2, 1000, 128).to(backend.device)
    keys, values = stored.compress_kv(k, k)
    q = oracle.gaussian(2, 8, 200, 128).to(backend.device)
    first = ck.sparse_attention(q, keys, values, backend=backend.name)
    for _ in range(3):
        assert oracle.same_bits(ck.sparse_attention(q, keys, values, backend=backend.name), first)


@each_stored
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_pages_and_ragged_queries(backend, head_dim, stored, rng):
    """A cache's sequences of different lengths, with different numbers of query tokens in one call."""
    dtype = rng.choice(oracle.DTYPES)
    options = stored.options(head_dim)
    rule, keep = options.pop("method"), {name: x for name, x in options.items() if x is not None}
    cache = ck.KVCache(
        max_batch=3,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        capacity=400,
        window=32,
        key_rule=rule,
        value_rule=rule,
        device=backend.device,
        **keep,
    )
    k, v = (oracle.gaussian(3, 2, 200, head_dim, dtype=dtype).to(backend.device) for _ in range(2))
    cache.prefill(k, v)
    cache.append(*(oracle.gaussian(3, 2, 90, head_dim, dtype=dtype).to(backend.device) for _ in range(2)))
    for counts in ([40, 1, 0], [1, 90, 33], [70, 70, 70]):
        starts = torch.tensor([sum(counts[:i]) for i in range(4)], dtype=torch.int32)
        q = oracle.gaussian(1, 6, sum(counts), head_dim, dtype=dtype)
        out = cache.attend(q.to(backend.device), cu_seqlens_q=starts, backend=backend.name)
        for row, count in enumerate(counts):
            part = q[:, :, starts[row] : starts[row + 1]]
            if not count:
                continue
            dense = (x[None].cpu() for x in cache.dense(row))
            expected, _ = oracle.attention(part, *dense, head_dim**-0.5)
            tolerance = 4e-3 if dtype == torch.float16 else 2e-2  # dense is rounded
            assert oracle.relative_error(out[:, :, starts[row] : starts[row + 1]], expected) <= tolerance


@pytest.mark.skipif(not hasattr(_C, "cuda"), reason="this build has no CUDA kernels")
def test_which_caches_the_prefill_kernel_serves():
    """All that have kernels of attention."""
    for name, tile_format in TILE_FORMATS.items():
        for codec in ("fp16", "bf16", *NARROW):
            served = name != "two_of_four_bitmap" or codec in NARROW
            assert _C.cuda.has_prefill_kernel(CODEC_IDS[codec], tile_format) == served, (name, codec)
