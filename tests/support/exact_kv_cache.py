"""KVCaches whose slots hold any tile, so that no value can be dropped, and what they must hold."""

from __future__ import annotations

import torch

import cute_kernels as ck
from tests.support.oracle import prune, same_bits

# Streams of 2 channels and 8 tokens: slots hold any tile, so that no value can be dropped.
EXACT = {"head_dim": 16, "keep": 12}


def make(device="cpu", **arguments) -> ck.KVCache:
    return ck.KVCache(**{"max_batch": 4, "kv_heads": 2, "capacity": 1000, "device": device, **EXACT, **arguments})


def pair(*shape: int, device="cpu", dtype=torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(shape).to(dtype).to(device), torch.randn(shape).to(dtype).to(device)


def held(tokens: torch.Tensor, keep: int | None, window: int) -> torch.Tensor:
    """(Hkv, T, D) as a cache holds it."""
    compressed = max(0, (tokens.shape[1] - window) // 64) * 64
    return torch.cat([prune(tokens[:, :compressed], keep), tokens[:, compressed:]], dim=1)


def check(cache: ck.KVCache, row: int, k: torch.Tensor, v: torch.Tensor) -> None:
    """The row holds (Hkv, T, D)."""
    for got, tokens, keep in zip(cache.dense(row), (k, v), (cache.key_keep, cache.value_keep)):
        assert same_bits(got.cpu(), held(tokens.cpu(), keep or None, cache.window))
