"""Pruning rules: which elements of a K or V cache are kept.

    ck.compress(k, role="key", sparsity=0.7)                                                      # "magnitude"
    ck.compress(v, role="value", sparsity=0.7, method="channel-magnitude")
    ck.compress_kv(k, v, sparsity=0.7, method=(ck.rules.ThinK(q=q), "magnitude"))                 # keys, values
    rule = ck.rules.OutputAware(q=q, attention=ck.rules.attention_mass(q, k))
    ck.compress_kv(k, v, sparsity=0.7, method=rule)
    ck.KVCache(..., sparsity=0.7, value_rule="channel-magnitude")     # a cache that grows, tile by tile

A rule's name will do where it needs nothing but the cache; otherwise make the rule and pass it. `keep` of D (or the
sparsity that says it) means the same share of the cache for every rule, counted along the rule's own direction:

| rule | ranks | along | source |
| --- | --- | --- | --- |
| "magnitude" | abs(x) | the channels of a token | Mustafar, arXiv 2505.22913 |
| "channel-magnitude" | abs(x) | `group` tokens of a channel | the same |
| "output-aware", keys | abs(K) times recent abs(q), summed | the channels of a token | the same |
| "output-aware", values | abs(V) times attention received, summed | `group` tokens of a channel | the same |
| "think", keys | norm of recent q's channel times norm of K's | whole channels | ThinK, arXiv 2407.21018 |
| "thinv", values | norm of V's channel | whole channels | ThinK for values, as compared in 2505.22913 |
| "random" | nothing: a control | the channels of a token | |
| "2of4" | abs(x) | four neighbouring channels of keys, tokens of values: exactly two | HieraSparse, arXiv 2604.16864 |
| "magnitude-2of4" | abs(x) | the same, at most two; of those the channels of a token | |

The last two give what sparse tensor cores multiply. See `TwoOfFour` for which channels are neighbours.

A cache that grows (`KVCache`) prunes tile by tile, by "magnitude", "channel-magnitude", "random", "2of4",
"magnitude-2of4" and rules of your own.

(For values, attention weighs all channels of a token alike, so per token its order is that of the magnitudes; for keys
the same holds for queries and the tokens of a channel. Hence the direction of each output-aware rule.)

For all of them: what is larger is kept, ties go to the lower channel or the earlier token, a NaN is larger than
everything, so is a score that is NaN (0 times infinity), and infinities are ordinary large values. What is kept stays
bit for bit, except that -0.0 counts as zero and becomes +0 like all that is dropped. Scores other than magnitudes are
float32 for elements and float64 for channels. A rule of your own is a subclass of `Rule` with one method.
"""

from __future__ import annotations

from typing import Any

from cute_kernels._runtime import checks
from cute_kernels.rules.base import GROUP_TOKENS, Rule, largest
from cute_kernels.rules.magnitude import ChannelMagnitude, Magnitude, Random
from cute_kernels.rules.queries import OutputAware, ThinK, ThinV, attention_mass
from cute_kernels.rules.two_of_four import MagnitudeTwoOfFour, TwoOfFour, channel_order

__all__ = [
    "GROUP_TOKENS",
    "RULES",
    "ChannelMagnitude",
    "Magnitude",
    "MagnitudeTwoOfFour",
    "OutputAware",
    "Random",
    "Rule",
    "ThinK",
    "ThinV",
    "TwoOfFour",
    "attention_mass",
    "channel_order",
    "largest",
    "needs",
    "resolve",
    "resolve_pair",
]

RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (Magnitude, ChannelMagnitude, OutputAware, ThinK, ThinV, Random, TwoOfFour, MagnitudeTwoOfFour)
}
_NEED_INPUTS = {"output-aware": "OutputAware(q=..., attention=...)", "think": "ThinK(q=...)"}


def needs(name: str, role: str) -> str | None:
    """What the rule of that name takes besides the cache: "q", "attention" or nothing."""
    if name not in _NEED_INPUTS:
        return None
    return "attention" if (name, role) == ("output-aware", "value") else "q"


def resolve(method: Any, argument: str = "method") -> Rule:
    """The rule that `method` names or is. Raises ValueError for anything else, and for a name that is not enough.

    argument: what errors call it.
    """
    if isinstance(method, Rule):
        return method
    if not isinstance(method, str) or method not in RULES:
        names = ", ".join(map(repr, RULES))
        raise ValueError(f"{argument} must be one of {names} or a cute_kernels.rules.Rule, got {checks.shown(method)}")
    if method in _NEED_INPUTS:
        raise ValueError(f"{argument} {method!r} needs inputs: pass cute_kernels.rules.{_NEED_INPUTS[method]}")
    return RULES[method]()


def resolve_pair(method: Any) -> tuple[Rule, Rule]:
    """The rules of keys and values: `method` is one for both or a tuple of two."""
    if not isinstance(method, tuple):
        rule = resolve(method)
        return rule, rule
    if len(method) != 2:
        raise ValueError(f"method must be one rule or a tuple of two, (keys, values), got {len(method)}")
    return resolve(method[0]), resolve(method[1])
