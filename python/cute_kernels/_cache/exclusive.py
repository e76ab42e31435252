"""One call of a cache at a time, and no cache left between two states.

A method that runs alone claims its cache first; where another call has it, RuntimeError. Before it changes anything it
says what the rows go back to (`Change`); if an exception then ends it, Ctrl-C at any point among them, the cache is
brought to that state. No step of this can be cut in two by a signal: Python handles signals at calls, loops and the
start of functions only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch.compiler import is_compiling

from cute_kernels._cache.sequences import Row

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")
_Self = TypeVar("_Self")

IN_USE = (
    "another call of this KVCache is under way: a cache is for one thread at a time, and not for a pruning rule that "
    "the cache itself calls; give every thread a cache of its own, or hold one lock of yours around all calls"
)


def not_recorded(what: str) -> RuntimeError:
    """The error of a method that cannot be recorded."""
    return RuntimeError(
        f"{what} cannot be part of a compiled or traced function, nor run under FakeTensorMode or "
        "torch.func.functionalize: append, attend and step can"
    )


@dataclass
class Change:
    """What a call is about to change.

    what: the method. rows: their states before; those that it leaves out keep what the host's table says.
    destroys: what the rows held is being written over: they go back to no tokens instead.
    """

    what: str
    rows: dict[int, Row]
    destroys: bool = False


class Claimed(Protocol):
    """A `core.CacheCore`."""

    claims: dict[None, object]  # of the call that is under way; empty where there is none
    change: Change | None

    def recover(self) -> None: ...


class Exclusive:
    """Makes methods run alone and to their end, or not at all. core_of: what finds the core of their object."""

    def __init__(self, core_of: Callable[[Any], Claimed]) -> None:
        self._core_of = core_of

    def __call__(
        self, method: Callable[Concatenate[_Self, _Parameters], _Result]
    ) -> Callable[Concatenate[_Self, _Parameters], _Result]:
        core_of = self._core_of

        @wraps(method)
        def alone(self: _Self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            if is_compiling():  # what can be recorded comes here when it runs, as an operation
                raise not_recorded(method.__name__)
            core, claim = core_of(self), object()
            claims = core.claims
            try:
                if claims.setdefault(None, claim) is not claim:
                    raise RuntimeError(IN_USE)
                if core.change is not None:  # an interrupt came again, while the core recovered from the one before
                    core.recover()
                result = method(self, *args, **kwargs)
                core.change = None
                return result
            except BaseException:
                if None in claims and claims[None] is claim and core.change is not None:
                    core.recover()
                raise
            finally:
                if None in claims and claims[None] is claim:
                    del claims[None]

        return alone
