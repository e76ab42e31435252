"""Products with a compressed cache. fp32 accumulation; the numerics contract is in the README."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import _checks, reference
from cute_kernels._extension import _C, DTYPE_CODES
from cute_kernels._backends import resolve
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
    batch, q_heads, q_tokens = _checks.query_side(q, "q", k, "k", head_dim, "D", (k.dtype,), " like k")
    scale = _checks.scale(scale)
    if out_dtype not in _checks.PRODUCT_DTYPES:
        raise TypeError(f"out_dtype must be torch.float32, torch.float16 or torch.bfloat16, got {out_dtype!r}")
    shape = (batch, q_heads, q_tokens, tokens)
    if out is not None:
        _checks.output(out, shape, out_dtype, k.device, (("q", q), *k._tensors().items()))
    backend = resolve(backend, k.device)
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=k.device)
    if out.numel() == 0:
        return out
    if backend == "reference":
        return reference.sparse_qk(q, k, scale, out)
    q = q.resolve_neg()
    view, strides, out_code = k._kernel_view(), q.stride()[:3], DTYPE_CODES[out_dtype]
    if backend == "cpu":
        _C.cpu.sparse_qk(
            view, q.data_ptr(), strides, q_heads, q_tokens, scale, out.data_ptr(), out_code, torch.get_num_threads()
        )
        return out
    with torch.cuda.device(k.device):
        _C.cuda.sparse_qk(
            view,
            q.data_ptr(),
            strides,
            q_heads,
            q_tokens,
            scale,
            out.data_ptr(),
            out_code,
            backend,
            torch.cuda.current_stream().cuda_stream,
        )
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
    batch, q_heads, q_tokens = _checks.query_side(p, "p", v, "v", tokens, "T", _checks.PRODUCT_DTYPES)
    shape = (batch, q_heads, q_tokens, head_dim)
    if out is not None:
        _checks.output(out, shape, v.dtype, v.device, (("p", p), *v._tensors().items()))
    backend = resolve(backend, v.device)
    if out is None:
        out = torch.empty(shape, dtype=v.dtype, device=v.device)
    if out.numel() == 0:
        return out
    if tokens == 0:
        with torch.no_grad():
            return out.zero_()
    if backend == "reference":
        return reference.sparse_av(p, v, out)
    p = p.resolve_neg()
    view, strides, p_code = v._kernel_view(), p.stride()[:3], DTYPE_CODES[p.dtype]
    if backend == "cpu":
        _C.cpu.sparse_av(
            view, p.data_ptr(), strides, p_code, q_heads, q_tokens, out.data_ptr(), torch.get_num_threads()
        )
        return out
    with torch.cuda.device(v.device):
        nbytes = _C.cuda.workspace_bytes(view, q_heads, q_tokens, backend)
        workspace = torch.empty(nbytes, dtype=torch.uint8, device=v.device)
        _C.cuda.sparse_av(
            view,
            p.data_ptr(),
            strides,
            p_code,
            q_heads,
            q_tokens,
            out.data_ptr(),
            workspace.data_ptr(),
            backend,
            torch.cuda.current_stream().cuda_stream,
        )
    return out
