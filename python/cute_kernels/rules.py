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

import abc
from typing import Any, ClassVar

import torch
from torch import Tensor

from cute_kernels._runtime import checks
from cute_kernels._storage.two_of_four import dealt_apart

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
        x = _floats(x, "x", (4,))
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


def _largest_of_groups(scores: Tensor, kept: int, group: int) -> Tensor:
    """Of every `group` tokens of a channel kept / D, rounded down but at least 1; the last group may be shorter."""
    tokens, head_dim = scores.shape[2:]
    whole = tokens // group * group
    grouped = scores[:, :, :whole].unflatten(2, (whole // group, group))
    masks = [largest(grouped, max(1, group * kept // head_dim), 3).flatten(2, 3)] if whole else []
    if rest := tokens - whole:
        masks.append(largest(scores[:, :, whole:], max(1, rest * kept // head_dim), 2))
    return torch.cat(masks, dim=2)


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
        self.group = _positive(group, "group")

    def mean_kept(self, kept: int, head_dim: int) -> int:
        of_channel = max(1, self.group * kept // head_dim)
        return max(kept, -(-head_dim * of_channel // self.group))

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        return _largest_of_groups(x.abs(), kept, self.group)


class OutputAware(Rule):
    """Keys: per token the `kept` largest abs(K) times the sum of abs(q). Values: per channel, of every `group` tokens,
    the share kept / D with the largest abs(V) times the attention that the token receives, at least one.

    q: (B, Hq, Sq, D), recent queries, for keys: 32 in the source. Summed over Sq and the query heads of a KV head.
    attention: for values, attention probabilities (B, Hq, Sq, T) of recent queries, summed likewise, or sums already,
        (B, Hkv, T), as `attention_mass` gives them.
    Without a role (`prune` without `role=`) the input that is there says which rule is meant.
    """

    name = "output-aware"
    group = GROUP_TOKENS
    whole_cache = "weighs by queries or attention that were given for a whole cache"

    def __init__(self, q: Tensor | None = None, attention: Tensor | None = None, group: int = GROUP_TOKENS) -> None:
        if q is None and attention is None:
            raise ValueError("OutputAware needs q, for keys, or attention, for values, or both")
        self.q = None if q is None else _floats(q, "q", (4,))
        self.attention = None if attention is None else _floats(attention, "attention", (3, 4))
        self.group = _positive(group, "group")

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        if role is None:
            if self.q is not None and self.attention is not None:
                raise ValueError("role must be 'key' or 'value' for OutputAware with both q and attention")
            role = "key" if self.q is not None else "value"
        if role == "key":
            return largest(x.abs().float() * self._query_weight(x), kept, 3)
        return _largest_of_groups(x.abs().float() * self._token_weight(x), kept, self.group)

    def _query_weight(self, keys: Tensor) -> Tensor:
        """(B, Hkv, 1, D)"""
        return _by_kv_head(_given(self.q, "q", "keys"), "q", keys, 3, 3).float().abs().sum(dim=(2, 3))[:, :, None]

    def _token_weight(self, values: Tensor) -> Tensor:
        """(B, Hkv, T, 1)"""
        attention = _given(self.attention, "attention", "values")
        if attention.dim() == 4:
            return _by_kv_head(attention, "attention", values, 3, 2).float().sum(dim=(2, 3))[..., None]
        if attention.shape != values.shape[:3] or attention.device != values.device:
            raise ValueError(
                f"attention must have shape (B, Hkv, T) = {tuple(values.shape[:3])}, or (B, Hq, Sq, T), on "
                f"{values.device}, got {checks.described(attention)}"
            )
        return attention.float()[..., None]


class ThinK(Rule):
    """Keys: the `kept` channels of a head with the largest norm of recent queries times norm of keys, for all tokens.

    q: (B, Hq, Sq, D), recent queries, 32 in the source; squares are summed over Sq and the query heads of a KV head.
    """

    name = "think"
    per_token = True
    whole_cache = "weighs by queries and chooses channels for all tokens at once"
    group = GROUP_TOKENS

    def __init__(self, q: Tensor) -> None:
        self.q = _floats(q, "q", (4,))

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        if role == "value":
            raise ValueError("method 'think' prunes keys; for values take 'thinv'")
        queries = _by_kv_head(self.q, "q", x, 3, 3).double().square().sum(dim=(2, 3))
        return _whole_channels(queries * _channel_energy(x), x, kept)


class ThinV(Rule):
    """Values: the `kept` channels of each head with the largest norm, for all tokens."""

    name = "thinv"
    per_token = True
    whole_cache = "chooses channels for all tokens at once"
    group = GROUP_TOKENS

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        if role == "key":
            raise ValueError("method 'thinv' prunes values; for keys make a cute_kernels.rules.ThinK(q=...)")
        return _whole_channels(_channel_energy(x), x, kept)


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


def _lost(x: Tensor, pruned: Tensor, kept: int) -> Tensor:
    """How many nonzeros that are among the `kept` largest of their token are not in `pruned`."""
    return (largest(x.abs(), kept, 3) & (x != 0) & (pruned == 0)).sum()


class TwoOfFour(Rule):
    """Of every four neighbours the two with the largest abs(x): the pattern of sparse tensor cores, and of the tile
    format "two_of_four". It takes no `keep`: half of every four is kept.

    Neighbours are those along the product's inner dimension. Of values: four consecutive tokens, counted from the
    first. Of keys: four channels in the order that `channel_order` chooses such that channels with many large elements
    do not meet: from the whole cache or, in a cache that grows, from the first tokens of a sequence that it stores.
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
        return two_of_four(x, None if role == "value" else channel_order(x, x.shape[3] // 2), role)


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
        candidates = two_of_four(x, None if role == "value" else channel_order(x, most), role)
        if kept == x.shape[3]:
            return candidates
        return largest(torch.where(candidates, x.abs(), -1.0), kept, 3) & candidates

    def constrained(self, x: Tensor, pruned: Tensor, kept: int) -> Tensor | None:
        return _lost(x, pruned, min(kept, x.shape[3] // 2))


def channel_order(x: Tensor, kept: int) -> Tensor:
    """The order of channels, (B, Hkv, D) int64, whose fours are neighbours for `TwoOfFour`: position -> channel.

    Channels that are often among the `kept` largest of their token, and not zero, are kept apart: see `dealt_apart`.
    """
    return dealt_apart((largest(x.abs(), kept, 3) & (x != 0)).sum(2))


def two_of_four(x: Tensor, order: Tensor | None, role: str | None) -> Tensor:
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


@torch.no_grad()
def attention_mass(q: Tensor, k: Tensor, *, scale: float | None = None, causal: bool = True) -> Tensor:
    """The attention that every cached token receives from recent queries, for `OutputAware`.

    q: (B, Hq, Sq, D), of the Sq newest tokens. k: (B, Hkv, T, D), T >= Sq if causal. scale: default 1 / sqrt(D).
    Returns (B, Hkv, T) float32: probabilities summed over Sq and the query heads of a KV head.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device or range.
    """
    q, k = _floats(q, "q", (4,)), _floats(k, "k", (4,))
    factor = max(1, q.shape[3]) ** -0.5 if scale is None else checks.scale(scale)
    checks.flag(causal, "causal")
    queries = _by_kv_head(q, "q", k, 3, 3).float()  # (B, Hkv, G, Sq, D)
    count, tokens = q.shape[2], k.shape[2]
    if causal and count > tokens:
        raise ValueError(f"q must be of the newest of k's T = {tokens} tokens, got Sq = {count}")
    if 0 in q.shape[:3]:  # no query, but maybe more tokens than fit into a mask
        return torch.zeros(k.shape[:3], device=k.device)
    logits = queries @ k.float().transpose(-1, -2)[:, :, None]
    logits *= factor
    if causal:
        hidden = torch.ones(count, tokens, dtype=torch.bool, device=q.device).triu_(tokens - count + 1)
        logits.masked_fill_(hidden, float("-inf"))
    return logits.softmax(dim=-1).sum(dim=(2, 3))


def _channel_energy(x: Tensor) -> Tensor:
    """(B, Hkv, D) float64: squares summed over the tokens."""
    return torch.linalg.vector_norm(x, dim=2, dtype=torch.float64).square()


def _whole_channels(scores: Tensor, x: Tensor, kept: int) -> Tensor:
    return largest(scores, kept, 2)[:, :, None].expand(x.shape)


def _by_kv_head(value: Tensor, name: str, x: Tensor, last: int, like: int) -> Tensor:
    """(B, Hq, Sq, N) -> (B, Hkv, Hq / Hkv, Sq, N), where N is x's dimension `like`."""
    batch, kv_heads = x.shape[:2]
    letter = "BHTD"[like]
    if value.shape[0] != batch or value.shape[last] != x.shape[like] or not kv_heads or value.shape[1] % kv_heads:
        raise ValueError(
            f"{name} must have shape (B, Hq, Sq, {letter}) with B = {batch}, Hq a multiple of {kv_heads} and "
            f"{letter} = {x.shape[like]}, got {tuple(value.shape)}"
        )
    if value.device != x.device:
        raise ValueError(f"{name} must be on the device of the cache, {x.device}, got {value.device}")
    return value.unflatten(1, (kv_heads, value.shape[1] // kv_heads))


def _given(value: Tensor | None, name: str, of: str) -> Tensor:
    if value is None:
        raise ValueError(
            f"method 'output-aware' needs {name} for {of}: pass cute_kernels.rules.OutputAware({name}=...)"
        )
    return value


def _floats(value: Any, name: str, dimensions: tuple[int, ...]) -> Tensor:
    checks.tensor(value, name)
    checks.dtype(value, name, _DTYPES)
    if value.dim() not in dimensions:
        expected = " or ".join(map(str, dimensions))
        raise ValueError(f"{name} must have {expected} dimensions, got shape {tuple(value.shape)}")
    return value.detach()


def _positive(value: Any, name: str) -> int:
    count = checks.integer(value, name)
    if count < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    return count
