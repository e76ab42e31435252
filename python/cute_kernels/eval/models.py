"""Local model folders, and the cache that a setting asks for."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cute_kernels import rules
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import TILE_TOKENS
from cute_kernels.eval.baselines import BASELINES
from cute_kernels.eval.settings import Setting, kept_elements

CACHES = ("pruned", "sparse")
GRANULARITY = {"pruned": 1, "sparse": TILE_TOKENS}  # of settings that name none
CacheMaker = Callable[[], Any]


class Missing(RuntimeError):
    """An optional dependency is not there; the message says which and how to get it."""


def require(module: str, why: str) -> None:
    """Raises Missing if a module of the extra `eval` cannot be found."""
    if importlib.util.find_spec(module) is None:
        raise Missing(f"{why} needs {module}: pip install 'cute-kernels[eval]'")


def check_folder(folder: Path) -> None:
    """Raises Missing without Transformers, ValueError for what is no model's folder."""
    require("transformers", "cute_kernels.eval")
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{folder} must be a local model folder in Hugging Face's format: there is no config.json in it"
        )


def load_model(folder: Path, device: torch.device, dtype: str | torch.dtype = "auto") -> Any:
    """A causal language model of a folder in Hugging Face's format. Nothing is downloaded."""
    check_folder(folder)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> Any:
    check_folder(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def check(settings: Sequence[Setting], cache: str) -> None:
    """Raises ValueError for a setting that a cache cannot have, whatever the model."""
    if cache not in CACHES:
        raise ValueError(f"cache must be one of {', '.join(CACHES)}, got {cache!r}")
    for setting in settings if cache == "sparse" else ():
        if setting.evicted:
            raise ValueError("--cache sparse evicts no tokens: take --cache pruned, or SparseKVCache.from_cache")
        if setting.codec in BASELINES:
            raise ValueError(f"--cache sparse does not store codec {setting.codec!r}: take --cache pruned")
        if setting.is_dense:
            continue
        for name in [name for name, sparsity in map(setting.rule_of, ("key", "value")) if sparsity]:
            if rules.RULES[name].whole_cache:
                raise ValueError(
                    f"--cache sparse prunes tile by tile, which rule {name!r} does not: take --cache pruned"
                )
        if setting.granularity != TILE_TOKENS:
            raise ValueError(
                f"--cache sparse prunes {TILE_TOKENS} tokens at a time: pass --granularity {TILE_TOKENS} or none, got "
                f"{setting.granularity}"
            )


def check_dtype(folder: Path, dtype: str, cache: str) -> None:
    """Raises ValueError if a cache does not store what the model will compute in. dtype: "auto" or torch's name."""
    from transformers import AutoConfig

    stored = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().dtype
    computed = getattr(torch, dtype) if dtype != "auto" else stored
    if cache == "sparse" and computed is not None and computed not in checks.CACHE_DTYPES:
        raise ValueError(
            "--cache sparse stores float16 or bfloat16, the model computes in "
            f"{checks.dtype_name(computed)}: pass --dtype float16 or --dtype bfloat16"
        )


def prepare(model: Any, settings: list[Setting], cache: str) -> None:
    """Checks that every setting can be evaluated on this model and cache, and shows queries to what wants them."""
    check(settings, cache)
    for setting in settings:
        cache_maker(model, setting, cache)()
    if cache == "pruned" and any(
        setting.evicted or (setting.rule_of(role)[1] and rules.needs(setting.rule_of(role)[0], role))
        for setting in settings
        for role in ("key", "value")
    ):
        from cute_kernels.eval import pruned_cache

        pruned_cache.observe(model)


def cache_maker(model: Any, setting: Setting, cache: str = "pruned") -> CacheMaker:
    """Makes empty caches for one sequence of calls each.

    cache: "pruned", dense in memory with pruned values, for every rule; "sparse", the compressed cache of
    cute_kernels.integrations.transformers and its kernels, for the rules that prune tile by tile.
    """
    if cache == "sparse" and not setting.is_dense:
        return _sparse(model, setting)
    from cute_kernels.eval import pruned_cache

    return lambda: pruned_cache.make(model.config, setting)


def _sparse(model: Any, setting: Setting) -> CacheMaker:
    pruning = {role: name for role in ("key", "value") for name, sparsity in (setting.rule_of(role),) if sparsity}
    try:
        from cute_kernels.integrations.transformers import SparseKVCache
    except ImportError as error:
        raise Missing(f"--cache sparse needs cute_kernels.integrations.transformers: {error}") from None
    config = model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keep: dict[str, int] = {}
    for role in ("key", "value"):
        rule, sparsity = setting.rule_of(role)
        if rule != "2of4" or not sparsity:  # which takes no number
            keep[f"{role}_keep"] = kept_elements(head_dim, sparsity) or head_dim
    chosen = {f"{role}_rule": name for role, name in pruning.items()}
    if setting.codec:
        chosen["codec"] = setting.codec
    return lambda: SparseKVCache(model, window=setting.window, **keep, **chosen)
