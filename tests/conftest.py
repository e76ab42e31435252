"""Fixtures: devices, backends, and fresh random inputs whose seed a failing test reports."""

from __future__ import annotations

import os
import random
import zlib

import hypothesis
import pytest

# Before torch starts OpenMP, whose threads otherwise spin after every operation, on the cores that the next call needs.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

SEED_VARIABLE = "CUTE_KERNELS_TEST_SEED"
BASE_SEED = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().randrange(2**31))
os.environ[SEED_VARIABLE] = str(BASE_SEED)  # for the processes that share the tests out

pytest.register_assert_rewrite("tests.support")

from tests.support.backends import BACKENDS, Backend, skip_unless_ok

hypothesis.settings.register_profile("cute_kernels", deadline=None, print_blob=True, max_examples=40)
hypothesis.settings.load_profile("cute_kernels")


def pytest_report_header(config):
    return f"inputs: {SEED_VARIABLE}={BASE_SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and "rng" in getattr(item, "fixturenames", ()):
        report.sections.append(("inputs", f"to repeat: {SEED_VARIABLE}={BASE_SEED}"))
    return report


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def rng(request) -> random.Random:
    """A test's own randomness; also seeds torch."""
    seed = zlib.crc32(f"{BASE_SEED} {request.node.nodeid}".encode())
    torch.manual_seed(seed)
    return random.Random(seed)


@pytest.fixture(params=BACKENDS)
def backend(request) -> Backend:
    """Every backend that a product can run on, with a device for its tensors."""
    name, device = request.param
    if device == "cuda":
        skip_unless_ok("sm80")  # compression on the device needs the extension's kernels, whatever multiplies
    skip_unless_ok(name)
    return Backend(name, torch.device(device))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Every device that compression runs on."""
    if request.param == "cuda":
        skip_unless_ok("sm80")
    return torch.device(request.param)
