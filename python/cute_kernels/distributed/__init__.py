"""A KV cache whose tokens, and heads where wanted, are spread over several devices: context parallel decoding.

    from cute_kernels.distributed import ShardedKVCache

    cache = ShardedKVCache(max_batch=1, kv_heads=8, head_dim=128, capacity=1 << 20, sparsity=0.7)   # on every rank
    cache.append(k, v)     # a prompt or new tokens, the same on every rank
    out = cache.attend(q)  # the same result on every rank

Tiles of 64 tokens go round to the ranks of a `torch.distributed` group, one each; the dense window of the newest tokens
is attended to by the first rank. Every rank attends to its own tokens, and outputs are merged by their log-sum-exps
(`merge_states`), so that a step moves the outputs between ranks and no keys or values. A mesh of two dimensions divides
the heads, too.
"""

from __future__ import annotations

from cute_kernels.distributed.cache import PendingAttention, ShardedKVCache

__all__ = ["PendingAttention", "ShardedKVCache"]
