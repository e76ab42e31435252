"""Token sequences whose second half follows from their first, the context, and from nothing else.

All are one marker, 2 N tokens of context, a separator and 2 N tokens:

* recall: N pairs of a key and a value, then the same pairs in another order: a value follows from its key.
* copying: 2 N symbols, then the same again.
* hops: N pairs of a symbol and the one it leads to, which begins another pair. Then walks of a start and four hops;
  every hop needs the one before. The four are right together or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SEPARATOR, RECALL, COPYING, HOPS_MARKER = range(4)
MARKERS = 4
HOPS = 4


@dataclass(frozen=True)
class Sequences:
    """ids, counted, told: (batch, 4 N + 2), int64, bool, int64. counted: what follows from the context. told: of what
    is counted, where in the sequence it stands. together: how many that are counted are right together.
    """

    ids: Tensor
    counted: Tensor
    told: Tensor
    together: int = 1

    @property
    def context(self) -> int:
        """Tokens up to the separator, which is one of them."""
        return self.ids.shape[1] // 2 + 1

    @property
    def distances(self) -> Tensor:
        """From what is counted back to where it was told: (batch, 4 N + 2) int64, 0 elsewhere."""
        places = torch.arange(self.ids.shape[1], device=self.ids.device)
        return torch.where(self.counted, places - self.told, 0)


def vocabulary(symbols: int) -> int:
    return symbols + MARKERS


def draw(task: str, pairs: int, symbols: int, batch: int, generator: torch.Generator) -> Sequences:
    """On the generator's device. symbols: how many tokens there are; recall takes keys from the first half of them and
    values from the second, hops takes all that it has from the first half, so pairs <= symbols / 2."""
    marker, context, rest, counted, told, together = TASKS[task](pairs, symbols, batch, generator)
    first = torch.full((batch, 1), marker, device=generator.device)
    separator = torch.full_like(first, SEPARATOR)
    rest = torch.where(rest < 0, SEPARATOR, rest + MARKERS)
    nothing = torch.zeros(batch, 2 * pairs + 2, dtype=torch.bool, device=generator.device)
    return Sequences(
        torch.cat([first, context + MARKERS, separator, rest], dim=1),
        torch.cat([nothing, counted], dim=1),
        torch.cat([torch.zeros_like(nothing, dtype=torch.int64), 1 + told], dim=1),  # behind the marker
        together,
    )


# Marker, context, rest (-1: a filler), counted, told, together.
_Parts = tuple[int, Tensor, Tensor, Tensor, Tensor, int]


def _recall(pairs: int, symbols: int, batch: int, generator: torch.Generator) -> _Parts:
    options = {"generator": generator, "device": generator.device}
    keys = torch.rand(batch, symbols // 2, **options).argsort(dim=1)[:, :pairs]
    values = torch.randint(symbols // 2, symbols, (batch, pairs), **options)
    order = torch.rand(batch, pairs, **options).argsort(dim=1)
    context = torch.stack([keys, values], dim=2).flatten(1)
    rest = torch.stack([keys.gather(1, order), values.gather(1, order)], dim=2).flatten(1)
    counted = torch.tensor([False, True], device=generator.device).repeat(pairs).expand(batch, -1)
    told = torch.stack([2 * order, 2 * order + 1], dim=2).flatten(1)
    return RECALL, context, rest, counted, told, 1


def _copying(pairs: int, symbols: int, batch: int, generator: torch.Generator) -> _Parts:
    context = torch.randint(symbols, (batch, 2 * pairs), generator=generator, device=generator.device)
    told = torch.arange(2 * pairs, device=generator.device).expand(batch, -1)
    return COPYING, context, context, torch.ones_like(context, dtype=torch.bool), told, 1


def _hops(pairs: int, symbols: int, batch: int, generator: torch.Generator) -> _Parts:
    device = generator.device
    options = {"generator": generator, "device": device}
    cycle = torch.rand(batch, symbols // 2, **options).argsort(dim=1)[:, :pairs]  # cycle[i] leads to cycle[i + 1]
    place = torch.rand(batch, pairs, **options).argsort(dim=1)  # of pair i in the context
    both = torch.stack([cycle, cycle.roll(-1, 1)], dim=2)
    context = torch.zeros_like(both).scatter_(1, place[:, :, None].expand(both.shape), both).flatten(1)
    walks = pairs // HOPS  # of different pairs each
    first = HOPS * torch.rand(batch, walks, **options).argsort(dim=1)
    steps = first[:, :, None] + torch.arange(HOPS + 1, device=device)
    walked = cycle.gather(1, (steps % pairs).flatten(1))
    told = torch.zeros_like(steps)
    told[:, :, 1:] = 2 * place.gather(1, steps[:, :, :-1].flatten(1)).unflatten(1, (walks, HOPS)) + 1
    counted = torch.ones_like(steps, dtype=torch.bool)
    counted[:, :, 0] = False
    fill = (0, 2 * pairs - walks * (HOPS + 1))
    rest, told, counted = (
        torch.nn.functional.pad(x.flatten(1), fill, value=value)
        for x, value in ((walked.unflatten(1, (walks, HOPS + 1)), -1), (told, 0), (counted, False))
    )
    return HOPS_MARKER, context, rest, counted, told, HOPS


TASKS: dict[str, Callable[[int, int, int, torch.Generator], _Parts]] = {
    "recall": _recall,
    "copying": _copying,
    "hops": _hops,
}
