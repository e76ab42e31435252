"""torch.ops.cute_kernels: the operations as torch sees them, with tensors and plain numbers as arguments.

They make torch.compile(fullgraph=True), FakeTensorMode and torch.export work on what calls the package. The public
functions check their arguments and call them; an operation itself trusts what it gets, but for what only real tensors
show: whether the backend can serve them, and memory that overlaps. They have no gradient.

A cache arrives as `Tensor[] cache, SymInt max_tile_rows`, which is what `storage` makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._extension import _C, DTYPE_CODES, ROLE_CODES
from cute_kernels.sparse_kv import SparseKV

NAMESPACE = "cute_kernels"
STORAGE = ("blocks", "row_offsets", "token_order", "channel_order")

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # operations live as long as this does


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operation for CPU and CUDA tensors; returns what calls it.

    schema: as torch.library writes it, without the namespace. fake: makes results of the right shapes, dtypes and
    devices from arguments without data.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # results never require a gradient
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def no_results(*_: Any) -> None:
    """The fake of an operation that writes to its arguments alone."""


def storage(kv: SparseKV) -> tuple[list[Tensor], int]:
    return [kv._blocks, kv._row_offsets, kv._token_order, kv._channel_order], kv._max_tile_rows


def kernel_view(
    cache: Sequence[Tensor], max_tile_rows: int, role: str, dtype: torch.dtype, tokens: int, head_dim: int
) -> _C.SparseView:
    """The cache as kernels take it; valid as long as its tensors live."""
    blocks, row_offsets, token_order, channel_order = cache
    batch, kv_heads, _ = channel_order.shape
    return _C.SparseView(
        blocks.data_ptr(),
        row_offsets.data_ptr(),
        token_order.data_ptr(),
        channel_order.data_ptr(),
        ROLE_CODES[role],
        DTYPE_CODES[dtype],
        batch,
        kv_heads,
        tokens,
        head_dim,
        max_tile_rows,
    )


def sparse_kv(
    cache: Sequence[Tensor], max_tile_rows: int, role: str, dtype: torch.dtype, tokens: int, head_dim: int
) -> SparseKV:
    """The cache as an object again, for the reference backend."""
    tensors: dict[str, Any] = dict(zip(STORAGE, cache))
    shape = (*tensors["channel_order"].shape[:2], tokens, head_dim)
    return SparseKV._from_parts(**tensors, role=role, dtype=dtype, shape=shape, max_tile_rows=max_tile_rows)
