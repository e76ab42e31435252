"""sparse_qk and sparse_av on every backend, against float64 products of the decompressed operands."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.support import oracle

# Relative Frobenius errors that the API promises, by the dtype of the result.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PRODUCT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Query heads a KV head, query tokens.
ROWS = [(1, 1), (3, 1), (4, 1), (8, 1), (1, 2), (4, 2), (3, 5), (8, 5), (1, 16), (4, 16), (8, 16)]


def sparse(x: torch.Tensor, role: str, keep: int | None, device) -> tuple[ck.SparseKV, torch.Tensor]:
    """(compressed, the dense tensor it stands for)"""
    return ck.compress(x.to(device), role=role, keep=keep), oracle.prune(x, keep)


def weights(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(shape) * 3).softmax(-1).to(dtype)


def check(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype and actual.shape == expected.shape and actual.is_contiguous()
    assert oracle.relative_error(actual, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("groups, queries", ROWS)
def test_qk_rows(backend, groups, queries, rng):
    k, dense = sparse(oracle.gaussian(2, 2, 333, 128), "key", 38, backend.device)
    q = oracle.gaussian(2, 2 * groups, queries, 128)
    check(ck.sparse_qk(q.to(backend.device), k, backend=backend.name), oracle.qk(q, dense), torch.float32)


@pytest.mark.parametrize("groups, queries", ROWS)
def test_av_rows(backend, groups, queries, rng):
    v, dense = sparse(oracle.gaussian(2, 2, 333, 128), "value", 38, backend.device)
    p = weights(2, 2 * groups, queries, 333)
    check(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, dense), torch.float16)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1000])
def test_shapes(backend, tokens, head_dim, dtype, rng):
    keep = rng.choice([None, 1, head_dim // 2, head_dim])
    x = oracle.gaussian(2, 3, tokens, head_dim, dtype=dtype)
    q, p = oracle.gaussian(2, 6, 1, head_dim, dtype=dtype), weights(2, 6, 1, tokens)
    k, dense = sparse(x, "key", keep, backend.device)
    check(ck.sparse_qk(q.to(backend.device), k, backend=backend.name), oracle.qk(q, dense), torch.float32)
    v, dense = sparse(x, "value", keep, backend.device)
    check(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, dense), dtype)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("other", PRODUCT_DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 3])
def test_dtypes(backend, other, dtype, queries, rng):
    """The dtype of the logits, and that of the weights."""
    x = oracle.gaussian(1, 2, 517, 128, dtype=dtype)
    k, dense = sparse(x, "key", 64, backend.device)
    q = oracle.gaussian(1, 8, queries, 128, dtype=dtype)
    check(ck.sparse_qk(q.to(backend.device), k, out_dtype=other, backend=backend.name), oracle.qk(q, dense), other)
    v, dense = sparse(x, "value", 64, backend.device)
    p = weights(1, 8, queries, 517, dtype=other)
    check(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, dense), dtype)


def test_auto_serves_every_device(backend, rng):
    k, dense = sparse(oracle.gaussian(1, 1, 100, 64), "key", 20, backend.device)
    q = oracle.gaussian(1, 2, 1, 64)
    check(ck.sparse_qk(q.to(backend.device), k), oracle.qk(q, dense), torch.float32)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_long_cache(backend, dtype, rng):
    x = oracle.lognormal_channels(1, 2, 5000, 128, dtype=dtype)
    q, p = oracle.gaussian(1, 8, 1, 128, dtype=dtype), weights(1, 8, 1, 5000)
    k, dense = sparse(x, "key", 38, backend.device)
    check(ck.sparse_qk(q.to(backend.device), k, backend=backend.name), oracle.qk(q, dense), torch.float32)
    v, dense = sparse(x, "value", 38, backend.device)
    check(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, dense), dtype)


def test_compressed_as_a_pair(backend, rng):
    k, v = oracle.gaussian(2, 2, 200, 128), oracle.gaussian(2, 2, 200, 128)
    keys, values = ck.compress_kv(k.to(backend.device), v.to(backend.device), key_keep=38, value_keep=64)
    q, p = oracle.gaussian(2, 8, 1, 128), weights(2, 8, 1, 200)
    expected = oracle.qk(q, oracle.prune(k, 38))
    check(ck.sparse_qk(q.to(backend.device), keys, backend=backend.name), expected, torch.float32)
    expected = oracle.av(p, oracle.prune(v, 64))
    check(ck.sparse_av(p.to(backend.device), values, backend=backend.name), expected, torch.float16)


@pytest.mark.parametrize("name", ["empty", "full", "one element", "ragged"])
def test_patterns(backend, name, rng):
    x = oracle.gaussian(1, 2, 190, 128)
    token, channel = torch.arange(190)[:, None], torch.arange(128)
    x = (
        x
        * {
            "empty": channel < 0,
            "full": channel >= 0,
            "one element": (token == 180) & (channel == 77),
            "ragged": (token // 3 + channel) % 190 < token,
        }[name]
    )
    q, p = oracle.gaussian(1, 4, 1, 128), torch.rand(1, 4, 1, 190) + 0.1  # no product of one element is subnormal
    k, dense = sparse(x, "key", None, backend.device)
    check(ck.sparse_qk(q.to(backend.device), k, backend=backend.name), oracle.qk(q, dense), torch.float32)
    v, dense = sparse(x, "value", None, backend.device)
    check(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, dense), torch.float16)


# ---- Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0, 1, -2.5, 128**-0.5, 1e-10, 1e6])
def test_scale(backend, scale, rng):
    k, dense = sparse(oracle.gaussian(1, 2, 100, 128), "key", 38, backend.device)
    q = oracle.gaussian(1, 4, 2, 128)
    actual = ck.sparse_qk(q.to(backend.device), k, scale=scale, backend=backend.name)
    check(actual, oracle.qk(q, dense, scale), torch.float32)


def test_scale_comes_before_rounding(backend, rng):
    """Products beyond fp16's range that the scale brings back."""
    k, dense = sparse(oracle.gaussian(1, 1, 100, 128, scale=300), "key", 64, backend.device)
    q = oracle.gaussian(1, 1, 1, 128, scale=300)
    actual = ck.sparse_qk(q.to(backend.device), k, scale=1e-4, out_dtype=torch.float16, backend=backend.name)
    check(actual, oracle.qk(q, dense, 1e-4), torch.float16)


