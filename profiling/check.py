"""The oracle: a row counts only if its result agrees with a float64 computation of the same inputs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

import cute_kernels as ck
from profiling.cases import Case
from profiling.operations import InputSet

METHOD = "float64, whole output"
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2}  # of the outputs' dtype; the API's contract


def tolerance(case: Case) -> float:
    """The largest relative Frobenius error that a row may have; compress is exact."""
    return 0.0 if case.op == "compress" else TOLERANCES[getattr(torch, case.load.dtype)]


def relative_error(case: Case, inputs: InputSet, result: Tensor | ck.SparseKV) -> float:
    """Relative Frobenius error of a call's result over the whole output; products: on the decompressed operands."""
    if case.op == "compress":
        got = ck.decompress(result).flatten(0, 1)  # (B*Hkv, T, D)
        heads = inputs.dense.flatten(0, 1)
        return _relative_error((pruned(heads[i], case.load.keep), got[i]) for i in range(len(heads)))
    return product_error(case, inputs.left, inputs.dense, result)


def product_error(case: Case, left: Tensor, cache: Tensor, result: Tensor) -> float:
    """Relative Frobenius error of `result` (B, Hq, Sq, T or D) against the product of left and cache, head by head."""
    shape = case.load.shape
    heads, rows = shape.batch * shape.kv_heads, shape.query_heads // shape.kv_heads * shape.query_tokens
    left, cache, result = left.reshape(heads, rows, -1), cache.flatten(0, 1), result.reshape(heads, rows, -1)

    def want(i: int) -> Tensor:
        right = cache[i].double()
        return left[i].double() @ (right.T if case.op == "sparse_qk" else right)

    return _relative_error((want(i), result[i]) for i in range(heads))


def pruned(x: Tensor, keep: int) -> Tensor:
    """x (..., D) with the `keep` largest magnitudes of each row, ties to the lower channel, and zeros elsewhere."""
    order = x.abs().float().sort(dim=-1, descending=True, stable=True).indices
    mask = torch.zeros_like(x, dtype=torch.bool).scatter_(-1, order[..., :keep], True)
    return torch.where(mask, x, 0)


def _relative_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """|want - got| / |want| over all (want, got) tensors."""
    off = size = 0.0
    for want, got in pairs:
        want, got = want.double(), got.double()
        off, size = off + (want - got).square().sum(), size + want.square().sum()
    return (off.sqrt() / size.sqrt()).item() if size > 0 else float(off)
