"""How much memory a call may take."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

MOST_ELEMENTS = 2**20  # of a tensor that the fuzzers copy: one that was expanded before would fill memory
MOST_COPIED_BYTES = 2**30  # of a cache that they copy: one that has grown may take most of a GPU


@cache
def _can_limit() -> bool:
    """Not where addresses are reserved by the terabyte, by a sanitizer, which has limits of its own (ASAN_OPTIONS), or
    by CUDA, which a call with device="cuda" may start."""
    return "asan" not in os.environ.get("LD_PRELOAD", "") and not torch.cuda.is_available()


@contextmanager
def memory(mebibytes: int) -> Iterator[None]:
    """So much more than now: beyond it allocations fail. On machines without CUDA, and without a sanitizer."""
    if not _can_limit():
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
