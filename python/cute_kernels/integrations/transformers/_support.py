"""Which Transformers, models and layers the cache serves; everything else is refused before the first token."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cute_kernels._cache import tile_rules
from cute_kernels._runtime import checks
from cute_kernels._runtime.backends import check_name, resolve
from cute_kernels._runtime.extension import HEAD_DIMS, LARGEST_HEAD_DIM
from cute_kernels._runtime.launching import compression_kernels
from cute_kernels._storage.checks import chosen_codec
from cute_kernels.distributed.ranks import HEADS, Ranks
from cute_kernels.rules import Magnitude

OLDEST, NEWEST = (5, 0), (5, 17)  # both ends are tested


def check_version() -> None:
    """Raises ImportError where Transformers is missing or too old; warns of one newer than any tested."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"cute_kernels.integrations.transformers needs Transformers ({error}): pip install "
            "'cute-kernels[transformers]'"
        ) from None
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < OLDEST:
        raise ImportError(
            f"cute_kernels.integrations.transformers serves Transformers {_text(OLDEST)} to "
            f"{_text(NEWEST)}, found {transformers.__version__}"
        )
    if found > NEWEST:
        warnings.warn(
            f"cute_kernels.integrations.transformers was tested with Transformers {_text(OLDEST)} to "
            f"{_text(NEWEST)}, found {transformers.__version__}",
            stacklevel=3,
        )


def decoder_config(source: Any) -> Any:
    """The config of the decoder's layers, of a model or its config; the object itself, so that it can be switched."""
    from transformers import PreTrainedConfig, PreTrainedModel

    if isinstance(source, PreTrainedModel):
        check_model(source)
        source = source.config
    if not isinstance(source, PreTrainedConfig):
        raise TypeError(f"config must be a Transformers config (model.config) or model, got {type(source).__name__}")
    if source.is_encoder_decoder:
        raise ValueError(f"{source.model_type} is an encoder-decoder model; SparseKVCache serves decoder-only models")
    return source.get_text_config(decoder=True)


def check_model(model: Any) -> None:
    """Raises ValueError for a model whose attention cannot be replaced, or that is where there are no kernels."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} does not choose its attention function by "
            "config._attn_implementation, so it cannot attend to a compressed cache"
        )
    others = sorted({parameter.device.type for parameter in model.parameters()} - {"cpu", "cuda", "meta"})
    if others:
        raise ValueError(
            f"SparseKVCache serves models on cpu and cuda devices, {type(model).__name__} is on {', '.join(others)}"
        )
    generation = getattr(model, "generation_config", None)
    implementation = getattr(generation, "cache_implementation", None)
    if implementation is not None:
        raise ValueError(
            f"the model's generation_config asks for another cache, cache_implementation={implementation!r}, which "
            "generate() does not take beside a SparseKVCache: set it to None"
        )


def check_devices(model: Any, backend: str) -> None:
    """Raises RuntimeError for a device of the model's that has no kernels, or that the backend does not serve."""
    for device in {parameter.device for parameter in model.parameters()}:
        if device.type != "meta":  # offloaded: where it runs shows with the first tokens
            compression_kernels(device)
            resolve(backend, device)


def check_layers(config: Any) -> int:
    """The number of layers that keep keys and values; raises ValueError unless all of them attend to all tokens."""
    from transformers import cache_utils

    if hasattr(cache_utils, "get_layer_types_and_kwargs"):
        types = list(cache_utils.get_layer_types_and_kwargs(config)[0])
    else:
        types = _layer_types(config)
    others = {name: [i for i, found in enumerate(types) if found == name] for name in dict.fromkeys(types)}
    others.pop("full_attention", None)
    if others:
        listed = "; ".join(f"{name}: layers {_ranges(layers)}" for name, layers in others.items())
        raise ValueError(
            f"SparseKVCache serves layers of full attention only; {config.model_type} has {listed}"
            + (f" (sliding_window={config.sliding_window})" if _slides(types) else "")
        )
    if getattr(config, "num_kv_shared_layers", None):
        raise ValueError(
            f"{config.model_type} shares keys and values between layers "
            f"(num_kv_shared_layers={config.num_kv_shared_layers}), which SparseKVCache does not serve"
        )
    return len(types)


def check_attention(config: Any) -> int:
    """The head dim; raises ValueError for attention that is not softmax(scale * q K^T) V of heads alike."""
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        raise ValueError(
            f"{config.model_type} caps its attention logits (attn_logit_softcapping={softcap}), which "
            "sparse attention does not"
        )
    if getattr(config, "kv_lora_rank", None) is not None:
        raise ValueError(
            f"{config.model_type} has latent attention (kv_lora_rank={config.kv_lora_rank}): keys and "
            "values differ in size, which SparseKVCache does not serve"
        )
    if not getattr(config, "is_causal", True):
        raise ValueError(f"{config.model_type} is configured with is_causal=False; a cache needs causal attention")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim must be a multiple of 8, from 8 to {LARGEST_HEAD_DIM}, got {head_dim}")
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads must be a multiple of num_key_value_heads, got {heads} and {kv_heads}")
    return head_dim


