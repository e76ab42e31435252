"""The reference backend's arithmetic: plain torch on dense operands, on any device, in float32, under autocast too.

On a GPU, float32 products follow torch's own switch for TF32 (torch.backends.cuda.matmul.allow_tf32, off by default).
Shapes as in the package: q (B, Hq, Sq, D), p (B, Hq, Sq, T), k and v (B, Hkv, T, D).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Products of float32 tensors like x are those of float32 in it."""
    return torch.autocast(x.device.type, enabled=False) if x.device.type in ("cpu", "cuda") else nullcontext()


@torch.no_grad()
def qk(q: Tensor, k: Tensor, scale: float, out: Tensor) -> Tensor:
    """Writes scale * q @ K^T to out (B, Hq, Sq, T) and returns it."""
    with without_autocast(q):
        logits = by_kv_head(q.float(), k.shape[1]) @ k.float().transpose(-1, -2)
    return out.copy_(logits.mul_(scale).view(out.shape))


@torch.no_grad()
def av(p: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Writes p @ V to out (B, Hq, Sq, D) and returns it."""
    with without_autocast(p):
        return out.copy_((by_kv_head(p.float(), v.shape[1]) @ v.float()).view(out.shape))


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """(B, Hq, Sq, N) -> (B, Hkv, Hq / Hkv * Sq, N): the query rows that meet the same KV head."""
    batch, heads, queries, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * queries, width)


@torch.no_grad()
def attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over the tokens that each query sees.

    q (B, Hq, Sq, D); keys, values (B, Hkv, N, D); visible (B, Sq, N) bool.
    Returns out (B, Hq, Sq, D) and the logarithm of the sum of exponentials (B, Hq, Sq), both float32: zeros and -inf
    for a query that sees nothing. A token that a query does not see has no part in its result, be it NaN.
    """
    batch, q_heads, queries, _ = q.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    if q.numel() == 0:
        return q.float(), torch.empty(q.shape[:3], device=q.device)
    with without_autocast(q):
        logits = by_kv_head(q.float(), kv_heads) @ keys.float().transpose(-1, -2) * scale
    logits = logits.view(batch, kv_heads, q_heads // kv_heads, queries, tokens)  # (B, Hkv, G, Sq, N)
    hidden = ~visible[:, None, None]
    logits.masked_fill_(hidden, float("-inf"))
    lse = logits.logsumexp(dim=-1)
    largest = logits.amax(dim=-1, keepdim=True) if tokens else lse[..., None]
    weights = (logits - largest.masked_fill(largest == float("-inf"), 0.0)).exp()
    sums = weights.sum(dim=-1, keepdim=True)
    weights = weights / sums.masked_fill(sums == 0, 1.0)
    with without_autocast(q):
        out = _weighted_sum(weights, values.float(), visible)
    return out.view(q.shape), lse.view(batch, q_heads, queries)


def _weighted_sum(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """weights (B, Hkv, G, Sq, N), values (B, Hkv, N, D) -> (B, Hkv, G, Sq, D)."""
    if bool(values.isfinite().all()):
        return weights @ values[:, :, None]
    # 0 * NaN is NaN: values that are not finite are zeroed for every query that does not see them.
    rows = [
        weights[:, :, :, i] @ values.masked_fill(~visible[:, None, i, :, None], 0.0) for i in range(visible.shape[1])
    ]
    return torch.stack(rows, dim=3)
