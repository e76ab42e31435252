"""Products with a compressed cache. float32 accumulation; docs/building.md has the numerics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime import checks, gradients, ops, reference
from cute_kernels._runtime.backends import check_name, resolve
from cute_kernels._runtime.extension import _C, DTYPE_IDS
from cute_kernels._runtime.launching import launch
from cute_kernels._storage import arguments, tile_reader
from cute_kernels._storage.checks import query_side
from cute_kernels._storage.storage import Storage
from cute_kernels.sparse_kv import SparseKV, storage_of


def sparse_qk(
    q: Tensor,
    k: SparseKV,
    *,
    scale: float = 1.0,
    out_dtype: torch.dtype = torch.float32,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Attention logits: scale * q @ K^T, query head h meeting KV head h // (Hq / Hkv).

    q: (B, Hq, Sq, D) of k's dtype, on its device, stride 1 in the last dimension.
    k: SparseKV of role "key", (B, Hkv, T, D).
    scale: finite; multiplies the product in float32.
    out_dtype: torch.float32, float16 or bfloat16.
    out: where to put the result, contiguous and apart from the inputs; default: a new tensor.
    backend: "auto" takes "cpu" on the CPU and on a GPU the kernels of its compute capability, "sm80" (8.x) or
        "sm90" (9.0, where "sm80" runs too). "reference" is plain torch. A backend that cannot serve the call raises.

    Returns (B, Hq, Sq, T) of out_dtype. It has no gradient: a backward pass through it raises RuntimeError.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError if
    the backend cannot serve the call; all before anything is launched.
    """
    if gradients.wanted(q):
        return gradients.without_gradient(
            "sparse_qk", lambda q: sparse_qk(q, k, scale=scale, out_dtype=out_dtype, backend=backend), q, out=out
        )
    keys = storage_of(k, "k", "key")
    _, _, tokens, head_dim = keys.shape
    shape = (*query_side(q, "q", keys, "k", head_dim, "D", (keys.dtype,), " like k"), tokens)
    scale = checks.scale(scale)
    checks.chosen_dtype(out_dtype, "out_dtype", checks.PRODUCT_DTYPES)
    if out is not None:
        checks.output(out, shape, out_dtype, keys.device)
    check_name(backend)
    if backend != "reference" and ops.eager(q, out, keys.blocks):
        return run_qk(q, keys, scale, out_dtype, backend, out)
    if out is None:
        return _QK(q, *arguments.pack(keys), tokens, scale, out_dtype, backend)
    _QK_OUT(q, *arguments.pack(keys), scale, backend, out)
    return out


