"""Perplexity of a text, segment by segment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cute_kernels.eval.decoding import negative_log_likelihood
from cute_kernels.eval.models import CacheMaker


def segments(ids: Tensor, context: int, limit: int | None) -> list[Tensor]:
    """Consecutive stretches of `context` tokens; what is left over is not used. Raises ValueError if there is none."""
    if len(ids) < context:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one segment of {context}: see --context")
    return list(ids.split(context)[: min(limit or len(ids), len(ids) // context)])


def perplexity(
    model: Any, make_cache: CacheMaker, chosen: list[Tensor], prefill: int, chunk: int, done: Callable[[], None]
) -> tuple[float, int]:
    """(exp of the mean negative log-likelihood of all tokens after the first `prefill` of a segment, their number)."""
    total, tokens = 0.0, 0
    for segment in chosen:
        total += negative_log_likelihood(model, make_cache, segment, prefill, chunk)
        tokens += len(segment) - prefill
        done()
    return math.exp(min(total / tokens, 700.0)), tokens
