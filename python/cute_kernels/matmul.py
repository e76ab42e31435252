"""Products with a compressed cache. fp32 accumulation; the numerics contract is in the README."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels import _checks, _ops, reference
from cute_kernels._extension import _C, DTYPE_CODES
from cute_kernels._backends import check_name, resolve
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
    if out is None:
        return _AV(p, *_ops.storage(v), head_dim, v.dtype, backend)
    _AV_OUT(p, *_ops.storage(v), backend, out)
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
    batch, q_heads, q_tokens, _ = q.shape
    out = torch.empty(batch, q_heads, q_tokens, tokens, dtype=out_dtype, device=q.device)
    _launch_qk(q, cache, max_tile_rows, scale, resolve(backend, q.device), out)
    return out


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
    _checks.apart(out, q=q, **dict(zip(_ops.STORAGE, cache)))
    _launch_qk(q, cache, max_tile_rows, scale, resolve(backend, q.device), out)


def _launch_qk(q: Tensor, cache: Sequence[Tensor], max_tile_rows: int, scale: float, backend: str, out: Tensor) -> None:
    _, q_heads, q_tokens, tokens = out.shape
    if out.numel() == 0:
        return
    keys = cache, max_tile_rows, "key", q.dtype, tokens, q.shape[3]
    if backend == "reference":
        reference.sparse_qk(q, _ops.sparse_kv(*keys), scale, out)
        return
    arguments = (
        _ops.kernel_view(*keys),
        q.data_ptr(),
        q.stride()[:3],
        q_heads,
        q_tokens,
        scale,
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
    )
    if backend == "cpu":
        _C.cpu.sparse_qk(*arguments, torch.get_num_threads())
        return
    with torch.cuda.device(q.device):
        _C.cuda.sparse_qk(*arguments, backend, torch.cuda.current_stream().cuda_stream)


def _av(
    p: Tensor, cache: Sequence[Tensor], max_tile_rows: int, head_dim: int, dtype: torch.dtype, backend: str
) -> Tensor:
    batch, q_heads, q_tokens, _ = p.shape
    out = torch.empty(batch, q_heads, q_tokens, head_dim, dtype=dtype, device=p.device)
    _launch_av(p, cache, max_tile_rows, resolve(backend, p.device), out)
    return out


def _av_fake(
    p: Tensor, cache: Sequence[Tensor], max_tile_rows: int, head_dim: int, dtype: torch.dtype, backend: str
) -> Tensor:
    return p.new_empty((*p.shape[:3], head_dim), dtype=dtype)


def _av_out(p: Tensor, cache: Sequence[Tensor], max_tile_rows: int, backend: str, out: Tensor) -> None:
    _checks.apart(out, p=p, **dict(zip(_ops.STORAGE, cache)))
    _launch_av(p, cache, max_tile_rows, resolve(backend, p.device), out)


def _launch_av(p: Tensor, cache: Sequence[Tensor], max_tile_rows: int, backend: str, out: Tensor) -> None:
    _, q_heads, q_tokens, tokens = p.shape
    if out.numel() == 0:
        return
    if tokens == 0:
        out.zero_()
        return
    values = cache, max_tile_rows, "value", out.dtype, tokens, out.shape[3]
    if backend == "reference":
        reference.sparse_av(p, _ops.sparse_kv(*values), out)
        return
    view = _ops.kernel_view(*values)
    arguments = view, p.data_ptr(), p.stride()[:3], DTYPE_CODES[p.dtype], q_heads, q_tokens, out.data_ptr()
    if backend == "cpu":
        _C.cpu.sparse_av(*arguments, torch.get_num_threads())
        return
    with torch.cuda.device(p.device):
        nbytes = _C.cuda.workspace_bytes(view, q_heads, q_tokens, backend)
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=p.device)
        _C.cuda.sparse_av(*arguments, workspace.data_ptr(), backend, torch.cuda.current_stream().cuda_stream)


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
