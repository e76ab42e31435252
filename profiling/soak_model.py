"""What a KVCache must hold: every sequence as dense K and V, pruned when the cache prunes. Plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from profiling.check import pruned

TILE = 64


@dataclass
class DenseSequence:
    """keys, values: (Hkv, tokens, D); the first `compressed` tokens are pruned."""

    keys: Tensor
    values: Tensor
    compressed: int = 0

    @property
    def tokens(self) -> int:
        return self.keys.shape[1]

    def copy(self) -> DenseSequence:
        return DenseSequence(self.keys, self.values, self.compressed)  # tensors are replaced, never written to


class DenseCache:
    """The operations of a KVCache on `max_batch` rows, None where a row is not in use."""

    def __init__(
        self, max_batch: int, kv_heads: int, head_dim: int, dtype: torch.dtype, keeps: tuple[int, int], window: int
    ) -> None:
        self.rows: list[DenseSequence | None] = [None] * max_batch
        self.shape, self.dtype, self.keeps, self.window = (kv_heads, head_dim), dtype, keeps, window

    @property
    def batch(self) -> int:
        return max((i + 1 for i, row in enumerate(self.rows) if row is not None), default=0)

    @property
    def in_use(self) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row is not None]

    def tokens(self, row: int) -> int:
        sequence = self.rows[row]
        return sequence.tokens if sequence is not None else 0

    def take(self, row: int) -> DenseSequence:
        """The row's sequence, an empty one if it was not in use."""
        sequence = self.rows[row]
        if sequence is None:
            heads, head_dim = self.shape
            empty = torch.empty(heads, 0, head_dim, dtype=self.dtype)
            sequence = self.rows[row] = DenseSequence(empty, empty)
        return sequence

    def append(self, row: int, k: Tensor, v: Tensor) -> None:
        """k, v (Hkv, n, D)."""
        sequence = self.take(row)
        keys, values = torch.cat([sequence.keys, k], dim=1), torch.cat([sequence.values, v], dim=1)
        done = sequence.compressed
        while keys.shape[1] - done >= self.window + TILE:
            done += TILE
        if done > sequence.compressed:
            new = slice(sequence.compressed, done)
            for x, keep in zip((keys, values), self.keeps):
                x[:, new] = pruned(x[:, new], keep or x.shape[2])
        self.rows[row] = DenseSequence(keys, values, done)

    def crop(self, row: int, length: int) -> None:
        sequence = self.take(row)
        keep = min(length, sequence.tokens) if length >= 0 else sequence.tokens + length
        done = sequence.compressed if keep >= sequence.compressed else keep // TILE * TILE
        self.rows[row] = DenseSequence(sequence.keys[:, :keep], sequence.values[:, :keep], done)

    def fork(self, row: int) -> int:
        target = self.rows.index(None)
        self.rows[target] = self.take(row).copy()
        return target

    def gather(self, sources: list[int]) -> None:
        chosen = [self.take(source).copy() for source in sources]
        self.rows = chosen + [None] * (len(self.rows) - len(chosen))


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """float64: q (Hq, Sq, D); keys, values (Hkv, tokens, D) -> out (Hq, Sq, D), lse (Hq, Sq)."""
    heads, queries, _ = q.shape
    group, tokens = heads // keys.shape[0], keys.shape[1]
    logits = scale * q.double() @ keys.double().repeat_interleave(group, dim=0).transpose(1, 2)
    if causal:
        ends = tokens - torch.arange(queries - 1, -1, -1)
        logits = logits.masked_fill(torch.arange(tokens) >= ends[:, None], float("-inf"))
    lse = logits.logsumexp(dim=-1) if tokens else torch.full((heads, queries), float("-inf"), dtype=torch.float64)
    weights = (logits - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    return weights @ values.double().repeat_interleave(group, dim=0), lse
