"""Checks of sparse_attention's arguments that take more than one tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime import checks
from cute_kernels._storage.storage import Storage


def pair(keys: Storage, values: Storage) -> None:
    """Keys and values of one cache: alike in dtype, shape and device."""
    if values.dtype != keys.dtype:
        expected, found = checks.dtype_name(keys.dtype), checks.dtype_name(values.dtype)
        raise TypeError(f"v must have the dtype of k, {expected}, got {found}")
    if values.shape != keys.shape:
        raise ValueError(f"v must have the shape of k, {tuple(keys.shape)}, got {tuple(values.shape)}")
    checks.device(values.device, "v", keys.device, "k")


def window(windows: Any, keys: Storage) -> None:
    if windows is None:
        return
    if not isinstance(windows, (tuple, list)):
        raise TypeError(f"window must be a pair (k_win, v_win) of tensors, got {type(windows).__name__}")
    if len(windows) != 2:
        raise ValueError(f"window must be a pair (k_win, v_win) of tensors, got {len(windows)} of them")
    batch, kv_heads, _, head_dim = keys.shape
    dtypes, device = (keys.dtype,), keys.device
    for name, dense in zip(("window[0]", "window[1]"), windows):
        checks.tensor(dense, name)
        checks.dtype(dense, name, dtypes, " like k")
        sizes = dense.shape
        if len(sizes) != 4 or sizes[0] != batch or sizes[1] != kv_heads or sizes[3] != head_dim:
            raise ValueError(
                f"{name} must have shape (B, Hkv, W, D) with B, Hkv, D = {batch}, {kv_heads}, {head_dim} as in k, "
                f"got {tuple(dense.shape)}"
            )
        checks.device(dense.device, name, device, "k")
        checks.unit_stride(dense, name)
    if windows[0].shape != windows[1].shape:
        raise ValueError(
            f"window[1] must have the shape of window[0], {tuple(windows[0].shape)}, got {tuple(windows[1].shape)}"
        )


def seq_lens(value: Any, keys: Storage) -> None:
    """Class, dtype, shape and device; `lengths` checks the numbers."""
    if value is None:
        return
    checks.tensor(value, "seq_lens")
    checks.dtype(value, "seq_lens", (torch.int32,))
    if tuple(value.shape) != (keys.shape[0],):
        raise ValueError(f"seq_lens must have shape (B,) = ({keys.shape[0]},), got {tuple(value.shape)}")
    checks.device(value.device, "seq_lens", keys.device, "k")


def lengths(seq_lens: Tensor, tokens: int) -> None:
    """The numbers in seq_lens, for backends that read them on the host."""
    found = seq_lens.tolist()
    if found and not 0 <= min(found) <= max(found) <= tokens:
        raise ValueError(f"seq_lens must be from 0 to T = {tokens}, got {min(found)} to {max(found)}")


def apart(
    out: Tensor,
    q: Tensor,
    caches: Iterable[checks.Extent],
    k_window: Tensor | None = None,
    v_window: Tensor | None = None,
    seq_lens: Tensor | None = None,
) -> None:
    """`out` shares no memory with the inputs. caches: `memory` of them."""
    checks.apart_from(out, caches)
    checks.apart(out, q=q, **{"window[0]": k_window, "window[1]": v_window}, seq_lens=seq_lens)


def memory(keys: Storage, values: Storage) -> list[checks.Extent]:
    """Where all tensors of both are."""
    return [
        extent
        for name, storage in (("k", keys), ("v", values))
        for extent in checks.extents(**{f"{name}.{field}": tensor for field, tensor in storage.tensors().items()})
    ]
