"""Dense caches of few bits, to compare pruned ones with: quantised and back, in plain torch and for any dtype.

| name | numbers | what shares a scale |
| --- | --- | --- |
| e4m3 | OCP E4M3 | a head; from the first tokens that are stored |
| kivi8, kivi4, kivi2 | 8, 4, 2 bits, least to largest | keys: 32 tokens of a channel; values: 32 channels of a token |
| kivi4-64, kivi2-64 | the same | groups of 64 |
| nvfp4 | E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 | 16 channels of a token: E4M3, relative to a scale a head as above |

A group of KIVI (arXiv 2402.02750) has a scale and a zero point of 16 bits each. NVFP4 is NVIDIA's format of that name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_LARGEST, E2M1_LARGEST = 448.0, 6.0
ROOM = 8.0  # of a scale of a head, for tokens to come that are larger than the first
NVFP4_BLOCK = 16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BETWEEN = tuple((a + b) / 2 for a, b in itertools.pairwise(_E2M1))  # ties go to the even code


@dataclass(frozen=True)
class Baseline:
    """value_bits: of a number. scale_bits: of what a group has besides. group: elements that share it; 0: a head's,
    which no element's bits count. tokens: of keys, that are quantised together."""

    value_bits: int
    scale_bits: int
    group: int
    tokens: int
    apply: Callable[[Tensor, str, Tensor], Tensor]

    @property
    def bits(self) -> float:
        """That an element takes."""
        return self.value_bits + (self.scale_bits / self.group if self.group else 0)


def head_scale(x: Tensor) -> Tensor:
    """(..., T, D), the first tokens that are stored -> (..., 1, 1) float32: the largest magnitude; 1 for zeros."""
    magnitude = x.float().abs()
    largest = torch.where(magnitude.isfinite(), magnitude, 0.0).amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


def quantised(x: Tensor, name: str, role: str, of_head: Tensor) -> Tensor:
    """x (..., T, D) as the baseline stores it, in its dtype. of_head: as `head_scale` gives it.

    T must be a multiple of the baseline's `tokens`. Raises ValueError for an unknown name, or sizes that groups do not
    divide.
    """
    if name not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {name!r}")
    return BASELINES[name].apply(x.float(), role, of_head).to(x.dtype)


def _e4m3(x: Tensor, role: str, of_head: Tensor) -> Tensor:
    scale = of_head * (ROOM / E4M3_LARGEST)
    return (x / scale).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float() * scale


def _kivi(bits: int, group: int) -> Baseline:
    def apply(x: Tensor, role: str, of_head: Tensor) -> Tensor:
        dim = -2 if role == "key" else -1
        _check_divides(x, dim, group)
        groups = x.unflatten(dim, (-1, group))
        along = groups.dim() - 2 if role == "key" else groups.dim() - 1
        least, most = groups.amin(along, keepdim=True), groups.amax(along, keepdim=True)
        zero = least.half().float()
        scale = ((most - least) / (2**bits - 1)).half().float()
        scale = torch.where(scale > 0, scale, 1.0)
        numbers = ((groups - zero) / scale).round().clamp(0, 2**bits - 1)
        return (numbers * scale + zero).flatten(along - 1, along)

    return Baseline(bits, 32, group, group, apply)


def _nvfp4(x: Tensor, role: str, of_head: Tensor) -> Tensor:
    _check_divides(x, -1, NVFP4_BLOCK)
    blocks = x.unflatten(-1, (-1, NVFP4_BLOCK))
    scale = of_head[..., None] * (ROOM / (E4M3_LARGEST * E2M1_LARGEST))
    of_block = blocks.abs().amax(-1, keepdim=True) / (E2M1_LARGEST * scale)
    of_block = of_block.clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn).float() * scale
    relative = (blocks / torch.where(of_block > 0, of_block, 1.0)).clamp(-E2M1_LARGEST, E2M1_LARGEST)
    numbers = torch.zeros_like(relative)
    for code, tie in enumerate(_BETWEEN, 1):
        reached = relative.abs() > tie if code % 2 else relative.abs() >= tie
        numbers = torch.where(reached, _E2M1[code], numbers)
    return torch.where(of_block > 0, numbers * relative.sign() * of_block, 0.0).flatten(-2)


def _check_divides(x: Tensor, dim: int, group: int) -> None:
    if x.shape[dim] % group:
        what = "tokens" if dim == -2 else "head_dim"
        raise ValueError(f"{what} must be a multiple of the group of {group}, got {x.shape[dim]}")


BASELINES = {
    "e4m3": Baseline(8, 0, 0, 1, _e4m3),
    "kivi8": _kivi(8, 32),
    "kivi4": _kivi(4, 32),
    "kivi2": _kivi(2, 32),
    "kivi4-64": _kivi(4, 64),
    "kivi2-64": _kivi(2, 64),
    "nvfp4": Baseline(4, 8, NVFP4_BLOCK, 1, _nvfp4),
}
