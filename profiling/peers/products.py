"""The dense products.

The query heads of a group and their query tokens are rows of one matrix a KV head: dense K or V is read once.
"""

from __future__ import annotations

import torch

from profiling.cases import Case
from profiling.operations import InputSet
from profiling.peers.base import Peer, Plugin, dense_peer, in_dtypes

_KEY_FORMS = {  # (left, cache, out)
    "matmul": lambda q, k, out: torch.matmul(q, k.transpose(1, 2), out=out),
    "baddbmm": lambda q, k, out: torch.baddbmm(out, q, k.transpose(1, 2), beta=0, out=out),
}
_VALUE_FORMS = {
    "matmul": lambda p, v, out: torch.matmul(p, v, out=out),
    "baddbmm": lambda p, v, out: torch.baddbmm(out, p, v, beta=0, out=out),
}


def _build(name: str, case: Case, inputs: InputSet, dtype: torch.dtype, prefix: str = "") -> Peer:
    """Scores in float32 reach this peer rounded to `dtype`: less to move, and cuBLAS has no mixed product."""
    shape = case.load.shape
    left = inputs.left.to(dtype).view(shape.heads, shape.rows, -1)
    cache = inputs.dense.to(dtype).view(shape.heads, shape.tokens, shape.head_dim)
    out = torch.empty(shape.heads, shape.rows, inputs.out.shape[-1], dtype=dtype, device=left.device)
    forms = _KEY_FORMS if case.product == "qk" else _VALUE_FORMS
    return dense_peer(name, (left, cache, out), {prefix + form: call for form, call in forms.items()}, (cache,))


def _cublas(case: Case, inputs: InputSet) -> Peer:
    return _build("cublas", case, inputs, inputs.dense.dtype)


def _torch(case: Case, inputs: InputSet) -> Peer:
    """torch's products on a CPU: which dtype is fastest depends on its instruction set, so all are tried."""
    return in_dtypes(lambda dtype, name: _build("torch", case, inputs, dtype, f"{name} "), own=inputs.dense.dtype)


PLUGINS = (
    Plugin("cublas", ("qk", "av"), ("cuda",), _cublas),
    Plugin("torch", ("qk", "av"), ("cpu",), _torch),
)
