"""Results beside float64: an error is measured by the terms of its sum, so that what cancels does not hide it."""

from __future__ import annotations

import torch
from torch import Tensor

import cute_kernels as ck
from tests.fuzz.case import Case

# Of a term: what the API promises of results in a cache's dtype. float32 logits are much better than that.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 2e-5}
LARGEST = {torch.float16: 65504.0, torch.bfloat16: 3e38, torch.float32: 3e38}
_LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 1e-37, torch.float32: 1e-37}  # results below may be rounded to zero
IN_RANGE = 1e37  # sums of magnitudes up to here do not overflow in float32


def tolerance_of(kv: ck.SparseKV, dtype: torch.dtype) -> float:
    """Of results in a dtype: a GPU rounds q, or p, times the scales of a narrow codec to float16."""
    return max(TOLERANCE[dtype], 1e-3) if kv.channel_scale is not None else TOLERANCE[dtype]


def close(case: Case, got: Tensor, want: Tensor, terms: Tensor, tolerance: float, what: str) -> None:
    """got: the result. want: float64, finite. terms: the sum of the magnitudes of what was added up to it."""
    case.require(got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}")
    dtype, got = got.dtype, got.detach().cpu().double()
    allowed = tolerance * terms + 2 * _LEAST[dtype] + torch.finfo(dtype).eps * want.abs()
    wrong = ~((got - want).abs() <= allowed)
    overflows = want.abs() + allowed > LARGEST[dtype]
    wrong &= ~(overflows & ((got.sign() == want.sign()) & (got.abs() >= 0.99 * LARGEST[dtype])))
    wrong &= terms < IN_RANGE
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        case.require(
            False,
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are off, at {at} it is {got[at].item():g}, not "
            f"{want[at].item():g} (terms of {terms[at].item():g}, {allowed[at].item():g} allowed)",
        )


def same_bits(case: Case, got: Tensor, want: Tensor, what: str) -> None:
    """NaN of any payload are told apart, too."""
    got, want = got.detach().cpu().resolve_neg().contiguous(), want.contiguous()
    case.require(
        got.shape == want.shape and got.dtype == want.dtype,
        f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}",
    )
    differ = got.view(torch.int16) != want.view(torch.int16)
    if differ.any():
        at = tuple(differ.nonzero()[0].tolist())
        case.require(False, f"{what}: {int(differ.sum())} elements differ, at {at} it is {got[at]}, not {want[at]}")


def same_values(case: Case, got: Tensor, want: Tensor, what: str) -> None:
    """Any NaN is as good as another."""
    same_bits(case, got.masked_fill(got.isnan(), float("nan")), want.masked_fill(want.isnan(), float("nan")), what)
