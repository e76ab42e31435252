"""What code asks of a GPU's memory. Blocks that torch hands out may be up to a megabyte larger: it does not split off less."""

from __future__ import annotations

from collections.abc import Callable

import torch


def requested() -> int:
    """Bytes at present."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def peak_request(action: Callable[[], object]) -> int:
    """Bytes beyond those before it, at their most while `action` runs."""
    before = requested()
    torch.cuda.reset_peak_memory_stats()
    action()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
