"""The operations under measurement: their input sets, their calls, and the bytes that a call moves.

An `InputSet` is all that one call reads and writes, so a profiler can run `prepare(case, device)` and then `call` once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import cute_kernels as ck
from profiling import data
from profiling.cases import Case


@dataclass(frozen=True)
class InputSet:
    """One call's operands."""

    sparse: ck.SparseKV  # the compressed cache; for compress: what the call makes of `dense`
    dense: Tensor        # (B, Hkv, T, D): the decompressed cache, the peers' operand; for compress: what to compress
    left: Tensor | None  # q (B, Hq, Sq, D) or p (B, Hq, Sq, T); None for compress
    out: Tensor | None   # (B, Hq, Sq, T) or (B, Hq, Sq, D) in the case's dtype; None for compress


def prepare(case: Case, device: torch.device) -> InputSet:
    """Builds a case's inputs on its device."""
    load, shape, dtype = case.load, case.load.shape, getattr(torch, case.load.dtype)
    rng = data.generator(device, case.seed)
    cache = data.cache(load, device, rng)
    sparse = ck.compress(cache, role=case.role, keep=load.keep)
    if case.op == "compress":
        return InputSet(sparse, cache, None, None)
    # A column of the product is a token for keys, a channel for values.
    make_left, columns = ((data.queries, shape.tokens) if case.op == "sparse_qk"
                          else (data.attention_weights, shape.head_dim))
    out = torch.empty(shape.batch, shape.query_heads, shape.query_tokens, columns, device=device, dtype=dtype)
    return InputSet(sparse, ck.decompress(sparse), make_left(shape, dtype, device, rng), out)


def call(case: Case, inputs: InputSet) -> Tensor | ck.SparseKV:
    """The measured call. Products write the peers' output dtype to a given tensor."""
    if case.op == "sparse_qk":
        out = inputs.out
        return ck.sparse_qk(inputs.left, inputs.sparse, out_dtype=out.dtype, out=out, backend=case.backend)
    if case.op == "sparse_av":
        return ck.sparse_av(inputs.left, inputs.sparse, out=inputs.out, backend=case.backend)
    if case.op == "compress":
        return ck.compress(inputs.dense, role=case.role, keep=case.load.keep)
    raise ValueError(f"no call for operation {case.op!r}")


def bytes_moved(case: Case, inputs: InputSet) -> int:
    """What a call must at least read and write: the compressed cache, and the dense operands it has."""
    dense = (inputs.dense,) if case.op == "compress" else (inputs.left, inputs.out)
    return inputs.sparse.nbytes + sum(t.nbytes for t in dense)


def copy_of(case: Case, inputs: InputSet) -> InputSet:
    """The same operands of the call at other addresses; what the call does not touch is shared."""
    if case.op == "compress":
        return replace(inputs, dense=inputs.dense.clone())
    return replace(inputs, sparse=_copy_of_sparse(inputs.sparse), left=inputs.left.clone(), out=inputs.out.clone())


def _copy_of_sparse(kv: ck.SparseKV) -> ck.SparseKV:
    # Not by way of state_dict: from_state_dict validates, which takes longer than all the timed calls together.
    return ck.SparseKV._from_parts(
        blocks=kv.blocks.clone(), row_offsets=kv.row_offsets.clone(), token_order=kv.token_order.clone(),
        channel_order=kv.channel_order.clone(), role=kv.role, dtype=kv.dtype, shape=kv.shape,
        max_tile_rows=kv.max_tile_rows, nnz=kv.nnz)
