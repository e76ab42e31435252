"""`SparseKVLM`: the harness's Hugging Face model on a `SparseKVCache`."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from cute_kernels._runtime import checks
from cute_kernels.integrations.transformers import SparseKVCache

NAME = "cute_kernels"
_RENAMED = {"cache_dtype": "dtype", "cache_backend": "backend"}  # HFLM has a dtype and a backend of its own
_OPTIONS = {
    name: name for name in inspect.signature(SparseKVCache).parameters if name not in ("config", *_RENAMED.values())
} | _RENAMED

Tokens = tuple[int, ...]
Request = tuple[tuple[str, str], list[int], list[int]]  # what the harness knows it by, context, continuation


@register_model(NAME)
class SparseKVLM(HFLM):
    """`HFLM` whose tokens attend to a pruned, compressed cache.

        lm_eval.simple_evaluate(model="cute_kernels", model_args="pretrained=FOLDER,sparsity=0.7", tasks=[...])

    Text is generated with a new `SparseKVCache` for each batch: the prompt is read densely, all after it from the
    compressed cache. Log-likelihoods are of the compressed cache too: a context is read densely but for its last token;
    that one and the continuation are read from the cache, one continuation after the other. Contexts shorter than a
    tile of 64 tokens and the window have nothing pruned, so that their scores are those of the dense model.

    pretrained, kwargs: as HFLM has them; a causal model with sdpa attention. And the options of SparseKVCache:
        sparsity, keep, key_rule, window and others by their names, its dtype and backend as cache_dtype, "float16" or
        "bfloat16", and cache_backend. From a command line they come as one number or name each.
    chunk: so many tokens of a continuation are read at a time. In between, tokens leave the window.

    Raises TypeError and ValueError, once the model is loaded, for what SparseKVCache refuses; TypeError for an option
    that is known neither here nor to the model.
    """

    def __init__(self, pretrained: str | PreTrainedModel, *, chunk: int = 32, **kwargs: Any) -> None:
        if checks.integer(chunk, "chunk") < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        options = {_OPTIONS[name]: kwargs.pop(name) for name in _OPTIONS.keys() & kwargs.keys()}
        if isinstance(options.get("dtype"), str):
            options["dtype"] = _dtype(options["dtype"])
        if not isinstance(pretrained, str):  # HFLM takes no notice of what it would hand to from_pretrained
            unknown = sorted(kwargs.keys() - inspect.signature(HFLM.__init__).parameters.keys())
            if unknown:
                raise TypeError(f"{type(self).__name__} has no option {', '.join(unknown)}")
        super().__init__(pretrained, **kwargs)
        self.chunk, self.cache_options = chunk, options
        self.make_cache()  # raises

    def make_cache(self) -> SparseKVCache:
        """An empty one."""
        model = self.model
        if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
            model = model.get_base_model()  # of peft
        return SparseKVCache(model, **self.cache_options)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        return super()._model_generate(
            context=context,
            max_length=max_length,
            stop=stop,
            past_key_values=self.make_cache(),
            **generation_kwargs,
        )

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Of each continuation: its log-likelihood, and whether it is the greedy one."""
        groups: dict[Tokens, dict[Tokens, list[int]]] = {}  # numbers of requests by what is read densely, and after it
        for number, (_, context, continuation) in enumerate(requests):
            tokens = tuple(context + continuation)[-(self.max_length + 1) : -1]
            split = len(tokens) - len(continuation)
            groups.setdefault(tokens[:split], {}).setdefault(tokens[split:], []).append(number)

        answers: dict[int, tuple[float, bool]] = {}
        with tqdm(
            total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests"
        ) as progress:
            for prompt, further in groups.items():
                cache = self.make_cache()
                if prompt:
                    self._read(prompt, cache, last_only=True)
                for left, (tokens, numbers) in zip(range(len(further) - 1, -1, -1), further.items()):
                    logits = self._score(tokens, copy.deepcopy(cache) if left else cache)
                    for number in numbers:
                        key, _, continuation = requests[number]
                        answers[number] = _answer(logits, continuation)
                        if key is not None:  # parts of a longer text have none
                            self.cache_hook.add_partial("loglikelihood", key, answers[number])
                        progress.update()
        return [answers[number] for number in range(len(requests))]

    def _score(self, tokens: Tokens, cache: SparseKVCache) -> Tensor:
        """Log-probabilities (n, vocabulary) of what follows each of n tokens."""
        parts = [tokens[first : first + self.chunk] for first in range(0, len(tokens), self.chunk)]
        logits = torch.cat([self._read(part, cache) for part in parts])
        return torch.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)

    @torch.no_grad()
    def _read(self, tokens: Tokens, cache: SparseKVCache, last_only: bool = False) -> Tensor:
        """Logits (n or 1, vocabulary)."""
        ids = torch.tensor([tokens], device=self.device)
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
            output = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1 if last_only else 0)
        return output.logits[0]


def _answer(logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
    """logits: log-probabilities (n, vocabulary), of n tokens."""
    expected = torch.tensor(continuation, device=logits.device)
    found = logits.gather(1, expected[:, None])
    return float(found.sum()), bool((logits.argmax(-1) == expected).all())


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"cache_dtype must be float16 or bfloat16, got {name!r}")
    return found
