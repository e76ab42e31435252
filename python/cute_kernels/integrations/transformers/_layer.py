"""One layer of a `SparseKVCache`: what Transformers asks of a cache layer, on a `KVCache`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from cute_kernels._attention import dense
from cute_kernels._cache.rows import core_of
from cute_kernels._runtime.backends import resolve
from cute_kernels._runtime.extension import _C, CODEC_IDS, TILE_FORMATS
from cute_kernels.distributed import ShardedKVCache
from cute_kernels.integrations.transformers import _support
from cute_kernels.integrations.transformers._attention import ForwardPass, NewTokens, dense_attention
from cute_kernels.kv_cache import KVCache
from cute_kernels.merging import merge_states

# New tokens on a cache that is not empty: up to so many, and no more than the dense window, are appended first and
# attend through the compressed cache. More of them (a next turn's prompt, a chunk of one) attend to what is cached and
# to one another before they are compressed: see `_extend`.
DIRECT_TOKENS = 32
HEADROOM = 256  # free tokens a sequence, at least, when a cache without a fixed capacity takes memory


@dataclass(frozen=True)
class Settings:
    """How a layer keeps its tokens."""

    options: dict[str, Any]  # of KVCache: what is kept, rules and codecs
    head_dim: int
    window: int
    capacity: int | None  # tokens a sequence may have, with memory for all of them from the start; None: grows
    dtype: torch.dtype | None
    backend: str
    mesh: Any = None  # over which the layer's tokens are spread; None: one device has them all
    heads_size: int = 1  # ranks that divide the model's heads among them


class SparseLayer(CacheLayerMixin):
    """Keys and values of one layer.

    seen: columns so far, padding and evicted tokens included. evicted: of these, tokens that the layer does not have,
    as many in every row.
    """

    is_compileable = False
    is_sliding = False
    is_croppable = True

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.kv: KVCache | ShardedKVCache | None = None
        self.seen = self.evicted = 0
        self._room = 0  # tokens a sequence
        self._made_for: tuple[Any, ...] = ()

    # ---- What Transformers calls ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: memory is taken when the first tokens come, for as many as there are."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The new keys and values (B, Hkv, n, D), marked for the attention function, which stores them."""
        new = NewTokens(self, key_states, value_states)
        return new, new

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        # Transformers before 5.2 hands over the positions of the queries rather than their number.
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.seen + new, 0

    def get_max_length(self) -> int:
        return self.settings.capacity or -1

    def get_max_cache_shape(self) -> int:  # the name of get_max_length before Transformers 5.10
        return self.get_max_length()

    @property
    def batch_size(self) -> int:
        return -1 if self.kv is None else self.kv.batch

    def reset(self) -> None:
        self.seen = self.evicted = 0
        if self.kv is not None:
            self.kv.reset()

    def reorder_cache(self, beam_idx: list[int] | Tensor) -> None:
        if self.seen:
            self._here("reorder_cache").reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.seen:
            kv = self._here("batch_repeat_interleave")
            self._fit(kv, repeats * kv.batch)
            kv.repeat_interleave(repeats)

    def batch_select_indices(self, indices: list[int] | Tensor) -> None:
        if self.seen:
            kv = self._here("batch_select_indices")
            self._fit(kv, len(indices))
            kv.select(indices)

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError("crop the SparseKVCache, not a layer of it: layers do not know the padding")

    def offload(self) -> None:
        raise NotImplementedError("SparseKVCache does not move to the CPU: offloaded caches are not supported")

    prefetch = offload

    # ---- What the cache calls ---------------------------------------------------------------------------------------

    def fill(self, keys: Tensor, values: Tensor, seen: int, valid: Tensor | None) -> None:
        """Takes the tokens of a dense layer, (B, Hkv, T, D) each, that stand for `seen` columns; T < seen: the others
        were evicted. valid: (B, T) bool, which of them are tokens; None: all."""
        kv = self._start(keys, keys.shape[2])
        # A view may have its channels apart, which the kernels do not read.
        keys, values = ((x if x.stride(3) == 1 else x.contiguous()).to(kv.dtype) for x in (keys, values))
        if valid is None or bool((valid[:, 1:] >= valid[:, :-1]).all()):
            kv.prefill(keys, values, lengths=None if valid is None else valid.sum(1).tolist())
        else:  # several turns with padding between them
            kv.prefill(keys[:, :, :0], values[:, :, :0])  # takes the rows into use
            for row, columns in enumerate(valid):
                index = columns.nonzero().flatten().to(keys.device)
                kv.prefill(keys[row : row + 1, :, index], values[row : row + 1, :, index], sequences=[row])
        self.seen, self.evicted = seen, seen - keys.shape[2]

    def reserve(self, columns: int) -> None:
        """Memory for so many more columns, taken now."""
        if self.kv is None:
            raise RuntimeError("there are no tokens yet that more could follow: run the prompt before reserve")
        if isinstance(self.kv, ShardedKVCache):  # has the memory for its capacity
            if self.seen + columns > self.kv.capacity:
                raise RuntimeError(
                    f"{self.seen} tokens and {columns} more exceed capacity = {self.kv.capacity} of the SparseKVCache"
                )
            return
        self._grow(self.kv, self.seen + columns - self.evicted)
        self.kv.reserve(columns)

    @property
    def captured(self) -> bool:
        """Whether graphs may append tokens that the host does not know of."""
        return isinstance(self.kv, KVCache) and core_of(self.kv).captured

    def forget_graphs(self) -> None:
        """All of them are gone."""
        if isinstance(self.kv, KVCache):
            core_of(self.kv).forget_graphs()

    def check_rows_move(self, what: str) -> None:
        """Raises NotImplementedError for what a cache over a mesh does not have."""
        if self.settings.mesh is not None:
            raise NotImplementedError(
                f"a SparseKVCache over a mesh with 'cp' has no {what}: beams, assisted decoding and masks that take "
                "tokens back need a cache on one device"
            )

    def cut(self, columns: int, seen: int, lengths: list[int] | None) -> None:
        """Drops the newest columns, which leaves `seen` of them and of each row `lengths` tokens, evicted ones counted;
        None: drops as many tokens."""
        if self.seen:
            self._here("crop").crop(-columns if lengths is None else self._held(lengths))
        self.seen = seen

    # ---- What the attention function calls --------------------------------------------------------------------------

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        forward: ForwardPass,
        scaling: float | None,
    ) -> Tensor:
        """Stores the new tokens and attends to all; query (B, Hq, n, D), keys and values (B, Hkv, n, D)
        -> (B, n, Hq, D) of query's dtype."""
        columns = forward.columns
        if self.seen != columns.seen:
            raise RuntimeError(
                f"layer {getattr(module, 'layer_idx', '?')} of the SparseKVCache has seen {self.seen} "
                f"columns, the pass starts at {columns.seen}: an earlier pass failed; reset() the cache"
            )
        end = columns.seen + columns.new
        self._check(keys, values, end)
        first = self.seen == 0
        kv = self._start(keys, columns.new) if first else self._filled
        if first and columns.left_padded:
            out = self._prefill(kv, module, query, keys, values, forward, scaling)
        else:
            forward.cache.begin(columns)
            if not first:
                self._continue(kv, columns.keep, end - self.evicted)
            if columns.fresh is None and (columns.new == 1 or columns.new <= min(self.settings.window, DIRECT_TOKENS)):
                out = self._step(kv, query, keys, values, scaling)
            else:
                out = self._extend(kv, module, query, keys, values, columns.fresh, scaling)
        self.seen, forward.cache.unfinished = end, False
        return out

    def _check(self, keys: Tensor, values: Tensor, end: int) -> None:
        """Of new tokens after which there are `end` columns; nothing has changed yet."""
        capacity, head_dim = self.settings.capacity, self.settings.head_dim
        tokens = end - self.evicted
        if capacity is not None and tokens > capacity:
            raise ValueError(f"{tokens} tokens exceed capacity = {capacity} of the SparseKVCache")
        if keys.shape[3] != head_dim:
            raise ValueError(
                f"the SparseKVCache was made for head_dim {head_dim}, got keys of {keys.shape[3]}: make it of the "
                "model that uses it, SparseKVCache(model, ...)"
            )
        if keys.shape != values.shape:
            raise ValueError(
                f"keys and values must be alike in shape, got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if self.seen == 0:
            _support.storage_dtype(self.settings.dtype, keys.dtype)  # raises
        elif keys.shape[0] != self._filled.batch:
            raise ValueError(
                f"the cache holds {self._filled.batch} sequences of {self.seen} tokens, got keys of {keys.shape[0]}; "
                "use another SparseKVCache or reset() this one"
            )

    def _step(
        self, kv: KVCache | ShardedKVCache, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None
    ) -> Tensor:
        dtype, backend = kv.dtype, self.settings.backend
        if isinstance(kv, ShardedKVCache):
            out = kv.step(query.to(dtype), keys.to(dtype), values.to(dtype), scale=scaling, backend=backend)
            return out.transpose(1, 2).to(query.dtype)
        core = core_of(kv)
        if query.dtype is dtype and keys.dtype is dtype and values.dtype is dtype:  # Tensor.to takes a microsecond
            return core.step(query, keys, values, scaling, backend, tokens_first=True)
        query_dtype = query.dtype
        query, keys, values = query.to(dtype), keys.to(dtype), values.to(dtype)
        return core.step(query, keys, values, scaling, backend, tokens_first=True).to(query_dtype)

    def _prefill(
        self,
        kv: KVCache | ShardedKVCache,
        module: nn.Module,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        forward: ForwardPass,
        scaling: float | None,
    ) -> Tensor:
        lengths = forward.columns.counts()
        mask = None if lengths is None else forward.dense_mask()
        out = dense_attention(module, query, keys, values, mask, scaling=scaling)[0]
        forward.cache.begin(
            forward.columns
        )  # after what may take too much memory: a smaller batch can be tried at once
        kv.prefill(keys.to(kv.dtype), values.to(kv.dtype), lengths=lengths)
        return out

    def _extend(
        self,
        kv: KVCache | ShardedKVCache,
        module: nn.Module,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        fresh: Tensor | None,
        scaling: float | None,
    ) -> Tensor:
        """Attention to what is cached and among the new tokens, which are then appended: merged by log-sum-exps where
        there is a kernel for it, else, sequence by sequence, the model's own attention to a decompressed copy."""
        if fresh is None and kv.batch and isinstance(kv, KVCache) and self._has_prefill_kernel(kv, query):
            out = self._merged(kv, query, keys, values, scaling)
            kv.append(keys, values)
            return out
        batch, heads, new, head_dim = query.shape
        out = query.new_zeros(batch, new, heads, head_dim)
        if not kv.batch:  # a first pass that is not padded on the left
            kv.prefill(*(x[:, :, :0].to(kv.dtype) for x in (keys, values)))
        for row in range(batch):
            index = slice(None) if fresh is None else fresh[row].nonzero().flatten().to(query.device)
            q, k, v = (x[row : row + 1, :, index] for x in (query, keys, values))
            if not q.shape[2]:
                continue
            old_k, old_v = (old.to(q.dtype)[None] for old in kv.dense(row))
            mask, cached = None, old_k.shape[2]
            if cached:
                mask = q.new_ones(1, 1, q.shape[2], cached + q.shape[2], dtype=torch.bool).tril(cached)
            every_k, every_v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
            out[row, index] = dense_attention(module, q, every_k, every_v, mask, scaling=scaling)[0][0]
            if fresh is not None:
                kv.append(k.to(kv.dtype), v.to(kv.dtype), sequences=[row])
        if fresh is None:
            kv.append(keys.to(kv.dtype), values.to(kv.dtype))
        return out

    def _has_prefill_kernel(self, kv: KVCache, query: Tensor) -> bool:
        """Whether many queries attend to the compressed cache faster than to a decompressed one."""
        stored = core_of(kv).config
        if query.dtype is not kv.dtype or not query.is_cuda or stored.key_codec != stored.value_codec:
            return False
        if resolve(self.settings.backend, query.device) != "sm90":
            return False
        return _C.cuda.has_prefill_kernel(CODEC_IDS[stored.key_codec], TILE_FORMATS[stored.tile_format])

    def _merged(self, kv: KVCache, query: Tensor, keys: Tensor, values: Tensor, scaling: float | None) -> Tensor:
        """Two parts, merged by their log-sum-exps: all that is cached, which every new token sees, and the new ones."""
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        cached = kv.attend(query, scale=scale, causal=False, return_lse=True, backend=self.settings.backend)
        parts = cached, dense.causal(query, keys, values, scale)
        outs, lses = zip(*parts, strict=True)
        return merge_states(outs, lses)[0].transpose(1, 2)

    # ---- Memory ------------------------------------------------------------------------------------------------------

    @property
    def _filled(self) -> KVCache | ShardedKVCache:
        assert self.kv is not None, "there are columns without a cache"
        return self.kv

    def _here(self, what: str) -> KVCache:
        """The tokens, on one device."""
        self.check_rows_move(what)
        kv = self._filled
        assert isinstance(kv, KVCache)
        return kv

    def _held(self, lengths: list[int]) -> list[int]:
        """Of tokens that count, those that the layer has."""
        return [length - self.evicted for length in lengths]

    def _start(self, keys: Tensor, columns: int) -> KVCache | ShardedKVCache:
        """A KVCache for these tokens: heads are counted here, a tensor parallel model has only some of the config's."""
        batch, kv_heads, _, head_dim = keys.shape
        dtype = _support.storage_dtype(self.settings.dtype, keys.dtype)
        made_for = (batch, kv_heads, head_dim, dtype, keys.device)
        if self.kv is not None and self._made_for == made_for and columns <= self._room:
            return self.kv  # after reset()
        self.kv = None  # frees its memory before more is taken
        self._made_for, self._room = made_for, self.settings.capacity or columns + max(HEADROOM, columns // 8)
        options = self.settings.options | {
            "max_batch": batch,
            "head_dim": head_dim,
            "dtype": dtype,
            "capacity": self._room,
            "window": self.settings.window,
            "device": keys.device,
        }
        if self.settings.mesh is None:
            self.kv = KVCache(kv_heads=kv_heads, max_append=1, **options)
        else:
            heads = kv_heads * self.settings.heads_size
            self.kv = ShardedKVCache(group=self.settings.mesh, kv_heads=heads, **options)
        return self.kv

    def _continue(self, kv: KVCache | ShardedKVCache, keep: list[int] | None, end: int) -> None:
        """A capacity of at least `end` tokens, without the tokens that no longer count."""
        if keep is not None:
            self._here("crop").crop(self._held(keep))
        self._grow(kv, end)

    def _fit(self, kv: KVCache, batch: int) -> None:
        if batch > kv.max_batch:
            kv.grow(max_batch=batch)

    def _grow(self, kv: KVCache | ShardedKVCache, columns: int) -> None:
        if columns > self._room and self.settings.capacity is None and isinstance(kv, KVCache):
            self._room = columns + max(HEADROOM, columns // 4)
            kv.grow(capacity=self._room)
