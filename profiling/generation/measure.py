"""Generates one batch and times it; finds the largest batch that fits."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from profiling.generation import graphs

SIDES = ("dense", "sparse", "static-graph", "flashinfer-graph", "sparse-graph", "sparse-loop-graph")
SDPA = ("default", "no-cudnn")
WARM_UP_PROMPT, WARM_UP_TOKENS = 256, 6
LOOKUP_PERIOD = 128  # tokens after which a prompt repeats itself, with prompt lookup
FILL = 0.97  # share of the device's memory that a largest batch may be expected to take
BACK_OFF = 0.95  # of a batch that turned out not to fit
ATTEMPTS = 8


@dataclass(frozen=True)
class Side:
    """A kind of cache to generate with."""

    name: str  # of SIDES
    sparsity: float | None = None
    key_keep: int | None = None
    value_keep: int | None = None
    window: int = 32
    sdpa: str = "default"  # of SDPA: torch's own choice of a backend, or that without cuDNN
    mesh: Any = None  # DeviceMesh over which sparse caches are spread
    chunk: int | None = None  # tokens of a prompt that a pass takes; None: all
    lookup: int | None = None  # tokens that prompt lookup proposes for a step; None: none
    codec: str | None = None  # of sparse caches; None: that of the model's dtype

    @property
    def sparse(self) -> bool:
        return self.name.startswith("sparse")

    @property
    def graph(self) -> bool:
        return self.name.endswith("-graph")

    def generate(self, model: Any, ids: torch.Tensor, new_tokens: int, clock: Any, cache: Any = None) -> Any:
        """Generates greedily; returns the cache. The clock's `put` gets the prompts, then every step's tokens.

        cache: holds the first of ids already, with room for all; None: a new one.
        """
        cache = self.cache(model, ids.shape[1] + new_tokens) if cache is None else cache
        with _backends(self.sdpa):
            if self.name == "flashinfer-graph":
                from profiling.generation import flashinfer

                with flashinfer.attention(model, cache):
                    graphs.generate(model, cache, ids, new_tokens, clock, chunk=self.chunk)
            elif self.graph and self.name != "sparse-graph":
                graphs.generate(model, cache, ids, new_tokens, clock, chunk=self.chunk)
            else:
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=new_tokens,
                    streamer=clock,
                    past_key_values=cache,
                    **({} if self.chunk is None else {"prefill_chunk_size": self.chunk}),
                    **({} if self.lookup is None else {"prompt_lookup_num_tokens": self.lookup}),
                )
        return cache

    def check(self, model: Any, capacity: int) -> None:
        """Raises what the side's cache says about the model or the options, before anything is measured."""
        self.cache(model, capacity)

    def cache(self, model: Any, capacity: int) -> Any:
        """An empty one for so many tokens, and for those that prompt lookup proposes in vain."""
        capacity += self.lookup or 0
        from transformers import DynamicCache, StaticCache

        if self.sparse:
            from cute_kernels.integrations.transformers import SparseKVCache

            return SparseKVCache(
                model,
                sparsity=self.sparsity,
                key_keep=self.key_keep,
                value_keep=self.value_keep,
                codec=self.codec,
                window=self.window,
                capacity=capacity,
                mesh=self.mesh,
                graphs=self.name == "sparse-graph",
            )
        if self.name == "flashinfer-graph":
            from profiling.generation.flashinfer import FlashInferCache

            return FlashInferCache(model.config, capacity)
        if self.graph:
            return StaticCache(config=model.config, max_cache_len=capacity)
        return DynamicCache(config=model.config)


