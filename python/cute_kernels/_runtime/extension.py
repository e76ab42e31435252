"""The extension module, with a clear error where it is not built, and how it numbers roles, dtypes and codecs."""

from __future__ import annotations

from functools import cache

import torch

try:
    from cute_kernels import _C
except ImportError as error:
    raise ImportError(
        f"cute_kernels: the extension module cute_kernels._C cannot be imported ({error}). In a checkout, build it "
        "with the same Python: 'make build' or 'python setup.py build_ext --inplace'. Otherwise reinstall the package."
    ) from error

ROLE_CODES: dict[str, int] = _C.format.ROLES
DTYPE_CODES: dict[torch.dtype, int] = {getattr(torch, name): code for name, code in _C.format.DTYPES.items()}
CODEC_CODES: dict[str, int] = _C.format.CODECS
TILE_FORMATS: tuple[str, ...] = tuple(_C.format.TILE_FORMATS)

_CODEC_NAMES = {code: name for name, code in CODEC_CODES.items()}


@cache
def own_codec(dtype: torch.dtype) -> str:
    """The codec that stores float16 or bfloat16 values as they are."""
    return _CODEC_NAMES[_C.format.own_codec(DTYPE_CODES[dtype])]


@cache
def codecs_of(dtype: torch.dtype) -> tuple[str, ...]:
    """The codecs that store values of this dtype."""
    return tuple(name for name, code in CODEC_CODES.items() if _C.format.stores(code, DTYPE_CODES[dtype]))


__all__ = ["CODEC_CODES", "DTYPE_CODES", "ROLE_CODES", "TILE_FORMATS", "_C", "codecs_of", "own_codec"]
