"""The operations under measurement: their input sets, their calls, and the bytes that a call moves.

An `InputSet` is all that one call reads and writes, so a profiler can run `prepare(case, device)` and then `call` once.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels import attention, products
from cute_kernels._runtime.extension import _C
from cute_kernels.sparse_kv import from_storage, storage_of
from profiling import data
from profiling.cases import Case

TILE = 64  # tokens
WINDOW = 64  # dense tokens that follow the compressed ones in sparse_attention


@dataclass(frozen=True)
class InputSet:
    """One call's operands. What an operation does not have is None."""

    sparse: ck.SparseKV | None  # the compressed cache (attention: the keys); for compress: what it makes of `dense`
    dense: Tensor  # (B, Hkv, T, D): the decompressed cache, for attention with the window behind it, which
    # is the peers' operand; for compress: its input
    left: Tensor | None  # q (B, Hq, Sq, D) or p (B, Hq, Sq, T)
    out: Tensor | None  # (B, Hq, Sq, T) for qk, else (B, Hq, Sq, D)
    sparse_values: ck.SparseKV | None = None  # attention only
    dense_values: Tensor | None = None  # attention only
    window: tuple[Tensor, Tensor] | None = None  # sparse_attention only: keys and values (B, Hkv, WINDOW, D)
    cache: ck.KVCache | None = None  # attend only

    @property
    def bits_per_element(self) -> float:
        """Of the cache as stored."""
        if self.cache is not None:
            return 8.0 * self.cache_bytes / (2 * self.dense.numel())
        return self.sparse.bits_per_element if self.sparse else 8.0 * self.dense.element_size()

    @property
    def cache_bytes(self) -> int:
        """What the operation stores or reads of the cache: keys and values for attention."""
        if self.cache is not None:
            used, (batch, heads, tokens, head_dim) = self.cache.statistics(), self.dense.shape
            newest = tokens - (tokens - WINDOW) // TILE * TILE  # that are in the window still
            window = 2 * batch * heads * newest * head_dim * self.dense.element_size()
            return (used["pages"] - used["pages_free"]) * used["page_bytes"] + window
        caches = (
            (self.sparse, self.sparse_values, *(self.window or ())) if self.sparse else (self.dense, self.dense_values)
        )
        return sum(cache.nbytes for cache in caches if cache is not None)


def prepare(case: Case, device: torch.device) -> InputSet:
    """Builds a case's inputs on its device. A dense operation's cache is not pruned."""
    shape, dtype, rng = case.load.shape, getattr(torch, case.load.dtype), data.generator(device, case.seed)
    if case.op == "sparse_attention":
        return _attention(case, device, rng)
    if case.op == "attend":
        return _paged(case, device, rng)
    sparse, dense = _cache(case, case.role, device, rng)
    if case.product in ("compress", "copy"):
        return InputSet(sparse, dense, None, None)
    # A column of the product is a token for qk, else a channel.
    columns = shape.tokens if case.product == "qk" else shape.head_dim
    scores = getattr(torch, case.scores_dtype)
    out = torch.empty(
        shape.batch,
        shape.query_heads,
        shape.query_tokens,
        columns,
        device=device,
        dtype=scores if case.product == "qk" else dtype,
    )
    if case.product == "av":
        return InputSet(sparse, dense, data.attention_weights(shape, scores, device, rng), out)
    left = data.queries(shape, dtype, device, rng)
    if case.product == "qk":
        return InputSet(sparse, dense, left, out)
    left *= shape.head_dim**0.5  # attention scales by itself
    return InputSet(sparse, dense, left, out, *_cache(case, "value", device, rng))


def _attention(case: Case, device: torch.device, rng: torch.Generator) -> InputSet:
    """Keys and values that were compressed together, and a window."""
    shape, dtype = case.load.shape, getattr(torch, case.load.dtype)
    keys, values = ck.compress_kv(
        data.cache(case.load, device, rng),
        data.cache(case.load, device, rng),
        **case.load.compression,
    )
    newest = replace(case.load, shape=replace(shape, tokens=WINDOW))
    window = data.cache(newest, device, rng), data.cache(newest, device, rng)
    dense = [torch.cat([ck.decompress(old), new], dim=2) for old, new in zip((keys, values), window)]
    left = data.queries(shape, dtype, device, rng) * shape.head_dim**0.5  # attention scales by itself
    out = torch.empty(left.shape, device=device, dtype=dtype)
    return InputSet(keys, dense[0], left, out, values, dense[1], window)


def _paged(case: Case, device: torch.device, rng: torch.Generator) -> InputSet:
    """A cache of as many tokens as sparse_attention has with its window, those of one prompt a sequence."""
    shape, dtype = case.load.shape, getattr(torch, case.load.dtype)
    compression = case.load.compression
    if rule := compression.pop("method", None):
        compression |= {"key_rule": rule, "value_rule": rule}
    cache = ck.KVCache(
        max_batch=shape.batch,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype=dtype,
        capacity=shape.tokens + WINDOW,
        window=WINDOW,
        device=device,
        **compression,
    )
    load = replace(case.load, shape=replace(shape, tokens=shape.tokens + WINDOW))
    cache.prefill(data.cache(load, device, rng), data.cache(load, device, rng))
    keys, values = (torch.stack(rows) for rows in zip(*(cache.dense(row) for row in range(shape.batch)), strict=True))
    left = data.queries(shape, dtype, device, rng) * shape.head_dim**0.5  # attention scales by itself
    out = torch.empty(left.shape, device=device, dtype=dtype)
    return InputSet(None, keys, left, out, dense_values=values, cache=cache)


