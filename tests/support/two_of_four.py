"""The rules "2of4" and "magnitude-2of4" by their definitions, group by group, on bit patterns."""

from __future__ import annotations

import numpy as np
import torch

from tests.support import oracle


def channel_order(x: torch.Tensor, kept: int) -> np.ndarray:
    """(B, H, D): position -> channel. Channels, those that magnitude keeps most often first, are dealt to D / 4 groups
    back and forth; turn r of group g is at place (r + g // 2) % 4 of the group."""
    batch, heads, _, head_dim = x.shape
    counts = (oracle.magnitude_keys(oracle.prune(x, kept)) > 0).sum(axis=2)
    order = np.zeros((batch, heads, head_dim), dtype=np.int64)
    groups = head_dim // 4
    for b in range(batch):
        for h in range(heads):
            densest = sorted(range(head_dim), key=lambda c: (-counts[b, h, c], c))
            for rank, channel in enumerate(densest):
                turn, place = divmod(rank, groups)
                group = place if turn % 2 == 0 else groups - 1 - place
                order[b, h, 4 * group + (turn + group // 2) % 4] = channel
    return order


def two_of_four(
    x: torch.Tensor, role: str, kept: int | None = None, limit: bool = False, order: np.ndarray | None = None
) -> torch.Tensor:
    """x pruned. kept: of every token, by which the channels are ordered; None: half. limit: whether of the two largest
    of every four only the `kept` largest of a token remain. order: of the channels; None: as `channel_order` has it."""
    _, _, tokens, head_dim = x.shape
    keys = oracle.magnitude_keys(x)
    lines = np.full((*keys.shape[:2], tokens + -tokens % 4, head_dim), -1)
    lines[:, :, :tokens] = keys
    mask = np.zeros(lines.shape, dtype=bool)
    if role == "key":
        order = channel_order(x, kept or head_dim // 2) if order is None else order
        index = np.broadcast_to(order[:, :, None], lines.shape)
        groups = np.take_along_axis(lines, index, 3).reshape(*lines.shape[:3], head_dim // 4, 4)
        best = np.zeros(groups.shape, dtype=bool)
        np.put_along_axis(best, np.argsort(-groups, axis=-1, kind="stable")[..., :2], True, axis=-1)
        np.put_along_axis(mask, index, best.reshape(lines.shape), 3)
    else:
        groups = lines.reshape(*lines.shape[:2], -1, 4, head_dim)
        best = np.zeros(groups.shape, dtype=bool)
        np.put_along_axis(best, np.argsort(-groups, axis=3, kind="stable")[:, :, :, :2], True, axis=3)
        mask = best.reshape(lines.shape)
    candidates = np.where(mask[:, :, :tokens] & (keys > 0), oracle.bits(x).numpy(), np.int16(0))
    pruned = torch.from_numpy(candidates).view(x.dtype)
    return oracle.prune(pruned, kept) if limit else pruned
