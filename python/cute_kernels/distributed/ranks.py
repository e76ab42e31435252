"""The ranks that share a cache: their groups, and what they agree on."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# What torch 2.13 calls all_gather_single; builds without torch.distributed have neither.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
TOKENS, HEADS = "cp", "tp"  # dimensions of a mesh


class Ranks:
    """Tokens are spread over the `world_size` ranks of one group, of which this process is `rank`; with a mesh of two
    dimensions heads over the `heads_size` ranks of another.

    group: a process group, a DeviceMesh of one dimension (named "cp", if it has a name), one of the dimensions "tp" and
        "cp" in any order, or None for the default group.

    Raises RuntimeError without torch.distributed, TypeError for another class, ValueError for other dimensions and for
    a group that this process is not in.
    """

    def __init__(self, group: Any) -> None:
        self._tokens, self._heads = _groups(group)
        self.rank, self.world_size = dist.get_rank(self._tokens), dist.get_world_size(self._tokens)
        if self.rank < 0:
            raise ValueError("group must have this process as a rank")
        self.heads_size = 1 if self._heads is None else dist.get_world_size(self._heads)

    def check_device(self, device: torch.device) -> None:
        """Raises ValueError where the group's backend moves no tensors of this device."""
        for group in (self._tokens, self._heads):
            if group is None:
                continue
            served = dist.get_backend_config(group)  # as "cpu:gloo,cuda:nccl"
            if device.type not in {pair.split(":")[0] for pair in served.split(",")}:
                raise ValueError(
                    f"the group's backend does not serve the cache's device {device}: it is {served}; "
                    "init_process_group takes 'gloo' for the CPU and 'nccl' for GPUs"
                )

    def local_heads(self, kv_heads: int) -> int:
        """Of the model's heads, those of each rank."""
        if kv_heads % self.heads_size:
            raise ValueError(
                f"kv_heads must be a multiple of the {self.heads_size} ranks of the mesh's dimension {HEADS!r}, "
                f"got {kv_heads}"
            )
        return kv_heads // self.heads_size

    def gather(self, parts: Tensor, *, async_op: bool = False) -> Any:
        """Every rank's row of `parts`, contiguous (world_size, n), from that rank; this rank's is there. Returns work
        to wait for, or None where it is done."""
        if self.world_size == 1:
            return None
        return _all_gather(parts.view(-1), parts[self.rank], group=self._tokens, async_op=async_op)

    def agree(
        self, what: str, described: dict[str, str], error: Exception | None = None, *, heads: bool = False
    ) -> None:
        """Raises on all ranks where one of them has an error, or describes the call differently.

        heads: also compare with ranks that have other heads, not only other tokens.
        """
        mine = (described, None if error is None else f"{type(error).__name__}: {error}")
        said = [_everyone(mine, self._tokens)]
        if heads and self._heads is not None:
            said = _everyone(said[0], self._heads)
        if error is not None:
            raise error
        each = [
            (f"{HEADS} {i}, {TOKENS} {rank}" if len(said) > 1 else f"rank {rank}", *words)
            for i, row in enumerate(said)
            for rank, words in enumerate(row)
        ]
        for name, _, text in each:
            if text:
                raise RuntimeError(f"{what} failed on {name} of the group: {text}")
        for argument in described:
            values = {name: texts.get(argument) for name, texts, _ in each}
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{name}: {value}" for name, value in values.items())
                raise ValueError(f"{what}: {argument} must be the same on all ranks, got {listed}")


def _everyone(mine: Any, group: Any) -> list[Any]:
    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, mine, group=group)
    return said


def _groups(group: Any) -> tuple[Any, Any]:
    """Of ranks with other tokens, and of those with other heads."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed has no group: call torch.distributed.init_process_group first")
    if group is None:
        return dist.group.WORLD, None
    if isinstance(group, dist.device_mesh.DeviceMesh):
        names = group.mesh_dim_names
        if group.ndim == 1 and names in (None, (TOKENS,)):
            return group.get_group(), None
        if group.ndim == 2 and names is not None and set(names) == {TOKENS, HEADS}:
            return group.get_group(TOKENS), group.get_group(HEADS)
        raise ValueError(
            f"group must be a DeviceMesh of one dimension, or of the dimensions {HEADS!r} (heads) and {TOKENS!r} "
            f"(tokens), got {group.ndim} with names {names}: take a part of it, as mesh[{TOKENS!r}]"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, a DeviceMesh or None, got {type(group).__name__}")
    return group, None
