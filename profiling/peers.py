"""What users would run instead: the dense product, or for compress a plain copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from profiling import timing
from profiling.cases import Case
from profiling.operations import InputSet

CHOICE_REPEATS = 5  # to find the fastest form; it is then timed again, beside the operation


@dataclass(frozen=True)
class Peer:
    """One peer of a case: a name and the operands of one call; `forms` compute the same from them in different ways."""

    name: str
    operands: tuple[Tensor, ...]
    forms: dict[str, Callable[..., object]]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.operands)

    def rotation(self, form: str, copies: int) -> list[timing.Call]:
        """Calls on `copies` sets of operands at different addresses."""
        call = self.forms[form]
        sets = [self.operands] + [tuple(t.clone() for t in self.operands) for _ in range(copies - 1)]
        return [lambda operands=operands: call(*operands) for operands in sets]


def peers(case: Case, inputs: InputSet) -> list[Peer]:
    """A case's peers; a row of the sweep for each."""
    return [_copy(inputs)] if case.op == "compress" else [_dense_product(case, inputs)]


def fastest_form(peer: Peer, copies: int, clock: timing.CpuTimer | timing.CudaTimer) -> str:
    if len(peer.forms) == 1:
        return next(iter(peer.forms))
    rotations = {form: peer.rotation(form, copies) for form in peer.forms}
    timings = timing.measure(rotations, CHOICE_REPEATS, clock)
    return min(timings, key=lambda form: timings[form].median_us)


# ---- Dense products --------------------------------------------------------------------------------------------------


def _dense_product(case: Case, inputs: InputSet) -> Peer:
    """The query heads of a group and their query tokens are rows of one matrix a KV head: dense K or V is read once.

    On a GPU cuBLAS in the cache's dtype. On a CPU torch's bfloat16 product, for float16 caches too: it is faster.
    """
    shape = case.load.shape
    on_gpu = inputs.dense.is_cuda
    dtype = inputs.dense.dtype if on_gpu else torch.bfloat16
    heads, rows = shape.batch * shape.kv_heads, shape.query_heads // shape.kv_heads * shape.query_tokens
    left = inputs.left.to(dtype).view(heads, rows, -1)
    cache = inputs.dense.to(dtype).view(heads, shape.tokens, shape.head_dim)
    out = torch.empty(heads, rows, inputs.out.shape[-1], dtype=dtype, device=left.device)
    forms = _KEY_FORMS if case.op == "sparse_qk" else _VALUE_FORMS
    return Peer("cublas" if on_gpu else "torch bf16", (left, cache, out), forms)


_KEY_FORMS = {  # (left, cache, out)
    "matmul": lambda q, k, out: torch.matmul(q, k.transpose(1, 2), out=out),
    "baddbmm": lambda q, k, out: torch.baddbmm(out, q, k.transpose(1, 2), beta=0, out=out),
}
_VALUE_FORMS = {
    "matmul": lambda p, v, out: torch.matmul(p, v, out=out),
    "baddbmm": lambda p, v, out: torch.baddbmm(out, p, v, beta=0, out=out),
}

# ---- Copy ------------------------------------------------------------------------------------------------------------


def _copy(inputs: InputSet) -> Peer:
    """Moves as many bytes as compress reads and writes: the time of compress at the device's copy bandwidth."""
    nbytes = (inputs.dense.nbytes + inputs.sparse.nbytes) // 2  # a copy moves each of its bytes twice
    source = torch.ones(nbytes, dtype=torch.uint8, device=inputs.dense.device)
    return Peer("copy", (source, torch.empty_like(source)), {"copy": lambda source, target: target.copy_(source)})
