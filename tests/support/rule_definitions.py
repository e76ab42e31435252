"""The definitions of the pruning rules, element by element in Python and float64."""

from __future__ import annotations

import numpy as np
import torch

from tests.support import oracle


def scores_of(values: np.ndarray) -> np.ndarray:
    """Sorts as the rules say: NaN above infinity."""
    return np.where(np.isnan(values), np.inf, values), np.isnan(values)


def best(values: np.ndarray, count: int) -> np.ndarray:
    """Mask of the `count` largest of a vector; ties: the first; NaN above everything."""
    magnitude, nan = scores_of(values)
    order = sorted(range(len(values)), key=lambda i: (not nan[i], -magnitude[i], i))
    mask = np.zeros(len(values), dtype=bool)
    mask[order[:count]] = True
    return mask


def expected(x, kept, group, score, direction) -> torch.Tensor:
    """x pruned. score(b, h, float64 magnitudes (T, D)) -> what is ranked, along "token", "group" or "channel"."""
    batch, heads, tokens, head_dim = x.shape
    magnitudes = x.cpu().double().abs().numpy()
    mask = np.zeros(x.shape, dtype=bool)
    for b in range(batch):
        for h in range(heads):
            ranked = score(b, h, magnitudes[b, h])
            if direction == "token":
                for t in range(tokens):
                    mask[b, h, t] = best(ranked[t], kept)
            elif direction == "channel":
                mask[b, h] = best(ranked, kept)[None]
            else:
                for first in range(0, tokens, group):
                    part = ranked[first : first + group]
                    for d in range(head_dim):
                        mask[b, h, first : first + group, d] = best(part[:, d], max(1, len(part) * kept // head_dim))
    words = oracle.bits(x).numpy()
    return torch.from_numpy(np.where(mask & (oracle.magnitude_keys(x) > 0), words, np.int16(0))).view(x.dtype)
