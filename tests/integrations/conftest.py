"""Fixtures of tests that run tiny models."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread():
    """Tiny tensors: waiting for threads is most of what several would do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def attention(monkeypatch):
    """Transformers' sdpa computes as a cache of float16 does; returns what computes, whose noise a test may set."""
    from transformers import AttentionInterface

    from tests.support.tiny_models import RoundingAttention

    rounding = RoundingAttention()
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", rounding)
    return rounding


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request) -> str:
    """Where a model is."""
    return request.param
