"""A storage as arguments of an operation of torch.ops.cute_kernels.

The operation knows the rest from its other arguments: the role, T and D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._storage.storage import TENSORS, Storage


def schema(name: str) -> str:
    """The arguments of a storage in an operation's schema."""
    return (
        f"Tensor[] {name}, SymInt {name}_max_tile_rows, str {name}_codec, str {name}_tile_format, "
        f"ScalarType {name}_dtype"
    )


def pack(storage: Storage) -> tuple[list[Tensor], int, str, str, torch.dtype]:
    """What `schema` declares."""
    return list(storage.tensors().values()), storage.max_tile_rows, storage.codec, storage.tile_format, storage.dtype


def unpack(packed: Sequence[Any], role: str, tokens: int, head_dim: int) -> Storage:
    cache, max_tile_rows, codec, tile_format, dtype = packed
    tensors = dict(zip(TENSORS, cache))
    shape = torch.Size((*tensors["channel_order"].shape[:2], tokens, head_dim))
    return Storage(
        **tensors,
        role=role,
        dtype=dtype,
        codec=codec,
        tile_format=tile_format,
        shape=shape,
        max_tile_rows=max_tile_rows,
    )
