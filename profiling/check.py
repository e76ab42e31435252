"""The oracle: a row counts only if its result agrees with a float64 computation of the same inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

import cute_kernels as ck
from profiling.cases import Case
from profiling.operations import InputSet

METHOD = "float64, whole output"
# Of the outputs' dtype; the API's contract.
TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-3}

ROUNDING = {"fp8": 0.03, "int8": 0.01, "int4": 0.15}  # of what a codec stores, on the sweep's data


def tolerance(case: Case) -> float:
    """The largest relative Frobenius error that a row may have; compress, but for what a codec rounds, and copy are
    exact."""
    if case.product in ("compress", "copy"):
        return ROUNDING.get(case.load.codec, 0.0) if case.product == "compress" else 0.0
    return TOLERANCES[getattr(torch, case.scores_dtype if case.product == "qk" else case.load.dtype)]


def relative_error(case: Case, inputs: InputSet, result: Tensor | ck.SparseKV) -> float:
    """Relative Frobenius error of a call's result over the whole output; on the decompressed operands."""
    if case.op == "compress":
        got = ck.decompress(result).flatten(0, 1)  # (B*Hkv, T, D)
        heads = inputs.dense.flatten(0, 1)
        if method := case.load.method:  # whose channels' neighbours depend on all tokens
            keep = None if method == "2of4" else case.load.keep
            return _relative_error(zip(ck.prune(inputs.dense, keep=keep, method=method).flatten(0, 1), got))
        return _relative_error((pruned(heads[i], case.load.keep), got[i]) for i in range(len(heads)))
    result = result.reshape(case.load.shape.heads, case.load.shape.rows, -1)
    return _relative_error(zip(expected(case, inputs), result, strict=True))


def expected(case: Case, inputs: InputSet) -> Iterator[Tensor]:
    """The float64 result (rows, T or D) of one KV head after the other; rows: the group's query heads, query tokens."""
    shape = case.load.shape
    left, cache = inputs.left.reshape(shape.heads, shape.rows, -1), inputs.dense.flatten(0, 1)
    for i in range(shape.heads):
        one, right = left[i].double(), cache[i].double()
        if case.product == "av":
            yield one @ right
        elif case.product == "qk":
            yield one @ right.T
        else:
            p = (one @ right.T * shape.head_dim**-0.5).softmax(-1)
            yield p @ inputs.dense_values.flatten(0, 1)[i].double()


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
