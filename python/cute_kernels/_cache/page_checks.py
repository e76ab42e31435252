"""Checks of arguments that `paged` takes: pools, windows and tensors in memory that the caller owns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from cute_kernels._cache import page_pool
from cute_kernels._cache.page_config import TensorSize
from cute_kernels._cache.pool import Pool, Windows
from cute_kernels._runtime import checks


def pool(value: Any) -> None:
    if not isinstance(value, Pool):
        raise TypeError(f"pool must be what make_pool makes, got {type(value).__name__}")


def tensors(**values: Any) -> None:
    """Before torch's own operations look at them; the rest is checked where they are used."""
    for name, value in values.items():
        checks.tensor(value, name)


def windows(value: Any, made_for: Pool) -> None:
    if not isinstance(value, Windows):
        raise TypeError(f"windows must be what make_windows makes, got {type(value).__name__}")
    keys = value.keys
    fits = keys.shape[:2] == (made_for.sequences, made_for.kv_heads) and keys.shape[3] == made_for.head_dim
    if not fits or keys.dtype != made_for.dtype or keys.device != made_for.device:
        raise ValueError(
            f"windows must be those of the pool's {made_for.sequences} sequences, {made_for.kv_heads} heads, head dim "
            f"and dtype, got {checks.described(keys)}"
        )


def lengths(value: Any, made_for: Pool) -> None:
    page_pool.check_index(value, "lengths", made_for.sequences, made_for.device)


def names(given: Any, wanted: Mapping[str, TensorSize], name: str) -> None:
    """That the tensors given are those wanted."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must map names to tensors, got {type(given).__name__}")
    missing, other = sorted(wanted.keys() - given.keys()), sorted(given.keys() - wanted.keys())
    if missing or other:
        raise ValueError(f"{name} must be {', '.join(wanted)}; missing {missing}, and not known {other}")
    for key in wanted:
        checks.tensor(given[key], key)


def sizes(given: Mapping[str, Tensor], wanted: Mapping[str, TensorSize]) -> None:
    """That they have the dtypes and shapes wanted, on one device."""
    device = checks.kernel_device(next(iter(given.values())).device)
    for name, size in wanted.items():
        tensor = given[name]
        checks.dtype(tensor, name, (size.dtype,))
        checks.device(tensor.device, name, device, "the other tensors")
        if tuple(tensor.shape) != size.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous, of shape {size.shape}, got {tuple(tensor.shape)} with strides "
                f"{tuple(tensor.stride())}"
            )
