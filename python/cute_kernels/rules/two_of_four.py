"""Rules of the pattern of sparse tensor cores: at most two of every four neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._runtime.extension import SCALED_CODECS
from cute_kernels._storage.channel_order import counted_tokens, dealt_apart
from cute_kernels.rules.base import Rule, largest

_MOST_OF_SLOTS = 0.35  # of a token, see `is_stored_as_slots`


def _lost(x: Tensor, pruned: Tensor, kept: int) -> Tensor:
    """How many nonzeros that are among the `kept` largest of their token are not in `pruned`."""
    return (largest(x.abs(), kept, 3) & (x != 0) & (pruned == 0)).sum()


class TwoOfFour(Rule):
    """Of every four neighbours the two with the largest abs(x): the pattern of sparse tensor cores, and of the tile
    format "two_of_four". It takes no `keep`: half of every four is kept.

    Neighbours are those along the product's inner dimension. Of values: four consecutive tokens, counted from the
    first. Of keys: four channels in the order that `channel_order` chooses such that channels with many large elements
    do not meet: from 1024 tokens of the cache at most or, in a cache that grows, from the first tokens of a sequence
    that it stores.
    """

    name = "2of4"
    group = 4

    def checked_kept(self, kept: int, head_dim: int, argument: str = "keep") -> int:
        if kept:
            raise ValueError(f"{argument} must be None with method '2of4', which keeps two of every four elements")
        return head_dim // 2

    def mean_kept(self, kept: int, head_dim: int) -> int:
        return min(kept, head_dim // 2)

    def constrained(self, x: Tensor, pruned: Tensor, kept: int) -> Tensor | None:
        return _lost(x, pruned, kept)

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        return self.mask_in(x, None if role == "value" else channel_order(x, x.shape[3] // 2), kept, role)

    def mask_in(self, x: Tensor, order: Tensor | None, kept: int, role: str | None) -> Tensor:
        """`mask` with the channels of keys in this order, (B, Hkv, D) int64."""
        return two_of_four_mask(x, order, role)


class MagnitudeTwoOfFour(Rule):
    """Of every four neighbours, as `TwoOfFour` has them, the two with the largest abs(x) are candidates; of those the
    `kept` largest of a token are kept, at most half of D. Without `kept` all candidates are."""

    name = "magnitude-2of4"
    per_token = True
    group = 4

    def checked_kept(self, kept: int, head_dim: int, argument: str = "keep") -> int:
        if kept > head_dim // 2:
            raise ValueError(
                f"{argument} must leave at most D / 2 = {head_dim // 2} elements a token with method 'magnitude-2of4', "
                f"got {kept}"
            )
        return kept or head_dim

    def mean_kept(self, kept: int, head_dim: int) -> int:
        return min(kept, head_dim // 2)

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        most = min(kept, x.shape[3] // 2)
        return self.mask_in(x, None if role == "value" else channel_order(x, most), kept, role)

    def mask_in(self, x: Tensor, order: Tensor | None, kept: int, role: str | None) -> Tensor:
        """`mask` with the channels of keys in this order, (B, Hkv, D) int64."""
        candidates = two_of_four_mask(x, order, role)
        if kept == x.shape[3]:
            return candidates
        return largest(torch.where(candidates, x.abs(), -1.0), kept, 3) & candidates

    def constrained(self, x: Tensor, pruned: Tensor, kept: int) -> Tensor | None:
        return _lost(x, pruned, min(kept, x.shape[3] // 2))


def is_stored_as_slots(rule: Rule, kept: int, codec: str, head_dim: int) -> bool:
    """Whether what the rule leaves is stored in the tile format "two_of_four_bitmap" unless another is asked for: in
    narrow codecs, from 65 % pruned on, where it is faster than the bitmap format."""
    return isinstance(rule, MagnitudeTwoOfFour) and codec in SCALED_CODECS and kept <= _MOST_OF_SLOTS * head_dim


def channel_order(x: Tensor, kept: int) -> Tensor:
    """The order of channels, (B, Hkv, D) int64, whose fours are neighbours for `TwoOfFour`: position -> channel.

    Channels that are often among the `kept` largest of their token, and not zero, are kept apart: see `dealt_apart`.
    1024 tokens of a head at most are looked at.
    """
    x = counted_tokens(x)
    return dealt_apart((largest(x.abs(), kept, 3) & (x != 0)).sum(2))


def two_of_four_mask(x: Tensor, order: Tensor | None, role: str | None) -> Tensor:
    """Bool mask of the two largest of every four neighbours, ties to the first; order (B, Hkv, D), int64: that of the
    channels of keys."""
    scores, (tokens, head_dim) = x.abs(), x.shape[2:]
    if role == "value":
        padded = torch.nn.functional.pad(scores, (0, 0, 0, -tokens % 4))
        return largest(padded.unflatten(2, (-1, 4)), 2, 3).flatten(2, 3)[:, :, :tokens]
    assert order is not None
    index = order[:, :, None].expand(x.shape)
    groups = scores.gather(3, index).unflatten(3, (head_dim // 4, 4))
    chosen = largest(groups, 2, 4).flatten(3)
    return torch.zeros_like(chosen).scatter_(3, index, chosen)
