"""Causal attention among the new tokens of a prompt, by torch's flash attention, which also gives the log-sum-exp."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """q (1, Hq, T, D), k and v (1, Hkv, T, D) -> out (1, Hq, T, D) of q's dtype, lse (1, Hq, T) float32."""
    if q.device.type == "cpu":
        group = q.shape[1] // k.shape[1]
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    else:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, scale=scale)
    return out, lse
