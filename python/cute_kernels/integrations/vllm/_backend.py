"""vLLM's side: the backend as it is chosen and asked, the builder of a step's metadata, a layer's implementation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, KVCacheLayout

from cute_kernels.integrations._serving.layer import SparseKVLayer
from cute_kernels.integrations._serving.step import BLOCK_TOKENS, Step, Steps
from cute_kernels.integrations.vllm._options import check_engine, check_layer, page_config
from cute_kernels.integrations.vllm._requests import RequestsByBlock

_engine: list[Any] = []  # the configuration of the engine whose model was made last in this process


class SparseKVBackend(AttentionBackend):
    """Blocks of 64 tokens, which are pages of one tile: a block's bytes are the compressed keys and values."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseKVImpl]:
        return SparseKVImpl

    @staticmethod
    def get_builder_cls() -> type[SparseKVMetadataBuilder]:
        return SparseKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [BLOCK_TOKENS]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 8 <= head_size <= 256 and head_size % 8 == 0

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A block is one state of 64 tokens: its slot."""
        if not isinstance(spec, FullAttentionSpec):
            raise ValueError(f"layers of {type(spec).__name__} are not served, only full attention")
        config = page_config(_engine[0], spec.num_kv_heads, spec.head_size, spec.dtype)  # vLLM asks without its own
        return replace(spec, tokens_per_state=BLOCK_TOKENS, state_content_bytes=config.slot_bytes)


class SparseKVCPUBackend(SparseKVBackend):
    """The same by the name under which the CPU platform looks for its backend."""

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


@dataclass(frozen=True)
class SparseKVMetadata(AttentionMetadata):
    step: Step


class SparseKVMetadataBuilder(AttentionMetadataBuilder[SparseKVMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        check_engine(vllm_config)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        impls = [layer.impl.sparse for layer in layers.values() if isinstance(layer.impl, SparseKVImpl)]
        most, tokens = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        self._steps, self._names = Steps(impls, most, tokens, device), RequestsByBlock(most)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SparseKVMetadata:
        common = common_attn_metadata
        ends = common.seq_lens_cpu_upper_bound  # exact without speculation
        if ends is None or common.is_prefilling is None:
            raise RuntimeError("the model runner must say how long requests are and which read their prompts")
        count = int((common.query_start_loc_cpu.diff() > 0).sum())  # without padding, which is behind
        starts = common.query_start_loc_cpu.numpy()[: count + 1].astype(np.int64)
        before, new_ends = ends.numpy()[:count] - np.diff(starts), ends.numpy()[:count].astype(np.int64)
        prefilling = common.is_prefilling.numpy()[:count].astype(bool)
        # Whether a request goes on or is another one in the same row, the runner does not say: a chunk of a prompt that
        # starts with a page starts with an empty window, too.
        begins = (prefilling & (before % BLOCK_TOKENS == 0)) | (before == 0)
        table = common.block_table_tensor[:count]
        if common.req_idx is not None:
            request = np.asarray(common.req_idx[:count], dtype=np.int64)
        else:
            request = self._names.rows(table.numpy(), before, new_ends, begins)
        return SparseKVMetadata(self._steps.step(request, starts, new_ends, begins, table, common.num_reqs - count))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> SparseKVMetadata:
        return SparseKVMetadata(self._steps.padding(common_attn_metadata.num_reqs))


class SparseKVImpl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        vllm_config = get_current_vllm_config()
        check_engine(vllm_config)
        check_layer(
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            attn_type=attn_type,
            kv_sharing_target_layer_name=kv_sharing_target_layer_name,
            others=others,
        )
        _engine[:] = [vllm_config]
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        config = page_config(vllm_config, self.num_kv_heads, head_size, vllm_config.model_config.dtype)
        rows = vllm_config.scheduler_config.max_num_seqs + 1
        self.sparse = SparseKVLayer(config, self.scale, rows, torch.get_default_device())

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseKVMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise RuntimeError("fused quantization of outputs is not served")
        if attn_metadata is None:  # vLLM measures memory
            return output
        queries, results = (x.view(-1, self.num_heads, self.head_size) for x in (query, output))
        keys, values = (x.view(-1, self.num_kv_heads, self.head_size) for x in (key, value))
        self.sparse.forward(attn_metadata.step, queries, keys, values, kv_cache, results)
        return output
