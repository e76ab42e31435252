"""A bounded part of `make fuzz`: so many cases of every target, from a new seed."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS
from tests.fuzz.worker import Job, attempt
from tests.support.backends import skip_unless_ok

# Less than eight seconds each, on one slow core.
CASES = {
    "compression": 200,
    "products": 400,
    "attention": 150,
    "merging": 400,
    "cache": 80,
    "paged": 40,
    "storage": 1200,
    "arguments": 500,
    "mustafar": 600,
}


def run(target: str, device: str, seed: int, cases: int) -> None:
    for index in range(cases):
        failure = attempt(Job(target, device, seed), index)
        if failure is not None:
            pytest.fail(str(failure), pytrace=False)


def test_every_target_has_its_cases():
    assert set(CASES) == set(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_cases(target, rng):
    run(target, "cpu", rng.randrange(2**31), CASES[target])


@pytest.mark.gpu
@pytest.mark.parametrize("target", TARGETS)
def test_cases_on_a_gpu(target, rng):
    skip_unless_ok("sm80")
    run(target, "cuda", rng.randrange(2**31), CASES[target] // 3)
