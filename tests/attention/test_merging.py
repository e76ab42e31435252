"""merge_states: attention over parts of the tokens, put together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels as ck
from tests.support import oracle

INF, NAN = float("inf"), float("nan")
NESTED = torch.nested.nested_tensor([torch.zeros(1, 1, 1, 8)] * 2)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def exact(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """In float64."""
    outs, lses = outs.double().cpu(), lses.double().cpu()
    lse = lses.logsumexp(dim=0)
    weights = (lses - lse.masked_fill(lse == -INF, 0)).exp()[..., None]
    return (torch.where(weights == 0, 0, outs) * weights).sum(dim=0), lse


def assert_merged(found: tuple[Tensor, Tensor], outs: Tensor, lses: Tensor) -> None:
    out, lse = found
    expected, expected_lse = exact(outs, lses)
    assert out.dtype == outs.dtype and lse.dtype == torch.float32
    tolerance = TOLERANCE[outs.dtype]
    torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=1e-5, rtol=1e-6, equal_nan=True)


def states(*shape: int, dtype=torch.float16, device="cpu", spread: float = 3) -> tuple[Tensor, Tensor]:
    """(N, B, Hq, Sq, D)"""
    return torch.randn(shape, dtype=dtype, device=device), spread * torch.randn(shape[:4], device=device)


@DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 33])
def test_any_number_of_parts(count, dtype, device, rng):
    for head_dim in (8, 40, 64, 128, 256):
        outs, lses = states(count, 2, 3, 2, head_dim, dtype=dtype, device=device)
        assert_merged(ck.merge_states(outs, lses), outs, lses)


def received(outs: Tensor, lses: Tensor, between: int) -> tuple[Tensor, Tensor]:
    """The same, each part's outputs before its lses and `between` bytes behind them."""
    parts = outs.shape[0]
    sizes = [x.nbytes // parts for x in (outs, lses)]
    held = torch.full((parts, sum(sizes) + between), 255, dtype=torch.uint8, device=outs.device)  # NaN in between
    views = held[:, : sizes[0]].view(outs.dtype), held[:, sizes[0] : sum(sizes)].view(lses.dtype)
    return tuple(view.unflatten(1, x.shape[1:]).copy_(x) for view, x in zip(views, (outs, lses)))


@DEVICES
def test_lists_and_strides(device, rng):
    outs, lses = states(3, 2, 4, 1, 64, device=device)
    merged = ck.merge_states(outs, lses)
    swapped = outs.transpose(1, 2).contiguous().transpose(1, 2), lses.transpose(0, 3).contiguous().transpose(0, 3)
    odd = torch.empty(outs.numel() + 1, dtype=outs.dtype, device=device)[1:].view(outs.shape).copy_(outs)
    # Parts apart from one another, in one buffer as ranks send them, and where vectors of 16 bytes cannot be read.
    apart, unaligned = (received(outs, lses, between) for between in (16, 4))
    for given in (
        (list(outs), tuple(lses)),
        swapped,
        (torch._neg_view(-outs), torch._neg_view(-lses)),
        (odd, lses),
        apart,
        unaligned,
    ):
        assert all(oracle.same_bits(a, b) for a, b in zip(ck.merge_states(*given), merged, strict=True))


@DEVICES
def test_parts_of_a_cache(backend_parts, device, rng):
    """As one call over all tokens."""
    x, y = (oracle.gaussian(2, 2, 300, 64).to(device) for _ in range(2))
    q = oracle.gaussian(2, 4, 1, 64).to(device)
    whole = ck.sparse_attention(q, *ck.compress_kv(x, y, keep=64), return_lse=True)
    parts = []
    for first, last in backend_parts:
        pair = ck.compress_kv(x[:, :, first:last], y[:, :, first:last], keep=64)
        parts.append(ck.sparse_attention(q, *pair, return_lse=True))
    merged = ck.merge_states(*zip(*parts))
    for found, expected in zip(merged, whole, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.fixture
def backend_parts() -> list[tuple[int, int]]:
    return [(0, 64), (64, 64), (64, 257), (257, 300)]  # one of them empty


@DEVICES
@pytest.mark.parametrize("garbage", [NAN, INF, 0.0])
@pytest.mark.parametrize("count", [3, 9, 35])
def test_parts_without_tokens(count, garbage, device, rng):
    """Whatever lies in their outputs; of rows that no part has tokens of, zeros."""
    outs, lses = states(count, 2, 2, 2, 64, device=device)
    lses[1:-1] = -INF
    lses[:, 0, 1] = -INF
    outs[lses == -INF] = garbage
    assert_merged(ck.merge_states(outs, lses), outs, lses)
    out, lse = ck.merge_states(outs, lses)
    assert not out[0, 1].any() and (lse[0, 1] == -INF).all()


@DEVICES
def test_extreme_weights(device, rng):
    outs, lses = states(4, 2, 2, 2, 64, dtype=torch.float32, device=device)
    for shift in (1e4, -1e4, 80.0):
        assert_merged(ck.merge_states(outs, lses + shift), outs, lses + shift)
    far = lses * 1e6
    assert_merged(ck.merge_states(outs, far), outs, far)


@DEVICES
def test_what_is_not_finite_stays_in_its_row(device, rng):
    outs, lses = states(3, 1, 2, 2, 64, dtype=torch.float32, device=device)
    clean = ck.merge_states(outs, lses)
    outs[1, 0, 0, 0, 5], lses[2, 0, 1, 1] = INF, NAN
    out, lse = ck.merge_states(outs, lses)
    assert out[0, 0, 0, 5] == INF and out[0, 1, 1].isnan().all() and lse[0, 1, 1].isnan()
    same = torch.ones_like(out, dtype=torch.bool)
    same[0, 0, 0, 5], same[0, 1, 1] = False, False
    assert torch.equal(out[same], clean[0][same])


@DEVICES
@pytest.mark.parametrize("shape", [(2, 0, 4, 1, 64), (2, 3, 4, 0, 64)])
def test_nothing_to_merge(shape, device):
    out, lse = ck.merge_states(*states(*shape, device=device))
    assert out.shape == shape[1:] and lse.shape == shape[1:4]


@pytest.mark.parametrize(
    "outs, lses, error, message",
    [
        (1, torch.zeros(1), TypeError, "outs must be a torch.Tensor or a list"),
        ([], [], ValueError, "outs must have at least one tensor"),
        (torch.zeros(0, 1, 1, 1, 8), torch.zeros(0, 1, 1, 1), ValueError, "at least one"),
        (torch.zeros(2, 1, 1, 8), torch.zeros(2, 1, 1), ValueError, "outs must be at least one tensor"),
        (torch.zeros(2, 1, 1, 1, 8), torch.zeros(2, 1, 1, 2), ValueError, "lses must have the shape of outs"),
        (torch.zeros(2, 1, 1, 1, 9), torch.zeros(2, 1, 1, 1), ValueError, "head dim"),
        (torch.zeros(2, 1, 1, 1, 264), torch.zeros(2, 1, 1, 1), ValueError, "head dim"),
        (torch.zeros(2, 1, 1, 1, 8).double(), torch.zeros(2, 1, 1, 1), TypeError, "outs must be"),
        (torch.zeros(2, 1, 1, 1, 8), torch.zeros(2, 1, 1, 1).half(), TypeError, "lses must be"),
        ([torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 2, 8)], torch.zeros(2, 1, 1, 1), ValueError, r"outs\[1\] is"),
        ([torch.zeros(1, 1, 1, 8), None], torch.zeros(2, 1, 1, 1), TypeError, r"outs\[1\] must be"),
        (torch.zeros(2, 1, 1, 1, 8), torch.zeros(2, 1, 1, 1, device="meta"), ValueError, "lses must be on"),
        (NESTED, torch.zeros(2, 1, 1, 1), TypeError, "outs must be a dense"),
        ([NESTED, NESTED], torch.zeros(2, 1, 1, 1), TypeError, r"outs\[0\] must be a dense"),
        (torch.zeros(2, 1, 1, 1, 8), torch.zeros(2, 1, 1, 1).to_sparse(), TypeError, "lses must be a dense"),
    ],
)
def test_bad_input(outs, lses, error, message):
    with pytest.raises(error, match=message):
        ck.merge_states(outs, lses)


def test_recorded_and_differentiated(rng):
    outs, lses = states(3, 2, 4, 1, 64)
    torch.library.opcheck(torch.ops.cute_kernels.merge_states.default, (outs, lses))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: ck.merge_states(*x), backend="aot_eager", fullgraph=True)
    assert all(oracle.same_bits(a, b) for a, b in zip(compiled(outs, lses), ck.merge_states(outs, lses)))
    with FakeTensorMode() as mode:
        out, lse = ck.merge_states(mode.from_tensor(outs), list(mode.from_tensor(lses)))
        assert (out.shape, lse.shape, out.dtype) == ((2, 4, 1, 64), (2, 4, 1), torch.float16)
    with pytest.raises(RuntimeError, match="merge_states is for decoding and has no gradient"):
        ck.merge_states(outs.requires_grad_(), lses)[0].sum().backward()
