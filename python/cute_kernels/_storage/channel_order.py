"""The order of channels by the rules of two of four: which four are neighbours."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

COUNTED_TOKENS = 1024  # of a head, at most


def counted_tokens(x: Tensor) -> Tensor:
    """The tokens of x (B, Hkv, T, D) that are counted to order the channels: all of up to 1024, else 1024 at most that
    are equally far apart. It is a view."""
    return x[:, :, :: max(1, -(-x.shape[2] // COUNTED_TOKENS))]


def dealt_apart(counts: Tensor) -> Tensor:
    """Channels (..., D) by position, int64: densest first, ties to the lower channel, dealt to D / 4 groups back and
    forth. counts: of every channel.

    Within a group the densest has a place that rotates from group to group, so that every position modulo 8 has dense
    and empty channels alike.
    """
    densest_first = counts.sort(dim=-1, descending=True, stable=True).indices
    return densest_first[..., _rank_at(counts.shape[-1], counts.device)]


@lru_cache(maxsize=64)
@_disable_current_modes()  # a table that stays: it must not be a FakeTensorMode's
def _rank_at(head_dim: int, device: torch.device) -> Tensor:
    """Position -> rank of the channel that is dealt to it."""
    rank = torch.arange(head_dim, device="cpu")
    groups = head_dim // 4
    turn, place = rank // groups, rank % groups
    group = torch.where(turn % 2 == 0, place, groups - 1 - place)
    position = 4 * group + (turn + group // 2) % 4
    return torch.empty_like(position).scatter_(0, position, rank).to(device)
