"""The extension module, with a clear error where it is not built, and the ids of roles, dtypes and codecs in it."""

from __future__ import annotations

import torch

from cute_kernels._runtime.loading import why_not

try:
    from cute_kernels import _C
except ImportError as error:
    raise ImportError(why_not(error)) from error

ROLE_IDS: dict[str, int] = _C.format.ROLES
DTYPE_IDS: dict[torch.dtype, int] = {getattr(torch, name): dtype_id for name, dtype_id in _C.format.DTYPES.items()}
CODEC_IDS: dict[str, int] = _C.format.CODECS
TILE_FORMATS: dict[str, int] = _C.format.TILE_FORMATS
TILE_TOKENS: int = _C.format.TILE_TOKENS

# Tables rather than calls of the extension: checks of arguments read them, and a compiler cannot follow such a call.
LARGEST_HEAD_DIM: int = max(_C.format.HEAD_DIMS)
HEAD_DIMS = tuple(d for d in range(1, LARGEST_HEAD_DIM + 1) if _C.format.padded_head_dim(d))

CODEC_NAMES = {codec_id: name for name, codec_id in CODEC_IDS.items()}
_CODEC_DTYPES = {dtype: DTYPE_IDS[dtype] for dtype in (torch.float16, torch.bfloat16)}
_OWN_CODECS = {dtype: CODEC_NAMES[_C.format.own_codec(dtype_id)] for dtype, dtype_id in _CODEC_DTYPES.items()}
_CODECS = {
    dtype: tuple(name for name, codec_id in CODEC_IDS.items() if _C.format.stores(codec_id, dtype_id))
    for dtype, dtype_id in _CODEC_DTYPES.items()
}

SCALED_CODECS = frozenset(name for name, codec_id in CODEC_IDS.items() if _C.format.scale_rows(codec_id))


def own_codec(dtype: torch.dtype) -> str:
    """The codec that stores float16 or bfloat16 values as they are."""
    return _OWN_CODECS[dtype]


def codecs_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The codecs that store values of this dtype."""
    return _CODECS[dtype]


__all__ = [
    "CODEC_IDS",
    "CODEC_NAMES",
    "DTYPE_IDS",
    "HEAD_DIMS",
    "LARGEST_HEAD_DIM",
    "ROLE_IDS",
    "SCALED_CODECS",
    "TILE_FORMATS",
    "TILE_TOKENS",
    "_C",
    "codecs_of",
    "own_codec",
]
