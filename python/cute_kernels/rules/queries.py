"""Rules that weigh by recent queries, and those for whole channels."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._runtime import checks
from cute_kernels._runtime.reference import without_autocast
from cute_kernels.rules.base import GROUP_TOKENS, Rule, floats, largest, largest_of_groups, positive

_TOKENS_AT_A_TIME = 1024  # whose squares are in memory


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
        self.q = None if q is None else floats(q, "q", (4,))
        self.attention = None if attention is None else floats(attention, "attention", (3, 4))
        self.group = positive(group, "group")

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        if role is None:
            if self.q is not None and self.attention is not None:
                raise ValueError("role must be 'key' or 'value' for OutputAware with both q and attention")
            role = "key" if self.q is not None else "value"
        if role == "key":
            return largest(x.abs().float() * self._query_weight(x), kept, 3)
        return largest_of_groups(x.abs().float() * self._token_weight(x), kept, self.group)

    def _query_weight(self, keys: Tensor) -> Tensor:
        """(B, Hkv, 1, D)"""
        return by_kv_head(_given(self.q, "q", "keys"), "q", keys, 3, 3).float().abs().sum(dim=(2, 3))[:, :, None]

    def _token_weight(self, values: Tensor) -> Tensor:
        """(B, Hkv, T, 1)"""
        attention = _given(self.attention, "attention", "values")
        if attention.dim() == 4:
            return by_kv_head(attention, "attention", values, 3, 2).float().sum(dim=(2, 3))[..., None]
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
        self.q = floats(q, "q", (4,))

    def mask(self, x: Tensor, kept: int, role: str | None) -> Tensor:
        if role == "value":
            raise ValueError("method 'think' prunes keys; for values take 'thinv'")
        queries = by_kv_head(self.q, "q", x, 3, 3).double().square().sum(dim=(2, 3))
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


@torch.no_grad()
def attention_mass(q: Tensor, k: Tensor, *, scale: float | None = None, causal: bool = True) -> Tensor:
    """The attention that every cached token receives from recent queries, for `OutputAware`.

    q: (B, Hq, Sq, D), of the Sq newest tokens. k: (B, Hkv, T, D), T >= Sq if causal. scale: default 1 / sqrt(D).
    Returns (B, Hkv, T) float32: probabilities summed over Sq and the query heads of a KV head.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device or range.
    """
    q, k = floats(q, "q", (4,)), floats(k, "k", (4,))
    factor = max(1, q.shape[3]) ** -0.5 if scale is None else checks.scale(scale)
    checks.flag(causal, "causal")
    queries = by_kv_head(q, "q", k, 3, 3).float()  # (B, Hkv, G, Sq, D)
    count, tokens = q.shape[2], k.shape[2]
    if causal and count > tokens:
        raise ValueError(f"q must be of the newest of k's T = {tokens} tokens, got Sq = {count}")
    if 0 in q.shape[:3]:  # no query, but maybe more tokens than fit into a mask
        return torch.zeros(k.shape[:3], device=k.device)
    with without_autocast(queries):
        logits = queries @ k.float().transpose(-1, -2)[:, :, None]
    logits *= factor
    if causal:
        hidden = torch.ones(count, tokens, dtype=torch.bool, device=q.device).triu_(tokens - count + 1)
        logits.masked_fill_(hidden, float("-inf"))
    return logits.softmax(dim=-1).sum(dim=(2, 3))


def _channel_energy(x: Tensor) -> Tensor:
    """(B, Hkv, D) float64: squares summed over the tokens, so many at a time. A norm, squared, would not be exact, and
    channels that tie would no longer."""
    energy = x.new_zeros(*x.shape[:2], x.shape[3], dtype=torch.float64)
    for part in x.split(_TOKENS_AT_A_TIME, dim=2):
        energy += part.double().square().sum(dim=2)
    return energy


def _whole_channels(scores: Tensor, x: Tensor, kept: int) -> Tensor:
    return largest(scores, kept, 2)[:, :, None].expand(x.shape)


def by_kv_head(value: Tensor, name: str, x: Tensor, last: int, like: int) -> Tensor:
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
