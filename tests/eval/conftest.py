"""A tiny random model with a tokenizer, as fixtures of the evaluation's tests."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.eval import models
from tests.support import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama and a tokenizer of characters, in Hugging Face's format."""
    transformers = pytest.importorskip("transformers", reason="needs the extra eval")
    path = tmp_path_factory.mktemp("model")
    fast = tiny_tokenizer.make()
    fast.chat_template = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}:"
    fast.save_pretrained(path)
    config = transformers.LlamaConfig(
        vocab_size=len(tiny_tokenizer.CHARACTERS), hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, bos_token_id=0,
        eos_token_id=1, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return models.load_model(folder, torch.device("cpu"))
