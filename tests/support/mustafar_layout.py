"""Writes caches in the layout of the original project, group by group; `cute_kernels.mustafar` has its description."""

from __future__ import annotations

import torch

from tests.support import oracle


def write(x: torch.Tensor, role: str):
    """(bitmaps, counts, list of values, offsets) of x (B, Hkv, T, D), as the original lays them out."""
    batch, heads, tokens, head_dim = x.shape
    bitmaps, counts, values, offsets = [], [], [], []
    total = 0
    for head in oracle.bits(x).numpy().reshape(batch * heads, tokens, head_dim):
        if role == "key":
            groups = [head[t : t + 64, d] for t in range(0, tokens, 64) for d in range(head_dim)]
        else:
            groups = [
                head[t + i, d : d + 64] for t in range(0, tokens, 64) for d in range(0, head_dim, 64) for i in range(64)
            ]
        words, accumulated, packed = [], [0], []
        for group in groups:
            elements = [int(e) for e in group]
            word = int("".join("01"[e & 0x7FFF != 0] for e in elements), 2)  # the first element is the highest bit
            words.append(word - (1 << 64) if word >> 63 else word)
            nonzeros = [e for e in elements if e & 0x7FFF]
            nonzeros += [0] * (-len(nonzeros) % 8)
            packed += nonzeros
            accumulated.append(accumulated[-1] + len(nonzeros) // 2)
        bitmaps.append(words)
        counts.append(accumulated)
        values.append(torch.tensor(packed, dtype=torch.int16).view(x.dtype))
        offsets.append(total // 8)
        total += len(packed)
    shape = (batch * heads, tokens * head_dim // 64)
    return (
        torch.tensor(bitmaps, dtype=torch.int64).view(shape),
        torch.tensor(counts, dtype=torch.int32),
        values,
        torch.tensor(offsets, dtype=torch.int32),
    )
