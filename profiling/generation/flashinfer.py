"""A dense paged cache, and FlashInfer's attention to it in steps of one token: what servers run without sparsity.

Needs the package flashinfer-python (the extra `peers`), which compiles its kernels at the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from profiling.peers.flashinfer import PAGE, WORKSPACE_BYTES

IMPLEMENTATION = "paged_decode"  # as Transformers knows it, which takes names with "flash" for packages


class FlashInferCache(Cache):
    """Keys and values in pages of `PAGE` tokens, of sequences of equal length; all pages are there from the start.

    A prompt runs by torch's sdpa. Before each step of one token `prepare` makes FlashInfer's plan for all layers; the
    step itself may be captured in a CUDA graph.

    Raises:
        RuntimeError: flashinfer-python is not installed.
        ValueError: the model has layers other than full attention.
    """

    def __init__(self, config: Any, capacity: int) -> None:
        try:
            import flashinfer
        except ImportError as error:
            raise RuntimeError("FlashInfer is not installed: pip install 'cute-kernels[peers]'") from error
        config = config.get_text_config(decoder=True)
        other = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
        if other or getattr(config, "sliding_window", None):
            raise ValueError(f"FlashInferCache takes full attention, not {', '.join(other) or 'a sliding window'}")
        self.flashinfer = flashinfer
        self.query_heads: int = config.num_attention_heads
        self.pages = -(-capacity // PAGE)  # of a sequence
        self.prompt_tokens = self.steps = 0
        self.wrapper: Any = None
        super().__init__(layers=[_PagedLayer(self) for _ in range(config.num_hidden_layers)])

    @property
    def tokens(self) -> int:
        """Of each sequence, with that of the step that was prepared."""
        return self.prompt_tokens + self.steps

    def prepare(self) -> None:
        """Plans a step of one token. Waits for nothing on the device."""
        keys = self.layers[0].keys
        batch, (_, _, heads, head_dim) = keys.shape[0] // self.pages, keys.shape
        if self.wrapper is None:
            self._make_wrapper(batch, keys.device)
        if self.tokens == self.pages * PAGE:
            raise ValueError(f"FlashInferCache: no room beyond {self.tokens} tokens a sequence")
        self.steps += 1
        pages = -(-self.tokens // PAGE)
        if self._indices.numel() != batch * pages:
            each = torch.arange(pages, dtype=torch.int32, device=keys.device)
            self._indices = (self._batch_indices[:, None] * self.pages + each).flatten()
        self._positions.fill_(self.tokens - 1)
        self.wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32) * pages,
            self._indices,
            torch.full((batch,), (self.tokens - 1) % PAGE + 1, dtype=torch.int32),
            self.query_heads,
            heads,
            head_dim,
            PAGE,
            q_data_type=keys.dtype,
            kv_data_type=keys.dtype,
        )

    def _make_wrapper(self, batch: int, device: torch.device) -> None:
        def integers(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._table = integers(batch + 1), integers(batch * self.pages), integers(batch)
        self._batch_indices = torch.arange(batch, dtype=torch.int32, device=device)
        self._positions, self._indices = integers(batch), integers(0)
        self.wrapper = self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._table[0],
            paged_kv_indices_buffer=self._table[1],
            paged_kv_last_page_len_buffer=self._table[2],
        )

    def append(self, layer: _PagedLayer, keys: Tensor, values: Tensor) -> None:
        """One token a sequence, each (B, Hkv, 1, D)."""
        indptr, indices, last_page_len = self._table
        self.flashinfer.append_paged_kv_cache(
            keys.squeeze(2),
            values.squeeze(2),
            self._batch_indices,
            self._positions,
            (layer.keys, layer.values),
            indices,
            indptr,
            last_page_len,
        )

    def attend(self, module: Any, q: Tensor, keys: Tensor, values: Tensor, mask: Any, **options: Any) -> Any:
        """As Transformers calls attention: q (B, Hq, tokens, D), output (B, tokens, Hq, D)."""
        if self.steps == 0:
            return sdpa_attention_forward(module, q, keys, values, mask, **options)
        return self.wrapper.run(q.squeeze(2), (keys, values)).unsqueeze(1), None


class _PagedLayer(CacheLayerMixin):
    """keys, values (B*pages, PAGE, Hkv, D): page p of sequence b is b*pages + p."""

    def __init__(self, cache: FlashInferCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, head_dim = key_states.shape
        shape = batch * self.cache.pages, PAGE, heads, head_dim
        self.keys, self.values = key_states.new_zeros(shape), value_states.new_zeros(shape)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """What `FlashInferCache.attend` takes: the prompt's own states, then all pages."""
        if self.cache.steps:
            self.cache.append(self, key_states, value_states)
            return self.keys, self.values
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        batch, heads, tokens, head_dim = key_states.shape
        for pages, states in ((self.keys, key_states), (self.values, value_states)):
            pages.view(batch, -1, heads, head_dim)[:, :tokens] = states.transpose(1, 2)
        self.cache.prompt_tokens = tokens
        return key_states, value_states

    def get_seq_length(self) -> int:
        return self.cache.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.tokens + query_length, 0

    def get_max_length(self) -> int:
        return self.cache.pages * PAGE


@contextmanager
def attention(model: Any, cache: FlashInferCache) -> Iterator[None]:
    """The model's attention is the cache's."""
    before = model.config._attn_implementation
    AttentionInterface.register(IMPLEMENTATION, cache.attend)
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping[IMPLEMENTATION]
