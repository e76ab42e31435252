"""Checks of arguments that meet a compressed cache: codecs, queries, probabilities and memory to compress into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import CODEC_IDS, codecs_of, own_codec
from cute_kernels._storage.storage import Storage


def chosen_codec(codec: Any, name: str, dtype: torch.dtype) -> str:
    """The codec that `codec` names for a cache of `dtype`; None: the one that stores its values as they are."""
    if codec is None:
        return own_codec(dtype)
    if not isinstance(codec, str):
        raise TypeError(f"{name} must be a str or None, got {type(codec).__name__}")
    if codec not in CODEC_IDS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, CODEC_IDS))} or None, got {codec!r}")
    if codec not in codecs_of(dtype):
        allowed = ", ".join(map(repr, codecs_of(dtype)))
        raise ValueError(f"{name} must be one of {allowed} for {checks.dtype_name(dtype)}, got {codec!r}")
    return codec


def check_codecs(keys: Storage, values: Storage, backend: str) -> None:
    """RuntimeError unless `backend` has kernels of sparse_attention for the codecs of both caches."""
    if keys.codec != values.codec and backend not in ("reference", "cpu"):
        raise RuntimeError(
            f"backend '{backend}' has no kernels of sparse_attention for keys in codec '{keys.codec}' and values in "
            f"codec '{values.codec}': 'reference' and 'cpu' have"
        )


def check_preallocated(out: Storage, name: str, x: Tensor, x_name: str, kept: int) -> None:
    """Memory that x can be compressed into, `kept` elements of a token (0: all nonzeros), in `out`'s codec."""
    if out.totals is None:
        raise ValueError(f"{name} must be a SparseKV made by SparseKV.preallocate, this one has a fixed content")
    if out.dtype != x.dtype:
        raise TypeError(
            f"{name} must be {checks.dtype_name(x.dtype)} like {x_name}, got {checks.dtype_name(out.dtype)}"
        )
    if out.shape != x.shape:
        raise ValueError(f"{name} must have the shape of {x_name}, {tuple(x.shape)}, got {tuple(out.shape)}")
    checks.device(out.device, name, x.device, x_name)
    if out.keep and not 0 < kept <= out.keep:
        wanted = f"{kept} are to be kept" if kept else "all nonzeros are to be kept"
        raise ValueError(f"{name} was preallocated for {out.keep} elements a token, {wanted}")


def query_side(
    value: Any,
    name: str,
    cache: Storage,
    cache_name: str,
    last: int,
    last_letter: str,
    dtypes: Sequence[torch.dtype],
    why: str = "",
) -> tuple[int, int, int]:
    """q or p: (B, Hq, Sq, `last`), of `dtypes`, on the device of the cache it meets. Returns (B, Hq, Sq)."""
    checks.tensor(value, name)
    checks.dtype(value, name, dtypes, why)
    batch, kv_heads, _, _ = cache.shape
    sizes = value.shape
    if len(sizes) != 4 or sizes[0] != batch or sizes[3] != last:
        raise ValueError(
            f"{name} must have shape (B, Hq, Sq, {last_letter}) with B = {batch} and {last_letter} = {last} as "
            f"in {cache_name}, got {tuple(sizes)}"
        )
    _, heads, queries, _ = sizes
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(
            f"{name} must have a number of heads Hq that is a multiple of {cache_name}'s Hkv = {kv_heads}, got {heads}"
        )
    checks.device(value.device, name, cache.device, cache_name)
    checks.unit_stride(value, name)
    return batch, heads, queries
