"""The load of requests through continuous batching."""

from __future__ import annotations

import argparse
import json

import pytest

from profiling import serving_load

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

SIZES = {
    "requests": 7,
    "memory-mib": 8,
    "under-way": 3,
    "step-tokens": 100,
    "prompt": 60,
    "answer": 15,
    "longest": 150,
}


def test_requests():
    options = argparse.Namespace(seed=3, requests=300, prompt=100, answer=20, longest=400, spread=0.5, rate=0.0)
    requests = serving_load.draw_requests(options, 50)
    assert len(requests) == 300 and all(arrival == 0 for arrival, _, _ in requests)
    sizes = sorted(len(prompt) for _, prompt, _ in requests)
    assert 80 < sizes[150] < 125 and sizes[0] >= 1 and sizes[-1] <= 400
    assert all(0 <= token < 50 for _, prompt, _ in requests for token in prompt)
    options.rate = 10.0
    arrivals = [arrival for arrival, _, _ in serving_load.draw_requests(options, 50)]
    assert arrivals == sorted(arrivals) and 20 < arrivals[-1] < 45


def test_the_compressed_side(capsys):
    if not (5, 16) <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) <= (5, 17):
        pytest.skip("continuous batching is served with Transformers 5.16 and 5.17")
    sizes = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]
    options = ["--device", "cpu", "--model", "tiny", "--side", "sparse", "--rate", "100", *sizes]
    assert serving_load.main(options) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["side"] == "sparse" and row["requests"] == 7 and 1 <= row["under_way_at_most"] <= 3
    assert row["tokens_per_s"] > 0 and 0 < row["first_token_p50_s"] <= row["first_token_p99_s"]
