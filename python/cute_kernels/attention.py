"""Attention over a compressed cache and a dense window of the newest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import _attention_checks, _checks, _ops, reference
from cute_kernels._attention_call import AttentionCall, kernel_window
from cute_kernels._backends import check_name, launch, resolve
from cute_kernels._extension import _C
from cute_kernels.sparse_kv import SparseKV

_MOST_SPLITS = 2**31 - 1  # more make no difference


def sparse_attention(
    q: Tensor,
    k: SparseKV,
    v: SparseKV,
    *,
    scale: float | None = None,
    window: tuple[Tensor, Tensor] | None = None,
    seq_lens: Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    num_splits: int | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q [K; Kw]^T) [V; Vw], query head h meeting KV head h // (Hq / Hkv).

    q: (B, Hq, Sq, D) of k's dtype, on its device, any strides but 1 in the last dimension.
    k, v: SparseKV of roles "key" and "value", alike in shape (B, Hkv, T, D), dtype and device; compressed together or
        not.
    scale: finite; None: 1 / sqrt(D).
    window: (k_win, v_win), each (B, Hkv, W, D) of k's dtype: dense tokens that follow the compressed ones.
    seq_lens: (B,) int32 on k's device, 0 to T: how many compressed tokens of each batch row count; the window follows
        them. None: all T. The GPU kernels alone read them, without a synchronisation, and bring what is out of range
        to the nearest end of it; "reference" and "cpu" check it.
    causal: the Sq queries stand for the Sq newest tokens; query i sees all tokens but the Sq - 1 - i newest. False:
        every query sees every token.
    return_lse: return (out, lse) with lse (B, Hq, Sq) float32, the natural logarithm of the sum of exponentials.
    num_splits: the most parts that a kernel cuts a KV head's tokens into; None lets it choose. The reference backend
        has no parts.
    out: where to put the result, contiguous and apart from the inputs; default: a new tensor.
    backend: "auto" takes "cpu" on the CPU and on a GPU the kernels of its compute capability, "sm80" (8.x) or
        "sm90" (9.0, where "sm80" runs too). "reference" is plain torch. A backend that cannot serve the call raises.

    Returns (B, Hq, Sq, D) of q's dtype; softmax and accumulation in float32. A query that sees no token gives zeros
    and an lse of -inf. What a query does not see has no part in its result, be it NaN or infinite. On "sm80" and "sm90"
    there is an exception: a NaN or an infinity in a token of its own batch row and KV head that causality hides from
    it, but not from a later query.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError if
    the backend cannot serve the call; all before anything is launched.
    """
    options = scale, causal, return_lse, num_splits, backend
    known = k._attention_call if _ops.unobserved() and isinstance(k, SparseKV) else None
    if known is not None and known.fits(q, k, v, window, seq_lens, options, out):
        return known.run(q, k, v, window, seq_lens, out)
    _checks.sparse(k, "k", "key")
    _checks.sparse(v, "v", "value")
    if v.dtype != k.dtype:
        raise TypeError(f"v must have the dtype of k, {_checks.dtype_name(k.dtype)}, got {_checks.dtype_name(v.dtype)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    if v.device != k.device:
        raise ValueError(f"v must be on the device of k, {k.device}, got {v.device}")
    _checks.query_side(q, "q", k, "k", k.shape[3], "D", (k.dtype,), " like k")
    factor = 1 / math.sqrt(k.shape[3]) if scale is None else _checks.scale(scale)
    _attention_checks.window(window, k)
    _attention_checks.seq_lens(seq_lens, k)
    _checks.flag(causal, "causal")
    _checks.flag(return_lse, "return_lse")
    if num_splits is not None and _checks.integer(num_splits, "num_splits") < 1:
        raise ValueError(f"num_splits must be at least 1, got {num_splits}")
    if out is not None:
        _checks.output(out, q.shape, q.dtype, k.device)
    check_name(backend)
    splits = min(num_splits or 0, _MOST_SPLITS)
    windows = (None, None) if window is None else window
    if backend != "reference" and _ops.eager(q, *windows, seq_lens, out, k._blocks, v._blocks):
        result = _run(q, k, v, *windows, seq_lens, factor, causal, splits, backend, return_lse=return_lse, out=out)
        if q.numel():
            name = resolve(backend, q.device)
            k._attention_call = AttentionCall(q, k, v, seq_lens, options, factor=factor, splits=splits, name=name)
        return result if return_lse else result[0]
    inputs = q, *_ops.storage(k), *_ops.storage(v), *windows, seq_lens
    numbers = k.shape[2], factor, causal, splits, backend
    if out is None:
        return (_ATTENTION_LSE if return_lse else _ATTENTION)(*inputs, *numbers)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    _ATTENTION_OUT(*inputs, *numbers, out, lse)
    return out if lse is None else (out, lse)


def _attend(
    keys: _C.SparseView,
    values: _C.SparseView,
    q: Tensor,
    *,
    window: _C.Window | None = None,
    lengths: Tensor | None = None,
    sequences: Tensor | None = None,
    scale: float,
    causal: bool = True,
    return_lse: bool = False,
    num_splits: int = 0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Runs the kernels of "cpu", "sm80" or "sm90"; arguments were checked. Returns (out, lse or None).

    keys, values: contiguous or of pages of one table; caches of `S` sequences.
    q: (B, Hq, Sq, D). sequences: (B,) int32, the sequence that a row of q meets; None: row b meets sequence b.
    window: what `kernel_window` made. lengths: (S,) int32, how many tokens of the compressed cache count, from the
        first; None: all. Both contiguous.
    num_splits: 0 lets the kernels choose. out, lse: where to put the results, contiguous; None: new tensors.
    """
    batch, q_heads, q_tokens, _ = q.shape
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if lse is None and return_lse:
        lse = torch.empty(batch, q_heads, q_tokens, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    q = _checks.plain(q)
    arguments = (
        keys,
        values,
        window,
        q.data_ptr(),
        q.stride()[:3],
        batch,
        q_heads,
        q_tokens,
        0 if sequences is None else sequences.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        scale,
        causal,
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
        num_splits,
    )
    if backend == "cpu":
        _C.cpu.sparse_attention(*arguments, torch.get_num_threads())
        return out, lse
    if not hasattr(_C.cuda, "sparse_attention"):
        raise RuntimeError(f"backend '{backend}' cannot serve this call: extension built without sparse_attention")
    launch(_C.cuda.sparse_attention, q.device, *arguments, q.new_empty, backend)
    return out, lse


@torch.no_grad()
def _attend_reference(
    keys: Tensor,
    values: Tensor,
    q: Tensor,
    *,
    window: tuple[Tensor, Tensor] | None = None,
    window_lengths: Tensor | None = None,
    lengths: Tensor | None = None,
    sequences: Tensor | None = None,
    scale: float,
    causal: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `_attend` in plain torch, with dense keys and values (S, Hkv, T, D)."""
    batch, compressed = keys.shape[0], keys.shape[2]
    if window is not None:
        keys, values = torch.cat([keys, window[0]], dim=2), torch.cat([values, window[1]], dim=2)
    room = keys.shape[2] - compressed
    tokens_of = torch.full((batch,), compressed, device=q.device) if lengths is None else lengths.long()
    window_of = torch.full((batch,), room, device=q.device) if window_lengths is None else window_lengths.long()
    if sequences is not None:
        keys, values, tokens_of, window_of = (x[sequences.long()] for x in (keys, values, tokens_of, window_of))
    visible = _visible(q.shape[2], compressed, keys.shape[2], tokens_of, window_of, causal)
    result, lse = reference.attention(q, keys, values, visible, scale)
    out = result.to(q.dtype) if out is None else out.copy_(result)
    return out, lse


def _visible(queries: int, compressed: int, tokens: int, lengths: Tensor, window: Tensor, causal: bool) -> Tensor:
    """(B, Sq, tokens) bool, for `tokens` keys, the first `compressed` of them compressed, the others the window's.

    lengths, window: (B,) int64, how many of both count.
    """
    token = torch.arange(tokens, device=lengths.device)
    lengths, end = lengths[:, None], (lengths + window)[:, None]
    # A token's place in its batch row: the window starts where the row's compressed tokens end.
    place = torch.where(token < compressed, token, token - compressed + lengths)  # (B, tokens)
    counts = torch.where(token < compressed, place < lengths, place < end)  # (B, tokens)
    newer = torch.arange(queries - 1, -1, -1, device=lengths.device) * int(causal)
    return counts[:, None] & (place[:, None] < (end - newer)[:, :, None])


# ---- torch.ops.cute_kernels ------------------------------------------------------------------------------------------


def _run(
    q: Tensor,
    k: SparseKV,
    v: SparseKV,
    k_window: Tensor | None,
    v_window: Tensor | None,
    seq_lens: Tensor | None,
    scale: float,
    causal: bool,
    num_splits: int,
    backend: str,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """sparse_attention; arguments were checked, but for what only tensors with data show."""
    if out is not None:
        _attention_checks.apart(out, q, k, v, k_window, v_window)
    backend = resolve(backend, q.device)
    if seq_lens is not None and backend in ("reference", "cpu"):
        _attention_checks.lengths(seq_lens, k.shape[2])
    window = None
    if k_window is not None and v_window is not None and k_window.shape[2]:
        window = _checks.plain(k_window), _checks.plain(v_window)
    lengths = None if seq_lens is None else _checks.plain(seq_lens).contiguous()
    options: dict[str, Any] = {"lengths": lengths, "scale": scale, "causal": causal, "out": out}
    if backend == "reference":
        dense = reference.decompress(k), reference.decompress(v)
        out, computed = _attend_reference(*dense, q, window=window, **options)
        return out, computed if lse is None else lse.copy_(computed)
    return _attend(
        k._kernel_view(),
        v._kernel_view(),
        q,
        window=window and kernel_window(*window),
        return_lse=return_lse,
        num_splits=num_splits,
        lse=lse,
        backend=backend,
        **options,
    )


def _run_op(
    q: Tensor,
    k_cache: Sequence[Tensor],
    k_max_tile_rows: int,
    v_cache: Sequence[Tensor],
    v_max_tile_rows: int,
    k_window: Tensor | None,
    v_window: Tensor | None,
    seq_lens: Tensor | None,
    tokens: int,
    *options: Any,
    **results: Any,
) -> tuple[Tensor, Tensor | None]:
    k = _ops.sparse_kv(k_cache, k_max_tile_rows, "key", q.dtype, tokens, q.shape[3])
    v = _ops.sparse_kv(v_cache, v_max_tile_rows, "value", q.dtype, tokens, q.shape[3])
    return _run(q, k, v, k_window, v_window, seq_lens, *options, **results)


def _attention(*arguments: Any) -> Tensor:
    return _run_op(*arguments)[0]


def _attention_lse(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    return _run_op(*arguments, return_lse=True)


def _attention_out(*arguments: Any) -> None:
    *inputs, out, lse = arguments
    _run_op(*inputs, out=out, lse=lse)


def _attention_fake(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _attention_lse_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


_ARGUMENTS = (
    "Tensor q, Tensor[] k_cache, SymInt k_max_tile_rows, Tensor[] v_cache, SymInt v_max_tile_rows, Tensor? k_window, "
    "Tensor? v_window, Tensor? seq_lens, SymInt tokens, float scale, bool causal, int num_splits, str backend"
)
_ATTENTION = _ops.define(f"sparse_attention({_ARGUMENTS}) -> Tensor", _attention, _attention_fake)
_ATTENTION_LSE = _ops.define(
    f"sparse_attention_lse({_ARGUMENTS}) -> (Tensor, Tensor)", _attention_lse, _attention_lse_fake
)
_ATTENTION_OUT = _ops.define(
    f"sparse_attention_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!)? lse) -> ()", _attention_out, _ops.no_results
)
