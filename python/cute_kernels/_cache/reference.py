"""The reference backend of KVCache.attend."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels._attention.packed import PackedQueries
from cute_kernels._runtime import reference


@torch.no_grad()
def attend_reference(
    q: Tensor,
    caches: Sequence[tuple[Tensor, Tensor]],
    scale: float,
    causal: bool,
    out: Tensor | None,
    lse: Tensor | None,
    packed: PackedQueries | None = None,
) -> tuple[Tensor, Tensor]:
    """Row by row in plain torch; caches: (Hkv, tokens, D) of K and V for every row of the batch. Returns (out, lse)."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if lse is None else lse
    ranges = None if packed is None else packed.ranges(q.shape[2])
    for row, (keys, values) in enumerate(caches):
        one, queries = slice(row, row + 1), slice(None)
        if ranges is not None:
            one, queries = slice(0, 1), slice(*ranges[row])
        part = q[one, :, queries]
        tokens = keys.shape[1]
        ends = torch.full((part.shape[2],), tokens, device=q.device)
        if causal:
            ends -= torch.arange(part.shape[2] - 1, -1, -1, device=q.device)
        visible = torch.arange(tokens, device=q.device) < ends[:, None]
        result, sums = reference.attention(part, keys[None], values[None], visible[None], scale)
        out[one, :, queries].copy_(result)
        lse[one, :, queries].copy_(sums)
    return out, lse
