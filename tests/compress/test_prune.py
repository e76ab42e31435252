"""prune: the rule, bit for bit, on every kind of input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_kernels as ck
from tests.support import oracle

KINDS = {
    "gaussian": lambda *shape, dtype: oracle.gaussian(*shape, dtype=dtype),
    "ties": lambda *shape, dtype: torch.randint(-3, 4, shape).to(dtype),
    "random bits": lambda *shape, dtype: oracle.random_bits(*shape, dtype=dtype),
    "constant": lambda *shape, dtype: torch.full(shape, -2.0, dtype=dtype),
    "zeros": lambda *shape, dtype: torch.zeros(shape, dtype=dtype),
    "negative zeros": lambda *shape, dtype: -torch.zeros(shape, dtype=dtype),
}


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_oracle(kind, head_dim, dtype, device, rng):
    x = KINDS[kind](2, 3, 37, head_dim, dtype=dtype)
    for keep in (1, rng.randrange(1, head_dim), head_dim - 1, head_dim):
        pruned = ck.prune(x.to(device), keep=keep)
        assert pruned.device.type == device.type and pruned.is_contiguous()
        assert oracle.same_bits(pruned, oracle.prune(x, keep)), keep
    assert oracle.same_bits(ck.prune(x.to(device)), oracle.prune(x, None))


@given(data=st.data(), dtype=st.sampled_from(oracle.DTYPES))
def test_any_bits(data, dtype):
    """Few distinct magnitudes near each other: ties, neighbours, special values."""
    head_dim = data.draw(st.sampled_from([8, 16, 40, 64]))
    near = data.draw(st.sampled_from([0, 1, 0x0400, 0x3C00, oracle.INFINITY_BITS[dtype], 0x7FFF]))
    magnitude = st.integers(max(0, near - 2), min(0x7FFF, near + 2))
    words = data.draw(st.lists(st.tuples(magnitude, st.booleans()), min_size=head_dim, max_size=head_dim))
    x = torch.tensor([m - 0x8000 * sign for m, sign in words], dtype=torch.int16).view(dtype).view(1, 1, 1, head_dim)
    keep = data.draw(st.integers(1, head_dim))
    assert oracle.same_bits(ck.prune(x, keep=keep), oracle.prune(x, keep))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keeps_exactly_keep(head_dim, device, rng):
    x = torch.rand(1, 2, 100, head_dim).add(0.5).half().to(device)  # without zeros
    for keep in range(1, head_dim + 1, 7):
        assert ((ck.prune(x, keep=keep) != 0).sum(-1) == keep).all()


@pytest.mark.parametrize("sparsity", [0, 0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 0.9, 0.99, 1, 1.0])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_sparsity(sparsity, head_dim, device, rng):
    x = oracle.gaussian(1, 1, 10, head_dim)
    keep = max(1, math.floor(head_dim * (1 - sparsity) + 1e-6))
    assert oracle.same_bits(ck.prune(x.to(device), sparsity=sparsity), oracle.prune(x, keep))


def test_sparsity_does_not_lose_one_to_rounding():
    x = torch.arange(1, 81, dtype=torch.float16).view(1, 1, 1, 80)
    assert int((ck.prune(x, sparsity=0.9) != 0).sum()) == 8  # 80 * (1 - 0.9) is 7.999999999999998


def test_ties_keep_the_lower_channel(device):
    x = torch.tensor([1, -3, 3, 2, 3, -3, 0, 1], dtype=torch.float16, device=device).view(1, 1, 1, 8)
    assert ck.prune(x, keep=3).flatten().tolist() == [0, -3, 3, 0, 3, 0, 0, 0]


def test_nan_is_largest(device):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([inf, 1, nan, -inf, 0, -nan, 7, 2], dtype=torch.float16, device=device).view(1, 1, 1, 8)
    assert (ck.prune(x, keep=2).cpu().isnan().flatten().nonzero().flatten()).tolist() == [2, 5]
    assert oracle.same_bits(ck.prune(x, keep=3), oracle.prune(x.cpu(), 3))
    assert ck.prune(x, keep=3).flatten()[0] == inf


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 0, 5, 64), (2, 2, 0, 64)])
def test_empty(shape, device):
    assert ck.prune(torch.empty(shape, dtype=torch.float16, device=device), keep=3).shape == shape


def views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x under all kinds of strides, with 1 in the last dimension."""
    batch, heads, tokens, head_dim = x.shape
    wide = torch.full((batch, heads, tokens, head_dim + 3), 99.0, dtype=x.dtype, device=x.device)
    wide[..., 1 : head_dim + 1] = x
    spread = torch.full((2 * batch, heads, 3 * tokens, head_dim), 99.0, dtype=x.dtype, device=x.device)
    spread[1::2, :, 2::3] = x
    return {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "odd offset and stride": wide[..., 1 : head_dim + 1],
        "every third token": spread[1::2, :, 2::3],
    }


def test_views(device, rng):
    x = oracle.random_bits(2, 3, 70, 80)
    for name, view in views(x.to(device)).items():
        assert oracle.same_bits(ck.prune(view, keep=20), oracle.prune(x, 20)), name
    expanded = x[:1, :1].to(device).expand(2, 3, -1, -1)
    assert oracle.same_bits(ck.prune(expanded, keep=20), oracle.prune(x[:1, :1].expand(2, 3, -1, -1), 20))


def test_input_is_left_alone(device, rng):
    x = oracle.gaussian(1, 1, 64, 64).to(device)
    before = x.clone()
    pruned = ck.prune(x, keep=64)
    pruned.zero_()
    assert torch.equal(x, before)
