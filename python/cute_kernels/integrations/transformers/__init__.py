"""Hugging Face Transformers: generate with a compressed KV cache.

    from cute_kernels.integrations.transformers import SparseKVCache

    model.generate(**inputs, past_key_values=SparseKVCache(model, sparsity=0.7))

Serves Transformers 5.0 to 5.17 (extra `transformers`) and decoder models whose layers all attend to every earlier
token: Llama, Mistral without a sliding window, Qwen 2 and 3, Gemma and their like.
"""

from __future__ import annotations

from cute_kernels.integrations.transformers._support import check_version

check_version()

from cute_kernels.integrations.transformers._attention import NAME
from cute_kernels.integrations.transformers.cache import SparseKVCache

__all__ = ["NAME", "SparseKVCache"]
