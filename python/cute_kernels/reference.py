"""The reference backend: plain torch on any device, reading the packed storage. Slow, but simple enough to believe.

Products decompress the whole cache and multiply in float32. On a GPU, float32 products follow torch's own switch for
TF32 (torch.backends.cuda.matmul.allow_tf32, off by default).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import _tiles
from cute_kernels._extension import _C
from cute_kernels.sparse_kv import SparseKV


@torch.no_grad()
def decompress(kv: SparseKV) -> Tensor:
    """(B, Hkv, T, D) of kv's dtype, bit for bit what is stored."""
    batch, kv_heads, tokens, head_dim = kv.shape
    padded, tile_tokens, layout = kv.channel_order.shape[-1], _C.format.TILE_TOKENS, _tiles.layout_of(kv)
    tiles = _tiles.tiles_per_head(tokens)
    bits = torch.zeros(batch * kv_heads * tiles, tile_tokens * padded, dtype=torch.int16, device=kv.device)
    for first, last in _tiles.chunks(kv):
        token_order, channel_order = _tiles.orders(kv, first, last)
        index = token_order[:, layout.token] * padded + channel_order[:, layout.channel]  # (tiles, E, L)
        bits[first:last].scatter_(1, index.flatten(1), _tiles.element_values(kv, first, last).flatten(1))
    dense = bits.view(batch, kv_heads, tiles * tile_tokens, padded)[:, :, :tokens, :head_dim]
    return dense.contiguous().view(kv.dtype)


@torch.no_grad()
def sparse_qk(q: Tensor, k: SparseKV, scale: float, out: Tensor) -> Tensor:
    """Writes scale * q @ K^T to out (B, Hq, Sq, T) and returns it. Arguments as for `matmul.sparse_qk`, checked."""
    logits = by_kv_head(q.float(), k.shape[1]) @ decompress(k).float().transpose(-1, -2)
    return out.copy_(logits.mul_(scale).view(out.shape))


@torch.no_grad()
def sparse_av(p: Tensor, v: SparseKV, out: Tensor) -> Tensor:
    """Writes p @ V to out (B, Hq, Sq, D) and returns it. Arguments as for `matmul.sparse_av`, checked."""
    return out.copy_((by_kv_head(p.float(), v.shape[1]) @ decompress(v).float()).view(out.shape))


def by_kv_head(x: Tensor, kv_heads: int) -> Tensor:
    """(B, Hq, Sq, N) -> (B, Hkv, Hq / Hkv * Sq, N): the query rows that meet the same KV head."""
    batch, heads, queries, width = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * queries, width)


@torch.no_grad()
def attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention in float32 over the tokens that each query sees.

    q (B, Hq, Sq, D); keys, values (B, Hkv, N, D); visible (B, Sq, N) bool.
    Returns out (B, Hq, Sq, D) and the logarithm of the sum of exponentials (B, Hq, Sq), both float32: zeros and -inf
    for a query that sees nothing. What a query does not see has no part in its result, be it NaN.
    """
    batch, q_heads, queries, _ = q.shape
    kv_heads, tokens = keys.shape[1], keys.shape[2]
    if q.numel() == 0:
        return q.float(), torch.empty(q.shape[:3], device=q.device)
    logits = by_kv_head(q.float(), kv_heads) @ keys.float().transpose(-1, -2) * scale
    logits = logits.view(batch, kv_heads, q_heads // kv_heads, queries, tokens)  # (B, Hkv, G, Sq, N)
    hidden = ~visible[:, None, None]
    logits.masked_fill_(hidden, float("-inf"))
    lse = logits.logsumexp(dim=-1)
    weights = (logits - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    out = _weighted_sum(weights, values.float(), visible)
    return out.view(q.shape), lse.view(batch, q_heads, queries)


def _weighted_sum(weights: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """weights (B, Hkv, G, Sq, N), values (B, Hkv, N, D) -> (B, Hkv, G, Sq, D)."""
    if bool(values.isfinite().all()):
        return weights @ values[:, :, None]
    # A weight of 0 does not silence a NaN or an infinity: such values have to be taken out, query by query.
    rows = [
        weights[:, :, :, i] @ values.masked_fill(~visible[:, None, i, :, None], 0.0) for i in range(visible.shape[1])
    ]
    return torch.stack(rows, dim=3)
