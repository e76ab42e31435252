"""Attention over sequences of very different lengths, beside as many of one length with as many tokens in all.

    python -m profiling.ragged                                                # on a GPU: lengths from 128 to 32768
    python -m profiling.ragged --device cpu --batch 4 --longest 1024

Lengths are log-uniform and lie on the device, as an engine has them (`seq_lens`). A draw of them is timed beside equal
lengths, once in caches of just so many tokens without `seq_lens` and once with it: all three in turn, each with a cold
cache. In brackets: what share of their elements a second the ragged batch reaches. No window, one query token."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch

import cute_kernels as ck
from profiling import environment, timing

COPIES = 2  # of every cache at least, used in turn


def draw_lengths(options: argparse.Namespace, draw: int) -> list[int]:
    rng = torch.Generator().manual_seed(options.seed + draw)
    low, high = math.log(options.shortest), math.log(options.longest)
    exponents = torch.empty(options.batch, dtype=torch.float64).uniform_(low, high, generator=rng)
    return [min(max(round(length), options.shortest), options.longest) for length in exponents.exp().tolist()]


class Batches:
    """Caches of `batch` sequences and the calls that attend to them."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        self._cache_bytes = environment.environment(device).cache_bytes
        self._q = self._normal(options.query_heads, 1)

    def caches(self, tokens: int, mean: int) -> list[tuple[ck.SparseKV, ck.SparseKV]]:
        """As many as leave the device's cache cold if `mean` of a sequence's tokens are read at a call."""
        first = self._compressed(tokens)
        read = sum(kv.nbytes for kv in first) * mean // tokens
        copies = max(COPIES, timing.copies_for_cold_cache(read, self._cache_bytes))
        return [first] + [self._compressed(tokens) for _ in range(copies - 1)]

    def calls(
        self, caches: Sequence[tuple[ck.SparseKV, ck.SparseKV]], lengths: Sequence[int] | None = None
    ) -> list[timing.Call]:
        on_device = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=self._device)
        return [
            lambda kv=kv: ck.sparse_attention(self._q, *kv, seq_lens=on_device, backend=self._options.backend)
            for kv in caches
        ]

    def _compressed(self, tokens: int) -> tuple[ck.SparseKV, ck.SparseKV]:
        k, v = (self._normal(self._options.kv_heads, tokens) for _ in range(2))
        return ck.compress_kv(k, v, keep=self._options.keep)

    def _normal(self, heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(
            self._options.batch, heads, tokens, self._options.head_dim, dtype=torch.float16, device=self._device
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.ragged", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--backend", default="auto", help="default: %(default)s")
    sizes = {
        "batch": 32,
        "query-heads": 32,
        "kv-heads": 8,
        "head-dim": 128,
        "keep": 38,
        "shortest": 128,
        "longest": 32768,
        "draws": 3,
        "repeats": 30,
    }
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the first draw, the next ones follow it")
    options = parser.parse_args(arguments)
    if any(getattr(options, name.replace("-", "_")) < 1 for name in sizes):
        parser.error("sizes must be at least 1")
    if options.shortest > options.longest:
        parser.error("--shortest is more than --longest")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: --device cpu, with a smaller --batch and --longest")

    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    torch.manual_seed(options.seed)
    batches = Batches(options, device)
    clock = timing.timer(device, environment.environment(device).clock_mhz)
    draws = [draw_lengths(options, draw) for draw in range(options.draws)]
    long = batches.caches(options.longest, min(sum(lengths) for lengths in draws) // options.batch)
    for draw, lengths in enumerate(draws):
        mean = sum(lengths) // options.batch
        equal = batches.caches(mean, mean)
        rotations = {
            "ragged": batches.calls(long, lengths),
            "equal": batches.calls(equal),
            "with seq_lens": batches.calls(equal, [mean] * options.batch),
        }
        us = {name: found.median_us for name, found in timing.measure(rotations, options.repeats, clock).items()}
        more = sum(lengths) / (mean * options.batch)
        beside = ", ".join(
            f"{name} {us[name]:.1f} us ({us[name] / us['ragged'] * more:.1%})" for name in ("equal", "with seq_lens")
        )
        print(
            f"draw {draw}: {mean} tokens on average, {min(lengths)} to {max(lengths)}: {us['ragged']:.1f} us; {beside}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
