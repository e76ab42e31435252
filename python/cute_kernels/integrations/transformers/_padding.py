"""Which columns of a batch are tokens: padding never enters the cache, so columns and tokens have to be told apart.

A column is a place in the padded batch, as generate() counts them; a row's tokens are the columns that its attention
mask has ones for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Columns:
    """What a forward pass brings, alike for all layers.

    seen: columns before it. new: its own. fresh: (B, new) bool on the host, which of those are tokens; None: all are.
    keep: of each row, how many of its cached tokens still count; None: all. valid: (B, w) bool on the mask's device,
    the state after the pass; columns from w on are tokens in every row; None: all are.
    """

    seen: int
    new: int
    fresh: Tensor | None
    keep: list[int] | None
    valid: Tensor | None

    @property
    def left_padded(self) -> bool:
        """Whether each row's new tokens come after its padding."""
        return self.fresh is None or bool((self.fresh[:, 1:] >= self.fresh[:, :-1]).all())

    def counts(self) -> list[int] | None:
        """New tokens of each row; None: `new`."""
        return None if self.fresh is None else self.fresh.sum(1).tolist()


def arrive(valid: Tensor | None, mask: Tensor | None, seen: int, new: int) -> Columns:
    """The columns of a pass with attention mask `mask`, (B, seen + new) bool or None, after the state `valid`.

    Waits for the device once, as Transformers itself does to find out whether a mask is all ones; not in the capture
    of a CUDA graph, where the mask is taken to hold ones for all new columns.

    Raises ValueError for a mask that says of a cached token what the cache cannot do.
    """
    if mask is None or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
        return Columns(seen, new, None, None, valid)
    if mask.dim() != 2 or mask.shape[1] != seen + new:
        raise ValueError(_wrong_columns(tuple(mask.shape), seen, new))
    known = 0 if valid is None else valid.shape[1]
    as_expected = mask[:, known:].all()
    if valid is not None:
        if valid.shape[0] != mask.shape[0]:
            raise ValueError(f"attention_mask has {mask.shape[0]} rows, the cache holds {valid.shape[0]} sequences")
        as_expected &= (mask[:, :known] == valid).all()
    if as_expected:
        return Columns(seen, new, None, None, valid)
    before = torch.ones(mask.shape[0], seen, dtype=torch.bool, device="cpu")
    if valid is not None:
        before[:, :known] = valid.cpu()
    on_host = mask.cpu()
    keep, fresh = _cut(before, on_host[:, :seen]), on_host[:, seen:]
    _refuse_right_padding(fresh)
    return Columns(seen, new, None if fresh.all() else fresh, keep, None if on_host.all() else mask.clone())


def _wrong_columns(shape: tuple[int, ...], seen: int, new: int) -> str:
    if not seen:
        return f"attention_mask must have a column for each of the {new} new tokens, got shape {shape}"
    return (
        f"the SparseKVCache still holds {seen} tokens of earlier calls, which attention_mask must count beside the "
        f"{new} new ones; it has shape {shape}. To go on after them pass the ids and the mask of all; for another "
        "prompt or model call cache.reset() before, or make a new cache; generate(use_cache=False) takes none"
    )


def _refuse_right_padding(fresh: Tensor) -> None:
    """Rows may bring no token at all, as those that are short have it in a chunk of the batch's prompts."""
    ends_early = fresh.any(1, keepdim=True) & ~fresh[:, -1:]
    if ends_early.any():
        raise ValueError(
            f"attention_mask has padding behind the new tokens of rows {_rows(ends_early)}: SparseKVCache takes "
            "padding on the left of a prompt, as tokenizer.padding_side = 'left' makes it"
        )


def tokens_until(valid: Tensor | None, column: int) -> list[int] | None:
    """Tokens of each row before a column; None: as many as columns."""
    if valid is None:
        return None
    missing = (~valid[:, :column]).sum(1)
    return (column - missing).tolist()


def _cut(before: Tensor, now: Tensor) -> list[int] | None:
    """keep of `Columns`, for tokens cached before and those that the mask now lets in, (B, seen) bool on the host."""
    if (now & ~before).any():
        raise ValueError(
            "attention_mask lets in cached columns that were masked when they came, in rows "
            f"{_rows(now & ~before)}; their tokens are not in the cache"
        )
    left = now.sum(1)
    # What still counts must be the first tokens of those cached: tokens can be cut off, not cut out.
    cut_out = now & (before.cumsum(1) > left[:, None])
    if cut_out.any():
        raise ValueError(
            f"attention_mask masks cached tokens that are followed by others, in rows {_rows(cut_out)}; "
            "only a row's newest tokens can be taken from the cache"
        )
    return left.tolist() if (left != before.sum(1)).any() else None


def _rows(where: Tensor) -> str:
    found = where.any(1).nonzero().flatten().tolist()
    return ", ".join(map(str, found[:8])) + (", ..." if len(found) > 8 else "")
