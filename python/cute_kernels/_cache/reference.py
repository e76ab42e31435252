"""The reference backend of KVCache.attend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels._runtime import reference


@torch.no_grad()
def attend_reference(
    q: Tensor,
    caches: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    causal: bool,
    out: Tensor | None,
    lse: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Row by row in plain torch; caches: (Hkv, tokens, D) of K and V for every row of q. Returns (out, lse)."""
    queries = q.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if lse is None else lse
    for row, (keys, values) in enumerate(caches):
        tokens = keys.shape[1]
        ends = torch.full((queries,), tokens, device=q.device)
        if causal:
            ends -= torch.arange(queries - 1, -1, -1, device=q.device)
        visible = torch.arange(tokens, device=q.device) < ends[:, None]
        one = slice(row, row + 1)
        result, sums = reference.attention(q[one], keys[None], values[None], visible[None], scale)
        out[one].copy_(result)
        lse[one].copy_(sums)
    return out, lse
