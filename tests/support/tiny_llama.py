"""A tiny Llama in bfloat16, and passes through it."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

TINY = {
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


def config(kind="Llama", **changes):
    return getattr(transformers, f"{kind}Config")(**TINY | changes)


def model(dtype=torch.bfloat16, **changes):
    return transformers.LlamaForCausalLM(config(**changes)).eval().to(dtype)


def run(served, cache, tokens=5, batch=1, mask=None, **options):
    with torch.no_grad():
        return served(
            torch.ones(batch, tokens, dtype=torch.long), attention_mask=mask, past_key_values=cache, **options
        )
