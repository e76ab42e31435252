"""The rules "2of4" and "magnitude-2of4" by their definitions, on bit patterns; checks of what is stored by them."""

from __future__ import annotations

import numpy as np
import torch

import cute_kernels as ck
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


def check_attention(backend, q, keys, values, dense_k, dense_v, tolerance: float, rng) -> None:
    """Attention to caches that stand for dense_k and dense_v, (B, Hkv, T, D) float64: alone, and behind a window."""
    batch, kv_heads, tokens, head_dim = dense_k.shape
    window = tuple(oracle.gaussian(batch, kv_heads, 40, head_dim, dtype=q.dtype) for _ in range(2))
    lengths = torch.tensor([rng.randrange(tokens + 1) for _ in range(batch)], dtype=torch.int32)
    for options in ({}, {"window": window}, {"window": window, "seq_lens": lengths}):
        expected, lse = oracle.attention(q, dense_k, dense_v, 0.1, **options)
        on_device = {
            name: tuple(x.to(backend.device) for x in value) if name == "window" else value.to(backend.device)
            for name, value in options.items()
        }
        out, got = ck.sparse_attention(
            q.to(backend.device), keys, values, scale=0.1, return_lse=True, backend=backend.name, **on_device
        )
        assert oracle.relative_error(out, expected) < tolerance
        assert torch.allclose(got.cpu().double(), lse, atol=2e-2)


def with_word(kv: ck.SparseKV, row: int, value: int) -> ck.SparseKV:
    """Storage with another first word in a row, as `from_state_dict` takes or refuses it."""
    state = kv.state_dict()
    state["blocks"] = state["blocks"].clone()
    state["blocks"][row, 0] = value
    return ck.SparseKV.from_state_dict(state)
