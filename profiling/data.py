"""Inputs: the cache's distributions, queries and attention weights. Everything follows from the case's seed."""

from __future__ import annotations

import torch
from torch import Tensor

from profiling.cases import EQUAL_BLOCK, Load, Shape


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def cache(load: Load, device: torch.device, rng: torch.Generator) -> Tensor:
    """The cache before pruning, (B, Hkv, T, D) in the load's dtype.

    gaussian: independent N(0, 1).
    outlier: gaussian, times a scale for every channel of every head that is lognormal with sigma 1; real keys have such
        channels.
    equal: every token's `keep` largest channels are whole, aligned blocks of 8, other blocks from token to token. So
        each token keeps the same number in each of the 8 channel classes and every value stream comes out equally long:
        the storage has no padding, which shows what padding costs the others.
    """
    shape = load.shape
    size = (shape.batch, shape.kv_heads, shape.tokens, shape.head_dim)
    x = torch.randn(size, device=device, dtype=torch.float32, generator=rng)
    if load.data == "outlier":
        x *= torch.randn(shape.batch, shape.kv_heads, 1, shape.head_dim, device=device, generator=rng).exp_()
    elif load.data == "equal":
        x = _with_equal_streams(x, load.keep)
    return x.to(getattr(torch, load.dtype))


def _with_equal_streams(x: Tensor, keep: int) -> Tensor:
    tokens, head_dim = x.shape[-2:]
    blocks, kept = head_dim // EQUAL_BLOCK, keep // EQUAL_BLOCK
    # Token t keeps blocks t, t + 1, ... (mod blocks): every channel is kept equally often.
    distance = torch.arange(blocks, device=x.device)[None, :] - torch.arange(tokens, device=x.device)[:, None]
    is_kept = (distance % blocks < kept).repeat_interleave(EQUAL_BLOCK, dim=1)  # (T, D)
    # Magnitudes in [4, 8] and [0.5, 1]: the order of the two groups survives rounding to bfloat16.
    magnitude = 2 - torch.exp2(-x.abs())
    return torch.copysign(torch.where(is_kept, 4 * magnitude, 0.5 * magnitude), x)


def queries(shape: Shape, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> Tensor:
    """q (B, Hq, Sq, D), scaled such that the logits of a gaussian cache are about N(0, 1)."""
    size = (shape.batch, shape.query_heads, shape.query_tokens, shape.head_dim)
    q = torch.randn(size, device=device, dtype=torch.float32, generator=rng)
    return (q * shape.head_dim**-0.5).to(dtype)


def attention_weights(shape: Shape, dtype: torch.dtype, device: torch.device, rng: torch.Generator) -> Tensor:
    """p (B, Hq, Sq, T): softmax of gaussian logits."""
    size = (shape.batch, shape.query_heads, shape.query_tokens, shape.tokens)
    return torch.randn(size, device=device, dtype=torch.float32, generator=rng).softmax(-1).to(dtype)
