"""Transformers' continuous batching on compressed pages: its scheduler and block manager, our memory and attention.

Transformers' manager has no public way to take another cache: what it builds a processor of is private, so versions
that were not tested are refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_manager import BlockManager, FullAttentionCacheAllocator
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
)
from transformers.generation.continuous_batching.initialization import update_cb_config_after_cache_creation
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING

from cute_kernels import paged
from cute_kernels._runtime import checks
from cute_kernels.integrations._serving.layer import SparseKVLayer
from cute_kernels.integrations._serving.step import BLOCK_TOKENS, UNKNOWN_LENGTHS, Step, Steps
from cute_kernels.integrations.transformers import _batching_options, _support

ATTENTION = "paged|sparse_kv"


class SparsePagedCache(PagedAttentionCache):
    """Blocks of 64 tokens that hold compressed tiles, and a dense window for each request under way.

    The base class's own constructor allocates dense blocks and is not called; what the scheduler and the inputs read of
    a cache is set here.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: paged.PageConfig,
        layers: int,
        *,
        blocks: int,
        requests: int,
        tokens: int,
        graphs: bool,
    ) -> None:
        """blocks: of 64 tokens, for all layers. requests: at most, under way. tokens: new ones of a step. graphs: steps
        of decoding alone are captured."""
        text = model.config.get_text_config()
        self.config, self.dtype, self.device = text, model.dtype, model.device
        self.num_key_value_heads, self.head_dim = config.kv_heads, config.head_dim
        self.block_size, self.num_blocks, self.max_batch_tokens = BLOCK_TOKENS, blocks, tokens
        self.num_pages = blocks * BLOCK_TOKENS
        self.num_groups = self.num_full_attention_groups = 1
        self.num_sliding_attention_groups = self.max_sliding_window_blocks_per_request = 0
        # Transformers captures steps with a block table, which is for flash attention: our own is beside it.
        self.max_blocks_per_request = blocks if graphs else 0
        self.read_trash_index = self.write_trash_index = self.sentinel_index = 0  # of dense pages, which there are not
        self.allow_block_sharing = self.use_prefix_sharing = True
        self.group_cache_managers = [FullAttentionCacheAllocator(0, BLOCK_TOKENS, allow_block_sharing=True)]
        self._block_manager = BlockManager(blocks, BLOCK_TOKENS, tp_on=False)
        self._total_prefix_length = 0
        shape = blocks, config.kv_heads, 1, config.slot_bytes
        self.key_cache = [torch.zeros(shape, dtype=torch.int8, device=self.device) for _ in range(layers)]
        self.value_cache: list[Tensor] = []  # behind the keys of the same slot
        self.layers = [SparseKVLayer(config, 0.0, requests + 1, self.device) for _ in range(layers)]
        self._steps = Steps(self.layers, requests, blocks * BLOCK_TOKENS, self.device)
        for layer, memory in zip(self.layers, self.key_cache):
            layer.bind(memory)  # not in a capture, whose memory is the graph's
        self._free = list(range(requests))
        self._rows: dict[str, int] = {}  # of requests under way
        self._begun: set[str] = set()
        self._batch: list[tuple[str, int, int]] = []  # requests of the next step, tokens before it, new tokens
        self._step: Step | None = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps run on another stream

    @property
    def nbytes(self) -> int:
        """Of blocks, and of all that layers keep beside them."""
        return sum(part.nbytes for part in (*self.key_cache, *self.layers, self._steps))

    def allocate_blocks(self, n_blocks: int, request_id: str, allocated_blocks: int) -> int | None:
        """None, where a request that begins finds no free window: it waits, as for blocks."""
        if request_id not in self._rows and not self._free:
            return None
        allocated = super().allocate_blocks(n_blocks, request_id, allocated_blocks)
        if allocated is not None and request_id not in self._rows:
            self._rows[request_id] = self._free.pop()
        return allocated

    def free_blocks(self, request_id: str) -> None:
        super().free_blocks(request_id)
        if request_id in self._rows:
            self._free.append(self._rows.pop(request_id))
            self._begun.discard(request_id)

    def search_prefix_match(self, request_id: str, prompt_ids: list[int]) -> int:
        """Never the whole prompt: a request starts at the beginning of a block."""
        return super().search_prefix_match(request_id, prompt_ids[:-1])

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: list[list[int]] | None,
        write_index: list[list[int]],
    ) -> None:
        """One more request of the next step, in the order of the batch. No index is written: pages have a table."""
        self._batch.append((request_id, past_length, query_length))

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        """The same, of a step of decoding alone."""
        self._batch.append((request_id, past_length, query_length))

    def begin_step(self, padding: int, captured: bool) -> None:
        """Describes the step of the requests that were named, or of padding alone, to the layers.

        padding: rows behind those. captured: a graph replays it, also for requests of other lengths.
        """
        batch, self._batch = self._batch, []
        if not batch:
            self._step = self._steps.padding(padding)
            return
        ids, past, new = zip(*batch)
        table = self.group_cache_managers[0].block_table
        blocks = np.zeros((len(ids), max(len(table[each]) for each in ids)), dtype=np.int32)
        for i, request_id in enumerate(ids):
            blocks[i, : len(table[request_id])] = table[request_id]
        counts = np.array(new)
        step = self._steps.step(
            np.array([self._rows[each] for each in ids]),
            np.concatenate([[0], counts.cumsum()]),
            np.array(past) + counts,
            np.array([each not in self._begun for each in ids]),
            torch.from_numpy(blocks).to(self.device),
            padding,
        )
        self._step = replace(step, expected=UNKNOWN_LENGTHS) if captured else step
        self._begun.update(ids)

    @property
    def step(self) -> Step:
        """The step that runs."""
        if self._step is None:
            raise RuntimeError("no step has begun")
        return self._step

    def copy_cache(self, list_source_blocks: list[int], list_forked_blocks: list[int]) -> None:
        raise RuntimeError("requests cannot fork: num_return_sequences must be 1")


