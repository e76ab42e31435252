"""What all pruning rules have in common."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels._runtime import checks

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # of what rules take beside the cache
GROUP_TOKENS = 32  # as in the experiments of arXiv 2505.22913


class Rule(abc.ABC):
    """Chooses what is kept of a cache.

    per_token: a promise that at most `kept` elements of any token are kept, so that storage preallocated for `kept`
        holds them. Where it is broken, such storage takes the largest `kept`.
    group: how many tokens are meant to be pruned together; a cache that grows hands over multiples of it.
    whole_cache: why it cannot prune a tile without knowing more than the tile, as a sentence that the name starts;
        None: it can, so it serves caches that grow.
    """

    name: ClassVar[str]
    per_token: ClassVar[bool] = False
    whole_cache: ClassVar[str | None] = None
    group: int = 1

    def __repr__(self) -> str:
        """Without an address, so that messages, and names of tests, are the same in every process."""
        return f"<rule {type(self).__name__}>"

    def checked_kept(self, kept: int, head_dim: int, argument: str = "keep") -> int:
        """What `mask` gets for a caller's `kept` of head_dim elements; 0: the caller did not say, and every nonzero is
        kept. Raises ValueError, which names the argument, for a number that the rule cannot keep."""
        return kept

    @abc.abstractmethod
    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        """What is kept of x: bool, of its shape and device.

        x: (B, Hkv, T, D), float16, bfloat16, float32 or float64. kept: of every D elements, 1 to D. role: "key",
        "value", or None if the caller does not say. Raises ValueError if the rule does not serve the role or its inputs
        do not fit x.
        """

    def mean_kept(self, kept: int, head_dim: int) -> int:
        """At most so many elements a token are kept, on average over `group` tokens: a cache that grows has slots for
        tiles of them, which trim what exceeds that by much. 0: any number, slots hold every element."""
        return kept if self.per_token else 0

    def constrained(self, x: Tensor, pruned: Tensor, kept: int) -> Tensor | None:
        """Of a rule that constrains "magnitude": how many values that would keep, as many a token, are lost, an int64
        on x's device. None: it is no such rule. pruned: what `prune` gave of x."""
        return None

    @torch.no_grad()
    def prune(self, x: Tensor, kept: int, role: str | None = None) -> Tensor:
        """x with +0 for what is dropped and for -0.0; contiguous. Arguments as for `mask`; kept 0: every nonzero.

        Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, role or range, or a wrong mask, and
        what `mask` raises.
        """
        x = floats(x, "x", (4,))
        kept = checks.integer(kept, "kept")
        if not 0 <= kept <= x.shape[3]:
            raise ValueError(f"kept must be from 0 to D = {x.shape[3]}, got {kept}")
        if role is not None:
            checks.role(role)
        if kept == 0 or x.numel() == 0:
            return torch.where(x == 0, 0.0, x).contiguous()
        mask = self.mask(x, kept, role)
        if (
            not isinstance(mask, Tensor)
            or mask.dtype != torch.bool
            or mask.is_nested
            or mask.shape != x.shape
            or mask.device != x.device
        ):
            raise ValueError(
                f"method {self.name!r} must return a bool mask of shape {tuple(x.shape)} on {x.device}, got "
                f"{checks.described(mask)}"
            )
        return torch.where(mask & (x != 0), x, 0.0).contiguous()


def largest(scores: Tensor, count: int, dim: int) -> Tensor:
    """Bool mask of the `count` largest along `dim`. Ties: the first. NaN is larger than everything."""
    order = scores.sort(dim=dim, descending=True, stable=True).indices.narrow(dim, 0, count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(dim, order, True)


def largest_of_groups(scores: Tensor, kept: int, group: int) -> Tensor:
    """Of every `group` tokens of a channel kept / D, rounded down but at least 1; the last group may be shorter."""
    tokens, head_dim = scores.shape[2:]
    whole = tokens // group * group
    grouped = scores[:, :, :whole].unflatten(2, (whole // group, group))
    masks = [largest(grouped, max(1, group * kept // head_dim), 3).flatten(2, 3)] if whole else []
    if rest := tokens - whole:
        masks.append(largest(scores[:, :, whole:], max(1, rest * kept // head_dim), 2))
    return torch.cat(masks, dim=2)


def floats(value: Any, name: str, dimensions: tuple[int, ...]) -> Tensor:
    checks.tensor(value, name)
    checks.dtype(value, name, _DTYPES)
    if value.dim() not in dimensions:
        expected = " or ".join(map(str, dimensions))
        raise ValueError(f"{name} must have {expected} dimensions, got shape {tuple(value.shape)}")
    return value.detach()


def positive(value: Any, name: str) -> int:
    count = checks.integer(value, name)
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    return count