def strided(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x (B, H, S, N) under all kinds of strides, with 1 in the last dimension."""
    wide = torch.full((*x.shape[:3], x.shape[3] + 5), 9.0, dtype=x.dtype, device=x.device)
    wide[..., 3:-2] = x
    every_second = x.repeat_interleave(2, dim=0).repeat_interleave(2, dim=2)
    return {
        "heads and queries swapped": x.transpose(1, 2).contiguous().transpose(1, 2),
        "odd offset and stride": wide[..., 3:-2],
        "every second": every_second[::2, :, 1::2],
        "batch innermost": x.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3),
    }


@pytest.mark.parametrize("queries", [1, 3])
def test_strides(backend, queries, rng):
    x = oracle.gaussian(2, 2, 150, 80)
    k, keys = sparse(x, "key", 30, backend.device)
    v, values = sparse(x, "value", 30, backend.device)
    q = oracle.gaussian(2, 4, queries, 80)
    for name, view in strided(q.to(backend.device)).items():
        assert torch.equal(view.cpu(), q), name
        check(ck.sparse_qk(view, k, backend=backend.name), oracle.qk(q, keys), torch.float32)
    for dtype in PRODUCT_DTYPES:
        p = weights(2, 4, queries, 150, dtype=dtype)
        for name, view in strided(p.to(backend.device)).items():
            assert torch.equal(view.cpu(), p), name
            check(ck.sparse_av(view, v, backend=backend.name), oracle.av(p, values), torch.float16)
    one = q[:, :1].expand(2, 4, queries, 80)
    check(ck.sparse_qk(one.to(backend.device), k, backend=backend.name), oracle.qk(one, keys), torch.float32)
    same = p[:, :1].expand(2, 4, queries, 150)
    check(ck.sparse_av(same.to(backend.device), v, backend=backend.name), oracle.av(same, values), torch.float16)


def test_pending_negations(backend, rng):
    x = oracle.gaussian(2, 2, 100, 80).to(backend.device)
    k, v = ck.compress_kv(x, x, keep=20)
    q, p = oracle.gaussian(2, 4, 3, 80).to(backend.device), torch.rand(2, 4, 3, 100, device=backend.device)
    expected = ck.sparse_qk(q, k, backend=backend.name)
    assert oracle.same_bits(ck.sparse_qk(torch._neg_view(-q), k, backend=backend.name), expected)
    expected = ck.sparse_av(p, v, backend=backend.name)
    assert oracle.same_bits(ck.sparse_av(torch._neg_view(-p), v, backend=backend.name), expected)


def test_single_token_takes_any_last_stride(backend, rng):
    v, dense = sparse(oracle.gaussian(1, 2, 1, 64), "value", 30, backend.device)
    p = torch.rand(1, 4, 1, 7).to(backend.device)[..., ::7]
    check(ck.sparse_av(p, v, backend=backend.name), oracle.av(p, dense), torch.float16)


def test_autocast_makes_no_difference(backend, rng):
    k, dense = sparse(oracle.gaussian(1, 2, 200, 128), "key", 38, backend.device)
    v, _ = sparse(oracle.gaussian(1, 2, 200, 128), "value", 38, backend.device)
    q, p = oracle.gaussian(1, 4, 3, 128).to(backend.device), weights(1, 4, 3, 200).to(backend.device)
    with torch.autocast(backend.device.type, torch.bfloat16):
        logits, out = ck.sparse_qk(q, k, backend=backend.name), ck.sparse_av(p, v, backend=backend.name)
    check(logits, oracle.qk(q, dense), torch.float32)
    assert oracle.same_bits(out, ck.sparse_av(p, v, backend=backend.name))


def test_out(backend, rng):
    x = oracle.gaussian(1, 2, 100, 128)
    k, keys = sparse(x, "key", 38, backend.device)
    v, values = sparse(x, "value", 38, backend.device)
    q, p = oracle.gaussian(1, 4, 2, 128), weights(1, 4, 2, 100)
    for dtype in PRODUCT_DTYPES:
        out = torch.full((1, 4, 2, 100), float("nan"), dtype=dtype, device=backend.device)
        assert ck.sparse_qk(q.to(backend.device), k, out_dtype=dtype, out=out, backend=backend.name) is out
        check(out, oracle.qk(q, keys), dtype)
    out = torch.full((1, 4, 2, 128), float("nan"), dtype=torch.float16, device=backend.device)
    assert ck.sparse_av(p.to(backend.device), v, out=out, backend=backend.name) is out
    check(out, oracle.av(p, values), torch.float16)


def test_nothing_beside_out_is_written(backend, rng):
    x = oracle.gaussian(2, 2, 70, 64)
    k, v = (ck.compress(x.to(backend.device), role=role, keep=20) for role in ("key", "value"))
    q, p = oracle.gaussian(2, 6, 3, 64).to(backend.device), weights(2, 6, 3, 70).to(backend.device)
    for launch, shape, dtype in (
        (lambda out: ck.sparse_qk(q, k, out=out, backend=backend.name), (2, 6, 3, 70), torch.float32),
        (lambda out: ck.sparse_av(p, v, out=out, backend=backend.name), (2, 6, 3, 64), torch.float16),
    ):
        numel = torch.Size(shape).numel()
        memory = torch.full((numel + 256,), 7.0, dtype=dtype, device=backend.device)
        launch(memory[128:-128].view(shape))
        assert (memory[:128] == 7).all() and (memory[-128:] == 7).all() and not (memory[128:-128] == 7).all()


def test_inputs_are_left_alone(backend, rng):
    x = oracle.gaussian(1, 2, 100, 128)
    q = oracle.gaussian(1, 4, 1, 128).to(backend.device)
    p = weights(1, 4, 1, 100).to(backend.device)
    k, v = (ck.compress(x.to(backend.device), role=role, keep=38) for role in ("key", "value"))
    before = [t.clone() for t in (q, p)]
    results = [ck.sparse_qk(q, k, backend=backend.name), ck.sparse_av(p, v, backend=backend.name)]
    for result in results:
        result.zero_()
    assert torch.equal(q, before[0]) and torch.equal(p, before[1])
    for kv in (k, v):
        assert oracle.same_bits(ck.decompress(kv), oracle.prune(x, 38))


@pytest.mark.parametrize(
    "batch, q_heads, kv_heads, queries, tokens",
    [(0, 4, 2, 1, 5), (2, 4, 2, 1, 0), (2, 4, 2, 0, 5), (2, 0, 2, 1, 5), (2, 0, 0, 1, 5), (0, 4, 2, 0, 0)],
)
def test_empty(backend, batch, q_heads, kv_heads, queries, tokens):
    x = torch.ones(batch, kv_heads, tokens, 64, dtype=torch.float16, device=backend.device)
    q = torch.ones(batch, q_heads, queries, 64, dtype=torch.float16, device=backend.device)
    p = torch.ones(batch, q_heads, queries, tokens, device=backend.device)
    logits = ck.sparse_qk(q, ck.compress(x, role="key"), backend=backend.name)
    assert logits.shape == (batch, q_heads, queries, tokens) and logits.dtype == torch.float32
    v = ck.compress(x, role="value")
    out = ck.sparse_av(p, v, backend=backend.name)
    assert out.shape == (batch, q_heads, queries, 64) and out.dtype == torch.float16 and (out == 0).all()
    given = torch.full_like(out, 3)
    assert (ck.sparse_av(p, v, out=given, backend=backend.name) == 0).all() and (given == 0).all()


# ---- Special values --------------------------------------------------------------------------------------------------


def check_special(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """NaN and infinities where they are expected, the rest within tolerance."""
    actual = actual.cpu()
    assert torch.equal(actual.isnan(), expected.isnan())
    infinite = expected.isinf()
    assert torch.equal(actual[infinite].double(), expected[infinite])
    check(actual.masked_fill(~expected.isfinite(), 0), expected.masked_fill(~expected.isfinite(), 0), dtype)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_special_values_stay_where_they_belong(backend, special, dtype, rng):
    x = oracle.gaussian(2, 2, 150, 128, dtype=dtype)
    x[0, 1, 77, 3] = special
    x[1, 0, 149, 127] = special
    k, keys = sparse(x, "key", 38, backend.device)
    q = oracle.gaussian(2, 4, 2, 128, dtype=dtype)
    check_special(ck.sparse_qk(q.to(backend.device), k, backend=backend.name), oracle.qk(q, keys), torch.float32)
    v, values = sparse(x, "value", 38, backend.device)
    for p_dtype in PRODUCT_DTYPES:
        p = weights(2, 4, 2, 150).clamp_min(1e-6).to(p_dtype)
        check_special(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, values), dtype)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_nan_in_one_row_does_not_reach_others(backend, queries, dtype, rng):
    x = oracle.gaussian(1, 2, 150, 128, dtype=dtype)
    k, keys = sparse(x, "key", 38, backend.device)
    q = oracle.gaussian(1, 8, queries, 128, dtype=dtype)
    q[0, 5, -1, 9] = float("nan")
    logits = ck.sparse_qk(q.to(backend.device), k, backend=backend.name).cpu()
    assert logits[0, 5, -1].isnan().all()
    check_special(logits, oracle.qk(q, keys), torch.float32)
    v, values = sparse(x, "value", 38, backend.device)
    for p_dtype in PRODUCT_DTYPES:
        p = weights(1, 8, queries, 150, dtype=p_dtype)
        p[0, 2, 0, 80] = float("nan")
        out = ck.sparse_av(p.to(backend.device), v, backend=backend.name).cpu()
        assert out[0, 2, 0].isnan().all()
        check_special(out, oracle.av(p, values), dtype)


@pytest.mark.parametrize("p_dtype", PRODUCT_DTYPES, ids=str)
def test_infinite_weight(backend, p_dtype, rng):
    """Without zeros among the values, every product with it is an infinity."""
    v, values = sparse(oracle.gaussian(1, 1, 100, 64).abs() + 0.1, "value", None, backend.device)
    p = weights(1, 4, 1, 100, dtype=p_dtype)
    p[0, 1, 0, 30] = float("inf")
    check_special(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, values), torch.float16)


# ---- Ranges ----------------------------------------------------------------------------------------------------------


def check_rows(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """The promise holds for a call of any one query row, and so row by row."""
    for row, want in zip(actual.flatten(0, 2), expected.flatten(0, 2)):
        check(row.contiguous(), want, dtype)


@pytest.mark.parametrize("tokens", [64, 1000, 20000])
def test_uniform_weights_of_a_long_cache(backend, tokens, rng):
    """1 / T and less are subnormal in fp16, or zero; the values make up for it."""
    v, values = sparse(oracle.gaussian(1, 1, tokens, 64, scale=8e3).clamp(-6e4, 6e4), "value", 20, backend.device)
    for factor in (1.0, 1e-3, 1e-5):
        p = torch.full((1, 4, 1, tokens), factor / tokens)
        check_rows(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, values), torch.float16)


@pytest.mark.parametrize("p_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_different_magnitudes(backend, p_dtype, rng):
    v, values = sparse(oracle.gaussian(1, 1, 300, 128), "value", 38, backend.device)
    magnitude = torch.tensor([1e-2, 1.0, 1e2, 3e3, 0.1, 30.0, 1e-1, 10.0]).view(1, 8, 1, 1)
    p = (weights(1, 8, 1, 300) * magnitude).to(p_dtype)
    check_rows(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, values), torch.float16)


@pytest.mark.parametrize("order", ["rising", "falling", "shuffled"])
def test_magnitudes_mixed_in_a_row(backend, order, rng):
    """Weights from 1e-20 to 1e5: what counts is the sum."""
    tokens = 500
    v, values = sparse(oracle.gaussian(1, 2, tokens, 128, scale=1e-2), "value", 64, backend.device)
    p = torch.logspace(-20, 5, tokens) * torch.randn(tokens).sign()
    p = {"rising": p, "falling": p.flip(0), "shuffled": p[torch.randperm(tokens)]}[order]
    p = p.expand(1, 4, 2, tokens)
    check_rows(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, values), torch.float16)


@pytest.mark.parametrize("magnitude", [1e-20, 1e-8, 1e5, 1e20])
def test_extreme_weights_of_bfloat16_values(backend, magnitude, rng):
    v, values = sparse(oracle.gaussian(1, 2, 300, 128, dtype=torch.bfloat16), "value", 64, backend.device)
    p = torch.randn(1, 4, 1, 300) * magnitude
    check_rows(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, values), torch.bfloat16)


@pytest.mark.parametrize("magnitude", [1e-8, 1e-6, 1e-3, 1e5])
def test_extreme_weights_of_float16_values(backend, magnitude, rng):
    """Values chosen such that the result is in fp16's normal range."""
    x = oracle.gaussian(1, 2, 300, 128, scale=min(1e4, 1 / magnitude)).clamp(-6e4, 6e4)
    v, values = sparse(x, "value", 64, backend.device)
    p = torch.randn(1, 4, 1, 300) * magnitude
    check_rows(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, values), torch.float16)


def test_fp16_subnormals(backend, rng):
    x = torch.randint(-1023, 1024, (1, 2, 130, 64), dtype=torch.int16).abs().view(torch.float16)
    k, keys = sparse(x, "key", 20, backend.device)
    q = oracle.gaussian(1, 4, 1, 64).abs() + 0.1
    check(ck.sparse_qk(q.to(backend.device), k, backend=backend.name), oracle.qk(q, keys), torch.float32)
    v, values = sparse(x, "value", 20, backend.device)
    p = torch.rand(1, 4, 1, 130) * 1e4
    check(ck.sparse_av(p.to(backend.device), v, backend=backend.name), oracle.av(p, values), torch.float16)


def test_large_logits(backend, rng):
    """Far beyond fp16's range, within float32's."""
    k, keys = sparse(oracle.gaussian(1, 2, 130, 128, scale=1e4), "key", 64, backend.device)
    q = oracle.gaussian(1, 4, 1, 128, scale=1e4)
    check(ck.sparse_qk(q.to(backend.device), k, backend=backend.name), oracle.qk(q, keys), torch.float32)
