"""Prefill densely, then read the pruned cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.eval.models import CacheMaker


def _forward(model: Any, ids: Tensor, cache: Any, first: int, last_only: bool) -> Tensor:
    """Logits (B, n or 1, vocabulary) of ids (B, n), float32. first: tokens before them."""
    places = {}
    if cache.get_seq_length() != first:  # some were evicted
        places["position_ids"] = torch.arange(first, first + ids.shape[1], device=ids.device)[None]
    output = model(
        input_ids=ids,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1 if last_only else 0,  # 0: all
        **places,
    )
    return output.logits.float()


@torch.inference_mode()
def answer(model: Any, make_cache: CacheMaker, context: Tensor, question: Tensor, length: int) -> Tensor:
    """Greedy continuation (B, length) of context (B, n) followed by question (B, m), m >= 1.

    The context is prefilled and its older tokens pruned before the question is read, so that all of the answer comes
    from the pruned cache.
    """
    cache = make_cache()
    _forward(model, context, cache, 0, last_only=True)
    first = context.shape[1]
    token = _forward(model, question, cache, first, last_only=True)[:, -1].argmax(-1, keepdim=True)
    tokens = [token]
    for i in range(length - 1):
        place = first + question.shape[1] + i
        token = _forward(model, token, cache, place, last_only=True)[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


@dataclass(frozen=True)
class Prefilled:
    """A dense prefill, for caches that differ only in what they make of it. layers: keys and values (B, Hkv, T, D).
    logits: (B, 1, vocabulary), of what follows."""

    layers: list[tuple[Tensor, Tensor]]
    logits: Tensor

    @property
    def tokens(self) -> int:
        return self.layers[0][0].shape[2]


@torch.inference_mode()
def prefilled(model: Any, ids: Tensor) -> Prefilled:
    """ids: (B, T)."""
    from transformers.cache_utils import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = _forward(model, ids, cache, 0, last_only=True)
    return Prefilled([(layer.keys, layer.values) for layer in cache.layers], logits)


def _predictions(
    model: Any, cache: Any, ids: Tensor, prefill: int, chunk: int, known: Prefilled | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(what is predicted for them (B, m, vocabulary), ids (B, m)) for all of ids[:, prefill:], chunk by chunk. known:
    the prefill, if it was done before; not for rules that want its queries."""
    if known is None:
        previous = _forward(model, ids[:, :prefill], cache, 0, last_only=True)
    else:
        previous = known.logits
        for layer, (keys, values) in zip(cache.layers, known.layers):
            layer.update(keys.clone(), values.clone())
    first = prefill
    for part in ids[:, prefill:].split(chunk, dim=1):
        logits = torch.cat([previous, _forward(model, part, cache, first, last_only=False)], dim=1)
        previous, first = logits[:, -1:], first + part.shape[1]
        yield logits[:, :-1], part


@torch.inference_mode()
def negative_log_likelihood(model: Any, make_cache: CacheMaker, ids: Tensor, prefill: int, chunk: int) -> float:
    """Summed over ids[prefill:], natural logarithm. ids: (n,), n > prefill >= 1.

    ids[:prefill] are prefilled densely, the rest is read `chunk` tokens at a time; in between tokens leave the window.
    """
    return float(losses(model, make_cache, ids[None], prefill, chunk).double().sum())


@torch.inference_mode()
def losses(
    model: Any, make_cache: CacheMaker, ids: Tensor, prefill: int, chunk: int, known: Prefilled | None = None
) -> Tensor:
    """Negative log-likelihood of each of ids[:, prefill:], float32 (B, n - prefill). ids: (B, n); read as above. known:
    the prefill, if it was done before; not for rules that want its queries."""
    of_parts = [
        torch.nn.functional.cross_entropy(logits.transpose(1, 2), part, reduction="none")
        for logits, part in _predictions(model, make_cache(), ids, prefill, chunk, known)
    ]
    return torch.cat(of_parts, dim=1)


@torch.inference_mode()
def correct(model: Any, make_cache: CacheMaker, ids: Tensor, prefill: int, chunk: int) -> Tensor:
    """Which of ids[:, prefill:] the model finds likeliest, bool (B, n - prefill). ids: (B, n); read as above."""
    right = [logits.argmax(-1) == part for logits, part in _predictions(model, make_cache(), ids, prefill, chunk)]
    return torch.cat(right, dim=1)


@torch.inference_mode()
def generate(model: Any, make_cache: CacheMaker, prompt: Tensor, length: int, end_tokens: list[int]) -> Tensor:
    """Greedy continuation (m,) of prompt (n,), m <= length, by the model's own `generate`: what the prompt's last token
    predicts still comes from the dense prefill, as in the published experiments."""
    output = model.generate(
        input_ids=prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        past_key_values=make_cache(),
        max_new_tokens=length,
        do_sample=False,
        num_beams=1,
        temperature=None,
        top_p=None,
        top_k=None,
        eos_token_id=end_tokens or None,
        pad_token_id=end_tokens[0] if end_tokens else None,
    )
    return output[0, len(prompt) :]
