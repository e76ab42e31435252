"""One of several processes that share a model's heads; started by tests/integrations/test_transformers_tp.py.

python -m tests.support.tensor_parallel_child FOLDER: prints what the first process found, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import transformers.integrations.accelerate as placement
from transformers import AutoModelForCausalLM, DynamicCache

from cute_kernels.integrations.transformers import SparseKVCache
from tests.support import ranks


def sharded(folder: Path):
    try:
        from transformers.distributed import DistributedConfig

        how = {"distributed_config": DistributedConfig(tp_plan="auto")}
    except (ImportError, TypeError):  # older ones
        how = {"tp_plan": "auto"}
    # Asked for where a device is named; for one device a process nothing of it is used.
    placement.is_accelerate_available = lambda *args: True
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **how).eval()


@torch.no_grad()
def logits(model, cache, ids: torch.Tensor, mask: torch.Tensor, prompt: int) -> torch.Tensor:
    """Of the prompts' last tokens and of every later one."""
    positions, found, seen = (mask.cumsum(1) - 1).clamp(min=0), [], 0
    for end in range(prompt, ids.shape[1] + 1):
        now = slice(seen, end)
        found.append(
            model(
                ids[:, now], attention_mask=mask[:, :end], position_ids=positions[:, now], past_key_values=cache
            ).logits[:, -1]
        )
        seen = end
    return torch.stack(found).float()


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    model = sharded(folder)
    inputs = torch.load(folder / "inputs.pt")
    ids, mask = inputs["input_ids"].to(model.device), inputs["attention_mask"].to(model.device)
    options = {"window": 8, "dtype": torch.float16}
    cache = SparseKVCache(model, keep=model.config.head_dim, **options)
    dense = DynamicCache(config=model.config)
    expected, got = (logits(model, each, ids, mask, inputs["prompt"]) for each in (dense, cache))
    pruned = SparseKVCache(model, sparsity=0.5, **options)
    options = {"num_beams": 2, "max_new_tokens": 5, "do_sample": False}
    answer = model.generate(ids, attention_mask=mask, past_key_values=pruned, **options)
    if os.environ["RANK"] == "0":
        print(
            json.dumps(
                {
                    "error": float((got - expected).norm() / expected.norm()),
                    "device": model.device.type,
                    "kv_heads": [layer.kv.kv_heads for layer in cache.layers],
                    "lengths": cache.layers[0].kv.lengths.tolist(),
                    "nbytes": cache.nbytes(),
                    "answer": list(answer.shape),
                }
            )
        )


if __name__ == "__main__":
    main()
    ranks.end_process()
