"""Products with a compressed cache. fp32 accumulation; the numerics contract is in the README."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels import _checks, _ops, reference
from cute_kernels._extension import _C, DTYPE_CODES
from cute_kernels._backends import check_name, launch, resolve
from cute_kernels.sparse_kv import SparseKV


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

    q: (B, Hq, Sq, D) of k's dtype, on its device, any strides but 1 in the last dimension.
    k: SparseKV of role "key", (B, Hkv, T, D).
    scale: finite; multiplies the product in float32.
    out_dtype: torch.float32, float16 or bfloat16.
    out: where to put the result, contiguous and apart from the inputs; default: a new tensor.
    backend: "auto" takes "cpu" on the CPU and on a GPU the kernels of its compute capability, "sm80" (8.x) or
        "sm90" (9.0, where "sm80" runs too). "reference" is plain torch. A backend that cannot serve the call raises.

    Returns (B, Hq, Sq, T) of out_dtype.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError if
    the backend cannot serve the call; all before anything is launched.
    """
    _checks.sparse(k, "k", "key")
    _, _, tokens, head_dim = k.shape
    shape = (*_checks.query_side(q, "q", k, "k", head_dim, "D", (k.dtype,), " like k"), tokens)
    scale = _checks.scale(scale)
    if out_dtype not in _checks.PRODUCT_DTYPES:
        raise TypeError(f"out_dtype must be torch.float32, torch.float16 or torch.bfloat16, got {out_dtype!r}")
    if out is not None:
        _checks.output(out, shape, out_dtype, k.device)
    check_name(backend)
    if backend != "reference" and _ops.eager(q, out, k._blocks):
        return _run_qk(q, k, scale, out_dtype, backend, out)
    if out is None:
        return _QK(q, *_ops.storage(k), tokens, scale, out_dtype, backend)
    _QK_OUT(q, *_ops.storage(k), scale, backend, out)
    return out


def sparse_av(p: Tensor, v: SparseKV, *, out: Tensor | None = None, backend: str = "auto") -> Tensor:
    """Weighted sums of values: p @ V, query head h meeting KV head h // (Hq / Hkv).

    p: (B, Hq, Sq, T) float32, float16 or bfloat16, on v's device, any strides but 1 in the last dimension. Any weights:
        they need not be positive nor add up to 1.
    v: SparseKV of role "value", (B, Hkv, T, D).
    out: where to put the result, contiguous and apart from the inputs; default: a new tensor.
    backend: "auto" takes "cpu" on the CPU and on a GPU the kernels of its compute capability, "sm80" (8.x) or
        "sm90" (9.0, where "sm80" runs too). "reference" is plain torch. A backend that cannot serve the call raises.

    Returns (B, Hq, Sq, D) of v's dtype, accumulated in float32; zeros if T is 0.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError if
    the backend cannot serve the call; all before anything is launched.
    """
    _checks.sparse(v, "v", "value")
    _, _, tokens, head_dim = v.shape
    shape = (*_checks.query_side(p, "p", v, "v", tokens, "T", _checks.PRODUCT_DTYPES), head_dim)
    if out is not None:
        _checks.output(out, shape, v.dtype, v.device)
    check_name(backend)
    if backend != "reference" and _ops.eager(p, out, v._blocks):
        return _run_av(p, v, backend, out)
    if out is None:
        return _AV(p, *_ops.storage(v), head_dim, v.dtype, backend)
    _AV_OUT(p, *_ops.storage(v), backend, out)
    return out


def _run_qk(
    q: Tensor, k: SparseKV, scale: float, out_dtype: torch.dtype, backend: str, out: Tensor | None = None
) -> Tensor:
    """sparse_qk; arguments were checked, but for the backend and for memory that overlaps."""
    backend = resolve(backend, q.device)
    batch, q_heads, q_tokens, _ = q.shape
    if out is None:
        out = q.new_empty(batch, q_heads, q_tokens, k.shape[2], dtype=out_dtype)
    else:
        _checks.apart(out, q=q, **_ops.named_storage(k))
    if out.numel() == 0:
        return out
    if backend == "reference":
        reference.sparse_qk(q, k, scale, out)
        return out
    q = _checks.plain(q)
    strides, dtype = q.stride()[:3], DTYPE_CODES[out_dtype]
    arguments = k._kernel_view(), q.data_ptr(), strides, q_heads, q_tokens, scale, out.data_ptr(), dtype
    if backend == "cpu":
        _C.cpu.sparse_qk(*arguments, torch.get_num_threads())
    else:
        launch(_C.cuda.sparse_qk, q.device, *arguments, backend)
    return out


