"""One case: its randomness, where it runs, and what it drew."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch

import cute_kernels as ck
from cute_kernels._runtime.extension import _C

ISA_VARIABLE = "CUTE_KERNELS_CPU_ISA"
T = TypeVar("T")


class Mismatch(AssertionError):
    """A result differs from the oracle's, or a call did what it must not."""


@dataclass(frozen=True)
class Backend:
    """What multiplies, and in which instruction set of the CPU."""

    name: str
    isa: str = ""

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Kernels look the instruction set up in every call."""
        with environment(ISA_VARIABLE, self.isa) if self.isa else nullcontext():
            yield


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@cache
def isas() -> list[str]:
    """Instruction sets that this CPU has; the one that the environment names, if it does."""
    if os.environ.get(ISA_VARIABLE):
        return [os.environ[ISA_VARIABLE]]
    found = []
    for name in ("avx512bf16", "avx512", "avx2", "scalar"):
        with environment(ISA_VARIABLE, name):
            try:
                found.append(_C.cpu.isa())
            except RuntimeError:
                continue
    return found


@cache
def backends(device: str) -> list[Backend]:
    """All that multiply on a device."""
    if device == "cpu":
        return [Backend("reference"), *(Backend("cpu", isa) for isa in isas())]
    served = [name for name, status in ck.backends().items() if status == "ok" and name not in ("reference", "cpu")]
    return [Backend("reference"), *map(Backend, served)]


class Case:
    """rng: the case's own. torch is seeded with it, too. Whatever is drawn is drawn on the CPU, so that a case is the
    same on every device; what runs it is drawn last."""

    def __init__(self, target: str, seed: int, index: int, device: str) -> None:
        self.target, self.seed, self.index, self.device = target, seed, index, device
        self.rng = random.Random(f"{seed} {target} {index}")
        self.drawn: dict[str, Any] = {}  # what a failure shows
        torch.manual_seed(self.rng.getrandbits(48))

    @property
    def command(self) -> str:
        """Runs this case alone."""
        options = f"--target {self.target} --seed {self.seed} --case {self.index} --device {self.device}"
        return f"PYTHONPATH=python:. python -m tests.fuzz {options}"

    def note(self, name: str, value: T) -> T:
        self.drawn[name] = value
        return value

    def choose(self, name: str, choices: list[T] | tuple[T, ...]) -> T:
        return self.note(name, self.rng.choice(choices))

    def often(self, chance: float) -> bool:
        return self.rng.random() < chance

    def require(self, holds: bool | torch.Tensor, what: str) -> None:
        if not holds:
            raise Mismatch(what)

    @contextmanager
    def backend(self) -> Iterator[str]:
        """The name of one of the backends on the case's device, with an instruction set of its own on the CPU."""
        backend = self.choose("backend", backends(self.device))
        with backend.chosen(), self.threads():
            yield backend.name

    @contextmanager
    def threads(self) -> Iterator[None]:
        """One thread mostly: the cases are small."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.choose("threads", [1, 1, 1, 2, 3]))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def __str__(self) -> str:
        drawn = "".join(f"\n  {name}: {value}" for name, value in self.drawn.items())
        return f"{self.target}, case {self.index} of seed {self.seed} on {self.device}{drawn}"
