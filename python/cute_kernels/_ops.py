"""torch.ops.cute_kernels: the operations as torch sees them, with tensors and plain numbers as arguments.

They make torch.compile(fullgraph=True), FakeTensorMode and torch.export work on what calls the package. The public
functions check their arguments and call them; an operation itself trusts what it gets, but for what only real tensors
show: whether the backend can serve them, and memory that overlaps. They have no gradient.

Where `eager` says that nobody would notice, the public functions leave torch.library out: its dispatcher takes longer
than all else that they do.

A cache arrives as `Tensor[] cache, SymInt max_tile_rows`, which is what `storage` makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import profiler
from torch.compiler import is_compiling

from cute_kernels.sparse_kv import SparseKV

NAMESPACE = "cute_kernels"
STORAGE = ("blocks", "row_offsets", "token_order", "channel_order")

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
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


def eager(*tensors: Tensor | None) -> bool:
    """Whether kernels alone would see an operation on these tensors: they are plain ones, and nothing compiles, traces,
    transforms, intercepts or profiles what is called."""
    return unobserved() and _PLAIN.issuperset(map(type, tensors))


def unobserved() -> bool:
    """`eager` without the tensors."""
    return (
        not is_compiling()
        and not _len_torch_dispatch_stack()
        and peek_interpreter_stack() is None
        and not _is_tracing()
        and not profiler._is_profiler_enabled
    )


def storage(kv: SparseKV) -> tuple[list[Tensor], int]:
    return [kv._blocks, kv._row_offsets, kv._token_order, kv._channel_order], kv._max_tile_rows


def named_storage(kv: SparseKV) -> dict[str, Tensor]:
    return dict(zip(STORAGE, storage(kv)[0]))


def sparse_kv(
    cache: Sequence[Tensor], max_tile_rows: int, role: str, dtype: torch.dtype, tokens: int, head_dim: int
) -> SparseKV:
    """The cache as an object again."""
    tensors: dict[str, Any] = dict(zip(STORAGE, cache))
    shape = (*tensors["channel_order"].shape[:2], tokens, head_dim)
    return SparseKV._from_parts(**tensors, role=role, dtype=dtype, shape=shape, max_tile_rows=max_tile_rows)
