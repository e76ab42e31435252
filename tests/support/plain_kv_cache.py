"""What a KVCache must give, on dense tensors: tokens listed by sequence, pruned 64 at a time, attention in float64."""

from __future__ import annotations

import math

import torch

from tests.support import oracle

TILE = 64


class PlainKVCache:
    """The part of KVCache's interface that the integrations use."""

    def __init__(
        self,
        *,
        max_batch,
        kv_heads,
        head_dim,
        dtype=torch.float16,
        capacity,
        pool_tokens=None,
        sparsity=None,
        keep=None,
        key_keep=None,
        value_keep=None,
        key_rule="magnitude",
        value_rule="magnitude",
        codec=None,
        key_codec=None,
        value_codec=None,
        window=32,
        page_tokens=64,
        max_append=64,
        device="cpu",
    ):
        if sparsity is not None:
            keep = max(1, math.floor(head_dim * (1 - sparsity) + 1e-6))
        self.keeps = key_keep or keep or head_dim, value_keep or keep or head_dim
        self.shape, self.dtype, self.device = (kv_heads, head_dim), dtype, torch.device(device)
        self.max_batch, self.capacity, self.recent = max_batch, capacity, window
        self.reset()

    @property
    def batch(self):
        return len(self.rows)

    @property
    def lengths(self):
        return torch.tensor([row[0].shape[1] for row in self.rows], dtype=torch.int32, device=self.device)

    def reset(self):
        self.rows, self.pruned = [], []

    def grow(self, *, capacity=None, max_batch=None):
        self.capacity, self.max_batch = capacity or self.capacity, max_batch or self.max_batch

    def prefill(self, k, v, *, lengths=None, sequences=None):
        assert not self.rows and k.shape[0] <= self.max_batch
        for i in range(k.shape[0]):
            count = k.shape[2] if lengths is None else int(lengths[i])
            self.rows.append([x[i, :, x.shape[2] - count :].clone() for x in (k, v)])
            self.pruned.append(0)
            self._prune(i)

    def append(self, k, v, *, sequences=None):
        for i, row in enumerate(range(k.shape[0]) if sequences is None else sequences):
            self.rows[row] = [torch.cat([old, x[i]], dim=1) for old, x in zip(self.rows[row], (k, v))]
            self._prune(row)

    def _prune(self, row):
        k, v = self.rows[row]
        assert k.shape[1] <= self.capacity
        end = self.pruned[row] + max(0, k.shape[1] - self.pruned[row] - self.recent) // TILE * TILE
        for x, keep in zip((k, v), self.keeps):
            x[:, self.pruned[row] : end] = oracle.prune(x[None, :, self.pruned[row] : end], keep)[0]
        self.pruned[row] = end

    def attend(self, q, *, scale=None, causal=True, backend="auto"):
        out = []
        for i, (k, v) in enumerate(self.rows):
            groups, tokens = q.shape[1] // k.shape[0], k.shape[1]
            scores = q[i].double() @ k.double().repeat_interleave(groups, 0).transpose(1, 2)
            scores *= q.shape[3] ** -0.5 if scale is None else scale
            hidden = torch.ones(q.shape[2], tokens, dtype=torch.bool, device=q.device).triu(tokens - q.shape[2] + 1)
            p = scores.masked_fill(hidden, -math.inf).softmax(-1)
            out.append((p @ v.double().repeat_interleave(groups, 0)).to(q.dtype))
        return torch.stack(out)

    def step(self, q, k, v, scale, backend, *, tokens_first):
        """As of the core of a KVCache."""
        assert tokens_first
        self.append(k, v)
        return self.attend(q, scale=scale, backend=backend).transpose(1, 2)

    def dense(self, sequence):
        return tuple(self.rows[sequence])

    def crop(self, length, *, sequences=None):
        for i, (k, v) in enumerate(self.rows):
            left = length if isinstance(length, int) else int(length[i])
            left = max(0, k.shape[1] + left) if left < 0 else min(left, k.shape[1])
            self.rows[i] = [x[:, :left].clone() for x in (k, v)]
            self.pruned[i] = min(self.pruned[i], left // TILE * TILE)

    def select(self, indices):
        picked = torch.as_tensor(indices).tolist()
        self.rows = [[x.clone() for x in self.rows[i]] for i in picked]
        self.pruned = [self.pruned[i] for i in picked]

    reorder = select

    def repeat_interleave(self, repeats):
        self.select(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def nbytes(self):
        return sum(x.nbytes for row in self.rows for x in row)