def sparse_av(p: Tensor, v: SparseKV, *, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Weighted sums of values: p @ V, query head h meeting KV head h // (Hq / Hkv).

    p: (B, Hq, Sq, T) float32, float16 or bfloat16, on v's device, stride 1 in the last dimension. Any weights:
        they need not be positive nor add up to 1.
    v: SparseKV of role "value", (B, Hkv, T, D).
    out: where to put the result, contiguous and apart from the inputs; default: a new tensor.
    backend: "auto" takes "cpu" on the CPU and on a GPU the kernels of its compute capability, "sm80" (8.x) or
        "sm90" (9.0, where "sm80" runs too). "reference" is plain torch. A backend that cannot serve the call raises.

    Returns (B, Hq, Sq, D) of v's dtype, accumulated in float32; zeros if T is 0. It has no gradient: a backward pass
    through it raises RuntimeError.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError if
    the backend cannot serve the call; all before anything is launched.
    """
    if gradients.wanted(p):
        return gradients.without_gradient("sparse_av", lambda p: sparse_av(p, v, backend=backend), p, out=out)
    values = storage_of(v, "v", "value")
    _, _, tokens, head_dim = values.shape
    shape = (*query_side(p, "p", values, "v", tokens, "T", checks.PRODUCT_DTYPES), head_dim)
    if out is not None:
        checks.output(out, shape, values.dtype, values.device)
    check_name(backend)
    if backend != "reference" and ops.eager(p, out, values.blocks):
        return run_av(p, values, backend, out)
    if out is None:
        return _AV(p, *arguments.pack(values), head_dim, backend)
    _AV_OUT(p, *arguments.pack(values), backend, out)
    return out


# ---- For the package's own use: behind the checks of arguments -------------------------------------------------------


def run_qk(
    q: Tensor,
    keys: Storage,
    scale: float,
    out_dtype: torch.dtype,
    backend: str,
    out: Tensor | None = None,
    *,
    stages_ahead: int = 0,
) -> Tensor:
    """sparse_qk; checks what needs tensors with data: the backend, the codec, and memory that overlaps.

    stages_ahead: depth of the GPU kernels' pipeline, for measurements; 0 lets them choose.
    """
    backend = resolve(backend, q.device)
    batch, q_heads, q_tokens, _ = q.shape
    if out is None:
        out = q.new_empty(batch, q_heads, q_tokens, keys.shape[2], dtype=out_dtype)
    else:
        checks.apart(out, q=q, **keys.tensors())
    if out.numel() == 0:
        return out
    if backend == "reference":
        return reference.qk(q, tile_reader.operand(keys), scale, out)
    q = checks.plain(q)
    strides, dtype = q.stride()[:3], DTYPE_IDS[out_dtype]
    operands = keys.view(), q.data_ptr(), strides, q_heads, q_tokens, scale, out.data_ptr(), dtype
    if backend == "cpu":
        _C.cpu.sparse_qk(*operands, torch.get_num_threads())
    else:
        launch(_C.cuda.sparse_qk, q.device, *operands, backend, stages_ahead)
    return out


def run_av(p: Tensor, values: Storage, backend: str, out: Tensor | None = None, *, stages_ahead: int = 0) -> Tensor:
    """sparse_av, as `run_qk` does sparse_qk."""
    backend = resolve(backend, p.device)
    batch, q_heads, q_tokens, tokens = p.shape
    if out is None:
        out = p.new_empty(batch, q_heads, q_tokens, values.shape[3], dtype=values.dtype)
    else:
        checks.apart(out, p=p, **values.tensors())
    if out.numel() == 0:
        return out
    if tokens == 0:
        out.detach().zero_()  # like kernels, without autograd: out may require a gradient
        return out
    if backend == "reference":
        return reference.av(p, tile_reader.operand(values), out)
    p = checks.plain(p)
    strides, dtype = p.stride()[:3], DTYPE_IDS[p.dtype]
    operands = values.view(), p.data_ptr(), strides, dtype, q_heads, q_tokens, out.data_ptr()
    if backend == "cpu":
        _C.cpu.sparse_av(*operands, torch.get_num_threads())
    else:
        launch(_C.cuda.sparse_av, p.device, *operands, out.new_empty, backend, stages_ahead)
    return out


# ---- torch.ops.cute_kernels ------------------------------------------------------------------------------------------


def _qk(q: Tensor, *packed: Any) -> Tensor:
    *cache, tokens, scale, out_dtype, backend = packed
    return run_qk(q, arguments.unpack(cache, "key", tokens, q.shape[3]), scale, out_dtype, backend)


def _qk_fake(q: Tensor, *packed: Any) -> Tensor:
    *_, tokens, _, out_dtype, _ = packed
    return q.new_empty((*q.shape[:3], tokens), dtype=out_dtype)


def _qk_out(q: Tensor, *packed: Any) -> None:
    *cache, scale, backend, out = packed
    run_qk(q, arguments.unpack(cache, "key", out.shape[3], q.shape[3]), scale, out.dtype, backend, out)


def _av(p: Tensor, *packed: Any) -> Tensor:
    *cache, head_dim, backend = packed
    return run_av(p, arguments.unpack(cache, "value", p.shape[3], head_dim), backend)


def _av_fake(p: Tensor, *packed: Any) -> Tensor:
    *_, dtype, head_dim, _ = packed
    return p.new_empty((*p.shape[:3], head_dim), dtype=dtype)


def _av_out(p: Tensor, *packed: Any) -> None:
    *cache, backend, out = packed
    run_av(p, arguments.unpack(cache, "value", p.shape[3], out.shape[3]), backend, out)


_CACHE = arguments.schema("cache")
_QK = ops.define(
    f"sparse_qk(Tensor q, {_CACHE}, SymInt tokens, float scale, ScalarType out_dtype, str backend) -> Tensor",
    _qk,
    _qk_fake,
)
_QK_OUT = ops.define(
    f"sparse_qk_out(Tensor q, {_CACHE}, float scale, str backend, Tensor(a!) out) -> ()", _qk_out, ops.no_results
)
_AV = ops.define(f"sparse_av(Tensor p, {_CACHE}, SymInt head_dim, str backend) -> Tensor", _av, _av_fake)
_AV_OUT = ops.define(f"sparse_av_out(Tensor p, {_CACHE}, str backend, Tensor(a!) out) -> ()", _av_out, ops.no_results)
