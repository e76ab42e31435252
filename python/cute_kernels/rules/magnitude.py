"""Rules that look at nothing but the cache, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._runtime import checks
from cute_kernels.rules.base import GROUP_TOKENS, Rule, largest, largest_of_groups, positive


class Magnitude(Rule):
    """Per token the `kept` largest abs(x). `prune` and `compress` run it as kernels."""

    name = "magnitude"
    per_token = True

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        return largest(x.abs(), kept, 3)


class ChannelMagnitude(Rule):
    """Per channel, of every `group` tokens, the share kept / D with the largest abs(x), at least one."""

    name = "channel-magnitude"
    group = GROUP_TOKENS

    def __init__(self, group: int = GROUP_TOKENS) -> None:
        self.group = positive(group, "group")

    def mean_kept(self, kept: int, head_dim: int) -> int:
        of_channel = max(1, self.group * kept // head_dim)
        return max(kept, -(-head_dim * of_channel // self.group))

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        return largest_of_groups(x.abs(), kept, self.group)


class Random(Rule):
    """Per token `kept` elements by chance: what any other rule has to beat.

    seed: of a generator on the CPU that goes on from call to call of the rule, so that keys, values and layers differ
    and CPU and GPU agree; from -2^63 to 2^64 - 1. The name "random" means a new Random(0) for the call.
    """

    name = "random"
    per_token = True

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator("cpu").manual_seed(checks.integer(seed, "seed", 2**64 - 1))

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        return largest(torch.rand(x.shape, generator=self._generator, device="cpu").to(x.device), kept, 3)