def memory_parts(config: paged.PageConfig, layers: int, requests: int) -> tuple[int, int]:
    """Bytes of all layers: of windows and what else does not depend on the number of blocks; of a block."""
    rows = requests + 1
    beside = sum(size.nbytes for size in config.pool_tensors(0, rows, 0).values())
    tables = 2 * requests * 4 + layers * rows * 4  # as Steps has them; windows count their lengths themselves
    return layers * (rows * config.window_bytes + beside) + tables, layers * config.page_bytes + rows * 4


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cache: SparsePagedCache | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function: query (1, Hq, tokens, D), key and value (1, Hkv, tokens, D) -> (1, tokens, Hq, D)."""
    if not isinstance(cache, SparsePagedCache):
        raise RuntimeError(f"attention {ATTENTION!r} runs in a SparseKVBatching only")
    layer, index = cache.layers[module.layer_idx], module.layer_idx
    layer.scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    tokens_first = [x[0].transpose(0, 1) for x in (query, key, value)]
    out = torch.zeros(tokens_first[0].shape, dtype=query.dtype, device=query.device)
    layer.forward(cache.step, *tokens_first, cache.key_cache[index], out)
    return out[None], None


AttentionInterface.register(ATTENTION, attend)


class SparseBatchProcessor(ContinuousBatchProcessor):
    """Describes each step before the model runs: replays of a graph ask nothing."""

    cache: SparsePagedCache

    def _generation_step(self, model: nn.Module) -> None:
        batch = self.inputs_and_outputs
        captures = batch.use_block_table
        self._begin(batch.num_q_tokens - batch.num_request_in_batch if captures else 0, captures)
        super()._generation_step(model)

    @torch.no_grad()
    def warmup(self, model: nn.Module) -> None:
        """Captures a graph for every number of rows, of padding alone."""
        batch, rows = self.inputs_and_outputs, 1
        while self.model_runner.use_cuda_graph_decode:
            batch.num_q_tokens, batch.max_kv_read, batch.num_request_in_batch = rows, 0, 0
            batch.use_block_table = True
            self._begin(rows, True)
            self.model_runner.compute_batch(model, batch.get_model_kwargs(use_padding=True))
            if rows == batch.max_requests_per_batch:
                break
            rows = min(2 * rows, batch.max_requests_per_batch)
        self.inputs_and_outputs.reset()

    def _begin(self, padding: int, captured: bool) -> None:
        stream = self.inputs_and_outputs.compute_stream
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self.cache.begin_step(padding, captured)


class SparseKVBatching(ContinuousBatchingManager):
    """A manager of continuous batching whose blocks hold compressed tiles.

        with SparseKVBatching(model, sparsity=0.7, memory=8 << 30, requests=64) as manager:
            manager.add_request(ids, max_new_tokens=100)
            manager.get_result()

    model: a causal language model, as `SparseKVCache` takes it, float16 or bfloat16, not over several devices.
    sparsity, keep, key_keep, value_keep, codec, window: as for `KVCache`.
    memory: bytes for blocks and windows of all layers. requests: at most, under way.
    generation_config: as for Transformers' own manager; num_return_sequences must be 1.
    batching: Transformers' options; those for block size, memory, compilation, asynchronous batching and offloading are
        not for this cache, and refused. use_cuda_graph: whether steps of decoding alone are replays of graphs, by
        default on GPUs; a graph is captured where a number of rows, rounded up to a power of two, is new, or for all of
        them by `warmup()`.

    Methods are those of Transformers' manager. Raises TypeError or ValueError for arguments or a model that are not
    served; ImportError for another Transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        memory: int,
        requests: int = 64,
        sparsity: float | None = None,
        keep: int | None = None,
        key_keep: int | None = None,
        value_keep: int | None = None,
        codec: str | None = None,
        window: int = 32,
        generation_config: GenerationConfig | None = None,
        batching: ContinuousBatchingConfig | None = None,
    ) -> None:
        _batching_options.check_version()
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be a Transformers model, got {type(model).__name__}")
        text = _support.decoder_config(model)
        layers, head_dim = _support.check_layers(text), _support.check_attention(text)
        if model.dtype not in checks.CACHE_DTYPES:
            raise ValueError(f"model must compute in float16 or bfloat16, got {checks.dtype_name(model.dtype)}")
        kept = {"sparsity": sparsity, "keep": keep, "key_keep": key_keep, "value_keep": value_keep, "codec": codec}
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        self._config = paged.configure(
            kv_heads=heads, head_dim=head_dim, dtype=model.dtype, max_append=1, window=window, **kept
        )
        self._most = checks.integer(requests, "requests")
        if self._most < 1:
            raise ValueError(f"requests must be at least 1, got {requests}")
        if getattr(model, "_device_mesh", None) is not None:
            raise ValueError("model must be on one device, this one has a device mesh")
        fixed, block = memory_parts(self._config, layers, self._most)
        self._blocks = (checks.integer(memory, "memory") - fixed) // block
        if self._blocks < 1:
            raise ValueError(
                f"memory must hold a block and the dense windows of {self._most} requests, {fixed + block} bytes, got "
                f"{memory}"
            )
        chosen = GenerationConfig() if generation_config is None else generation_config
        if (chosen.num_return_sequences or 1) != 1:
            raise ValueError(f"num_return_sequences must be 1, got {chosen.num_return_sequences}")
        super().__init__(model, chosen, _batching_options.resolved(batching, self._blocks, self._most, model.device))

    def switch_to_cb_friendly_attn(self, model: Any) -> None:
        """Nothing: the model attends as before until `start` or `warmup`."""

    def warmup(self) -> None:
        self._switch()
        super().warmup()

    def start(self) -> None:
        if not self.is_running():
            self._switch()
        super().start()

    def _switch(self) -> None:
        now = self.model.config._attn_implementation
        if now != ATTENTION:
            self._original_attn_impl = now  # which `stop` gives back
            self.model.set_attn_implementation(ATTENTION)

    @property
    def page_config(self) -> paged.PageConfig:
        """Of a layer."""
        return self._config

    @property
    def memory(self) -> int:
        """Bytes of blocks and windows, once the first request came."""
        processor = self.batch_processor
        return 0 if processor is None else processor.cache.nbytes

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        processor = getattr(self, "batch_processor", None)
        if isinstance(processor, ContinuousBatchProcessor):
            processor.reset()
            return processor
        options, text = self.continuous_batching_config, self.model.config.get_text_config()
        cache = SparsePagedCache(
            self.model,
            self._config,
            text.num_hidden_layers,
            blocks=self._blocks,
            requests=self._most,
            tokens=options.max_batch_tokens,
            graphs=any(options.cuda_graph_booleans),
        )
        self._use_prefix_sharing = True
        update_cb_config_after_cache_creation(options, self._blocks, cache.max_batch_tokens, True)
        scheduler = SCHEDULER_MAPPING[options.scheduler_type](
            cache=cache,
            safety_margin=options.safety_margin,
            max_requests_per_batch=options.max_requests_per_batch,
        )
        return SparseBatchProcessor(
            cache=cache,
            config=text,
            generation_config=self.generation_config,
            continuous_batching_config=options,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=scheduler,
            distributed_helper=self.distributed_helper,
        )

    def __enter__(self) -> SparseKVBatching:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(block=True)
        self.destroy()
