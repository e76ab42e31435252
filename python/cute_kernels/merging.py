"""Attention over parts of the tokens, merged: for caches that are split over devices, or shared in part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime import checks, gradients, ops
from cute_kernels._runtime.extension import DTYPE_IDS
from cute_kernels._runtime.launching import address, compression_kernels


def merge_states(outs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over all tokens, from attention over N disjoint parts of them.

    outs: N tensors (B, Hq, Sq, D), or one (N, B, Hq, Sq, D); float32, float16 or bfloat16. D: a multiple of 8 to 256.
    lses: likewise (B, Hq, Sq) or (N, B, Hq, Sq), float32: the natural logarithm of each part's sum of exponentials, as
        `sparse_attention` and `KVCache.attend` return it with return_lse=True. (Times ln 2, where it is to base 2, as
        FlashInfer's.) -inf: a part without tokens, whose output is not read.

    Returns (out, lse), (B, Hq, Sq, D) of outs' dtype and (B, Hq, Sq) float32, as if one call had seen all tokens: zeros
    and -inf where no part has any. Computed in float32; a kernel of one pass on GPUs. A backward pass through them
    raises RuntimeError.

    Raises TypeError for a wrong class or dtype; ValueError for a wrong shape, device or head dim, or without a part;
    RuntimeError if the extension has no kernels for the device.
    """
    outs, lses = _stacked(outs, "outs"), _stacked(lses, "lses")
    if gradients.wanted(outs, lses):
        return gradients.without_gradient("merge_states", merge_states, outs, lses)
    checks.dtype(outs, "outs", checks.PRODUCT_DTYPES)
    checks.dtype(lses, "lses", (torch.float32,))
    if outs.dim() != 5 or outs.shape[0] == 0:
        raise ValueError(f"outs must be at least one tensor (B, Hq, Sq, D), stacked {tuple(outs.shape)}")
    if lses.shape != outs.shape[:4]:
        raise ValueError(
            f"lses must have the shape of outs without D, {tuple(outs.shape[:4])}, got {tuple(lses.shape)}"
        )
    checks.head_dim(outs.shape[4], "outs", tuple(outs.shape))
    checks.device(lses.device, "lses", outs.device, "outs")
    return _merge(outs, lses) if ops.eager(outs, lses) else _MERGE(outs, lses)


def _stacked(value: Any, name: str) -> Tensor:
    """The parts in one tensor."""
    if isinstance(value, Tensor):
        checks.tensor(value, name)
        return value
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"{name} must be a torch.Tensor or a list or tuple of them, got {type(value).__name__}")
    if not value:
        raise ValueError(f"{name} must have at least one tensor, got none")
    for i, part in enumerate(value):
        checks.tensor(part, f"{name}[{i}]")
        alike = part.shape, part.dtype, part.device
        if alike != (value[0].shape, value[0].dtype, value[0].device):
            raise ValueError(
                f"{name} must be alike in shape, dtype and device: {name}[0] is {checks.described(value[0])}, "
                f"{name}[{i}] is {checks.described(part)}"
            )
    return torch.stack(list(value))


# ---- torch.ops.cute_kernels ------------------------------------------------------------------------------------------


def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _merge_fake(outs, lses)
    if not out.numel():
        return out, lse
    outs, lses = checks.plain(outs), checks.plain(lses)
    if outs.device.type == "cpu":
        _merge_on_cpu(outs, lses, out, lse)
        return out, lse
    kernels = compression_kernels(outs.device)
    outs, lses = _readable(outs), _readable(lses)
    with kernels.launch() as stream:
        kernels.module.merge_states(
            address(outs),
            address(lses),
            outs.stride(0),
            lses.stride(0),
            address(out),
            address(lse),
            outs.shape[0],
            lse.numel(),
            outs.shape[4],
            DTYPE_IDS[outs.dtype],
            stream,
        )
    return out, lse


def _merge_fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _merge_on_cpu(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    largest = lses.amax(dim=0)
    zero = largest.masked_fill(largest == float("-inf"), 0.0)  # -inf - -inf is no number
    weights = (lses - zero).exp()
    total = weights.sum(dim=0)
    merged = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for part, weight, empty in zip(outs, weights, lses == float("-inf")):
        merged.addcmul_(part.float().masked_fill(empty[..., None], 0.0), weight[..., None])
    out.copy_(merged.div_(total.masked_fill(total == 0, 1.0)[..., None]))
    lse.copy_(zero + total.log())


def _readable(x: Tensor) -> Tensor:
    """Parts that are contiguous, at any distance from one another; the kernel loads 16 bytes of an output at a time."""
    x = x if x[0].is_contiguous() else x.contiguous()
    wanted = 16 if x.dim() == 5 else 4
    misaligned = x.data_ptr() % wanted or (x.shape[0] > 1 and x.stride(0) * x.element_size() % wanted)
    return x.clone(memory_format=torch.contiguous_format) if misaligned else x


_MERGE = ops.define("merge_states(Tensor outs, Tensor lses) -> (Tensor, Tensor)", _merge, _merge_fake)
