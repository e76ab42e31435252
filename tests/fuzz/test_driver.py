"""What becomes of cases that fail, crash or hang, and what is said of them."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.fuzz import driver
from tests.fuzz.case import Case
from tests.fuzz.worker import Job
from tests.support import ROOT

SECRET = 7


def one_of_each(case: Case) -> None:
    """A target."""
    case.note("number", case.rng.randrange(10**9))
    if case.index == 1:
        case.require(case.index == 0, "it is not 0")
    elif case.index == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    elif case.index == 4:
        time.sleep(1000)


NAME = f"{__name__}:one_of_each"


def test_failures_crashes_and_hangs_end_their_case_alone(capfd):
    (outcome,) = driver.run([Job(NAME, "cpu", SECRET, end=5)], patience=2)
    said = capfd.readouterr().err
    assert outcome.cases == 5 and [failure.index for failure in outcome.failures] == [1, 2, 4]
    assert "it is not 0" in outcome.failures[0].what and "number: " in outcome.failures[0].what
    assert "SIGSEGV" in outcome.failures[1].what and "2 seconds" in outcome.failures[2].what
    for failure in outcome.failures:
        assert f"--target {NAME} --seed {SECRET} --case {failure.index} --device cpu" in failure.command
        assert f"to repeat: {failure.command}" in said
    assert "5 cases" in said and "a second" in said and "3 failed" in said


def test_the_command_repeats_the_case():
    failed = Case(NAME, SECRET, 1, "cpu")
    number = failed.rng.randrange(10**9)
    words = shlex.split(failed.command)
    assert words[:2] == ["PYTHONPATH=python:.", "python"]
    environment = {**os.environ, "PYTHONPATH": "python:."}
    done = subprocess.run(
        [sys.executable, *words[2:]], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and f"number: {number}" in done.stderr and "it is not 0" in done.stderr


def test_a_case_depends_on_its_seed_and_number_alone():
    def draws(seed: int, index: int) -> list[float]:
        case = Case("any", seed, index, "cpu")
        return [case.rng.random() for _ in range(3)]

    assert draws(1, 2) == draws(1, 2)
    assert draws(1, 2) != draws(1, 3) and draws(1, 2) != draws(2, 2)


@pytest.mark.parametrize(
    "wrong, said",
    [
        (["--minutes", "0"], "above 0"),
        (["--cases", "-5"], "at least 1"),
        (["--target", "nothing"], "compression"),
        (["--case", "1"], "--seed"),
        (["--device", "tpu"], "cpu"),
    ],
)
def test_wrong_options(wrong, said, monkeypatch, capsys):
    from tests.fuzz import __main__ as command

    monkeypatch.setattr(sys, "argv", ["fuzz", *wrong])
    with pytest.raises(SystemExit) as stopped:
        command.options()
    assert stopped.value.code == 2 and re.search(said, capsys.readouterr().err)
