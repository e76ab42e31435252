"""Checks of arguments that are tensors, numbers or flags. Every message names the argument, what it takes and what it
got.

TypeError: a wrong class or dtype. ValueError: a wrong shape, device, stride or range.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime.extension import HEAD_DIMS, LARGEST_HEAD_DIM, ROLE_CODES

CACHE_DTYPES = (torch.float16, torch.bfloat16)
PRODUCT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_FLOAT32_MAX = torch.finfo(torch.float32).max


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(value: Any, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {value.layout}")


def dtype(value: Tensor, name: str, allowed: Sequence[torch.dtype], why: str = "") -> None:
    if value.dtype not in allowed:
        names = " or ".join(dtype_name(d) for d in allowed)
        raise TypeError(f"{name} must be {names}{why}, got {dtype_name(value.dtype)}")


def device(found: torch.device, name: str, expected: torch.device, of: str) -> None:
    if found != expected:
        raise ValueError(f"{name} must be on the device of {of}, {expected}, got {found}")


def unit_stride(value: Tensor, name: str) -> None:
    """Rows must be dense in memory; the other strides are free."""
    if value.stride()[-1] != 1 and value.shape[-1] > 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {tuple(value.stride())}; "
            f"pass {name}.contiguous()"
        )


def dense_cache(x: Any, name: str) -> Tensor:
    """A K or V to be compressed, (B, Hkv, T, D); returns it without a pending negation."""
    tensor(x, name)
    if x.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a cpu or cuda device, got {x.device}")
    dtype(x, name, CACHE_DTYPES)
    if x.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions (B, Hkv, T, D), got shape {tuple(x.shape)}")
    head_dim(x.shape[3], name, tuple(x.shape))
    unit_stride(x, name)
    return plain(x)


def plain(value: Tensor) -> Tensor:
    """The same tensor without a pending negation, which kernels would not see. A compiler cannot trace that: there the
    operation sees to it when it runs."""
    return value.resolve_neg() if not torch.compiler.is_compiling() and value.is_neg() else value


def head_dim(value: int, name: str, shape: Sequence[int]) -> None:
    if value not in HEAD_DIMS:
        raise ValueError(
            f"{name} must have a head dim D that is a multiple of 8, from 8 to {LARGEST_HEAD_DIM}, got {value} in "
            f"shape {shape}"
        )


def role(value: Any) -> None:
    if not isinstance(value, str) or value not in ROLE_CODES:
        raise ValueError(f"role must be 'key' or 'value', got {value!r}")


def kept_elements(head_dim: int, sparsity: Any, keep: object, keep_name: str = "keep") -> int:
    """How many of `head_dim` elements each token keeps; 0: all that are nonzero."""
    if sparsity is not None and keep is not None:
        raise ValueError(
            f"sparsity and {keep_name} say the same thing: pass one of them, got sparsity={sparsity!r} and "
            f"{keep_name}={keep!r}"
        )
    if keep is not None:
        count = integer(keep, keep_name)
        if not 1 <= count <= head_dim:
            raise ValueError(f"{keep_name} must be from 1 to D = {head_dim}, got {count}")
        return count
    if sparsity is not None:
        fraction = real(sparsity, "sparsity")
        if not 0 <= fraction <= 1:
            raise ValueError(f"sparsity must be from 0 to 1, got {fraction}")
        return max(1, math.floor(head_dim * (1 - fraction) + 1e-6))
    return 0


def integer(value: Any, name: str) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got bool")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None


def real(value: Any, name: str) -> float:
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got one beyond the range of float") from None


def scale(value: Any) -> float:
    factor = real(value, "scale")
    if not abs(factor) <= _FLOAT32_MAX:
        raise ValueError(f"scale must be finite in float32, got {factor}")
    return factor


def flag(value: Any, name: str) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def pair(value: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"{name} must be a tuple (keys, values), got {type(value).__name__}")
    if len(value) != 2:
        raise ValueError(f"{name} must be two caches (keys, values), got {len(value)}")
    return value[0], value[1]


def kernel_device(value: Any) -> torch.device:
    """A cpu or cuda device, with its index."""
    try:
        target = torch.device(value)
    except RuntimeError:
        raise ValueError(f"device must name a cpu or cuda device, got {value!r}") from None
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a cpu or cuda device, got {target}")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("device 'cuda': torch finds no CUDA device")
    return target


def output(out: Any, expected: Sequence[int], expected_dtype: torch.dtype, of: torch.device) -> None:
    """Memory for a result, given by the caller: contiguous. `apart` checks that it shares none with the inputs."""
    tensor(out, "out")
    dtype(out, "out", (expected_dtype,))
    if tuple(out.shape) != tuple(expected):
        raise ValueError(f"out must have shape {tuple(expected)}, got {tuple(out.shape)}")
    if out.device != of:
        raise ValueError(f"out must be on the device of the inputs, {of}, got {out.device}")
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {tuple(out.stride())}")
    if not torch.compiler.is_compiling() and out.is_neg():  # a compiler cannot trace is_neg
        raise ValueError("out must not have a pending negation, got a tensor with is_neg()")


def apart(out: Tensor, **inputs: Tensor | None) -> None:
    """Raises ValueError if `out`, which is contiguous, shares memory with an input; for tensors with data."""
    begin = out.data_ptr()
    end = begin + out.nbytes
    for name, value in inputs.items():
        if value is None:
            continue
        address = value.data_ptr()
        if address < end and begin < address + _reach(value):
            raise ValueError(f"out must not share memory with {name}")


def _reach(value: Tensor) -> int:
    """Bytes from a tensor's first to the last that it may touch."""
    if value.numel() == 0 or value.is_contiguous():
        return value.nbytes
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return (last + 1) * value.element_size()
