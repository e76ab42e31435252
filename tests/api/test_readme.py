"""The Python examples of the README, and of the page that goes on with its names, run as they stand."""

from __future__ import annotations

import re

import pytest
import torch

import profiling

PAGES = ("README.md", "docs/integrations.md")  # one after the other
CHOICE = '"cuda" if torch.cuda.is_available() else "cpu"'


def python_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (profiling.ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.M)


def test_examples(device):
    pytest.importorskip("transformers", reason="Transformers is not installed")
    readme, others = (python_blocks(page) for page in PAGES)
    assert len(readme) == 4 and sum(block.count(CHOICE) for block in readme) == 3 and len(others) == 1
    names: dict[str, object] = {}
    for block in readme + others:
        exec(compile(block.replace(CHOICE, repr(str(device))), "documentation", "exec"), names)
    assert isinstance(names["x"], torch.Tensor) and names["model"].device.type == torch.device(device).type
    assert abs(names["K"].bits_per_element - 6.3) < 0.05
    assert names["model"].config._attn_implementation == "sparse_kv"


def test_serving_example(device):
    (block,) = python_blocks("docs/serving.md")
    names: dict[str, object] = {}
    exec(compile(block.replace(CHOICE, repr(str(device))), "documentation", "exec"), names)
    x = names["x"]
    assert isinstance(x, torch.Tensor) and x.shape == (2, 8, 1, 64) and x.isfinite().all()
