"""The model to generate with: a local folder, or random weights in the shape of a known model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# Shapes as published by their makers; Mistral's is that of versions without a sliding window.
_LLAMA3 = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}
RANDOM_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3-8b": ("LlamaConfig", _LLAMA3),
    "llama2-7b": (
        "LlamaConfig",
        _LLAMA3
        | {
            "vocab_size": 32000,
            "intermediate_size": 11008,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "mistral-7b": (
        "MistralConfig",
        _LLAMA3
        | {
            "vocab_size": 32768,
            "max_position_embeddings": 32768,
            "sliding_window": None,
            "head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-8b": (
        "Qwen3Config",
        _LLAMA3
        | {
            "vocab_size": 151936,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "max_position_embeddings": 40960,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "llama-1b": (
        "LlamaConfig",
        _LLAMA3
        | {  # of Llama 3.2
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "max_position_embeddings": 131072,
        },
    ),
    "tiny": (
        "LlamaConfig",
        _LLAMA3
        | {  # for CPUs and smoke tests
            "vocab_size": 1024,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    ),
}


def config_of(folder: Path | None, random_config: str) -> Any:
    """The config of a folder or, without one, of a name in RANDOM_CONFIGS."""
    import transformers

    if folder is not None:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind, shape = RANDOM_CONFIGS[random_config]
    return getattr(transformers, kind)(**shape)


def head_dim(config: Any) -> int:
    config = config.get_text_config(decoder=True)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def load(folder: Path | None, random_config: str, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """A causal language model for inference, with sdpa attention; random weights are made on the device."""
    import transformers

    if folder is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        model = model.to(device)
    else:
        config = config_of(None, random_config)
        torch.manual_seed(seed)
        with device:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    # A fixed number of new tokens, whatever they are.
    model.generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def dense_kv_bytes(model: Any, tokens: int) -> int:
    """Of one sequence of so many tokens in 16 bits, all layers."""
    config = model.config.get_text_config(decoder=True)
    return 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * tokens
