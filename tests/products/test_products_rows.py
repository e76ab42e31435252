"""sparse_qk of many query rows a KV head, which sm90 multiplies by warpgroups: every logit, bit for bit.

Keys and queries are small integers: every sum is exact in fp32 whatever its order, and an output is its rounding.
"""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from tests.support import oracle

OUT_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Query heads a KV head, query tokens: 17, 32, 33, 64, 65 and 136 rows.
ROWS = [(1, 17), (2, 16), (3, 11), (4, 16), (5, 13), (8, 17)]
# Rows of the output start on 16 bytes (whole tiles and not), on 8, on 4, on 2; a single token.
TOKENS = [192, 200, 1004, 130, 333, 1]


def integers(*shape: int, dtype=torch.float16) -> torch.Tensor:
    """-4 to 4, no zero more often than others: magnitudes repeat, so pruning meets ties."""
    return torch.randint(-4, 5, shape).to(dtype)


def check(backend, x: torch.Tensor, q: torch.Tensor, keep: int | None, scale: float = 1.0) -> None:
    """Every dtype of the output. x, q: integers, on the CPU."""
    k = ck.compress(x.to(backend.device), role="key", keep=keep)
    expected = oracle.qk(q, oracle.prune(x, keep), scale).float()
    for out_dtype in OUT_DTYPES:
        actual = ck.sparse_qk(q.to(backend.device), k, out_dtype=out_dtype, scale=scale, backend=backend.name)
        assert torch.equal(actual.cpu(), expected.to(out_dtype)), (x.shape, keep, out_dtype)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("groups, queries", ROWS)
def test_rows(backend, groups, queries, tokens, rng):
    check(backend, integers(2, 2, tokens, 128), integers(2, 2 * groups, queries, 128), 38)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("groups, queries", [(4, 8), (4, 16)])
def test_head_dims(backend, groups, queries, head_dim, dtype, rng):
    tokens = rng.choice(TOKENS)
    for keep in (None, rng.randint(1, head_dim)):
        x, q = integers(2, 3, tokens, head_dim, dtype=dtype), integers(2, 3 * groups, queries, head_dim, dtype=dtype)
        check(backend, x, q, keep, scale=0.25)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [6000, 6007])
@pytest.mark.parametrize("groups, queries", [(4, 6), (4, 16), (5, 16)])
def test_pieces_of_many_tiles(backend, groups, queries, tokens, out_dtype, rng):
    """More tiles than workers have, in pieces that cross segments; the same bits every time."""
    x, q = integers(4, 8, tokens, 64), integers(4, 8 * groups, queries, 64)
    k = ck.compress(x.to(backend.device), role="key", keep=20)
    expected = oracle.qk(q, oracle.prune(x, 20)).float().to(out_dtype).to(backend.device)
    for _ in range(20 if backend.name.startswith("sm") else 1):
        assert torch.equal(ck.sparse_qk(q.to(backend.device), k, out_dtype=out_dtype, backend=backend.name), expected)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [128, 132, 201])
def test_outputs_that_start_anywhere(backend, tokens, out_dtype, rng):
    """On 16 bytes and beside them; nothing beside the output is written."""
    x, q = integers(1, 2, tokens, 128), integers(1, 8, 16, 128)
    k = ck.compress(x.to(backend.device), role="key", keep=38)
    expected = oracle.qk(q, oracle.prune(x, 38)).float().to(out_dtype)
    for offset in (256, 257, 258, 260):
        memory = torch.full((expected.numel() + 512,), -7.5, dtype=out_dtype, device=backend.device)
        out = memory[offset : offset + expected.numel()].view(expected.shape)
        ck.sparse_qk(q.to(backend.device), k, out_dtype=out_dtype, out=out, backend=backend.name)
        assert torch.equal(out.cpu(), expected), offset
        assert (memory[:offset] == -7.5).all() and (memory[offset + expected.numel() :] == -7.5).all(), offset


@pytest.mark.parametrize("name", ["empty", "full", "one element", "ragged"])
def test_patterns(backend, name, rng):
    token, channel = torch.arange(190)[:, None], torch.arange(128)
    there = {
        "empty": channel < 0,
        "full": channel >= 0,
        "one element": (token == 180) & (channel == 77),
        "ragged": (token // 3 + channel) % 190 < token,
    }[name]
    check(backend, (torch.randint(1, 5, (1, 2, 190, 128)) * there).half(), integers(1, 10, 13, 128), None)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("groups, queries", [(4, 8), (4, 16), (5, 13)])
def test_special_values_stay_where_they_belong(backend, groups, queries, dtype, out_dtype, rng):
    """NaN and infinities in tokens of the cache and in query rows reach their logits and no others."""
    x, q = integers(2, 2, 150, 128, dtype=dtype), integers(2, 2 * groups, queries, 128, dtype=dtype)
    for token, special in ((0, "nan"), (77, "inf"), (149, "-inf")):
        x[rng.randrange(2), rng.randrange(2), token, rng.randrange(128)] = float(special)
    q[0, 1, 3, 9] = float("nan")
    q[1, -1, -1, 100] = float("inf")
    expected = oracle.qk(q, oracle.prune(x, 60)).float().to(out_dtype)
    assert expected.isnan().any() and expected.isfinite().any()
    k = ck.compress(x.to(backend.device), role="key", keep=60)
    actual = ck.sparse_qk(q.to(backend.device), k, out_dtype=out_dtype, backend=backend.name).cpu()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_rounding_of_gaussian_logits(backend, rng):
    """An ordinary cache, within what the API promises; 16 bits are the rounding of 32."""
    x, q = oracle.gaussian(2, 2, 777, 128), oracle.gaussian(2, 8, 16, 128)
    k = ck.compress(x.to(backend.device), role="key", keep=38)
    wide = ck.sparse_qk(q.to(backend.device), k, scale=128**-0.5, backend=backend.name)
    assert oracle.relative_error(wide, oracle.qk(q, oracle.prune(x, 38), 128**-0.5)) <= 1e-3
    for out_dtype in (torch.float16, torch.bfloat16):
        actual = ck.sparse_qk(q.to(backend.device), k, scale=128**-0.5, out_dtype=out_dtype, backend=backend.name)
        assert torch.equal(actual, wide.to(out_dtype))
