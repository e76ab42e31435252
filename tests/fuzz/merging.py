"""merge_states beside float64: parts with and without tokens, of magnitudes far apart."""

from __future__ import annotations

import torch
from torch import Tensor

import cute_kernels as ck
from tests.fuzz import inputs
from tests.fuzz.case import Case
from tests.fuzz.compare import TOLERANCE, close

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_SMALLEST_WEIGHT = 2.0**-120  # of a row's largest: those below may count as zero


def run(case: Case) -> None:
    rng = case.rng
    parts = case.choose("parts", [1, 2, 2, 3, 5, 17])
    shape = rng.randint(0, 3), rng.choice([1, 4, 5, 8]), rng.choice([0, 1, 1, 3, 9]), rng.choice(inputs.HEAD_DIMS)
    case.note("shape", shape)
    dtype = case.choose("dtype", _DTYPES)
    outs = (torch.randn(parts, *shape) * case.choose("magnitude", [1e-4, 1.0, 1e4])).to(dtype)
    lses = torch.randn(parts, *shape[:3]) * case.choose("magnitude of lses", [0.0, 1.0, 30.0, 1e4])
    empty = torch.rand(lses.shape) < case.choose("without tokens", [0.0, 0.3, 0.9, 1.0])
    lses = lses.masked_fill(empty, float("-inf"))
    given = outs.masked_fill(empty[..., None], float("nan"))  # must not be read
    operands = given.to(case.device), lses.to(case.device)
    stacked = case.choose("stacked", [True, False])
    with case.threads():
        out, lse = ck.merge_states(*(operands if stacked else (list(each) for each in operands)))
    _compare(case, out, lse, outs, lses)


def _compare(case: Case, out: Tensor, lse: Tensor, outs: Tensor, lses: Tensor) -> None:
    exact, values = lses.double(), outs.double()
    none = (exact == float("-inf")).all(0)
    want_lse = torch.where(none, float("-inf"), exact.masked_fill(none, 0.0).logsumexp(0))
    weights = torch.where(none, 0.0, (exact - want_lse.masked_fill(none, 0.0)).exp())[..., None]
    error = 2.0**-21 * float(exact.masked_fill(exact == float("-inf"), 0.0).abs().max() if exact.numel() else 0.0)
    tolerance = TOLERANCE[out.dtype] + 4 * error
    lost = _SMALLEST_WEIGHT / tolerance * values.abs().sum(0)
    close(case, out, (weights * values).sum(0), (weights * values.abs()).sum(0) + lost, tolerance, "out")
    case.require(torch.equal(lse.cpu() == float("-inf"), none), "lse: -inf is elsewhere")
    off = (lse.cpu().double() - want_lse)[~none].abs()
    case.require(bool((off <= 1e-5 + error).all()), "lse differs")
