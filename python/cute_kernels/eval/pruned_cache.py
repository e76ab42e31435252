"""A Transformers cache, dense in memory, whose tokens older than the window are pruned and rounded: numerically what a
sparse cache holds, for any rule, codec, dtype and head size.

A layer prunes at the start of its next update, so that the tokens of one forward pass, a prefill above all, see each
other densely, and the queries of that pass are known to the rules that want them. Tokens are evicted at the end of the
first pass, as the next one's mask counts them; what reads such a cache says where its tokens stand (position_ids).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cute_kernels import rules
from cute_kernels.eval.baselines import BASELINES, head_scale, quantised
from cute_kernels.eval.rounding import channel_scales, rounded
from cute_kernels.eval.settings import Setting, kept_elements

OBSERVED_QUERIES = 32  # as in the sources of the rules
_QUERIES_AT_ONCE = 256  # whose attention to all keys is in memory
OBSERVED_ATTENTION = "cute_kernels_observed_sdpa"
_LAYER = "_cute_kernels_layer"


class PrunedLayer(DynamicLayer):
    """One layer's keys and values. seed: of random rules, so that layers differ."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        super().__init__()
        self._setting = setting
        self._random = {"key": rules.Random(2 * seed), "value": rules.Random(2 * seed + 1)}
        self._pruned = 0
        self._evicts = setting.evicted > 0  # until the first pass
        self._scales: dict[str, Tensor] = {}  # of channels, or a baseline's of heads, by role, once chosen
        self._queries: Tensor | None = None
        self._scale: float | None = None
        pruned_roles = [role for role in ("key", "value") if setting.rule_of(role)[1]]
        self._wants_queries = any(rules.needs(setting.rule_of(role)[0], role) for role in pruned_roles)
        groups = [rules.RULES[setting.rule_of(role)[0]].group for role in pruned_roles]
        if setting.codec in BASELINES:
            groups.append(BASELINES[setting.codec].tokens)
        self._together = math.lcm(setting.granularity, *groups)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends; returns all keys and values, as pruned before this call. (B, Hkv, T, D) each."""
        if self.is_initialized:
            self._prune_old()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self._wants_queries or self._evicts:
            setattr(keys, _LAYER, self)  # by which the attention function finds this layer
        return keys, values

    def observe(self, queries: Tensor, keys: Tensor, scale: float | None) -> None:
        """Queries (B, Hq, Sq, D) that have met this layer's keys (B, Hkv, T, D); the newest are remembered."""
        if self._evicts:
            self._evict(queries, keys, scale)
        seen = queries if self._queries is None else torch.cat([self._queries, queries], dim=2)
        self._queries, self._scale = seen[:, :, -OBSERVED_QUERIES:].clone(), scale

    @torch.no_grad()
    def _evict(self, queries: Tensor, keys: Tensor, scale: float | None) -> None:
        """Of the prompt, every KV head keeps the newest tokens and those that got most attention, half of the budget
        each. keys: all of the pass, which attends to them whether they stay or not."""
        tokens = keys.shape[2]
        first = tokens - queries.shape[2]
        mass = torch.zeros(keys.shape[:3], device=keys.device)
        for part in range(0, queries.shape[2], _QUERIES_AT_ONCE):
            some = queries[:, :, part : part + _QUERIES_AT_ONCE]
            seen = first + part + some.shape[2]
            mass[:, :, :seen] += rules.attention_mass(some, keys[:, :, :seen], scale=scale)
        kept = max(1, round(tokens * (1 - self._setting.evicted)))
        recent = kept // 2
        mass[:, :, tokens - recent :] = math.inf
        which = mass.topk(kept, dim=2).indices.sort(dim=2).values[..., None]
        self.keys, self.values = (x.gather(2, which.expand(-1, -1, -1, x.shape[3])) for x in (self.keys, self.values))
        self._evicts = False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        self._pruned = min(self._pruned, self.get_seq_length())

    @torch.no_grad()
    def _prune_old(self) -> None:
        end = max(0, self.get_seq_length() - self._setting.window) // self._together * self._together
        if end <= self._pruned or self._setting.is_dense:
            return
        assert self.keys is not None and self.values is not None
        old, codec = slice(self._pruned, end), self._setting.codec
        made = {role: self._rule(role, old) for role in ("key", "value") if self._setting.rule_of(role)[1]}
        for role, cache in (("key", self.keys), ("value", self.values)):
            if codec and self._pruned == 0:
                self._scales[role] = (head_scale if codec in BASELINES else channel_scales)(cache[:, :, old])
            if role in made:
                kept = kept_elements(cache.shape[3], self._setting.rule_of(role)[1])
                cache[:, :, old] = made[role].prune(cache[:, :, old], kept, role)
            if codec in BASELINES:
                cache[:, :, old] = quantised(cache[:, :, old], codec, role, self._scales[role])
            elif codec:
                cache[:, :, old] = rounded(cache[:, :, old], codec, self._scales[role])
        self._pruned = end

    def _rule(self, role: str, old: slice) -> rules.Rule:
        name = self._setting.rule_of(role)[0]
        needed = rules.needs(name, role)
        if name == "random":
            return self._random[role]
        if needed is None:
            return rules.resolve(name)
        if self._queries is None:
            raise RuntimeError(
                f"rule {name!r} needs the model's queries, which this model's attention function does not hand over: "
                "call cute_kernels.eval.pruned_cache.observe(model) first"
            )
        assert self.keys is not None
        if name == "think":
            return rules.ThinK(self._queries)
        if needed == "q":
            return rules.OutputAware(q=self._queries)
        mass = rules.attention_mass(self._queries, self.keys, scale=self._scale)
        return rules.OutputAware(attention=mass[:, :, old])


def make(config: PreTrainedConfig, setting: Setting) -> Cache:
    """An empty cache for a model. Raises ValueError for layers that are not full attention."""
    layers = DynamicCache(config=config).layers
    for i, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            raise ValueError(
                f"layer {i} of this {config.model_type} model keeps a {type(layer).__name__}: only layers of full "
                "attention can be pruned here"
            )
    return Cache(layers=[PrunedLayer(setting, i) for i in range(len(layers))])


def observe(model: Any) -> None:
    """Makes a model's attention (sdpa from now on) show its queries to pruned layers whose rules want them."""
    model.set_attn_implementation(OBSERVED_ATTENTION)


def _observed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    layer = getattr(key, _LAYER, None)
    if layer is not None:
        layer.observe(query, key, kwargs.get("scaling"))
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(OBSERVED_ATTENTION, _observed_attention)
AttentionMaskInterface.register(OBSERVED_ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
