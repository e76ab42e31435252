"""What a layer of a Transformers model does in a step of decoding between its projections: cache update and attention.

Without a model: the functions that Llama's attention calls, as it calls them. Passes over a few layers follow one
another, the layers in turn; what a pass does once, its mask, counts as a part of its first layer.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cute_kernels.integrations.transformers import SparseKVCache

LAYERS = 4


class LayerStep:
    """Calling it is the step of the next layer. k, v (B, Hkv, T, D): what each layer holds to begin with."""

    def __init__(self, config: LlamaConfig, cache: Cache, k: torch.Tensor, v: torch.Tensor) -> None:
        batch, kv_heads, _, head_dim = k.shape
        heads = config.num_attention_heads
        self.config, self.cache, self.layer, self.mask = config, cache, 0, None
        self.module = SimpleNamespace(is_causal=True, training=False, num_key_value_groups=heads // kv_heads)

        def projected(count: int) -> torch.Tensor:
            return torch.randn(batch, 1, count, head_dim, dtype=k.dtype, device=k.device).transpose(1, 2)

        for _ in range(LAYERS):
            self._run(projected(heads).expand(-1, -1, k.shape[2], -1), k, v)
        self.q, self.k, self.v = projected(heads), projected(kv_heads), projected(kv_heads)

    def __call__(self) -> None:
        self._run(self.q, self.k, self.v)

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        batch, _, new, _ = q.shape
        if self.layer == 0:
            embeds = q.new_empty(batch, new, 1)
            self.mask = create_causal_mask(
                config=self.config, inputs_embeds=embeds, attention_mask=None, past_key_values=self.cache
            )
        k, v = self.cache.update(k, v, self.layer)
        attention: Any = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        out, _ = attention(self.module, q, k, v, self.mask, dropout=0.0, scaling=q.shape[3] ** -0.5)
        out.reshape(batch, new, -1).contiguous()
        self.layer = (self.layer + 1) % LAYERS


def _config(heads: int, k: torch.Tensor) -> LlamaConfig:
    _, kv_heads, _, head_dim = k.shape
    return LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=heads * head_dim,
        dtype=k.dtype,
        attn_implementation="sdpa",
    )


def sparse(heads: int, k: torch.Tensor, v: torch.Tensor, keep: int, capacity: int) -> LayerStep:
    config = _config(heads, k)
    return LayerStep(config, SparseKVCache(config, keep=keep, capacity=capacity), k, v)


def dense(heads: int, k: torch.Tensor, v: torch.Tensor) -> LayerStep:
    config = _config(heads, k)
    return LayerStep(config, DynamicCache(config=config), k, v)