def prunes_in_kernels(key_rule: Any, value_rule: Any) -> bool:
    """Whether a cache of these rules prunes in the kernels that store its tiles."""
    return all(isinstance(rule, Magnitude) for rule in tile_rules.resolve_pair(key_rule, value_rule))


def layer_options(
    head_dim: int, layers: int, amounts: dict[str, Any], key_rule: Any, value_rule: Any
) -> list[dict[str, Any]]:
    """What to keep, as each layer's KVCache takes it, checked as that would once the first tokens come.

    amounts: sparsity, keep, key_keep, value_keep; each is one for all layers, a sequence of one for each layer, or a
    mapping of layer numbers to one; layers that it leaves out have None.
    """
    keys, values = tile_rules.resolve_pair(key_rule, value_rule)
    by_layer = {name: _by_layer(value, name, layers) for name, value in amounts.items()}
    found = []
    for layer in range(layers):
        own = {name: each[layer] for name, each in by_layer.items()}
        try:
            checks.kept_elements(head_dim, own["sparsity"], own["keep"])
            for name in ("key_keep", "value_keep"):
                checks.kept_elements(head_dim, None, own[name], name)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error} (layer {layer})") from None
        found.append(own | {"key_rule": keys, "value_rule": values})
    return found


def _by_layer(value: Any, name: str, layers: int) -> list[Any]:
    """One for each layer."""
    if isinstance(value, Mapping):
        for layer in value:
            if not 0 <= checks.integer(layer, f"every layer of {name}") < layers:
                raise ValueError(f"{name} must name layers from 0 to {layers - 1}, got {layer}")
        return [value.get(layer) for layer in range(layers)]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != layers:
            raise ValueError(f"{name} must have one value for each of {layers} layers, got {len(value)}")
        return list(value)
    return [value] * layers


def check_options(window: Any, capacity: Any, backend: Any) -> None:
    """What KVCache would raise once the first tokens come."""
    if checks.integer(window, "window") < 0:
        raise ValueError(f"window must be at least 0, got {window}")
    if capacity is not None and checks.integer(capacity, "capacity") < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    check_name(backend)


def check_mesh(mesh: Any, config: Any, capacity: Any) -> tuple[Any, int]:
    """(mesh over which tokens are spread, or None; ranks that divide the heads)."""
    if mesh is None:
        return None, 1
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    if getattr(mesh, "mesh_dim_names", None) == (HEADS,):  # the model's own plan divides them
        if kv_heads % mesh.size():
            raise ValueError(
                f"num_key_value_heads must be a multiple of the {mesh.size()} ranks of the mesh's dimension {HEADS!r}, "
                f"got {kv_heads}"
            )
        return None, mesh.size()
    ranks = Ranks(mesh)
    ranks.local_heads(kv_heads)
    if capacity is None:
        raise ValueError("a SparseKVCache over a mesh with 'cp' takes its memory at once: pass capacity")
    return mesh, ranks.heads_size


def cache_dtype(dtype: Any, model_dtype: torch.dtype | None) -> torch.dtype | None:
    """What keys and values are stored in; None: as they come."""
    if dtype is None:
        if model_dtype is not None and model_dtype not in checks.CACHE_DTYPES:
            raise ValueError(_wants_16_bits(model_dtype))
        return None
    checks.chosen_dtype(dtype, "dtype", checks.CACHE_DTYPES)
    return dtype if model_dtype is None else storage_dtype(dtype, model_dtype)


def check_codecs(codecs: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """What KVCache would raise for its codecs once the first tokens come; dtype None: their dtype is not known yet."""
    dtypes = checks.CACHE_DTYPES if dtype is None else (dtype,)
    for name, codec in codecs.items():
        errors = []
        for possible in dtypes:
            try:
                chosen_codec(codec, name, possible)
            except ValueError as error:
                errors.append(error)
        if len(errors) == len(dtypes):
            raise errors[0]


def storage_dtype(dtype: torch.dtype | None, found: torch.dtype) -> torch.dtype:
    """What keys of dtype `found` are stored in, where the cache was asked for `dtype`."""
    if found in checks.CACHE_DTYPES:
        if dtype is not None and dtype != found:
            raise ValueError(
                f"the cache was asked to store {checks.dtype_name(dtype)}, the model computes in "
                f"{checks.dtype_name(found)}: leave out dtype or cast the model"
            )
        return found
    if dtype is None or found != torch.float32:
        raise ValueError(_wants_16_bits(found))
    return dtype


def _wants_16_bits(found: torch.dtype) -> str:
    return (
        f"the cache stores float16 or bfloat16, the model computes in {checks.dtype_name(found)}: load it with "
        "dtype=torch.bfloat16, or pass SparseKVCache(..., dtype=torch.float16 or torch.bfloat16) to have keys, "
        "values and queries rounded"
    )


def _layer_types(config: Any) -> list[str]:
    """Transformers before 5.10 has no function for it."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return list(types)
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"] * config.num_hidden_layers
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"] * config.num_hidden_layers
    return ["full_attention"] * config.num_hidden_layers


def _slides(types: list[str]) -> bool:
    return any("sliding" in name for name in types)


def _ranges(numbers: list[int]) -> str:
    """As "0-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
