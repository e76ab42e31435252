"""Tensor parallel heads: the linear layers of a model divided over ranks by the plan that its class publishes.

What torch's parallelize_module does, without DTensor: a CUDA graph of a step then holds nothing but the layers' kernels
and one sum of a tensor in place for each layer whose inputs are divided.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_DIVIDED = {"colwise": 0, "rowwise": 1}  # the dimension of a weight (out, in)
_SMALL = 1 << 19  # elements that GPUs sum through symmetric memory


def spread(model: Any, mesh: Any) -> None:
    """Divides the model over a DeviceMesh of one dimension, in place; random weights need no checkpoint.

    Raises ValueError for a model without a plan of linear layers, and for what the mesh does not divide.
    """
    ranks, rank = mesh.size(), mesh.get_local_rank()
    plan = getattr(model.config, "base_model_tp_plan", None) or {}
    styles = {}
    for name, style in plan.items():
        if style in _DIVIDED:
            styles[re.compile(re.escape(f"{model.base_model_prefix}.{name}").replace(r"\*", r"\d+"))] = style
        elif not style.startswith("replicated"):  # as norms of one head are
            raise ValueError(f"--mesh: {type(model).__name__} divides {name} by {style!r}, which is not served")
    if not styles:
        raise ValueError(f"--mesh: {type(model).__name__} has no plan for tensor parallel heads")
    config = model.config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % ranks:
            raise ValueError(f"--mesh: tp={ranks} does not divide the model's {name} {getattr(config, name)}")
    sums = _Sums(mesh.get_group(), next(model.parameters()))
    for name, module in model.named_modules():
        style = next((style for pattern, style in styles.items() if pattern.fullmatch(name)), None)
        if style is not None:
            _divide(module, _DIVIDED[style], ranks, rank)
            if style == "rowwise":
                module.register_forward_hook(sums)


def _divide(module: nn.Linear, dimension: int, ranks: int, rank: int) -> None:
    module.weight.data = module.weight.data.chunk(ranks, dimension)[rank].clone()
    if module.bias is not None:
        if dimension == 0:
            module.bias.data = module.bias.data.chunk(ranks)[rank].clone()
        elif rank:
            module.bias = None  # the sum has it once


class _Sums:
    """Of a layer's output over the ranks, as a forward hook. Small tensors on GPUs of one host by torch's symmetric
    memory, which is faster than NCCL there; others by the group."""

    def __init__(self, group: Any, like: Tensor) -> None:
        self._group = group
        self._room: Tensor | None = None
        if like.device.type == "cuda":
            import torch.distributed._symmetric_memory as symmetric_memory

            self._room = symmetric_memory.empty(_SMALL, dtype=like.dtype, device=like.device)
            symmetric_memory.rendezvous(self._room, group.group_name)

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if self._room is None or output.numel() > _SMALL:
            dist.all_reduce(output, group=self._group)
            return output
        room = self._room[: output.numel()]
        flat = output.reshape(-1)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(room, flat, "sum", self._group.group_name).view_as(output)
