"""`SparseKVCache`: what a user passes to generate()."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from cute_kernels._runtime import checks
from cute_kernels.integrations.transformers import _dense, _graphs, _padding, _support
from cute_kernels.integrations.transformers._attention import DENSE, NAME, KVLength, TracedLength, register
from cute_kernels.integrations.transformers._layer import Settings, SparseLayer
from cute_kernels.rules import Rule

Number = TypeVar("Number", int, float)
PerLayer = Number | Sequence[Number | None] | Mapping[int, Number | None] | None


class SparseKVCache(Cache):
    """A KV cache for `generate` whose older tokens are pruned, stored as bitmaps and packed nonzeros.

        model.generate(**inputs, past_key_values=SparseKVCache(model, sparsity=0.7))
        SparseKVCache(model, key_keep=38, value_keep=64)                      # of head_dim channels
        SparseKVCache(model, sparsity=[0.5] * 4 + [0.8] * 28)                 # layer by layer
        SparseKVCache(model, sparsity={layer: 0.7 for layer in range(2, 32)}) # layers 0 and 1 are not pruned
        SparseKVCache(model, sparsity=0.7, value_rule="channel-magnitude")
        SparseKVCache(model, sparsity=0.7, graphs=True)                       # steps as replays of CUDA graphs
        SparseKVCache(model, sparsity=0.7, mesh=mesh, capacity=131072)        # tokens spread over several GPUs
        SparseKVCache.from_cache(dense_cache, model, sparsity=0.7)            # of tokens that were read already

    Prompts run through the model's own attention ("sdpa") on dense keys and values and are compressed behind it, layer
    by layer; new tokens attend to the compressed cache and a dense window of the newest tokens. Padding on the left
    never enters the cache; padding on the right is refused. Beams, several returned sequences, further turns on the
    same cache, `prefill_chunk_size` and prompt lookup work as with Transformers' DynamicCache. A prompt on a cache that
    is not empty attends to the pruned tokens.

    A cache that holds tokens goes on after them: its next pass takes an attention_mask that counts them, or none. For
    another prompt call `reset()` or make another cache. After a pass that failed midway, by Ctrl-C for example, a cache
    raises RuntimeError until it is `reset()`. A compiled model.forward is left for the mask, and twice a layer for the
    cache.

    config: the model. Or its own config, `model.config`: then its class, its devices and its generation_config are not
        checked here, and what does not fit shows with the first tokens. Its attention implementation, which must be
        "sdpa", is switched to "sparse_kv"; for all other caches, and without one, that is the same as "sdpa".
    sparsity, keep, key_keep, value_keep: as `cute_kernels.prune` and `KVCache` take them: the share of each token's
        channels to drop, or the number to keep, alike for keys and values or apart. With keep = head_dim nothing is
        lost. Each is one number for all layers, or a sequence of one number for each layer, or a mapping from layers'
        numbers to theirs. Layers that a mapping leaves out have None. A layer that has None of all four keeps every
        nonzero that its rules allow.
    key_rule, value_rule: pruning rules, as `KVCache` takes them; of `cute_kernels.rules` those that prune tile by tile.
    codec, key_codec, value_codec: as `KVCache` takes them.
    window: so many newest tokens stay dense at least.
    capacity: tokens a sequence may have, prompt and answer; memory for so many is taken at once. None: memory grows
        with the tokens.
    dtype: for models that compute in float32: store float16 or bfloat16, to which keys, values and queries are rounded.
        None: as the model computes, which must be float16 or bfloat16 then.
    backend: of `KVCache.attend`.
    mesh: a DeviceMesh of the dimensions "cp", "tp" or both; every rank runs the model on the same inputs. Along "cp"
        the tokens of every layer are spread, as by `cute_kernels.distributed.ShardedKVCache`, which needs capacity;
        prompts run whole on every rank, and samplers need one seed on all of them. No beams, no crop. Along "tp" the
        model's heads are spread, by its own plan or torch's: the cache takes the heads that come.

    graphs: run decoding steps, passes of one token a sequence, as replays of a CUDA graph, which the host does not slow
        down; config must be the model, whose `forward` is wrapped for it. The second step of a turn is captured; memory
        for a quarter more tokens, 256 at least, is taken then, and again when they are used up. What a replay reads,
        the weights first of all, must stay where it is; hooks inside the model run at the capture only. Prompts, and
        steps between which beams or assisted decoding change the cache, run as without it. So does everything where
        steps cannot be captured: a warning names the reason once.

    Raises TypeError and ValueError here for options that do not fit, and for what the config tells: layers with a
    sliding window or another kind of attention, logit soft-capping, keys and values shared between layers,
    encoder-decoder models, a float32 model, another 16-bit dtype than the model's, an attention implementation other
    than "sdpa". For a model also a generation_config that asks for another cache, such as a static one, and
    RuntimeError for a device without kernels. What only the tensors tell, such as the dtype of a model that was cast,
    is checked with the first tokens.

    The method is that of Mustafar (arXiv 2505.22913): per-token magnitude pruning of keys and values.
    """

    layers: list[SparseLayer]  # type: ignore[assignment]  # of one kind only

    def __init__(
        self,
        config: PreTrainedConfig | PreTrainedModel,
        *,
        sparsity: PerLayer[float] = None,
        keep: PerLayer[int] = None,
        key_keep: PerLayer[int] = None,
        value_keep: PerLayer[int] = None,
        key_rule: str | Rule = "magnitude",
        value_rule: str | Rule = "magnitude",
        codec: str | None = None,
        key_codec: str | None = None,
        value_codec: str | None = None,
        window: int = 32,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        backend: str = "auto",
        mesh: Any = None,
        graphs: bool = False,
    ) -> None:
        decoder = _support.decoder_config(config)
        layers = _support.check_layers(decoder)
        head_dim = _support.check_attention(decoder)
        model_dtype = config.dtype if isinstance(config, PreTrainedModel) else decoder.dtype
        _support.check_options(window, capacity, backend)
        checks.flag(graphs, "graphs")
        if graphs and not isinstance(config, PreTrainedModel):
            raise TypeError(f"graphs=True takes the model as config, got {type(config).__name__}")
        if isinstance(config, PreTrainedModel):
            _support.check_devices(config, backend)
        amounts = {"sparsity": sparsity, "keep": keep, "key_keep": key_keep, "value_keep": value_keep}
        every = _support.layer_options(head_dim, layers, amounts, key_rule, value_rule)
        stored = _support.cache_dtype(dtype, model_dtype)
        spread, heads_size = _support.check_mesh(mesh, decoder, capacity)
        codecs = {"codec": codec, "key_codec": key_codec, "value_codec": value_codec}
        _support.check_codecs(codecs, stored if dtype is not None else model_dtype)
        super().__init__(
            layers=[
                SparseLayer(Settings(own | codecs, head_dim, window, capacity, stored, backend, spread, heads_size))
                for own in every
            ]
        )
        self._valid: Tensor | None = None  # which columns are tokens: _padding.Columns.valid
        self._fixed = 0  # columns with evicted ones among them, which cannot be taken back
        self._hidden_layers = getattr(decoder, "num_hidden_layers", None)
        self.unfinished = False  # a change has begun and not come to its end: layers may differ
        self.steps: _graphs.StepGraphs | None = None
        _switch(decoder)
        if graphs and isinstance(config, PreTrainedModel):
            in_kernels = _support.prunes_in_kernels(key_rule, value_rule)
            self.steps = _graphs.StepGraphs(self, _graphs.refusal(config, mesh, in_kernels))
            _graphs.wrap(config)

    @classmethod
    def from_cache(
        cls,
        cache: Cache,
        config: PreTrainedConfig | PreTrainedModel,
        *,
        attention_mask: Tensor | None = None,
        seq_length: int | None = None,
        consume: bool = False,
        **options: Any,
    ) -> SparseKVCache:
        """A SparseKVCache of what a DynamicCache holds, from which tokens may have been evicted.

            dense = DynamicCache(config=model.config)
            model(prompt[:, :-1], past_key_values=dense)
            sparse = SparseKVCache.from_cache(dense, model, sparsity=0.7, consume=True)
            model.generate(prompt, past_key_values=sparse)

        Layers may hold different numbers of tokens, all heads and sequences of a layer the same. The cache goes on at
        the positions after seq_length, whatever was evicted. Evicted tokens cannot be taken back: a crop, or a mask
        that ends, within the first seq_length columns raises ValueError then.

        cache: its layers have keys and values (B, Hkv, T, D) of float16 or bfloat16, or float32 with `dtype=`.
        config: the model or its config, as for SparseKVCache. Of the model it is also seen whether a press masks tokens
            head by head; a config cannot tell.
        attention_mask: (B, T) of bool or integers, 0 for padding, which does not enter the cache. None: no padding.
        seq_length: tokens that the model has read. None: as many as the cache holds, which is right where nothing was
            evicted or a press has moved the keys to the positions that they have now.
        consume: give the memory of each dense layer back as soon as it is compressed; the dense cache is empty then.
            False: it stays as it is.
        options: keyword arguments of SparseKVCache.

        Raises what SparseKVCache raises; TypeError for what is no cache, ValueError for layers that are quantized,
        sliding, offloaded, without tokens or unlike the model's in number or head_dim, for heads of different lengths,
        for padding where tokens were evicted, for layers of different lengths without seq_length. All before anything
        is changed; a failure after that, for lack of memory, leaves a consumed cache without its first layers.
        """
        checks.flag(consume, "consume")
        decoder = _support.decoder_config(config)
        implementation = decoder._attn_implementation
        made = cls(config, **options)
        try:
            settings = made.layers[0].settings
            dense = _dense.read(
                cache,
                config,
                layers=len(made.layers),
                head_dim=settings.head_dim,
                dtype=settings.dtype,
                capacity=settings.capacity,
                attention_mask=attention_mask,
                seq_length=seq_length,
            )
            for source, layer in zip(cache.layers, made.layers):
                layer.fill(source.keys, source.values, dense.seen, dense.valid)
                if consume:
                    _dense.release(source)
        except BaseException:
            decoder._attn_implementation = implementation
            raise
        made._valid = dense.valid
        made._fixed = dense.seen if any(layer.evicted for layer in made.layers) else 0
        return made

    # ---- What the mask and attention functions call -----------------------------------------------------------------

    def arrive(self, columns: int, mask: Tensor | None, config: Any = None) -> _padding.Columns:
        """What a pass brings after which there are so many columns, with a mask (B, columns) bool or None; config: of
        the model that runs."""
        self._require_finished()
        layers = getattr(config, "num_hidden_layers", self._hidden_layers)
        if layers != self._hidden_layers:
            raise ValueError(
                f"the SparseKVCache was made for a model of {self._hidden_layers} layers, this one has {layers}: make "
                "it of the model that uses it, SparseKVCache(model, ...)"
            )
        seen = self.get_seq_length()
        found = _padding.arrive(self._valid, mask, seen, columns - seen)
        if found.keep is not None:
            self._check_cut(min(found.keep))
        return found

    def admits(self, mask: Tensor | None) -> bool:
        """Whether a step of one token a sequence, with a mask (B, columns) or None, adds a token to every row and takes
        none back. Waits for the device where there is a mask."""
        self._require_finished()
        found = _padding.arrive(self._valid, None if mask is None else mask.bool(), self.get_seq_length(), 1)
        return found.fresh is None and found.keep is None

    def begin(self, columns: _padding.Columns) -> None:
        """The pass starts to change a layer, which says by `unfinished` when it is done."""
        self.unfinished = True
        self._valid = columns.valid

    def _check_cut(self, left: int) -> None:
        if left < self._fixed:
            raise ValueError(
                f"of the first {self._fixed} columns some were evicted, so they cannot be cut; {left} would be left"
            )

    def _require_finished(self) -> None:
        if self.unfinished or any(layer.seen != self.layers[0].seen for layer in self.layers):
            raise RuntimeError(
                "an earlier pass or change of this SparseKVCache failed midway, and its layers may differ: reset() it "
                "and run the prompt again"
            )

    def _require_one_device(self, what: str) -> None:
        """Before anything changes."""
        for layer in self.layers:
            layer.check_rows_move(what)

    @contextmanager
    def _change(self, what: str) -> Iterator[None]:
        """Of all layers. What ends it before its end leaves the cache unfinished."""
        self._require_finished()
        if self.steps is not None:
            self.steps.changed(what)
        self.unfinished = True
        yield
        self.unfinished = False

    # ---- What generate() and the model call --------------------------------------------------------------------------

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[Any, int]:
        length, offset = self._layer(layer_idx).get_mask_sizes(query_length)
        if torch.compiler.is_compiling():
            return TracedLength(length, self), offset
        return KVLength.of(length, self), offset

    @torch.compiler.disable
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        return self._layer(layer_idx).update(key_states, value_states)

    def _layer(self, layer_idx: int) -> SparseLayer:
        if layer_idx >= len(self.layers):
            raise ValueError(f"the cache was made for a model of {len(self.layers)} layers, got layer_idx {layer_idx}")
        return self.layers[layer_idx]

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "SparseKVCache takes memory with the first tokens; it cannot be exported or compiled as a static cache"
        )

    def reset(self) -> None:
        """No tokens any more; memory stays."""
        self.unfinished = True
        if self.steps is not None:
            self.steps.changed("reset")
        super().reset()
        self._valid, self._fixed = None, 0
        self.unfinished = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._require_one_device("reorder_cache")
        rows = beam_idx.tolist()  # once, not in every layer
        with self._change("reorder_cache"):
            for layer in self.layers:
                layer.reorder_cache(rows)
            if self._valid is not None:
                self._valid = self._valid.index_select(0, beam_idx.to(self._valid.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._require_one_device("batch_repeat_interleave")
        with self._change("batch_repeat_interleave"):
            super().batch_repeat_interleave(repeats)
            if self._valid is not None:
                self._valid = self._valid.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._require_one_device("batch_select_indices")
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        rows = indices.tolist()
        with self._change("batch_select_indices"):
            for layer in self.layers:
                layer.batch_select_indices(rows)
            if self._valid is not None:
                self._valid = self._valid[indices.to(self._valid.device)]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the newest columns: so many if negative; if positive, all but so many, as Transformers up to 5.17 has
        it; 0: none. Tokens of a tile that is cut are dense again, but stay pruned."""
        tokens_to_remove = int(tokens_to_remove)  # prompt lookup hands over a tensor
        seen = self.get_seq_length()
        left = min(seen, tokens_to_remove) if tokens_to_remove > 0 else max(0, seen + tokens_to_remove)
        if left == seen:
            return
        self._require_one_device("crop")
        self._check_cut(left)
        known = self._valid is not None and left < self._valid.shape[1]
        lengths = _padding.tokens_until(self._valid, left) if known else None
        with self._change("crop"):
            for layer in self.layers:
                layer.cut(seen - left, left, lengths)
            if self._valid is not None:
                self._valid = self._valid[:, :left]

    # ---- CUDA graphs -------------------------------------------------------------------------------------------------

    def reserve(self, columns: int) -> None:
        """Takes memory for so many more tokens of every sequence, so that passes can be captured in a CUDA graph.

        A captured pass of one token a sequence, without attention_mask and with position_ids that the caller steps,
        appends a token at every replay; tell the cache by `advance`. Padding that came before stays out, as ever.
        """
        for layer in self.layers:
            layer.reserve(columns)

    def columns_ahead(self, wanted: int) -> int:
        """So many of the wanted columns, as the capacity has room for."""
        layer = self.layers[0]
        capacity = layer.settings.capacity
        return wanted if capacity is None else min(wanted, capacity - layer.seen + layer.evicted)

    def advance(self, columns: int) -> None:
        """So many columns more than the host knows: of replays of a captured pass all but one, which was counted when
        it was captured, though nothing ran."""
        for layer in self.layers:
            layer.seen += columns

    # ---- What it holds ----------------------------------------------------------------------------------------------

    def nbytes(self) -> int:
        """All memory the layers hold, bytes."""
        return sum(layer.kv.nbytes() for layer in self.layers if layer.kv is not None)


def _switch(config: Any) -> None:
    """Sets the attention implementation; raises ValueError where that would change the model's own attention."""
    register()
    found = config._attn_implementation
    if found == NAME:
        return
    if found not in (DENSE, None):
        raise ValueError(
            f"SparseKVCache runs prompts through {DENSE!r} attention, the model has {found!r}: load it "
            f"with attn_implementation={DENSE!r}"
        )
    config._attn_implementation = NAME
