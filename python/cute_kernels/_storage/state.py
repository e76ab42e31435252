"""What `SparseKV.state_dict` says beside its tensors, and what `SparseKV.from_state_dict` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime.checks import shown
from cute_kernels._runtime.extension import CODEC_IDS, ROLE_IDS, SCALED_CODECS, TILE_FORMATS, codecs_of, own_codec
from cute_kernels._storage.storage import BITMAP, TENSORS, Storage
from cute_kernels._storage.validation import ALIGNMENT, check_tensors

FORMAT_NAME = "cute_kernels.sparse_kv"
FORMAT_VERSION = 5
OLDEST_VERSION = 3  # without codec and tile_format: every cache was stored in the own codec of its dtype
_TWO_OF_FOUR_VERSION = 5
_OLD_CODEC = "e4m3"  # of version 4: without scales

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_KEYS = {"format", "version", "role", "dtype", "shape", "max_tile_rows"}
_NEW_KEYS = {"codec", "tile_format"}


def state_metadata(storage: Storage) -> dict[str, Any]:
    """What tensors alone do not say; storage: exact."""
    return {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "tile_format": storage.tile_format,
        "codec": storage.codec,
        "role": storage.role,
        "dtype": str(storage.dtype).removeprefix("torch."),
        "shape": list(storage.shape),
        "max_tile_rows": storage.max_tile_rows,
    }


def read_state(state: object) -> Storage:
    """The storage that a state describes, of tensors that `check_tensors` takes and that are aligned.

    A state may come from a file that somebody else wrote: no memory is taken before its tensors are known to be as
    large as they claim, and as large as the metadata say.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict as state_dict() returns it, got {type(state).__name__}")
    if "metadata" not in state:
        _check_keys(state, "state", {*_tensors_of(""), "metadata"})
    metadata = _checked_metadata(state["metadata"])
    names = _tensors_of(metadata["codec"])
    _check_keys(state, "state", {*names, "metadata"})
    for name in names:
        if not isinstance(state[name], Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(state[name]).__name__}")
    tensors: dict[str, Any] = {name: state[name] for name in names}
    storage = Storage(**tensors, **metadata)
    check_tensors(storage)
    return storage.with_tensors({name: _aligned(tensor) for name, tensor in storage.tensors().items()})


def _tensors_of(codec: str) -> tuple[str, ...]:
    return TENSORS if codec in SCALED_CODECS else TENSORS[:-1]


def _check_keys(given: Mapping[str, Any], name: str, expected: set[str]) -> None:
    missing, foreign = sorted(expected - given.keys()), sorted(map(shown, given.keys() - expected))
    if missing or foreign:
        raise ValueError(f"{name} must have the keys {sorted(expected)}; missing: {missing}, not known: {foreign}")


def _checked_metadata(metadata: object) -> dict[str, Any]:
    if not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a dict, got {type(metadata).__name__}")
    name = metadata.get("format")
    if not isinstance(name, str) or name != FORMAT_NAME:
        raise ValueError(f"metadata: format must be '{FORMAT_NAME}', got {shown(name)}")
    version = metadata.get("version")
    if not isinstance(version, int) or not OLDEST_VERSION <= version <= FORMAT_VERSION:
        raise ValueError(f"metadata: version must be from {OLDEST_VERSION} to {FORMAT_VERSION}, got {shown(version)}")
    _check_keys(metadata, "metadata", _KEYS if version == OLDEST_VERSION else _KEYS | _NEW_KEYS)
    role, dtype, shape = metadata["role"], metadata["dtype"], metadata["shape"]
    if not isinstance(role, str) or role not in ROLE_IDS:
        raise ValueError(f"metadata: role must be 'key' or 'value', got {shown(role)}")
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"metadata: dtype must be 'float16' or 'bfloat16', got {shown(dtype)}")
    if not isinstance(shape, (list, tuple)) or len(shape) != 4 or not all(_is_size(size) for size in shape):
        raise ValueError(f"metadata: shape must be four sizes [B, Hkv, T, D], got {shown(shape)}")
    if not _is_size(metadata["max_tile_rows"]):
        raise ValueError(
            f"metadata: max_tile_rows must be an integer from 0 to 2^63 - 1, got {shown(metadata['max_tile_rows'])}"
        )
    return {
        "role": role,
        "dtype": _DTYPES[dtype],
        "codec": _checked_codec(metadata, _DTYPES[dtype]),
        "tile_format": BITMAP if version == OLDEST_VERSION else _checked_tile_format(metadata["tile_format"], version),
        "shape": tuple(shape),
        "max_tile_rows": metadata["max_tile_rows"],
    }


def _checked_codec(metadata: Mapping[str, Any], dtype: torch.dtype) -> str:
    if metadata["version"] == OLDEST_VERSION:
        return own_codec(dtype)
    codec = metadata["codec"]
    if isinstance(codec, str) and codec == _OLD_CODEC:
        raise ValueError(
            f"metadata: codec '{_OLD_CODEC}' of format version 4 has no scales and is not read any more; compress the "
            f"cache again with codec='fp8'"
        )
    if not isinstance(codec, str) or codec not in CODEC_IDS:
        raise ValueError(f"metadata: codec must be one of {', '.join(CODEC_IDS)}, got {shown(codec)}")
    if codec not in codecs_of(dtype):
        raise ValueError(f"metadata: codec '{codec}' does not store {metadata['dtype']}")
    return codec


def _checked_tile_format(tile_format: object, version: int) -> str:
    allowed = tuple(TILE_FORMATS) if version >= _TWO_OF_FOUR_VERSION else (BITMAP,)
    if not isinstance(tile_format, str) or tile_format not in allowed:
        raise ValueError(f"metadata: tile_format must be one of {', '.join(allowed)}, got {shown(tile_format)}")
    return tile_format


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _aligned(tensor: Tensor) -> Tensor:
    # A tensor mapped from a file, or a slice of a larger one, can start at any address.
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor
