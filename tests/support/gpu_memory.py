"""How much of a GPU's memory a call takes."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak(call: Callable[[], object]) -> int:
    """Bytes that torch has handed out at most during the call, beyond those before it.

    From a pool of its own: of blocks that other code has left, torch hands out up to a megabyte more than is asked for.
    """
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        call()
        return torch.cuda.max_memory_allocated() - before
