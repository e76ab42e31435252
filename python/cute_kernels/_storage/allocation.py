"""Storages whose size the device computes: packed while that size is on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C
from cute_kernels._storage.storage import Storage
from cute_kernels._storage.validation import MAX_ROWS


@dataclass(frozen=True)
class Unsized:
    """What is known of a storage before its size, and what has to be done with it.

    likely_rows: of 128 bytes, that are likely enough; 0: unknown.
    """

    name: str
    shape: torch.Size
    likely_rows: int
    read: Callable[[list[int]], tuple[int, int, int]]  # totals -> rows, rows of the longest tile, nonzeros. Checks them
    storage: Callable[[Tensor, int, int], Storage]  # of blocks, rows of the longest tile and nonzeros
    pack: Callable[[Storage], None]  # writes the blocks; on a GPU only if they are long enough


def allocate(caches: list[Unsized], totals: Tensor) -> list[Storage]:
    """totals: of each, as `read` takes them.

    While the totals are copied to the host, the device already packs into as much memory as is likely enough. Memory
    beyond the size is cut off; where the guess was too small, or none was made, the blocks are packed again into memory
    of the right size.
    """
    pending, device = _Totals(totals), totals.device
    guesses: list[Tensor | None] = []
    for cache in caches:
        if device.type == "cpu" or not 0 < cache.likely_rows <= MAX_ROWS:
            guesses.append(None)
            continue
        blocks = _blocks(cache.likely_rows, device)
        guesses.append(blocks)
        cache.pack(cache.storage(blocks, 0, 0))
    results: list[Storage] = []
    for cache, guess, numbers in zip(caches, guesses, pending.read()):
        rows, max_tile_rows, nnz = cache.read(numbers)
        if rows > MAX_ROWS:
            raise ValueError(
                f"{cache.name} of shape {tuple(cache.shape)} would take {rows} rows of 128 bytes, at most {MAX_ROWS} "
                "can be addressed: compress it in parts"
            )
        if guess is not None and rows <= guess.shape[0]:
            used = guess[:rows]
            blocks = used.clone() if rows < guess.shape[0] * 7 // 8 else used  # a clone frees the rest of the guess
            storage = cache.storage(blocks, max_tile_rows, nnz)
        else:
            storage = cache.storage(_blocks(rows, device), max_tile_rows, nnz)
            cache.pack(storage)
        results.append(storage)
    return results


class _Totals:
    """Totals that are being copied to the host; work that is queued after the copy does not wait for it."""

    def __init__(self, totals: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if totals.device.type == "cpu":
            self._values = totals
            return
        self._values = torch.empty(totals.shape, dtype=totals.dtype, device="cpu", pin_memory=True)
        self._values.copy_(totals, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(totals.device))

    def read(self) -> list[list[int]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def _blocks(rows: int, device: torch.device) -> Tensor:
    return torch.empty(rows, _C.format.LANES, dtype=torch.int32, device=device)
