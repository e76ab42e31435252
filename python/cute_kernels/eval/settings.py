"""What is pruned, by which rule and how much."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cute_kernels import rules
from cute_kernels._runtime.extension import SCALED_CODECS
from cute_kernels.eval.baselines import BASELINES

WINDOW = 32  # as in arXiv 2505.22913
PARTS = ("keys", "values", "both")
_PARTNERS = {"think": ("think", "thinv")}  # structured channels of keys and of values


def _check_two_of_four(rule: str, role: str, sparsity: float) -> None:
    """Two of four leave half: no other sparsity of "2of4", none below a half of "magnitude-2of4"."""
    if rule == "2of4" and sparsity not in (0, 0.5):
        raise ValueError(f"{role}_sparsity must be 0.5 with rule '2of4', which keeps two of every four, got {sparsity}")
    if rule == "magnitude-2of4" and 0 < sparsity < 0.5:
        raise ValueError(f"{role}_sparsity must be at least 0.5 with rule 'magnitude-2of4', got {sparsity}")


@dataclass(frozen=True)
class Setting:
    """One way to prune a cache.

    key_rule, value_rule: names from `cute_kernels.rules`. key_sparsity, value_sparsity: shares dropped, 0 to below 1;
    0 leaves that cache dense. window: how many of the newest tokens stay dense at least. granularity: tokens leave the
    window so many at a time, or as many as the rules want together if that is more. evicted: share of a prompt's tokens
    that are taken out before, those of least attention, as in H2O (arXiv 2306.14048). codec: how both caches are stored
    behind the window, "fp8", "int8" or "int4"; "": as they are. A name from `baselines` goes without pruning.
    """

    key_rule: str = "magnitude"
    value_rule: str = "magnitude"
    key_sparsity: float = 0.0
    value_sparsity: float = 0.0
    window: int = WINDOW
    granularity: int = 1
    evicted: float = 0.0
    codec: str = ""

    def __post_init__(self) -> None:
        for role, rule in (("key", self.key_rule), ("value", self.value_rule)):
            if rule not in rules.RULES:
                raise ValueError(f"{role}_rule must be one of {', '.join(rules.RULES)}, got {rule!r}")
            _check_two_of_four(rule, role, getattr(self, f"{role}_sparsity"))
        if self.key_rule == "thinv" or self.value_rule == "think":
            raise ValueError("think prunes keys and thinv values: 'think' alone means both, each where it belongs")
        for name in ("key_sparsity", "value_sparsity", "evicted"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be from 0 to below 1, got {getattr(self, name)}")
        if self.codec and self.codec not in SCALED_CODECS and self.codec not in BASELINES:
            names = ", ".join((*sorted(SCALED_CODECS), *BASELINES))
            raise ValueError(f"codec must be one of {names} or '', got {self.codec!r}")
        if self.codec in BASELINES and (self.key_sparsity or self.value_sparsity):
            raise ValueError(f"codec {self.codec!r} is that of a dense cache: nothing is pruned with it")
        if self.window < 0 or self.granularity < 1:
            raise ValueError(f"window must be >= 0 and granularity >= 1, got {self.window} and {self.granularity}")

    @property
    def part(self) -> str:
        """ "none", "keys", "values" or "both"."""
        return ("none", "keys", "values", "both")[(self.key_sparsity > 0) + 2 * (self.value_sparsity > 0)]

    @property
    def is_dense(self) -> bool:
        """Whether all of the cache stays as the model makes it."""
        return self.part == "none" and not self.codec

    @property
    def rule(self) -> str:
        """The rule's name, or both: "magnitude+channel-magnitude"."""
        pair = (self.key_rule, self.value_rule)
        alone = [name for name in dict.fromkeys(pair) if pair == _PARTNERS.get(name, (name, name))]
        return alone[0] if alone else "+".join(pair)

    @property
    def name(self) -> str:
        """For people and file names: "dense", "magnitude-both-0.7", "h2o-0.5+magnitude-k0.5-v0.7-fp8"."""
        evicted, codec = f"h2o-{self.evicted:g}" if self.evicted else "", f"-{self.codec}" if self.codec else ""
        if self.part == "none":
            return (evicted or "dense") + codec
        pruned = f"{self.rule}-{self.part}-{max(self.key_sparsity, self.value_sparsity):g}"
        if self.part == "both" and self.key_sparsity != self.value_sparsity:
            pruned = f"{self.rule}-k{self.key_sparsity:g}-v{self.value_sparsity:g}"
        return (f"{evicted}+{pruned}" if evicted else pruned) + codec

    def rule_of(self, role: str) -> tuple[str, float]:
        """(rule, sparsity) of "key" or "value"."""
        return (self.key_rule, self.key_sparsity) if role == "key" else (self.value_rule, self.value_sparsity)


DENSE = Setting()


def kept_elements(head_dim: int, sparsity: float) -> int:
    """Of D, as `prune` counts; 0 where nothing is pruned."""
    return max(1, math.floor(head_dim * (1 - sparsity) + 1e-6)) if sparsity else 0


def grid(
    rule_names: Sequence[str],
    parts: Sequence[str],
    sparsities: Sequence[float | tuple[float, float]],
    *,
    window: int = WINDOW,
    granularity: int = 1,
    evictions: Sequence[float] = (0.0,),
    codecs: Sequence[str] = ("",),
) -> list[Setting]:
    """Every combination, after the dense cache, and after the cache that nothing is pruned of where tokens are evicted.

    rule_names: of `cute_kernels.rules`; "think" prunes keys by ThinK and values by ThinV; KEYS+VALUES names two rules.
    parts: of "keys", "values" and "both". sparsities: each for keys and values alike, or (keys', values'). evictions:
    shares of tokens. codecs: as in `Setting`; of `baselines` come once, without pruning. Raises ValueError for a name
    that is unknown.
    """
    both = {"window": window, "granularity": granularity}
    settings = [Setting(**both), *(Setting(**both, evicted=share) for share in evictions)]
    settings += [Setting(**both, codec=codec) for codec in codecs if codec in BASELINES]
    codecs = [codec for codec in codecs if codec not in BASELINES]
    for evicted, rule_name in itertools.product(evictions, rule_names):
        key_rule, _, value_rule = rule_name.partition("+")
        if not value_rule:
            key_rule, value_rule = _PARTNERS.get(key_rule, (key_rule, key_rule))
        for part in parts:
            if part not in PARTS:
                raise ValueError(f"parts must be of {', '.join(PARTS)}, got {part!r}")
            for sparsity in sparsities:
                keys, values = sparsity if isinstance(sparsity, tuple) else (sparsity, sparsity)
                keys, values = keys * (part != "values"), values * (part != "keys")
                of_both = key_rule, value_rule, keys, values
                settings += [Setting(*of_both, **both, evicted=evicted, codec=codec) for codec in codecs]
    unique: dict[str, Setting] = {}
    for setting in settings:
        unique.setdefault(setting.name, setting)
    return list(unique.values())
