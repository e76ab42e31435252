"""Whether the host waits for the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raises where an operation of torch waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Fails also where anything else waits for it: the body has to end while the device still runs earlier work."""
    torch.cuda.synchronize()
    with no_synchronisation():
        start = torch.cuda.Event()
        torch.cuda._sleep(2_000_000_000)  # clock cycles, about a second
        start.record()
        yield
        assert not start.query(), "the calls waited for the device"