def _run_av(p: Tensor, v: SparseKV, backend: str, out: Tensor | None = None) -> Tensor:
    """sparse_av; arguments were checked, but for the backend and for memory that overlaps."""
    backend = resolve(backend, p.device)
    batch, q_heads, q_tokens, tokens = p.shape
    if out is None:
        out = p.new_empty(batch, q_heads, q_tokens, v.shape[3], dtype=v.dtype)
    else:
        _checks.apart(out, p=p, **_ops.named_storage(v))
    if out.numel() == 0:
        return out
    if tokens == 0:
        out.detach().zero_()  # of whom autograd is to know nothing
        return out
    if backend == "reference":
        reference.sparse_av(p, v, out)
        return out
    p = _checks.plain(p)
    strides, dtype = p.stride()[:3], DTYPE_CODES[p.dtype]
    arguments = v._kernel_view(), p.data_ptr(), strides, dtype, q_heads, q_tokens, out.data_ptr()
    if backend == "cpu":
        _C.cpu.sparse_av(*arguments, torch.get_num_threads())
    else:
        launch(_C.cuda.sparse_av, p.device, *arguments, out.new_empty, backend)
    return out


# ---- torch.ops.cute_kernels ------------------------------------------------------------------------------------------


def _qk(
    q: Tensor,
    cache: Sequence[Tensor],
    max_tile_rows: int,
    tokens: int,
    scale: float,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    k = _ops.sparse_kv(cache, max_tile_rows, "key", q.dtype, tokens, q.shape[3])
    return _run_qk(q, k, scale, out_dtype, backend)


def _qk_fake(
    q: Tensor,
    cache: Sequence[Tensor],
    max_tile_rows: int,
    tokens: int,
    scale: float,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    return q.new_empty((*q.shape[:3], tokens), dtype=out_dtype)


def _qk_out(q: Tensor, cache: Sequence[Tensor], max_tile_rows: int, scale: float, backend: str, out: Tensor) -> None:
    k = _ops.sparse_kv(cache, max_tile_rows, "key", q.dtype, out.shape[3], q.shape[3])
    _run_qk(q, k, scale, out.dtype, backend, out)


def _av(
    p: Tensor, cache: Sequence[Tensor], max_tile_rows: int, head_dim: int, dtype: torch.dtype, backend: str
) -> Tensor:
    return _run_av(p, _ops.sparse_kv(cache, max_tile_rows, "value", dtype, p.shape[3], head_dim), backend)


def _av_fake(
    p: Tensor, cache: Sequence[Tensor], max_tile_rows: int, head_dim: int, dtype: torch.dtype, backend: str
) -> Tensor:
    return p.new_empty((*p.shape[:3], head_dim), dtype=dtype)


def _av_out(p: Tensor, cache: Sequence[Tensor], max_tile_rows: int, backend: str, out: Tensor) -> None:
    v = _ops.sparse_kv(cache, max_tile_rows, "value", out.dtype, p.shape[3], out.shape[3])
    _run_av(p, v, backend, out)


_CACHE = "Tensor[] cache, SymInt max_tile_rows"
_QK = _ops.define(
    f"sparse_qk(Tensor q, {_CACHE}, SymInt tokens, float scale, ScalarType out_dtype, str backend) -> Tensor",
    _qk,
    _qk_fake,
)
_QK_OUT = _ops.define(
    f"sparse_qk_out(Tensor q, {_CACHE}, float scale, str backend, Tensor(a!) out) -> ()", _qk_out, _ops.no_results
)
_AV = _ops.define(
    f"sparse_av(Tensor p, {_CACHE}, SymInt head_dim, ScalarType dtype, str backend) -> Tensor", _av, _av_fake
)
_AV_OUT = _ops.define(f"sparse_av_out(Tensor p, {_CACHE}, str backend, Tensor(a!) out) -> ()", _av_out, _ops.no_results)
