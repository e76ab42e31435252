"""What caches take of memory at 70 % pruned: less than 45 % of dense, everything that is allocated counted."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck

PROMPT, NEW, WINDOW, KEEP, HEAD_DIM = 4096, 512, 32, 38, 128
TOKENS = PROMPT + NEW - 1  # the last new one is not fed back


def dense_bytes(batch: int, kv_heads: int) -> int:
    return 2 * batch * kv_heads * TOKENS * HEAD_DIM * 2


def test_a_cache_takes_less_than_45_percent_of_dense(rng):
    """For decoding: one token a step. And it has room for all tokens."""
    cache = ck.KVCache(
        max_batch=8,
        kv_heads=8,
        head_dim=HEAD_DIM,
        capacity=PROMPT + NEW,
        window=WINDOW,
        keep=KEEP,
        max_append=1,
        device="cpu",
    )
    assert cache.nbytes() < 0.45 * dense_bytes(8, 8)
    held = cache.nbytes()
    k, v = (torch.randn(1, 8, PROMPT, HEAD_DIM).half().expand(8, -1, -1, -1) for _ in range(2))
    cache.prefill(k, v)
    for _ in range(NEW // 64):
        cache.append(k[:, :, :64], v[:, :, :64])
    assert cache.lengths.tolist() == [PROMPT + NEW] * 8 and cache.nbytes() == held
    assert cache.statistics()["pages_free"] == 0


def test_so_does_the_cache_of_a_transformers_model(rng):
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
    from cute_kernels.integrations.transformers import SparseKVCache

    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        dtype="bfloat16",
    )
    model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    cache = SparseKVCache(model, sparsity=0.7, window=WINDOW, capacity=PROMPT + NEW)
    with torch.no_grad():
        for tokens in (PROMPT, *[1] * 3):
            model(torch.randint(17, (1, tokens)), past_key_values=cache, logits_to_keep=1)
    assert cache.layers[0].kv.key_keep == KEEP
    assert cache.nbytes() < 0.45 * 2 * dense_bytes(1, 1)
