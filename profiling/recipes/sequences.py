"""Token sequences of associative recall and copying.

Both are one marker, 2 N tokens of context, a separator and 2 N tokens that follow from the context:

* recall: N pairs of a key and a value, then the same pairs in another order: a value follows from its key.
* copying: 2 N symbols, then the same again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TASKS = ("recall", "copying")
SEPARATOR, RECALL, COPYING = range(3)
MARKERS = 3


@dataclass(frozen=True)
class Sequences:
    """ids: (batch, 4 N + 2) int64. counted: (batch, 4 N + 2) bool, what follows from the context."""

    ids: Tensor
    counted: Tensor

    @property
    def context(self) -> int:
        """Tokens up to the separator, which is one of them."""
        return self.ids.shape[1] // 2 + 1


def vocabulary(symbols: int) -> int:
    return symbols + MARKERS


def draw(task: str, pairs: int, symbols: int, batch: int, generator: torch.Generator) -> Sequences:
    """On the generator's device. symbols: how many tokens there are; recall takes keys from the first half of them and
    values from the second, so pairs <= symbols / 2."""
    device = generator.device
    options = {"generator": generator, "device": device}
    if task == "copying":
        context = torch.randint(symbols, (batch, 2 * pairs), **options)
        rest, counted = context, torch.ones_like(context, dtype=torch.bool)
    else:
        keys = torch.rand(batch, symbols // 2, **options).argsort(dim=1)[:, :pairs]
        values = torch.randint(symbols // 2, symbols, (batch, pairs), **options)
        order = torch.rand(batch, pairs, **options).argsort(dim=1)
        context = torch.stack([keys, values], dim=2).flatten(1)
        rest = torch.stack([keys.gather(1, order), values.gather(1, order)], dim=2).flatten(1)
        counted = torch.tensor([False, True], device=device).repeat(pairs).expand(batch, -1)
    marker = torch.full((batch, 1), RECALL if task == "recall" else COPYING, device=device)
    separator = torch.full_like(marker, SEPARATOR)
    ids = torch.cat([marker, context + MARKERS, separator, rest + MARKERS], dim=1)
    nothing = torch.zeros(batch, 2 * pairs + 2, dtype=torch.bool, device=device)
    return Sequences(ids, torch.cat([nothing, counted], dim=1))
