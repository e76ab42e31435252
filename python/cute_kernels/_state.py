"""What `SparseKV.state_dict` says beside its tensors, and what `SparseKV.from_state_dict` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._extension import ROLE_CODES
from cute_kernels._validation import ALIGNMENT, TENSOR_DTYPES

FORMAT_NAME = "cute_kernels.sparse_kv"
FORMAT_VERSION = 3

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def metadata(role: str, dtype: torch.dtype, shape: Sequence[int], max_tile_rows: int) -> dict[str, Any]:
    return {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "role": role,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "max_tile_rows": max_tile_rows,
    }


def parts(state: object) -> dict[str, Any]:
    """The arguments of `SparseKV._from_parts`; tensors are aligned, but otherwise as they were given."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict as state_dict() returns it, got {type(state).__name__}")
    _check_keys(state, "state", {*TENSOR_DTYPES, "metadata"})
    for name in TENSOR_DTYPES:
        if not isinstance(state[name], Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(state[name]).__name__}")
    checked = _checked_metadata(state["metadata"])
    return {**{name: _aligned(state[name]) for name in TENSOR_DTYPES}, **checked}


def _check_keys(given: Mapping[str, Any], name: str, expected: set[str]) -> None:
    missing, foreign = sorted(expected - given.keys()), sorted(map(str, given.keys() - expected))
    if missing or foreign:
        raise ValueError(f"{name} must have the keys {sorted(expected)}; missing: {missing}, not known: {foreign}")


def _checked_metadata(metadata: object) -> dict[str, Any]:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict, got {type(metadata).__name__}")
    if metadata.get("format") != FORMAT_NAME:
        raise ValueError(f"metadata: format must be '{FORMAT_NAME}', got {metadata.get('format')!r}")
    if metadata.get("version") != FORMAT_VERSION:
        raise ValueError(f"metadata: version must be {FORMAT_VERSION}, got {metadata.get('version')!r}")
    _check_keys(metadata, "metadata", {"format", "version", "role", "dtype", "shape", "max_tile_rows"})
    role, dtype, shape = metadata["role"], metadata["dtype"], metadata["shape"]
    if not isinstance(role, str) or role not in ROLE_CODES:
        raise ValueError(f"metadata: role must be 'key' or 'value', got {role!r}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"metadata: dtype must be 'float16' or 'bfloat16', got {dtype!r}")
    if not isinstance(shape, (list, tuple)) or len(shape) != 4 or not all(_is_size(size) for size in shape):
        raise ValueError(f"metadata: shape must be four sizes [B, Hkv, T, D], got {shape!r}")
    if not _is_size(metadata["max_tile_rows"]):
        raise ValueError(f"metadata: max_tile_rows must be a non-negative integer, got {metadata['max_tile_rows']!r}")
    return {"role": role, "dtype": _DTYPES[dtype], "shape": tuple(shape), "max_tile_rows": metadata["max_tile_rows"]}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _aligned(tensor: Tensor) -> Tensor:
    # Tensors mapped from a file, or cut out of a larger one, can start anywhere.
    if tensor.device.type in ("cpu", "cuda") and tensor.layout == torch.strided and tensor.data_ptr() % ALIGNMENT:
        return tensor.clone()
    return tensor
