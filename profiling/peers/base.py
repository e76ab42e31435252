"""What a plug-in is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from profiling import check, timing
from profiling.cases import Case
from profiling.operations import InputSet

CHOICE_REPEATS = 5  # to find the fastest form; it is then timed again, beside the operation


class Unavailable(RuntimeError):
    """A peer cannot serve a case; the message says why."""


@dataclass(frozen=True)
class Peer:
    """One peer of a case: the operands of one call; `forms` compute the same from them in different ways.

    A form returns its result, or the tensor it wrote it to, reshapeable to (B*Hkv, rows, T or D).
    """

    name: str
    operands: tuple[Tensor, ...]
    forms: Mapping[str, Callable[..., Tensor]]
    cache_bytes: int  # of the dense cache that a call reads
    bits_per_element: float  # of that cache
    tolerance: float  # of its relative Frobenius error; a peer beyond it is not measured
    bytes_moved: int  # what a call must at least read and write
    alternatives: tuple[Peer, ...] = ()  # the same on other operands, such as of another dtype: the fastest is measured

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.operands)

    def rotation(self, form: str, copies: int) -> list[timing.Call]:
        """Calls on `copies` sets of operands at different addresses."""
        call = self.forms[form]
        sets = [self.operands] + [tuple(t.clone() for t in self.operands) for _ in range(copies - 1)]
        return [lambda operands=operands: call(*operands) for operands in sets]

    def checked(self, error_of: Callable[[Tensor], float]) -> tuple[Peer, float]:
        """(this peer with the forms that run and compute the right thing, their largest error).

        Raises:
            Unavailable: no form does.
        """
        good, worst, reasons = {}, 0.0, []
        for name, form in self.forms.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's, about each kernel that it cannot take
                    error = error_of(form(*self.operands))
            except Exception as failure:
                reasons.append(f"{name}: {_reason(failure)}")
                continue
            if error <= self.tolerance:
                good[name], worst = form, max(worst, error)
            else:
                reasons.append(f"{name}: relative error {error:.1e} > {self.tolerance:.0e}")
        if not good:
            raise Unavailable(f"{self.name}: {'; '.join(reasons)}")
        return replace(self, forms=good, alternatives=()), worst

    def fastest(
        self,
        error_of: Callable[[Tensor], float],
        copies_of: Callable[[int], int],
        clock: timing.CpuTimer | timing.CudaTimer,
    ) -> tuple[Peer, str, float]:
        """(the fastest of this peer and its alternatives, its fastest form, its error), of what is right.

        copies_of: bytes of one call's operands -> how many sets of them are used in turn.

        Raises:
            Unavailable: nothing is.
        """
        good, reasons = [], []
        for peer in (self, *self.alternatives):
            try:
                good.append(peer.checked(error_of))
            except Unavailable as reason:
                reasons.append(str(reason))
        if not good:
            raise Unavailable("; ".join(reasons))
        found = {(peer.name, form): (peer, form, error) for peer, error in good for form in peer.forms}
        if len(found) == 1:
            return next(iter(found.values()))
        us: dict[tuple[str, str], float] = {}
        for peer, _ in good:
            rotations = {form: peer.rotation(form, copies_of(peer.nbytes)) for form in peer.forms}
            timings = timing.measure(rotations, CHOICE_REPEATS, clock)
            us |= {(peer.name, form): timings[form].median_us for form in rotations}
        return found[min(us, key=lambda key: us[key])]


@dataclass(frozen=True)
class Plugin:
    """A peer's name and how to make it. `unavailable` gives the reason why it cannot serve a case, or ""."""

    name: str  # as in rows and arguments
    products: tuple[str, ...]  # of "qk", "av", "attention", "compress", "copy"
    devices: tuple[str, ...]  # "cuda", "cpu"
    build: Callable[[Case, InputSet], Peer]
    unavailable: Callable[[Case], str] = lambda case: ""

    def peer(self, case: Case, inputs: InputSet) -> Peer:
        if reason := self.unavailable(case):
            raise Unavailable(f"{self.name}: {reason}")
        try:
            return self.build(case, inputs)
        except Exception as failure:
            raise Unavailable(f"{self.name}: {_reason(failure)}") from failure


def _reason(failure: Exception) -> str:
    """Other people's code fails in its own ways, and a case is measured without it; only a lost device is raised on."""
    if "CUDA error" in str(failure):
        raise failure
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def in_dtypes(build: Callable[[torch.dtype, str], Peer], own: torch.dtype) -> Peer:
    """The peer in the cache's dtype, with those in the other dtypes as alternatives.

    build: (dtype, its short name, which its forms begin with) -> peer.
    """
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    first, *others = sorted(names, key=lambda dtype: dtype != own)
    peer = build(first, names[first])
    return replace(peer, alternatives=tuple(build(dtype, names[dtype]) for dtype in others))


def dense_peer(
    name: str,
    operands: tuple[Tensor, ...],
    forms: Mapping[str, Callable[..., Tensor]],
    caches: tuple[Tensor, ...],
    tolerance: float | None = None,
    out_bytes: int = 0,
) -> Peer:
    """A peer whose operands and `out_bytes` more are what a call moves, `caches` being those that hold the cache."""
    dtype = caches[0].dtype
    return Peer(
        name,
        operands,
        forms,
        sum(t.nbytes for t in caches),
        8.0 * caches[0].element_size(),
        check.TOLERANCES.get(dtype, 0.0) if tolerance is None else tolerance,
        sum(t.nbytes for t in operands) + out_bytes,
    )
