"""`ElementPress`: zeros where a rule of `cute_kernels.rules` drops elements, in a dense cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from kvpress import BasePress
from kvpress.utils import get_prerope_query_states
from torch import Tensor, nn

from cute_kernels import rules
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import TILE_TOKENS
from cute_kernels.rules import Rule

OBSERVED_QUERIES = 32  # as in the sources of the rules


@dataclass
class ElementPress(BasePress):
    """Prunes elements of keys and values, those older than a dense window: what a `SparseKVCache` would hold, in a
    dense cache, for kvpress's pipeline and leaderboard. Saves no memory; `prefill` with `sparsity=` does.

    key_sparsity, value_sparsity: shares of the elements to drop, 0 to below 1; of every token's D channels
        floor(D * (1 - sparsity) + 1e-6) are kept, at least 1. Rules by channel keep that share of every channel.
    rule: a name of `cute_kernels.rules` or a rule of your own, or a tuple of two, (keys, values). "think" means ThinK
        for keys and ThinV for values. Rules that want queries get the newest 32 of the prompt.
    window: so many newest tokens stay dense at least; tokens leave it 64 at a time, as they do in a `SparseKVCache`.

    compression_ratio, as presses have it: the mean of both shares; setting it sets both. It counts elements: where
    values are 16 bits, bitmaps take another 1/16 of the dense bytes.

    Raises TypeError or ValueError for what does not fit, when it is made.
    """

    key_sparsity: float = 0.0
    value_sparsity: float = 0.0
    rule: str | Rule | tuple[str | Rule, str | Rule] = "magnitude"
    window: int = 32

    def __post_init__(self) -> None:
        for name in ("key_sparsity", "value_sparsity"):
            _check_share(getattr(self, name), name)
        if checks.integer(self.window, "window") < 0:
            raise ValueError(f"window must be at least 0, got {self.window}")
        pair = self.rule
        if not isinstance(pair, tuple):
            pair = ("think", "thinv") if pair == "think" else (pair, pair)
        if len(pair) != 2:
            raise ValueError(f"rule must be one rule or a tuple of two, (keys, values), got {len(pair)}")
        if pair[0] == "thinv" or pair[1] == "think":
            raise ValueError(
                "rule: think prunes keys and thinv values; 'think' alone means both, each where it belongs"
            )
        keys, values = (_resolved(rule, role) for role, rule in zip(("key", "value"), pair))
        # One rule for both where it is one name, looked up once: a random rule's generator then goes on from keys to
        # values and from layer to layer.
        self._rules = {"key": keys, "value": keys if isinstance(keys, Rule) and pair[0] == pair[1] else values}

    @property
    def compression_ratio(self) -> float:
        return (self.key_sparsity + self.value_sparsity) / 2

    @compression_ratio.setter
    def compression_ratio(self, share: float) -> None:
        _check_share(share, "compression_ratio")
        self.key_sparsity = self.value_sparsity = share

    @torch.no_grad()
    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """keys and values (B, Hkv, T, D) with +0 for what is dropped; new tensors where anything is. Called by
        kvpress."""
        end = max(0, keys.shape[2] - self.window) // TILE_TOKENS * TILE_TOKENS
        if not end:
            return keys, values
        found = []
        for role, x, share in (("key", keys, self.key_sparsity), ("value", values, self.value_sparsity)):
            if share:
                rule = self._rules[role]
                if isinstance(rule, str):
                    rule = _with_queries(rule, role, module, hidden_states, keys, kwargs, end)
                kept = checks.kept_elements(x.shape[3], share, None)
                x = torch.cat([rule.prune(x[:, :, :end], kept, role), x[:, :, end:]], dim=2)
            found.append(x)
        return found[0], found[1]


def _check_share(share: Any, name: str) -> None:
    if not isinstance(share, (int, float)) or isinstance(share, bool):
        raise TypeError(f"{name} must be a real number, got {type(share).__name__}")
    if not 0 <= share < 1:
        raise ValueError(f"{name} must be from 0 to below 1, got {share}")


def _resolved(rule: Any, role: str) -> Rule | str:
    """A name where the rule wants queries, which are another layer's each time."""
    if isinstance(rule, str) and rule in rules.RULES and rules.needs(rule, role) is not None:
        return rule
    return rules.resolve(rule, "rule")


def _with_queries(
    name: str,
    role: str,
    module: nn.Module,
    hidden_states: Tensor,
    keys: Tensor,
    kwargs: dict[str, Any],
    end: int,
) -> Rule:
    queries = _newest_queries(module, hidden_states, kwargs)
    if name == "think":
        return rules.ThinK(queries)
    if role == "key":
        return rules.OutputAware(q=queries)
    # Keys that a press before this one has left are not those of the newest columns, which a causal mask counts on.
    causal = keys.shape[2] == hidden_states.shape[1]
    mass = rules.attention_mass(queries, keys, scale=getattr(module, "scaling", None), causal=causal)
    return rules.OutputAware(attention=mass[:, :, :end])


def _newest_queries(module: nn.Module, hidden_states: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """(B, Hq, at most 32, D), at their positions."""
    queries = get_prerope_query_states(module, hidden_states[:, -OBSERVED_QUERIES:])
    cos, sin = (x[:, None, -OBSERVED_QUERIES:] for x in kwargs["position_embeddings"])
    first, second = queries.chunk(2, dim=-1)
    return queries * cos + torch.cat([-second, first], dim=-1) * sin
