"""Checks of sparse_attention's arguments that take more than one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels import _checks
from cute_kernels.sparse_kv import SparseKV


def window(pair: Any, k: SparseKV) -> None:
    if pair is None:
        return
    if not isinstance(pair, (tuple, list)):
        raise TypeError(f"window must be a pair (k_win, v_win) of tensors, got {type(pair).__name__}")
    if len(pair) != 2:
        raise ValueError(f"window must be a pair (k_win, v_win) of tensors, got {len(pair)} of them")
    batch, kv_heads, _, head_dim = k.shape
    dtypes, device = (k.dtype,), k.device
    for name, dense in zip(("window[0]", "window[1]"), pair):
        _checks.tensor(dense, name)
        _checks.dtype(dense, name, dtypes, " like k")
        sizes = dense.shape
        if len(sizes) != 4 or sizes[0] != batch or sizes[1] != kv_heads or sizes[3] != head_dim:
            raise ValueError(
                f"{name} must have shape (B, Hkv, W, D) with B, Hkv, D = {batch}, {kv_heads}, {head_dim} as in k, "
                f"got {tuple(dense.shape)}"
            )
        _checks.device(dense, name, device, "k")
        _checks.unit_stride(dense, name)
    if pair[0].shape != pair[1].shape:
        raise ValueError(
            f"window[1] must have the shape of window[0], {tuple(pair[0].shape)}, got {tuple(pair[1].shape)}"
        )


def seq_lens(value: Any, k: SparseKV) -> None:
    """But for what is in it."""
    if value is None:
        return
    _checks.tensor(value, "seq_lens")
    _checks.dtype(value, "seq_lens", (torch.int32,))
    if tuple(value.shape) != (k.shape[0],):
        raise ValueError(f"seq_lens must have shape (B,) = ({k.shape[0]},), got {tuple(value.shape)}")
    _checks.device(value, "seq_lens", k.device, "k")


def lengths(seq_lens: Tensor, tokens: int) -> None:
    """What is in seq_lens, for backends that read it on the host."""
    found = seq_lens.tolist()
    if found and not 0 <= min(found) <= max(found) <= tokens:
        raise ValueError(f"seq_lens must be from 0 to T = {tokens}, got from {min(found)} to {max(found)}")


def apart(
    out: Tensor, q: Tensor, k: SparseKV, v: SparseKV, k_window: Tensor | None = None, v_window: Tensor | None = None
) -> None:
    """`out` shares no memory with the inputs."""
    _checks.apart(out, q=q, k=k._blocks, v=v._blocks, **{"window[0]": k_window, "window[1]": v_window})
