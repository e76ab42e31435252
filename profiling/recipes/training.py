"""Trains a small Llama-architecture model on recall, copying and hops, from short sequences to long ones."""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from profiling.recipes import llama
from profiling.recipes.sequences import TASKS, draw, vocabulary
from profiling.recipes.steps import IGNORED, Steps

SATISFIED = 0.95  # accuracy at which sequences get longer
DONE = 0.998  # accuracy at full length, averaged, at which training ends
WARM_UP = 100  # steps
LONGER = 1.4


@dataclass(frozen=True, kw_only=True)
class Size(llama.Shape):
    """pairs: N of the sequences evaluated. tokens: of a training batch."""

    pairs: int
    symbols: int
    tokens: int
    steps: int
    learning_rate: float = 1e-3


FULL = Size(
    pairs=127,
    symbols=512,
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=1024,
    tokens=1 << 13,
    steps=8000,
)
SMALL = Size(
    pairs=127,
    symbols=512,
    layers=2,
    hidden=128,
    heads=2,
    kv_heads=1,
    head_dim=64,
    intermediate=512,
    tokens=1 << 13,
    steps=8000,
    learning_rate=2e-3,
)
QUICK = Size(
    pairs=31,
    symbols=64,
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate=128,
    tokens=1 << 12,
    steps=4000,
    learning_rate=3e-3,
)
TINY = replace(QUICK, head_dim=64)  # as quick, with the bits an element of a larger head


def build(size: Size, seed: int) -> Any:
    """The model, with random weights, float32."""
    return llama.build(size, seed, vocabulary(size.symbols), 4 * size.pairs + 2)


def train(
    model: Any, size: Size, seed: int, seconds: float, say: Callable[[str], None], graphs: bool = True
) -> dict[str, float]:
    """Until the tasks are solved at full length, or size.steps or `seconds` are over. Returns what came of it: `pairs`
    is the length that was learnt, 0 if none was.

    graphs: whether a GPU runs steps as CUDA graphs.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    step_of = Steps(model, (0.9, 0.98), 0.01, graphs)
    model.train()
    rng = random.Random(seed)
    lengths, average, start, step, learnt = [min(4, size.pairs)], 0.0, time.perf_counter(), 0, 0
    for step in range(1, size.steps + 1):
        # Other lengths in between: what follows must be found by what is before it, not by how far away it is.
        pairs = lengths[-1]
        shown = pairs if step % 2 == 0 else rng.choice(lengths)
        batch = max(2, size.tokens // (4 * shown + 2) // len(TASKS))
        drawn = [draw(task, shown, size.symbols, batch, generator) for task in TASKS]
        ids, counted = (torch.cat([getattr(d, name) for d in drawn]) for name in ("ids", "counted"))
        targets = torch.where(counted, ids, IGNORED)[:, drawn[0].context :]
        loss, right = step_of(ids[:, :-1], targets, size.learning_rate * min(1.0, step / WARM_UP))
        if step % 10:
            continue
        average = 0.8 * average + 0.2 * right.item()
        took = time.perf_counter() - start
        over = took > seconds
        if step % 200 == 0 or over:
            where = f"step {step} of {size.steps}, {took:.0f} of {seconds:g} s, {pairs} of {size.pairs} pairs"
            say(f"{where}: loss {loss.item():.4f}, right {average:.2%}")
        if average > SATISFIED:
            learnt = pairs
        if over or (pairs == size.pairs and average > DONE):
            break
        if average > SATISFIED and pairs < size.pairs:
            lengths.append(min(size.pairs, math.ceil(pairs * LONGER)))
            average = 0.0
    model.eval()
    took = time.perf_counter() - start
    say(f"trained {step} steps in {took:.0f} s: learnt {learnt} of {size.pairs} pairs, right {average:.2%}")
    return {"steps": step, "seconds": took, "pairs": learnt, "accuracy": average}


def print_to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
