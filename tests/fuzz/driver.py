"""Runs targets in processes of their own: what crashes or hangs is a failure of its case, and the rest goes on."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import cute_kernels as ck
from tests.fuzz.case import Case
from tests.fuzz.worker import Failure, Job, work

MOST_FAILURES = 10  # of a target, which then ends
PATIENCE = 300.0  # seconds that a case may take
_BETWEEN_LINES = 10.0  # seconds


@dataclass
class Outcome:
    """What came of a job."""

    job: Job
    cases: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        rate = self.cases / self.seconds if self.seconds else 0.0
        name = f"{self.job.target} on {self.job.device}"
        return f"{name}: {self.cases} cases, {rate:.0f} a second, {len(self.failures)} failed"


def run(jobs: list[Job], patience: float = PATIENCE) -> list[Outcome]:
    """One after the other. Progress and failures go to stderr."""
    package = str(Path(ck.__file__).resolve().parents[1])
    if sys.path[0] != package:  # `profiling` puts the checkout's first, be this one of another build
        sys.path.insert(0, package)
    outcomes = []
    for number, job in enumerate(jobs, 1):
        outcomes.append(_run(job, patience, f"[{number}/{len(jobs)}]"))
    return outcomes


def _run(job: Job, patience: float, prefix: str) -> Outcome:
    outcome, started = Outcome(job), time.monotonic()
    rest: Job | None = job
    while rest is not None and len(outcome.failures) < MOST_FAILURES:
        rest = _until_it_ends(rest, outcome, started, patience, prefix)
        if rest is not None and job.seconds is not None:
            left = job.seconds - (time.monotonic() - started)
            rest = replace(rest, seconds=left) if left > 0 else None
    outcome.seconds = time.monotonic() - started
    _say(f"{prefix} {outcome}")
    return outcome


def _until_it_ends(job: Job, outcome: Outcome, started: float, patience: float, prefix: str) -> Job | None:
    """One process. Returns what is left to do where a case has ended it."""
    context = multiprocessing.get_context("spawn")  # CUDA cannot be used in a fork
    receive, send = context.Pipe(duplex=False)
    current = context.Value("q", -1, lock=False)
    process = context.Process(target=work, args=(job, ck.__file__, send, current), daemon=True)
    process.start()
    send.close()
    at, since, line = -1, time.monotonic(), time.monotonic()
    try:
        while len(outcome.failures) < MOST_FAILURES:
            now = time.monotonic()
            if current.value != at:
                at, since = current.value, now
                outcome.cases = at + 1 - outcome.job.first
            if at >= 0 and now - since > patience:
                _fail(job, at, outcome, f"did not end within {patience:.0f} seconds")
                return _after(job, at)
            if now - line > _BETWEEN_LINES:
                outcome.seconds, line = now - started, now
                _say(f"{prefix} {outcome}{_left(outcome.job, outcome)}")
            if not receive.poll(0.2):
                continue
            try:
                failure = receive.recv()
            except EOFError:
                process.join()
                _fail(job, current.value, outcome, f"ended the process: {_reason(process.exitcode)}")
                return _after(job, current.value)
            if failure is None:
                return None
            outcome.failures.append(failure)
            _say(f"\n{failure}\n")
    finally:
        outcome.cases = max(0, current.value + 1 - outcome.job.first)
        process.kill()
        process.join()
    return None


def _fail(job: Job, index: int, outcome: Outcome, what: str) -> None:
    if index < 0:
        raise RuntimeError(f"target {job.target} could not be started; the output above says why")
    failure = Failure(index, f"{job.target}, case {index} {what}", _command(job, index))
    outcome.failures.append(failure)
    _say(f"\n{failure}\n")


def _command(job: Job, index: int) -> str:
    return Case(job.target, job.seed, index, job.device).command


def _after(job: Job, index: int) -> Job | None:
    return None if job.end is not None and index + 1 >= job.end else replace(job, first=index + 1)


def _reason(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return signal.Signals(-exitcode).name
    return f"exit status {exitcode}; a sanitizer's report is above"


def _left(job: Job, outcome: Outcome) -> str:
    if job.end is not None:
        return f", {outcome.cases} of {job.end - job.first}"
    return f", {outcome.seconds:.0f} of {job.seconds:.0f} s"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
