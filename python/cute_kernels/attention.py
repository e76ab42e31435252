"""Attention over a compressed cache and a dense window of the newest tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cute_kernels import _checks, reference
from cute_kernels._backends import resolve
from cute_kernels.sparse_kv import SparseKV


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
        them. None: all T.
    causal: the Sq queries stand for the Sq newest tokens; query i sees all tokens but the Sq - 1 - i newest. False:
        every query sees every token.
    return_lse: return (out, lse) with lse (B, Hq, Sq) float32, the natural logarithm of the sum of exponentials.
    num_splits: into how many parts a kernel cuts the tokens; None lets it choose. The reference backend has no parts.
    out: where to put the result, contiguous and apart from the inputs; default: a new tensor.
    backend: only "reference" serves so far, and reads seq_lens on the host; any other name, "auto" included, raises.

    Returns (B, Hq, Sq, D) of q's dtype. A query that sees no token gives zeros and an lse of -inf.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError if
    the backend cannot serve the call; all before anything is launched.
    """
    _checks.sparse(k, "k", "key")
    _checks.sparse(v, "v", "value")
    if v.dtype != k.dtype:
        raise TypeError(f"v must have the dtype of k, {_checks.dtype_name(k.dtype)}, got {_checks.dtype_name(v.dtype)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    if v.device != k.device:
        raise ValueError(f"v must be on the device of k, {k.device}, got {v.device}")
    _checks.query_side(q, "q", k, "k", k.shape[3], "D", (k.dtype,), " like k")
    scale = 1 / math.sqrt(k.shape[3]) if scale is None else _checks.scale(scale)
    _check_window(window, k)
    _check_seq_lens(seq_lens, k)
    _checks.flag(causal, "causal")
    _checks.flag(return_lse, "return_lse")
    if num_splits is not None and _checks.integer(num_splits, "num_splits") < 1:
        raise ValueError(f"num_splits must be at least 1, got {num_splits}")
    if out is not None:
        dense = zip(("window[0]", "window[1]"), window or ())
        _checks.output(out, q.shape, q.dtype, k.device, (("q", q), ("k", k.blocks), ("v", v.blocks), *dense))
    name = resolve(backend, k.device)
    if name != "reference":
        raise RuntimeError(f"sparse_attention has no {name} kernels yet; pass backend='reference'")
    _check_lengths(seq_lens, k.shape[2])

    keys, values = reference.decompress(k), reference.decompress(v)
    if window is not None:
        keys, values = torch.cat([keys, window[0].detach()], dim=2), torch.cat([values, window[1].detach()], dim=2)
    visible = _visible(q.shape[2], k, keys.shape[2], seq_lens, causal)
    result, lse = reference.attention(q, keys, values, visible, scale)
    with torch.no_grad():
        out = result.to(q.dtype) if out is None else out.copy_(result)
    return (out, lse) if return_lse else out


def _check_window(window: Any, k: SparseKV) -> None:
    if window is None:
        return
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window must be a pair (k_win, v_win) of tensors, got {type(window).__name__}")
    if len(window) != 2:
        raise ValueError(f"window must be a pair (k_win, v_win) of tensors, got {len(window)} of them")
    batch, kv_heads, _, head_dim = k.shape
    for name, dense in zip(("window[0]", "window[1]"), window):
        _checks.tensor(dense, name)
        _checks.dtype(dense, name, (k.dtype,), " like k")
        if dense.dim() != 4 or (*dense.shape[:2], dense.shape[3]) != (batch, kv_heads, head_dim):
            raise ValueError(
                f"{name} must have shape (B, Hkv, W, D) with B, Hkv, D = {batch}, {kv_heads}, {head_dim} as in k, "
                f"got {tuple(dense.shape)}"
            )
        _checks.device(dense, name, k.device, "k")
        _checks.unit_stride(dense, name)
    if window[0].shape != window[1].shape:
        raise ValueError(
            f"window[1] must have the shape of window[0], {tuple(window[0].shape)}, got {tuple(window[1].shape)}"
        )


def _check_seq_lens(seq_lens: Any, k: SparseKV) -> None:
    if seq_lens is None:
        return
    _checks.tensor(seq_lens, "seq_lens")
    _checks.dtype(seq_lens, "seq_lens", (torch.int32,))
    if tuple(seq_lens.shape) != (k.shape[0],):
        raise ValueError(f"seq_lens must have shape (B,) = ({k.shape[0]},), got {tuple(seq_lens.shape)}")
    _checks.device(seq_lens, "seq_lens", k.device, "k")


def _check_lengths(seq_lens: Tensor | None, tokens: int) -> None:
    if seq_lens is not None and seq_lens.numel():
        least, most = (int(value) for value in torch.stack(seq_lens.aminmax()))
        if least < 0 or most > tokens:
            raise ValueError(f"seq_lens must be from 0 to T = {tokens}, got from {least} to {most}")


def _visible(queries: int, k: SparseKV, tokens: int, seq_lens: Tensor | None, causal: bool) -> Tensor:
    """(B, Sq, tokens) bool, for `tokens` keys: the T compressed ones and the window."""
    batch, _, compressed, _ = k.shape
    token = torch.arange(tokens, device=k.device)
    lengths = torch.full((batch,), compressed, device=k.device) if seq_lens is None else seq_lens.long()
    # A token's place in its batch row: the window starts where the row's compressed tokens end.
    place = torch.where(token < compressed, token, token - compressed + lengths[:, None])  # (B, tokens)
    counts = (token >= compressed) | (token < lengths[:, None])  # (B, tokens)
    end = (lengths + tokens - compressed)[:, None].expand(batch, queries)
    if causal:
        end = end - torch.arange(queries - 1, -1, -1, device=k.device)
    return counts[:, None] & (place[:, None] < end[:, :, None])
