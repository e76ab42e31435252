"""What users would run instead, one plug-in a peer.

A plug-in says which operations it stands beside and on which devices, why it cannot serve a case, and makes a `Peer` of
the case's inputs. `--plugin MODULE` adds those that a module lists as PLUGINS.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from profiling.cases import Case
from profiling.peers.base import Peer, Plugin, Unavailable

__all__ = ["Peer", "Plugin", "Unavailable", "load", "named", "names", "of"]

_MODULES = ("profiling.peers.products", "profiling.peers.copy", "profiling.peers.sdpa", "profiling.peers.flashinfer")
_plugins: dict[str, Plugin] = {}


def load(module: str) -> None:
    """Adds a module's PLUGINS; one of a known name replaces it.

    Raises:
        ValueError: there is no such module, or no PLUGINS in it.
    """
    try:
        plugins = importlib.import_module(module).PLUGINS
    except (ImportError, AttributeError) as error:
        raise ValueError(f"plug-in {module}: {error}") from None
    _plugins.update((plugin.name, plugin) for plugin in plugins)


def names(product: str | None = None, device: str | None = None) -> list[str]:
    """The peers of a product ("qk", "av", "attention", "compress", "copy") and kind of device; None: any."""
    return [
        p.name for p in _all() if (product is None or product in p.products) and (device is None or device in p.devices)
    ]


def named(name: str) -> Plugin:
    """The plug-in of a name that `names` gives."""
    return {p.name: p for p in _all()}[name]


def of(case: Case, device: str, wanted: Iterable[str] | None) -> list[Plugin]:
    """The plug-ins beside which a sparse case is measured on a kind of device; None: all there are."""
    return [named(name) for name in names(case.product, device) if wanted is None or name in wanted]


def _all() -> Iterable[Plugin]:
    if not _plugins:
        for module in _MODULES:
            load(module)
    return _plugins.values()
