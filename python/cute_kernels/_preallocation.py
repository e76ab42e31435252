"""What `SparseKV.preallocate` makes a cache of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cute_kernels import _checks, _steps, _tiles
from cute_kernels._extension import _C


def parts(shape: Any, dtype: Any, role: Any, sparsity: Any, keep: Any, device: Any) -> dict[str, Any]:
    """The arguments of `SparseKV._from_parts`: a cache of zeros, with room for any other."""
    sizes = _sizes(shape)
    if dtype not in _checks.CACHE_DTYPES:
        raise TypeError(f"dtype must be float16 or bfloat16, got {_checks.dtype_name(dtype)}")
    _checks.role(role)
    kept = _checks.kept_elements(sizes[3], sparsity, keep)
    target = _checks.kernel_device(device)
    padded = _C.format.padded_head_dim(sizes[3])
    tensors = _steps.empty_tensors(sizes, kept, target)
    tiles = sizes[0] * sizes[1] * _tiles.tiles_per_head(sizes[2])
    shortest = _C.format.bitmap_rows(padded)
    totals = [tiles * shortest, shortest if tiles else 0, 0]
    return {
        **tensors,
        "role": role,
        "dtype": dtype,
        "shape": sizes,
        "max_tile_rows": _steps.rows_of_tile(padded, kept) if tiles else 0,
        "keep": kept,
        "totals": torch.tensor(totals, dtype=torch.int64, device=target),
    }


def _sizes(shape: Any) -> tuple[int, int, int, int]:
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"shape must be a sequence of four sizes (B, Hkv, T, D), got {type(shape).__name__}")
    if len(shape) != 4:
        raise ValueError(f"shape must be four sizes (B, Hkv, T, D), got {tuple(shape)}")
    batch, kv_heads, tokens, head_dim = (_checks.integer(size, "shape's sizes") for size in shape)
    if min(batch, kv_heads, tokens) < 0:
        raise ValueError(f"shape must have sizes of at least 0, got {tuple(shape)}")
    _checks.head_dim(head_dim, "shape", tuple(shape))
    return batch, kv_heads, tokens, head_dim