def _cache(case: Case, role: str, device: torch.device, rng: torch.Generator) -> tuple[ck.SparseKV | None, Tensor]:
    """(compressed, dense) cache of a role; dense is what it decompresses to, for compress what it is made of."""
    cache = data.cache(case.load, device, rng)
    if case.is_dense:
        return None, cache
    sparse = ck.compress(cache, role=role, **case.load.compression)
    return sparse, cache if case.op == "compress" else ck.decompress(sparse)


def call(case: Case, inputs: InputSet) -> Tensor | ck.SparseKV:
    """The measured call of a sparse operation. Products write to a given tensor.

    Raises:
        RuntimeError: the backend cannot serve the case, as with more stages ahead than fit into shared memory.
    """
    if case.stages_ahead:
        return _call_with_stages(case, inputs)
    return _call(case, inputs)


def _call_with_stages(case: Case, inputs: InputSet) -> Tensor:
    """The package's own functions behind the checks of arguments, which take the depth of the kernels' pipeline."""
    if case.backend not in _C.BACKENDS or not hasattr(_C, "cuda"):
        raise RuntimeError(f"backend {case.backend} has no stages ahead: GPU backends of this build have")
    left, out, sparse = inputs.left, inputs.out, storage_of(inputs.sparse, "sparse")
    stages = {"stages_ahead": case.stages_ahead}
    if case.op == "sparse_qk":
        return products.run_qk(left, sparse, 1.0, out.dtype, case.backend, out, **stages)
    if case.op == "sparse_av":
        return products.run_av(left, sparse, case.backend, out, **stages)
    if case.op == "sparse_attention":
        values, window = storage_of(inputs.sparse_values, "sparse_values"), inputs.window or (None, None)
        scale = left.shape[3] ** -0.5
        return attention.run(left, sparse, values, *window, None, scale, False, 0, case.backend, out=out, **stages)[0]
    raise ValueError(f"operation {case.op!r} has no stages ahead")


def _call(case: Case, inputs: InputSet) -> Tensor | ck.SparseKV:
    if case.op == "sparse_qk":
        out = inputs.out
        return ck.sparse_qk(inputs.left, inputs.sparse, out_dtype=out.dtype, out=out, backend=case.backend)
    if case.op == "sparse_av":
        return ck.sparse_av(inputs.left, inputs.sparse, out=inputs.out, backend=case.backend)
    if case.op == "sparse_attention":  # not causal, like its peers: every query sees every token
        return ck.sparse_attention(
            inputs.left,
            inputs.sparse,
            inputs.sparse_values,
            window=inputs.window,
            causal=False,
            out=inputs.out,
            backend=case.backend,
        )
    if case.op == "attend":  # likewise
        return inputs.cache.attend(inputs.left, causal=False, out=inputs.out, backend=case.backend)
    if case.op == "compress":
        return ck.compress(inputs.dense, role=case.role, **case.load.compression)
    raise ValueError(f"no call for operation {case.op!r}")


def bytes_moved(case: Case, inputs: InputSet) -> int:
    """What a call must at least read and write: the cache as stored, and the dense operands it has."""
    dense = (inputs.dense,) if case.op == "compress" else (inputs.left, inputs.out)
    return inputs.cache_bytes + sum(t.nbytes for t in dense)


def copy_of(case: Case, inputs: InputSet) -> InputSet:
    """The same operands of the call at other addresses; what the call does not touch is shared."""
    if case.op == "compress":
        return replace(inputs, dense=inputs.dense.clone())
    if case.op == "attend":
        return replace(inputs, cache=copy.deepcopy(inputs.cache), left=inputs.left.clone(), out=inputs.out.clone())
    sparse, values = _copy_of_sparse(inputs.sparse), None
    if inputs.sparse_values:  # which share the order of tokens with the keys
        values = _copy_of_sparse(inputs.sparse_values, token_order=sparse.token_order)
    return replace(
        inputs,
        sparse=sparse,
        left=inputs.left.clone(),
        out=inputs.out.clone(),
        sparse_values=values,
        window=inputs.window and tuple(tensor.clone() for tensor in inputs.window),
    )


def _copy_of_sparse(kv: ck.SparseKV, token_order: Tensor | None = None) -> ck.SparseKV:
    # Not by way of state_dict: from_state_dict validates, which takes longer than all the timed calls together.
    storage = storage_of(kv, "kv").exact()
    tensors = {name: tensor.clone() for name, tensor in storage.tensors().items()}
    if token_order is not None:
        tensors["token_order"] = token_order
    return from_storage(storage.with_tensors(tensors))
