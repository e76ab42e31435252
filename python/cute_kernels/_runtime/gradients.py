"""What stands in place of derivatives, which the kernels do not have: an error in the backward pass, not silence.

A function that autograd would record asks `wanted` and then runs by `without_gradient`. Its results require a gradient,
as torch's do, so a forward pass outside of torch.no_grad() works. A backward pass that reaches them raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cute_kernels._runtime import ops


def wanted(*tensors: Any) -> bool:
    """Whether autograd would record an operation on these, some of which may be None or no tensors.

    Raises RuntimeError for a tensor with a tangent (torch.func.jvp, torch.autograd.forward_ad).
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def without_gradient(name: str, call: Callable[..., Any], *tensors: Tensor | None, out: Tensor | None = None) -> Any:
    """call(*tensors), run without autograd; a backward pass through its results raises RuntimeError, which says `name`.

    Raises RuntimeError for an `out`, as torch does.
    """
    if out is not None:
        raise RuntimeError(f"{name} with out= takes no part in autograd, but an input requires grad: {_INSTEAD}")
    return _WithoutGradient.apply(name, call, *tensors)


_INSTEAD = "call it under torch.no_grad() or torch.inference_mode(), or pass detached tensors"


def _refuse_tangents(tensors: tuple[Any, ...]) -> None:
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise RuntimeError(f"the kernels are for decoding and have no derivative in forward mode: {_INSTEAD}")


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(name: str, call: Callable[..., Any], *tensors: Tensor | None) -> Any:
        return call(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        name, _, *tensors = inputs
        ctx.name = name
        ctx.likes = [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        of_inputs = (
            _NO_GRADIENT(gradients[0], ctx.name, *like) if need else None for need, like in zip(needed, ctx.likes)
        )
        return (None, None, *of_inputs)


# An operation, so that a compiler that traces the backward pass with the forward one meets no error there: it raises
# where a compiled backward pass runs.


def _no_gradient(gradient: Tensor, name: str, size: list[int], dtype: torch.dtype) -> NoReturn:
    raise RuntimeError(f"{name} is for decoding and has no gradient: {_INSTEAD}")


def _no_gradient_fake(gradient: Tensor, name: str, size: list[int], dtype: torch.dtype) -> Tensor:
    return gradient.new_empty(size, dtype=dtype)


_NO_GRADIENT = ops.define(
    "no_gradient(Tensor gradient, str name, SymInt[] size, ScalarType dtype) -> Tensor", _no_gradient, _no_gradient_fake
)
