"""What can be fuzzed, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from tests.fuzz import arguments, attention, cache, compression, merging, mustafar, paged, products, storage
from tests.fuzz.case import Case

Target = Callable[[Case], None]

TARGETS: dict[str, Target] = {
    "compression": compression.run,
    "products": products.run,
    "attention": attention.run,
    "merging": merging.run,
    "cache": cache.run,
    "paged": paged.run,
    "storage": storage.run,
    "arguments": arguments.run,
    "mustafar": mustafar.run,
}


def find(name: str) -> Target:
    """A target of the table, or one of another module's, named as module:function."""
    if name in TARGETS:
        return TARGETS[name]
    module, _, function = name.partition(":")
    if not function:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, or module:function, got {name!r}")
    target: Target = getattr(importlib.import_module(module), function)
    return target
