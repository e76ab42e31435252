"""Backends as parameters of tests, and skips where one cannot serve."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch


@dataclass(frozen=True)
class Backend:
    name: str
    device: torch.device


BACKENDS = [
    pytest.param(("reference", "cpu"), id="reference"),
    pytest.param(("cpu", "cpu"), id="cpu"),
    pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
    pytest.param(("sm80", "cuda"), id="sm80", marks=pytest.mark.gpu),
    pytest.param(("sm90", "cuda"), id="sm90", marks=pytest.mark.gpu),
]


def skip_unless_ok(name: str) -> None:
    """Skips the test that runs where the backend cannot serve, with the backend's own reason."""
    import cute_kernels as ck

    status = ck.backends()[name]
    if status != "ok":
        pytest.skip(f"{name}: {status}")
