"""KVCache with other pruning rules than per-token magnitude: tile by tile what the rule's definition says."""

from __future__ import annotations

import copy

import pytest
import torch

import cute_kernels as ck
from cute_kernels import rules
from cute_kernels._cache.rows import core_of
from tests.support.oracle import gaussian, lognormal_channels, prune, same_bits
from tests.support.rule_definitions import expected

TILE, HEAD_DIM = 64, 64


def make(device="cpu", **arguments) -> ck.KVCache:
    sizes = {"max_batch": 4, "kv_heads": 2, "head_dim": HEAD_DIM, "capacity": 1000, "window": 32}
    return ck.KVCache(device=device, **sizes | {"sparsity": 0.7} | arguments)


def pair(*shape: int, dtype=torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(lognormal_channels(*shape, HEAD_DIM, dtype=dtype) for _ in range(2))


class EveryOther(rules.Rule):
    """Of a user: even channels of even tokens and odd ones of odd tokens, the first `kept` of them."""

    name = "every other"

    def mask(self, x, kept, role):
        channels, tokens = torch.arange(x.shape[3]), torch.arange(x.shape[2])[:, None]
        return ((channels % 2 == tokens % 2) & (channels // 2 < kept)).expand(x.shape).to(x.device)


def by_definition(rule: str, tile: torch.Tensor, kept: int) -> torch.Tensor:
    """(Hkv, 64, D)"""
    if rule == "magnitude":
        return prune(tile, kept)
    if rule.startswith("channel"):
        group = int(rule.rpartition(" ")[2])
        return expected(tile[None], kept, group, lambda b, h, magnitudes: magnitudes, "group")[0]
    out = torch.zeros_like(tile)
    for token in range(TILE):
        out[:, token, token % 2 : 2 * kept : 2] = tile[:, token, token % 2 : 2 * kept : 2]
    return out + 0.0  # -0.0 is stored as zero


RULES = {
    "magnitude": "magnitude",
    "channel 32": "channel-magnitude",
    "channel 64": rules.ChannelMagnitude(64),
    "channel 16": rules.ChannelMagnitude(16),
    "own": EveryOther(),
}


def check(cache: ck.KVCache, row: int, given: tuple[torch.Tensor, torch.Tensor], names: tuple[str, str]) -> None:
    """given: (Hkv, T, D) each."""
    for tokens, name, kept, got in zip(given, names, (cache.key_keep, cache.value_keep), cache.dense(row)):
        end = max(0, (tokens.shape[1] - cache.window) // TILE) * TILE
        tiles = [by_definition(name, tile, kept) for tile in tokens[:, :end].split(TILE, dim=1)] if end else []
        assert same_bits(got.cpu(), torch.cat([*tiles, tokens[:, end:]], dim=1))


@pytest.mark.parametrize(
    "names",
    [
        ("channel 32", "channel 32"),
        ("magnitude", "channel 16"),
        ("channel 64", "magnitude"),
        ("own", "own"),
        ("magnitude", "own"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("page_tokens", [64, 192])
def test_tiles_are_pruned_by_the_rule_in_any_portions(device, names, page_tokens, rng):
    cache = make(
        device,
        page_tokens=page_tokens,
        sparsity=None,
        key_keep=19,
        value_keep=rng.randrange(12, 30),
        key_rule=RULES[names[0]],
        value_rule=RULES[names[1]],
    )
    k, v = pair(2, 2, 500)
    first, place = rng.choice([0, 1, 95, 96, 200]), 0
    cache.prefill(k[:, :, :first].to(device), v[:, :, :first].to(device))
    place = first
    while place < 500:
        portion = slice(place, place + rng.choice([1, 1, 7, 64, 130]))
        cache.append(k[:, :, portion].to(device), v[:, :, portion].to(device))
        place = min(500, portion.stop)
    for row in range(2):
        check(cache, row, (k[row], v[row]), names)
    statistics = cache.statistics()
    assert not any(count for name, count in statistics.items() if "trimmed" in name), statistics


def test_attention_over_such_a_cache(device, rng):
    cache = make(device, value_rule="channel-magnitude", key_rule="random")
    k, v = pair(2, 2, 300)
    cache.prefill(k.to(device), v.to(device))
    q = torch.randn(2, 4, 1, HEAD_DIM).half().to(device)
    got = cache.attend(q).float()
    for row in range(2):
        keys, values = (x.double().repeat_interleave(2, dim=0) for x in cache.dense(row))
        right = torch.softmax(q[row].double() @ keys.transpose(1, 2) / HEAD_DIM**0.5, dim=-1) @ values
        assert (got[row].double() - right).norm() <= 2e-3 * right.norm()


def test_random_keeps_as_many_of_every_token(rng):
    cache = make(key_rule="random", value_rule="random", keep=19, sparsity=None)
    k, v = (x.abs() + 1 for x in pair(1, 2, 32 + 3 * TILE))
    cache.prefill(k, v)
    kept = []
    for got, given in zip(cache.dense(0), (k[0], v[0])):
        pruned = got[:, : 3 * TILE]
        kept.append(pruned != 0)
        assert (kept[-1].sum(-1) == 19).all()
        assert torch.equal(pruned[kept[-1]], given[:, : 3 * TILE][kept[-1]])
    assert not torch.equal(*kept)  # one generator for both


def test_copies_and_cut_tiles(device, rng):
    """Rows that share pages, and tokens that return from a tile to the window, pruned as they are."""
    cache = make(device, key_rule="channel-magnitude", value_rule="channel-magnitude", page_tokens=128)
    k, v = pair(1, 2, 300)
    cache.prefill(k[:, :, :200].to(device), v[:, :, :200].to(device))
    cache.repeat_interleave(2)
    before = [x.clone() for x in cache.dense(0)]
    other = pair(1, 2, 100)
    for first in range(100):
        new = [torch.cat([x[:, :, 200 + first], o[:, :, first]])[:, :, None] for x, o in zip((k, v), other)]
        cache.append(*(x.to(device) for x in new))
    check(cache, 0, (k[0], v[0]), ("channel 32", "channel 32"))
    check(cache, 1, tuple(torch.cat([x[0, :, :200], o[0]], dim=1) for x, o in zip((k, v), other)), ("channel 32",) * 2)
    cache.crop(100)
    for got, old in zip(cache.dense(0), before):
        assert same_bits(got[:, :64], old[:, :64])
    twin = copy.deepcopy(cache)
    more = pair(2, 2, 100)
    for one in (cache, twin):
        one.append(*(x.to(device) for x in more))
    assert all(same_bits(*both) for both in zip(cache.dense(1), twin.dense(1)))


def test_memory_falls_with_every_rule_but_those_that_promise_nothing():
    sizes = {"head_dim": 128, "kv_heads": 8, "capacity": 4096, "keep": 38, "sparsity": None, "max_append": 1}
    plain = make(**sizes).nbytes()
    for rule in ("random", "channel-magnitude"):
        assert make(**sizes, key_rule=rule, value_rule=rule).nbytes() == plain
    assert make(**sizes, key_rule=EveryOther()).nbytes() > 1.4 * plain  # slots hold any tile


@pytest.mark.parametrize("kind", ["gaussian", "lognormal"])
def test_slots_have_room_for_groups_of_channels(kind, rng):
    cache = make(
        head_dim=128,
        keep=38,
        sparsity=None,
        capacity=40000,
        max_batch=1,
        key_rule="channel-magnitude",
        value_rule="channel-magnitude",
    )
    make_one = {"gaussian": gaussian, "lognormal": lognormal_channels}[kind]
    k, v = (make_one(1, 2, 512 * TILE, 128) for _ in range(2))
    cache.prefill(k, v)
    statistics = cache.statistics()
    assert statistics["key_tiles_trimmed"] + statistics["value_tiles_trimmed"] < 3, statistics


def test_few_kept_of_long_groups():
    """One of 128 channels, but of every 32 tokens of a channel at least one: slots know it."""
    cache = make(head_dim=128, keep=1, sparsity=None, key_rule="channel-magnitude", value_rule="channel-magnitude")
    k, v = (torch.randn(1, 2, 32 + 8 * TILE, 128).half() for _ in range(2))
    cache.prefill(k, v)
    for got in cache.dense(0):
        assert ((got[:, : 8 * TILE] != 0).sum() == 2 * 16 * 128).all()


def test_with_nothing_said_to_prune_every_nonzero_stays(rng):
    cache = make(sparsity=None, key_rule="channel-magnitude", value_rule="random")
    k, v = (x + 0.0 for x in pair(1, 2, 200))  # one that was rounded to -0.0 comes back as +0.0
    cache.prefill(k, v)
    assert all(same_bits(got, given[0]) for got, given in zip(cache.dense(0), (k, v)))


Q = torch.zeros(1, 2, 1, HEAD_DIM)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"key_rule": "think"}, "key_rule 'think' weighs by queries and chooses channels for all tokens at once"),
        ({"key_rule": rules.ThinK(Q)}, "key_rule 'think' weighs by queries"),
        ({"value_rule": "thinv"}, "value_rule 'thinv' chooses channels for all tokens"),
        ({"value_rule": "output-aware"}, "value_rule 'output-aware' weighs by queries or attention"),
        ({"key_rule": rules.OutputAware(q=Q)}, "prune whole caches by it, with prune, compress or compress_kv"),
        ({"key_rule": rules.ChannelMagnitude(48)}, "key_rule must have a group that divides the 64 tokens .* got 48"),
        ({"value_rule": "largest"}, "value_rule must be one of 'magnitude', .*got 'largest'"),
        ({"value_rule": None}, "value_rule must be one of .* got None"),
    ],
    ids=str,
)
def test_rules_that_cannot_serve_are_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@pytest.mark.parametrize("mean, error", [(-1, ValueError), ("x", TypeError), (0.5, TypeError)])
def test_a_rule_whose_numbers_make_no_sense(mean, error):
    rule = EveryOther()
    rule.mean_kept = lambda kept, head_dim: mean
    with pytest.raises(error, match="mean_kept of value_rule must be"):
        make(value_rule=rule)
    rule.group = mean
    with pytest.raises(error, match="value_rule"):
        make(value_rule=rule)


def test_a_rule_that_says_more_than_every_element_is_kept():
    rule, every = EveryOther(), EveryOther()
    rule.mean_kept, every.mean_kept = (lambda kept, head_dim: 2**40), (lambda kept, head_dim: head_dim)
    assert make(value_rule=rule).nbytes() == make(value_rule=every).nbytes()


@pytest.mark.parametrize("rule", ["magnitude", "channel-magnitude"])
def test_tensors_that_require_gradients(device, rule, rng):
    """What a cache holds takes no part in autograd, whatever is appended and asked."""
    cache, plain = (make(device, value_rule=rule) for _ in range(2))
    q = torch.randn(2, 4, 1, HEAD_DIM).half().to(device)
    for tokens in (50, 1, 70, 1, 200):
        new = [x.to(device) for x in pair(2, 2, tokens)]
        plain.append(*new)
        cache.append(*(x.clone().requires_grad_() for x in new))
        for backend in ("auto", "reference"):
            out = cache.attend(q.clone().requires_grad_(), backend=backend)
            assert out.requires_grad and torch.equal(out, plain.attend(q, backend=backend))
    assert not any(
        x.requires_grad
        for x in (*cache.dense(1), core_of(cache).storage.windows.keys, core_of(cache).storage.windows.values)
    )


@pytest.mark.gpu
def test_only_magnitude_is_captured(rng):
    cache = make("cuda", value_rule="channel-magnitude")
    k, v = (x.cuda() for x in pair(1, 2, 1))
    cache.append(k, v)
    cache.reserve(5)
    with (
        pytest.raises(RuntimeError, match="only rule 'magnitude' prunes in a CUDA graph"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        cache.append(k, v)
