"""Runs cases, one after the other."""

from __future__ import annotations

import faulthandler
import itertools
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

import cute_kernels as ck
from tests.fuzz import targets
from tests.fuzz.case import Case


@dataclass(frozen=True)
class Job:
    """Cases `first`, `first` + 1, ... of a target: up to `end`, or for `seconds`, whichever is there."""

    target: str
    device: str
    seed: int
    first: int = 0
    end: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Failure:
    """index: of the case. what: its inputs and what went wrong. command: repeats it alone."""

    index: int
    what: str
    command: str

    def __str__(self) -> str:
        return f"{self.what}\nto repeat: {self.command}"


def attempt(job: Job, index: int) -> Failure | None:
    """One case."""
    case = Case(job.target, job.seed, index, job.device)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about tensors that are only prototypes
            targets.find(job.target)(case)
    except Exception as error:
        return Failure(index, f"{case}\n{''.join(traceback.format_exception(error))}", case.command)
    return None


def work(job: Job, package: str, reports: Connection, current: Any) -> None:
    """In a process of its own, which a case may end. package: the file that cute_kernels has to be imported from.
    current: the index of the case that runs.

    Reports every Failure and, in the end, None.
    """
    if ck.__file__ != package:
        raise RuntimeError(f"cute_kernels was imported from {ck.__file__}, not from {package}")
    faulthandler.enable()
    torch.set_num_threads(1)
    targets.find(job.target)
    deadline = None if job.seconds is None else time.monotonic() + job.seconds
    for index in range(job.first, job.end) if job.end is not None else itertools.count(job.first):
        if deadline is not None and time.monotonic() > deadline:
            break
        current.value = index
        failure = attempt(job, index)
        if failure is not None:
            reports.send(failure)
    reports.send(None)
