"""SparseKVCache in a tensor parallel model: two processes, each with half of the heads by the model's tp_plan."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed")

from tests.support.tiny_models import make, prompts

CHILD = "tests.support.tensor_parallel_child"
PROCESSES, PROMPT, NEW = 2, 80, 20


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_heads_sharded_by_a_tp_plan(place, rng, tmp_path):
    if place == "cuda" and torch.cuda.device_count() < PROCESSES:
        pytest.skip(f"fewer than {PROCESSES} GPUs")
    make(vocab_size=96, num_key_value_heads=4).save_pretrained(tmp_path)  # 96: the processes share it too
    inputs = prompts((PROMPT, rng.randrange(1, PROMPT)))
    later = {"input_ids": torch.randint(1, 89, (2, NEW)), "attention_mask": torch.ones(2, NEW, dtype=torch.long)}
    whole = {name: torch.cat([inputs[name], later[name]], dim=1) for name in inputs}
    torch.save(whole | {"prompt": PROMPT}, tmp_path / "inputs.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PROCESSES)}
    shared |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if place == "cpu":
        shared["CUDA_VISIBLE_DEVICES"] = ""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", CHILD, str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(PROCESSES)
    ]
    try:
        outputs = [child.communicate(timeout=300) for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0] * PROCESSES, [error for _, error in outputs]
    found = json.loads(outputs[0][0].splitlines()[-1])
    assert found["device"] == place and found["kv_heads"] == [4 // PROCESSES] * 2
    assert found["lengths"] == whole["attention_mask"].sum(1).tolist()
    assert found["error"] < 5e-3  # of keys, values and queries rounded to float16
    assert found["answer"] == [2, PROMPT + NEW + 5]
