"""A prompt read under a press, and what is left of it compressed."""

from __future__ import annotations

from typing import Any

import torch
from kvpress import (
    BasePress,
    DecodingPress,
    DMSPress,
    FinchPress,
    KeyRerotationPress,
    PrefillDecodingPress,
    RestoreKVPress,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cute_kernels._runtime import checks
from cute_kernels.integrations.transformers import SparseKVCache


@torch.no_grad()
def prefill(model: PreTrainedModel, input_ids: Tensor, press: BasePress | None = None, **options: Any) -> SparseKVCache:
    """The cache of a prompt that the model reads under a press, pruned and compressed.

        cache = prefill(model, context_ids, SnapKVPress(compression_ratio=0.5), sparsity=0.7)

    model: whose attention is sdpa. input_ids: (B, T) integers without padding, on the model's device.
    press: evicts tokens while the prompt is read, as many from every head of a layer; layers may differ. None: none is
        evicted. Presses that work while decoding, and those that mask tokens head by head (AdaKV and its like), are
        refused.
    options: keyword arguments of `SparseKVCache`: sparsity or keep, rules, window, dtype and others.

    The prompt is held densely while it is read; layer by layer its memory is given back as it is compressed. Positions
    go on after the prompt's T tokens, or, after presses that move keys together, after those that are left.

    Returns the cache, which holds the whole prompt: the next pass takes what comes after it.

    Raises TypeError and ValueError for what does not fit, and what `SparseKVCache` and its `from_cache` raise.
    """
    _check(model, input_ids, press)
    SparseKVCache(model, **options)  # raises before the prompt is read
    dense = DynamicCache()
    if press is None:
        model.model(input_ids=input_ids, past_key_values=dense)
    else:
        with press(model):
            model.model(input_ids=input_ids, past_key_values=dense)
    seq_length = None if _moves_keys(press) else input_ids.shape[1]
    return SparseKVCache.from_cache(dense, model, seq_length=seq_length, consume=True, **options)


def _check(model: Any, input_ids: Any, press: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a Transformers model, got {type(model).__name__}")
    checks.tensor(input_ids, "input_ids")
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids must have shape (B, T) with tokens, got {tuple(input_ids.shape)}")
    if press is None:
        return
    if not isinstance(press, BasePress):
        raise TypeError(f"press must be a kvpress BasePress or None, got {type(press).__name__}")
    if isinstance(press, (DecodingPress, PrefillDecodingPress)) or (isinstance(press, DMSPress) and press.decoding):
        raise ValueError(
            f"{type(press).__name__} compresses while decoding, when tokens are compressed already: take a press for "
            "the prompt"
        )


def _moves_keys(press: BasePress | None) -> bool:
    """Whether what is left has positions without gaps, as kvpress's own pipeline takes it."""
    return isinstance(press, (KeyRerotationPress, RestoreKVPress)) or (
        isinstance(press, FinchPress) and press.rerotate_keys
    )
