"""SparseKVCache with amounts layer by layer and other pruning rules: what its layers hold, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.support.oracle import prune, same_bits
from tests.support.rule_definitions import expected

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers import DynamicCache

from cute_kernels import rules
from cute_kernels.integrations.transformers import SparseKVCache

LAYERS, HEAD_DIM, WINDOW, TILE = 3, 16, 8, 64


def make(layers=LAYERS, dtype=torch.bfloat16):
    config = transformers.LlamaConfig(
        vocab_size=89,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).eval().to(dtype)
    model.config.dtype = dtype
    return model


def keeps(cache) -> list[tuple[int, int]]:
    """(keys, values) of each layer."""
    with torch.no_grad():
        for layer in cache.layers:
            x = torch.zeros(1, 2, 3, HEAD_DIM, dtype=torch.bfloat16)
            layer._start(x, 3)
    return [(layer.kv.key_keep, layer.kv.value_keep) for layer in cache.layers]


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"sparsity": 0.5}, [(8, 8)] * 3),
        ({"sparsity": [0.5, 0.75, 0.0]}, [(8, 8), (4, 4), (16, 16)]),
        ({"sparsity": (0.5, None, 0.25)}, [(8, 8), (0, 0), (12, 12)]),
        ({"sparsity": {2: 0.5}}, [(0, 0), (0, 0), (8, 8)]),
        ({"keep": {0: 3, 1: 5}, "sparsity": {2: 0.5}}, [(3, 3), (5, 5), (8, 8)]),
        ({"key_keep": [1, 2, 3], "value_keep": 7}, [(1, 7), (2, 7), (3, 7)]),
        ({"sparsity": 0.5, "value_keep": {1: 2}}, [(8, 8), (8, 2), (8, 8)]),
        ({}, [(0, 0)] * 3),
    ],
    ids=str,
)
def test_amounts_layer_by_layer(options, kept):
    assert keeps(SparseKVCache(make(), **options)) == kept


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"sparsity": [0.5, 0.5]}, ValueError, "sparsity must have one value for each of 3 layers, got 2"),
        ({"keep": []}, ValueError, "keep must have one value for each of 3 layers, got 0"),
        ({"key_keep": {3: 4}}, ValueError, "key_keep must name layers from 0 to 2, got 3"),
        ({"value_keep": {-1: 4}}, ValueError, "value_keep must name layers from 0 to 2, got -1"),
        ({"sparsity": {"0": 0.5}}, TypeError, "every layer of sparsity must be an integer, got str"),
        ({"sparsity": [0.5, 1.5, 0.5]}, ValueError, r"sparsity must be from 0 to 1, got 1.5 \(layer 1\)"),
        ({"keep": {2: 17}}, ValueError, r"keep must be from 1 to D = 16, got 17 \(layer 2\)"),
        ({"key_keep": [4, 4, 2.5]}, TypeError, r"key_keep must be an integer, got float \(layer 2\)"),
        ({"sparsity": "0.7"}, TypeError, "sparsity must be a real number, got str"),
        ({"sparsity": 0.5, "keep": {1: 4}}, ValueError, r"say the same thing.*\(layer 1\)"),
        ({"keep": 4, "key_rule": "think"}, ValueError, "key_rule 'think' weighs by queries"),
        ({"keep": 4, "value_rule": "thinv"}, ValueError, "value_rule 'thinv' chooses channels for all tokens"),
        ({"keep": 4, "value_rule": rules.OutputAware(torch.ones(1, 2, 9, 16))}, ValueError, "'output-aware' weighs"),
        ({"keep": 4, "key_rule": "smallest"}, ValueError, "key_rule must be one of 'magnitude'"),
        ({"keep": 4, "key_rule": rules.ChannelMagnitude(24)}, ValueError, "a group that divides the 64 tokens"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_at_construction(options, error, message):
    model = make()
    with pytest.raises(error, match=message):
        SparseKVCache(model, **options)
    assert model.config._attn_implementation == "sdpa"


def held_by(rule: str, tokens: torch.Tensor, kept: int) -> torch.Tensor:
    """(Hkv, T, D) as a cache holds it."""
    end = max(0, (tokens.shape[1] - WINDOW) // TILE) * TILE
    tiles = []
    for tile in tokens[:, :end].split(TILE, dim=1) if end else ():
        if rule == "magnitude":
            tiles.append(prune(tile, kept))
        else:
            tiles.append(expected(tile[None], kept, 32, lambda b, h, magnitudes: magnitudes, "group")[0])
    return torch.cat([*tiles, tokens[:, end:]], dim=1)


@pytest.mark.parametrize(
    "names", [("magnitude", "channel-magnitude"), ("channel-magnitude", "channel-magnitude")], ids=" ".join
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_layers_hold_what_their_rule_keeps(names, device, rng):
    """One layer, whose keys and values come from the tokens alone: those of a dense cache, pruned by the tests."""
    model = make(layers=1).to(device)
    cache = SparseKVCache(model, key_keep=6, value_keep=9, window=WINDOW, key_rule=names[0], value_rule=names[1])
    dense = DynamicCache(config=model.config)
    ids = torch.randint(1, 89, (2, 300), device=device)
    ids[1] = ids[0]  # a batch whose rows go apart later
    place = 0
    while place < 300:
        portion = ids[:, place : place + rng.choice([1, 1, 5, 90])]
        place += portion.shape[1]
        with torch.no_grad():
            for each in (cache, dense):
                model(portion, past_key_values=each)
    for row in range(2):
        for got, tokens, name, kept in zip(
            cache.layers[0].kv.dense(row), (dense.layers[0].keys, dense.layers[0].values), names, (6, 9)
        ):
            assert same_bits(got.cpu(), held_by(name, tokens[row].cpu(), kept))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_generation_with_rules_and_amounts_of_every_kind(options, rng):
    model = make()
    ids = torch.randint(1, 89, (2, 150))
    mask = torch.ones_like(ids)
    mask[1, : rng.randrange(100)] = 0
    cache = SparseKVCache(
        model, sparsity=[0.0, 0.5, 0.75], window=WINDOW, key_rule="random", value_rule="channel-magnitude"
    )
    inputs = {"input_ids": ids * mask, "attention_mask": mask, "max_new_tokens": 80}
    answer = model.generate(**inputs, past_key_values=cache, **options)
    assert answer.shape[1] == 230 and cache.get_seq_length() == 229
    assert [layer.kv.key_keep for layer in cache.layers] == [16, 8, 4]


def test_random_layers_differ(rng):
    """One generator for all layers of a cache, which copies of the cache carry on alike."""
    cache = SparseKVCache(make(), keep=4, window=0, key_rule="random", value_rule="random")
    x = torch.ones(1, 2, TILE, HEAD_DIM, dtype=torch.bfloat16)
    twin = copy.deepcopy(cache)
    found = []
    for each in (cache, twin):
        for layer in each.layers:
            layer._start(x, TILE).prefill(x, x)
        found.append([tokens for layer in each.layers for tokens in layer.kv.dense(0)])
    assert all(torch.equal(*same) for same in zip(*found))
    assert all(not torch.equal(a, b) for i, a in enumerate(found[0]) for b in found[0][:i])
