"""The README's Python examples run as they stand, one after the other."""

from __future__ import annotations

import re

import pytest
import torch

import profiling

TEXT = (profiling.ROOT / "README.md").read_text(encoding="utf-8")
CHOICE = '"cuda" if torch.cuda.is_available() else "cpu"'


def test_examples(device):
    pytest.importorskip("transformers", reason="Transformers is not installed")
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4 and sum(block.count(CHOICE) for block in blocks) == 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block.replace(CHOICE, repr(str(device))), "README.md", "exec"), names)
    assert isinstance(names["x"], torch.Tensor) and names["model"].device.type == torch.device(device).type
    assert abs(names["K"].bits_per_element - 6.3) < 0.05
    assert names["model"].config._attn_implementation == "sparse_kv"
