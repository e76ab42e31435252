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
from torch._C import _get_dispatch_mode, _is_tracing, _len_torch_dispatch_stack, _TorchDispatchModeKey
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.autograd import profiler
from torch.compiler import is_compiling

NAMESPACE = "cute_kernels"

_RECORDING = (_TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.FUNCTIONAL)
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # operations live as long as this does


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Registers an operation for CPU and CUDA tensors; returns what calls it.

    schema: as torch.library writes it, without the namespace. fake: makes results of the right shapes, dtypes and
    devices from tensors without data. What is returned raises RuntimeError in torch.jit.trace if the operation writes
    to arguments: a trace loses such writes.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # results never require a gradient
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    operation = getattr(getattr(torch.ops, NAMESPACE), name).default
    if "!" not in schema:
        return operation

    def writing(*arguments: Any) -> Any:
        if not is_compiling() and _is_tracing():
            raise RuntimeError(
                f"{name} writes to its arguments, which torch.jit.trace loses: use torch.export or compile"
            )
        return operation(*arguments)

    return writing


def no_results(*_: Any) -> None:
    """The fake of an operation that only writes to its arguments."""


def recorded() -> bool:
    """Whether calls are recorded to run again later, or run on tensors without data: by torch.compile, torch.jit.trace,
    make_fx, FakeTensorMode or torch.func.functionalize. What is no operation has to be refused there."""
    interpreter = peek_interpreter_stack()
    return (
        is_compiling()
        or _is_tracing()
        or any(_get_dispatch_mode(mode) is not None for mode in _RECORDING)
        or (interpreter is not None and interpreter.key() == TransformType.Functionalize)
    )


def eager(*tensors: Tensor | None) -> bool:
    """Whether an operation on these tensors may bypass torch.library: they are plain tensors, and nothing compiles,
    traces, transforms, intercepts or profiles the call."""
    return unobserved() and _PLAIN.issuperset(map(type, tensors))


def unobserved() -> bool:
    """The part of `eager` that does not depend on the tensors."""
    return not profiler._is_profiler_enabled and _is_direct()


def direct(*tensors: Tensor | None) -> bool:
    """As `eager`, but the call may be profiled: these are real tensors, and it runs once, here."""
    return _is_direct() and _PLAIN.issuperset(map(type, tensors))


def _is_direct() -> bool:
    return (
        not is_compiling()
        and not _len_torch_dispatch_stack()
        and peek_interpreter_stack() is None
        and not _is_tracing()
    )
