"""Greedy generation whose steps are replays of one CUDA graph: what a model does when Python does not hold it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], None]


def capture(step: Step) -> Step:
    """A replay of it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def generate(
    model: Any,
    cache: Any,
    ids: torch.Tensor,
    new_tokens: int,
    clock: Any,
    capture: Callable[[Step], Step] = capture,
    chunk: int | None = None,
) -> None:
    """Generates with a StaticCache, a FlashInferCache or a SparseKVCache of sufficient capacity.

    The prompts run eagerly, and so does the first step; then one step is captured, which counts as time, and replayed.
    No padding. A cache's `prepare`, if it has one, runs on the host before each step. capture: what makes a replay of a
    step; tests have none. chunk: tokens of a prompt that a pass takes; None: all.
    """

    def forward(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = model(tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    prepare = getattr(cache, "prepare", lambda: None)
    clock.put(ids)
    batch, prompt = ids.shape
    positions = torch.arange(prompt, device=ids.device).expand(batch, prompt)
    for first in range(0, prompt, chunk or prompt):
        part = slice(first, first + (chunk or prompt))
        tokens = forward(ids[:, part], positions[:, part])
    clock.put(tokens.cpu())
    position = torch.full((batch, 1), prompt, device=ids.device)

    def step() -> None:
        tokens.copy_(forward(tokens, position))
        position.add_(1)

    prepare()
    step()
    clock.put(tokens.cpu())
    if hasattr(cache, "reserve"):
        cache.reserve(new_tokens - 2)
    replay = capture(step)
    for _ in range(new_tokens - 2):
        prepare()
        replay()
        clock.put(tokens.cpu())
    if hasattr(cache, "advance"):  # the host has seen the capture, not the replays
        cache.advance(prompt + new_tokens - 1 - cache.get_seq_length())
