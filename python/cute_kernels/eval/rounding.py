"""What a narrow codec makes of a pruned cache, in plain torch and for any dtype: see docs/format.md, "Scales"."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._runtime.extension import SCALED_CODECS, TILE_TOKENS

CODECS = tuple(sorted(SCALED_CODECS))
_LEAST_OF_HEAD = 2.0**-10  # a channel's scale, of the largest of its head
_LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}


def channel_scales(x: Tensor) -> Tensor:
    """(..., T, D) before pruning -> (..., 1, D) float32: the mean magnitude of a channel's nonzeros in the first tile,
    as caches that grow choose it for rule "magnitude" (for other rules they take it after pruning). A channel of zeros
    takes the largest of its head, a quiet one 2^-10 of it."""
    first = x[..., :TILE_TOKENS, :].float().abs()
    first = torch.where(first.isfinite(), first, 0.0)
    count = (first > 0).sum(-2, keepdim=True)
    scales = (first.sum(-2, keepdim=True) / count.clamp(min=1)).bfloat16().float().clamp(2.0**-100, 2.0**100)
    scales = torch.where(count > 0, scales, 0.0)
    most = scales.amax(-1, keepdim=True)
    scales = torch.where(scales > 0, scales.maximum(most * _LEAST_OF_HEAD), most)
    return torch.where(most > 0, scales, 1.0)


def rounded(x: Tensor, codec: str, of_channel: Tensor) -> Tensor:
    """x (..., T, D) as pruned, in its dtype: rounded to the codec's numbers, relative to scales of tokens and channels.

    Raises ValueError for an unknown codec.
    """
    if codec not in _LARGEST:
        raise ValueError(f"codec must be one of {', '.join(_LARGEST)}, got {codec!r}")
    largest = _LARGEST[codec]
    relative = x.float() * (1 / of_channel)
    of_token = _round_up(relative.abs().amax(-1, keepdim=True) / largest)
    numbers = (relative * (1 / of_token)).clamp(-largest, largest)
    numbers = numbers.to(torch.float8_e4m3fn).float() if codec == "fp8" else numbers.round()
    return (numbers * of_token * of_channel).to(x.dtype)


def _round_up(x: Tensor) -> Tensor:
    """To bf16, within 2^-48 and 2^48; 1 for 0."""
    up = ((x.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    return torch.where(x > 0, up.clamp(2.0**-48, 2.0**48), 1.0)
