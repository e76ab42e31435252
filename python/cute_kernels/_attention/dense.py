"""Attention of new tokens among themselves, dense, with log-sum-exps: what is merged with attention to a cache."""

from __future__ import annotations

import torch
from torch import Tensor


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale * q K^T) V of n tokens, each of which sees those up to itself, by torch's flash attention.

    q (B, Hq, n, D), k, v (B, Hkv, n, D) on a GPU, float16 or bfloat16, D a multiple of 8 up to 256. Returns out like q and
    lse (B, Hq, n) float32, natural logarithm.
    """
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False, scale=scale)
    return out, lse