@contextmanager
def _backends(sdpa: str) -> Iterator[None]:
    """Where torch prefers cuDNN, on some GPUs from some version on, that makes an execution plan for every length of
    the keys it has not met: for a dense cache once a step, tens of milliseconds on the host."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and sdpa != "no-cudnn")
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@dataclass(frozen=True)
class Result:
    ttft_ms: float
    step_ms: float
    tokens_per_s: float
    total_tokens_per_s: float
    peak_bytes: int | None
    kv_bytes: int
    cache: str


def median(results: Sequence[Result]) -> Result:
    """Of every time and speed for itself, of runs of one case; of memory the peak of them all."""
    timed = ("ttft_ms", "step_ms", "tokens_per_s", "total_tokens_per_s")
    medians = {name: statistics.median(getattr(result, name) for result in results) for name in timed}
    peaks = [result.peak_bytes for result in results if result.peak_bytes is not None]
    return replace(results[-1], **medians, peak_bytes=max(peaks, default=None))


class _Clock:
    """A streamer that notes when tokens reach the host; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []  # of all sequences

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.tokens.append(tokens.numel())

    def end(self) -> None:
        pass


def kv_bytes(cache: Any) -> int:
    """All that a cache holds."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes()
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


@torch.inference_mode()
def run(model: Any, side: Side, batch: int, prompt: int, new_tokens: int, seed: int, turn: int = 0) -> Result:
    """One batch of random prompts, of as many times the same tokens as prompt lookup needs to find some.

    turn: tokens of a second prompt behind the first: what is timed begins with them, once a cache holds the first.

    Raises torch.cuda.OutOfMemoryError if it does not fit.
    """
    device = model.device
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (batch, prompt + turn), generator=generator)
    if side.lookup is not None:
        ids = ids[:, :LOOKUP_PERIOD].repeat(1, -(-ids.shape[1] // LOOKUP_PERIOD))[:, : ids.shape[1]]
    ids = ids.to(device)

    def generate(prompt: int, turn: int, new_tokens: int) -> tuple[Any, _Clock, float]:
        """The cache, the clock, and when it started."""
        cache = None
        if turn:
            cache = side.cache(model, prompt + turn + new_tokens)
            side.generate(model, ids[:, :prompt], 1, _Clock(), cache)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        clock, start = _Clock(), time.perf_counter()
        return side.generate(model, ids[:, : prompt + turn], new_tokens, clock, cache), clock, start

    try:
        generate(min(prompt, WARM_UP_PROMPT), turn and min(turn, WARM_UP_PROMPT), WARM_UP_TOKENS)
        _settle(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        cache, clock, start = generate(prompt, turn, new_tokens)
        first, last = clock.times[1], clock.times[-1]
        steps = [b - a for a, b in zip(clock.times[1:], clock.times[2:])]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return Result(
            1e3 * (first - start),
            1e3 * statistics.median(steps),
            sum(clock.tokens[2:]) / (last - first),
            sum(clock.tokens[1:]) / (last - start),
            peak,
            kv_bytes(cache),
            type(cache).__name__,
        )
    finally:
        cache = None
        _settle(device)


def usable_bytes(device: torch.device) -> int:
    """Device memory that is free or held by torch."""
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def largest_batch(peaks: dict[int, int], usable: int) -> int:
    """The largest batch that should fit, from the peak bytes of smaller ones, which grow by the sequence.

    peaks: batch -> bytes, of at least two batches.
    """
    (small, less), (large, more) = min(peaks.items()), max(peaks.items())
    if small == large:
        raise ValueError(f"peaks must be of two batches at least, got {small} alone")
    per_sequence = (more - less) / (large - small)
    if per_sequence <= 0:
        raise ValueError(f"memory did not grow from batch {small} to {large}")
    return max(1, int((FILL * usable - (less - small * per_sequence)) / per_sequence))


def run_largest(
    model: Any, side: Side, peaks: dict[int, int], prompt: int, new_tokens: int, seed: int, turn: int = 0
) -> tuple[int, Result]:
    """(batch, result) of the largest batch that fits; smaller ones are tried where the expected one does not.

    Raises RuntimeError if none of `ATTEMPTS` batches fits.
    """
    batch = largest_batch(peaks, usable_bytes(model.device))
    for _ in range(ATTEMPTS):
        try:
            return batch, run(model, side, batch, prompt, new_tokens, seed, turn)
        except torch.cuda.OutOfMemoryError:
            _settle(model.device)
            tried, batch = batch, max(1, int(BACK_OFF * batch))
            if tried == 1:
                break
    raise RuntimeError(f"no batch from {tried} on fits")


def _settle(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
