"""What a plug-in is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
        return Peer(
            self.name, self.operands, good, self.cache_bytes, self.bits_per_element, self.tolerance, self.bytes_moved
        ), worst

    def fastest_form(self, copies: int, clock: timing.CpuTimer | timing.CudaTimer) -> str:
        if len(self.forms) == 1:
            return next(iter(self.forms))
        rotations = {form: self.rotation(form, copies) for form in self.forms}
        timings = timing.measure(rotations, CHOICE_REPEATS, clock)
        return min(timings, key=lambda form: timings[form].median_us)


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
