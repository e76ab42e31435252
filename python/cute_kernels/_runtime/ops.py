"""torch.ops.cute_kernels: the operations as torch sees them, with tensors and plain numbers as arguments.

They make torch.compile(fullgraph=True), FakeTensorMode and torch.export work on code that calls the package. The public
functions check their arguments and call them. An operation checks only what needs real tensors: whether the backend can
serve them, and whether memory overlaps. Operations have no gradient.

Where `eager` finds nothing that observes operations, the public functions bypass torch.library: its dispatcher takes
longer than the rest of their host code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import profiler
from torch.compiler import is_compiling

NAMESPACE = "cute_kernels"

_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # operations live as long as this does


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operation for CPU and CUDA tensors; returns what calls it.

    schema: as torch.library writes it, without the namespace. fake: makes results of the right shapes, dtypes and
    devices from tensors without data.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # results never require a gradient
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def no_results(*_: Any) -> None:
    """The fake of an operation that only writes to its arguments."""


def eager(*tensors: Tensor | None) -> bool:
    """Whether an operation on these tensors may bypass torch.library: they are plain tensors, and nothing compiles,
    traces, transforms, intercepts or profiles the call."""
    return unobserved() and _PLAIN.issuperset(map(type, tensors))


def unobserved() -> bool:
    """The part of `eager` that does not depend on the tensors."""
    return (
        not is_compiling()
        and not _len_torch_dispatch_stack()
        and peek_interpreter_stack() is None
        and not _is_tracing()
        and not profiler._is_profiler_enabled
    )
