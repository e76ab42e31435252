"""The reference backend of attention over a compressed cache and a window: which tokens every query sees."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._runtime import reference


@torch.no_grad()
def attend(
    keys: Tensor,
    values: Tensor,
    q: Tensor,
    *,
    window: tuple[Tensor, Tensor] | None = None,
    window_lengths: Tensor | None = None,
    lengths: Tensor | None = None,
    sequences: Tensor | None = None,
    scale: float,
    causal: bool = True,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `problem.launch_problem` computes, for dense keys and values (S, Hkv, T, D). Returns (out, lse).

    window_lengths: (S,), how many tokens of each window count; None: all.
    """
    batch, compressed = keys.shape[0], keys.shape[2]
    if window is not None:
        keys, values = torch.cat([keys, window[0]], dim=2), torch.cat([values, window[1]], dim=2)
    window_tokens = keys.shape[2] - compressed
    tokens_of = torch.full((batch,), compressed, device=q.device) if lengths is None else lengths.long()
    window_of = torch.full((batch,), window_tokens, device=q.device)
    if window_lengths is not None:
        window_of = window_lengths.long()
    if sequences is not None:
        keys, values, tokens_of, window_of = (x[sequences.long()] for x in (keys, values, tokens_of, window_of))
    visible = _visible(q.shape[2], compressed, keys.shape[2], tokens_of, window_of, causal)
    result, lse = reference.attention(q, keys, values, visible, scale)
    out = result.to(q.dtype) if out is None else out.copy_(result)
    return out, lse


def _visible(queries: int, compressed: int, tokens: int, lengths: Tensor, window: Tensor, causal: bool) -> Tensor:
    """(B, Sq, tokens) bool, for `tokens` keys, the first `compressed` of them compressed, the others the window's.

    lengths, window: (B,) int64, how many of both count.
    """
    token = torch.arange(tokens, device=lengths.device)
    lengths, end = lengths[:, None], (lengths + window)[:, None]
    # A token's position in its batch row: the window starts where the row's compressed tokens end.
    position = torch.where(token < compressed, token, token - compressed + lengths)  # (B, tokens)
    counts = torch.where(token < compressed, position < lengths, position < end)  # (B, tokens)
    newer = torch.arange(queries - 1, -1, -1, device=lengths.device) * int(causal)
    return counts[:, None] & (position[:, None] < (end - newer)[:, :, None])
