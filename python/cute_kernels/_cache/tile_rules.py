"""Pruning rules in a cache that grows: tile by tile, so that it does not matter in which chunks tokens arrive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels import rules
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import TILE_TOKENS


@dataclass(frozen=True)
class TileRule:
    """How the tiles of one role are pruned. kept: elements of a token, as the rule counts them; 0: every nonzero."""

    rule: rules.Rule
    role: str
    kept: int

    @property
    def in_kernels(self) -> bool:
        """Whether the kernels that store a tile prune it too."""
        return self.kept == 0 or isinstance(self.rule, rules.Magnitude)

    @property
    def kernel_keep(self) -> int:
        """Elements of a token that those kernels keep; 0: every nonzero."""
        return self.kept if self.in_kernels else 0

    def mean_kept(self, head_dim: int) -> int:
        """Elements of a token, on average, that slots are made for; 0: any number."""
        if self.in_kernels:
            return self.kept
        mean = checks.integer(self.rule.mean_kept(self.kept, head_dim), f"mean_kept of {self.role}_rule")
        if mean < 0:
            raise ValueError(f"mean_kept of {self.role}_rule must be at least 0, got {mean}")
        return min(mean, head_dim)

    def prune(self, x: Tensor, constrained: Tensor | None = None) -> Tensor:
        """What the kernels are to store of whole tiles x, (n, Hkv, 64 c, D); a new tensor unless they prune.

        constrained: what `Rule.constrained` says is added to this int64.
        """
        if self.in_kernels:
            return x
        pruned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for row, out in zip(x, pruned):  # row by row: scores and sorted indices take many times the memory of x
            dense = row.unflatten(1, (-1, TILE_TOKENS)).transpose(0, 1)
            tiles = self.rule.prune(dense, self.kept, self.role)
            out.copy_(tiles.transpose(0, 1).flatten(1, 2))
            if constrained is not None and (lost := self.rule.constrained(dense, tiles, self.kept)) is not None:
                constrained += lost
        return pruned


def resolve_pair(key_rule: Any, value_rule: Any) -> tuple[rules.Rule, rules.Rule]:
    """The rules that arguments key_rule and value_rule name or are; one object where they are equal.

    Raises ValueError for anything but a rule, and for rules that cannot prune tile by tile.
    """
    keys, values = _resolve(key_rule, "key_rule"), _resolve(value_rule, "value_rule")
    return keys, keys if value_rule == key_rule else values


def _resolve(given: Any, name: str) -> rules.Rule:
    kind = rules.RULES.get(given) if isinstance(given, str) else type(given)
    if kind is not None and (reason := getattr(kind, "whole_cache", None)):
        raise ValueError(
            f"{name} {kind.name!r} {reason}, and a cache that grows prunes tiles of {TILE_TOKENS} tokens as they get "
            "full: take another rule, or prune whole caches by it, with prune, compress or compress_kv"
        )
    rule = rules.resolve(given, name)
    group = checks.integer(rule.group, f"{name}'s group")
    if group < 1 or TILE_TOKENS % group:
        raise ValueError(f"{name} must have a group that divides the {TILE_TOKENS} tokens of a tile, got {group}")
    return rule
