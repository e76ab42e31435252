"""Checks of arguments that are tensors, numbers or flags. Every message names the argument, what it takes and what it
got.

TypeError: a wrong class or dtype. ValueError: a wrong shape, device, stride or range.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime.extension import HEAD_DIMS, LARGEST_HEAD_DIM, ROLE_IDS

CACHE_DTYPES = (torch.float16, torch.bfloat16)
PRODUCT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_FLOAT32_MAX = torch.finfo(torch.float32).max
_LONGEST_SHOWN = 80


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def shown(value: Any) -> str:
    """What was given, for a message: its repr where that is short, otherwise its class."""
    try:
        text = repr(value)
    except Exception:  # of an int with more digits than Python writes, or of a class of the caller's own
        text = ""
    return text if 0 < len(text) <= _LONGEST_SHOWN else type(value).__name__


def described(value: Any) -> str:
    """A tensor's dtype, shape and device, for a message; of anything else its class."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return f"a nested tensor of {dtype_name(value.dtype)}"
    return f"{dtype_name(value.dtype)} of shape {tuple(value.shape)} on {value.device}"


def tensor(value: Any, name: str) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")


def dtype(value: Tensor, name: str, allowed: Sequence[torch.dtype], why: str = "") -> None:
    if value.dtype not in allowed:
        names = " or ".join(dtype_name(d) for d in allowed)
        raise TypeError(f"{name} must be {names}{why}, got {dtype_name(value.dtype)}")


def chosen_dtype(value: Any, name: str, allowed: Sequence[torch.dtype]) -> None:
    """An argument that is a dtype."""
    if not isinstance(value, torch.dtype) or value not in allowed:
        names = " or ".join(map(str, allowed))
        raise TypeError(f"{name} must be {names}, got {shown(value)}")


def device(found: torch.device, name: str, expected: torch.device, of: str) -> None:
    if found != expected:
        raise ValueError(f"{name} must be on the device of {of}, {expected}, got {found}")


def unit_stride(value: Tensor, name: str) -> None:
    """Rows must be dense in memory; the other strides are free. A number, of no dimension, passes."""
    if value.dim() and value.stride()[-1] != 1 and value.shape[-1] > 1:
        raise ValueError(
            f"{name} must have stride 1 in its last dimension, got strides {tuple(value.stride())}; "
            f"pass {name}.contiguous()"
        )


def own_memory(value: Tensor, name: str) -> None:
    """For tensors that may come from somebody else's file: an expanded one claims any size without having it there."""
    if value.nbytes > value.untyped_storage().nbytes():
        raise ValueError(
            f"{name} must have memory for each of its elements, got shape {tuple(value.shape)} with strides "
            f"{tuple(value.stride())} in {value.untyped_storage().nbytes()} bytes"
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


def cache_shape(value: Any) -> tuple[int, int, int, int]:
    """A shape (B, Hkv, T, D) that the caller names."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise TypeError(f"shape must be a sequence of four sizes (B, Hkv, T, D), got {type(value).__name__}")
    if len(value) != 4:
        raise ValueError(f"shape must be four sizes (B, Hkv, T, D), got {shown(value)}")
    batch, kv_heads, tokens, channels = (integer(size, "every size of shape") for size in value)
    sizes = batch, kv_heads, tokens, channels
    if min(sizes) < 0:
        raise ValueError(f"shape must have sizes of at least 0, got {sizes}")
    head_dim(channels, "shape", sizes)
    return sizes


def role(value: Any) -> None:
    if not isinstance(value, str) or value not in ROLE_IDS:
        raise ValueError(f"role must be 'key' or 'value', got {shown(value)}")


def kept_elements(head_dim: int, sparsity: Any, keep: object, keep_name: str = "keep") -> int:
    """How many of `head_dim` elements each token keeps; 0: all that are nonzero."""
    if sparsity is not None and keep is not None:
        raise ValueError(
            f"sparsity and {keep_name} say the same thing: pass one of them, got sparsity={shown(sparsity)} and "
            f"{keep_name}={shown(keep)}"
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


def integer(value: Any, name: str, most: int = 2**63 - 1) -> int:
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        raise TypeError(f"{name} must be an integer, got bool")
    try:
        number = operator.index(value)
    except Exception:  # a tensor without data raises RuntimeError
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if not -(2**63) <= number <= most:
        raise ValueError(f"{name} must be from {-(2**63)} to {most}, got an integer of {number.bit_length()} bits")
    return number


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
    """A cpu or cuda device as tensors on it name it: "cpu", or "cuda" with an index."""
    if isinstance(value, bool) or not isinstance(value, (torch.device, str, numbers.Integral)):
        raise TypeError(f"device must be a torch.device, a str or an int, got {type(value).__name__}")
    try:
        name = str(value) if isinstance(value, (torch.device, str)) else f"cuda:{int(value)}"
        target = torch.device(name)
    except (RuntimeError, ValueError):  # ValueError: an int of more digits than Python writes
        raise ValueError(f"device must name a cpu or cuda device, got {shown(value)}") from None
    if str(target) != name:  # torch takes an index modulo 256
        raise ValueError(f"device must name a cpu or cuda device, got {shown(value)}")
    if target.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be a cpu or cuda device, got {target}")
    if target.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else " (this PyTorch was built without CUDA)"
        raise RuntimeError(f"device 'cuda': torch finds no CUDA device{built}; pass device='cpu' for the CPU backend")
    index = torch.cuda.current_device() if target.index is None else target.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"device must be one of torch's {torch.cuda.device_count()} CUDA devices, got {target}")
    return torch.device("cuda", index)


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


Extent = tuple[int, int, str]  # first address of a tensor's memory, the one behind it, and the tensor's name


def apart(out: Tensor, **inputs: Tensor | None) -> None:
    """Raises ValueError if `out`, which is contiguous, shares memory with an input; for tensors with data."""
    apart_from(out, extents(**inputs))


def apart_from(out: Tensor, memory: Iterable[Extent]) -> None:
    """`apart`, of inputs that are known."""
    begin = out.data_ptr()
    end = begin + out.nbytes
    for first, behind, name in memory:
        if first < end and begin < behind:
            raise ValueError(f"out must not share memory with {name}")


def extents(**inputs: Tensor | None) -> list[Extent]:
    return [
        (address := value.data_ptr(), address + _reach(value), name)
        for name, value in inputs.items()
        if value is not None
    ]


def _reach(value: Tensor) -> int:
    """Bytes from a tensor's first to the last that it may touch."""
    if value.numel() == 0 or value.is_contiguous():
        return value.nbytes
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
    return (last + 1) * value.element_size()
