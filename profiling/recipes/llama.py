"""The Llama-architecture models that recipes train, and a forward pass of theirs with few kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


def build(shape: Shape, seed: int, vocabulary: int, positions: int, **options: Any) -> Any:
    """The model, with random weights, float32. options: of LlamaConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=positions,
            bos_token_id=None,
            eos_token_id=None,
            **options,
        )
    )


def forward(model: Any, ids: Tensor, last: int) -> Tensor:
    """Logits (B, last, vocabulary) of the last tokens of ids (B, n), as LlamaForCausalLM has them; on a GPU computed in
    bfloat16."""
    config, dtype = model.config, torch.bfloat16 if ids.is_cuda else model.dtype
    places = torch.arange(ids.shape[1], device=ids.device)[None]
    cos, sin = model.model.rotary_emb(model.model.embed_tokens.weight, places)
    cos, sin = cos.to(dtype)[:, None], sin.to(dtype)[:, None]

    def linear(module: Any, x: Tensor) -> Tensor:
        return functional.linear(x, module.weight.to(dtype))

    def normed(module: Any, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], module.weight.to(dtype), config.rms_norm_eps)

    def heads(module: Any, x: Tensor) -> Tensor:
        return linear(module, x).unflatten(2, (-1, config.head_dim)).transpose(1, 2)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-second, first], dim=-1) * sin

    x = model.model.embed_tokens(ids).to(dtype)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        y = normed(layer.input_layernorm, x)
        y = functional.scaled_dot_product_attention(
            rotated(heads(attention.q_proj, y)),
            rotated(heads(attention.k_proj, y)),
            heads(attention.v_proj, y),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + linear(attention.o_proj, y.transpose(1, 2).flatten(2))
        y = normed(layer.post_attention_layernorm, x)
        x = x + linear(mlp.down_proj, functional.silu(linear(mlp.gate_proj, y)) * linear(mlp.up_proj, y))
    return linear(model.lm_head, normed(model.model.norm, x[:, -last:]))
