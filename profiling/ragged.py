"""Attention over sequences of very different lengths, beside as many of one length with as many tokens in all.

    python -m profiling.ragged                         # on a GPU: 32 and 128 sequences, lengths from 128 to 32768
    python -m profiling.ragged --device cpu --batch 4 --longest 1024

Lengths are log-uniform and lie on the device, as an engine has them (`seq_lens`). A draw of them is timed beside equal
lengths, once in caches of just so many tokens without `seq_lens` and once with it: all three in turn, each with a cold
cache. In brackets: what share of their elements a second the ragged batch reaches. No window, one query token."""

from __future__ import annotations

import argparse
import copy
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import cute_kernels as ck
from profiling import command_line, environment, plain_rows, timing

NAME = "ragged"
BATCHES = "32,128"
COPIES = 2  # of every cache at least, used in turn
SIZES = (
    ("query-heads", 32, "a multiple of --kv-heads"),
    ("kv-heads", 8, "heads of the caches"),
    ("head-dim", 128, "D"),
    ("keep", 38, "channels kept of D"),
    ("shortest", 128, "tokens of a sequence at least"),
    ("longest", 32768, "tokens of a sequence at most"),
    ("draws", 3, "draws of lengths"),
    ("repeats", 30, "timed calls a draw"),
)


def draw_lengths(options: argparse.Namespace, draw: int) -> list[int]:
    rng = torch.Generator().manual_seed(options.seed + draw)
    low, high = math.log(options.shortest), math.log(options.longest)
    exponents = torch.empty(options.batch, dtype=torch.float64).uniform_(low, high, generator=rng)
    return [min(max(round(length), options.shortest), options.longest) for length in exponents.exp().tolist()]


class Batches:
    """Caches of `batch` sequences and the calls that attend to them."""

    def __init__(self, options: argparse.Namespace, env: environment.Environment) -> None:
        self._options, self._device, self._cache_bytes = options, env.device, env.cache_bytes
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


def measured(options: argparse.Namespace, env: environment.Environment) -> Iterator[dict[str, Any]]:
    """A row of every draw, which it prints."""
    torch.manual_seed(options.seed)
    batches = Batches(options, env)
    clock = timing.timer(options.device, env.clock_mhz)
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
        shares = {name: us[name] / us["ragged"] * more for name in ("equal", "with seq_lens")}
        beside = ", ".join(f"{name} {us[name]:.1f} us ({share:.1%})" for name, share in shares.items())
        print(
            f"draw {draw + 1} of {options.draws}: {mean} tokens on average, {min(lengths)} to {max(lengths)}: "
            f"{us['ragged']:.1f} us; {beside}",
            flush=True,
        )
        yield {
            "B,Hq,Hkv,D": f"{options.batch},{options.query_heads},{options.kv_heads},{options.head_dim}",
            "keep": options.keep,
            "seed": options.seed + draw,
            "tokens, mean": mean,
            "shortest": min(lengths),
            "longest": max(lengths),
            "ragged, us": round(us["ragged"], 2),
            "equal, us": round(us["equal"], 2),
            "equal with seq_lens, us": round(us["with seq_lens"], 2),
            "of equal": round(shares["equal"], 4),
            "of equal with seq_lens": round(shares["with seq_lens"], 4),
        }


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m profiling.ragged", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--device",
        type=command_line.device,
        default="cuda",
        metavar="NAME",
        help="cpu, with a smaller --batch and --longest, or cuda (default: %(default)s)",
    )
    add(
        "--batch",
        type=command_line.positive_integers,
        default=BATCHES,
        metavar="LIST",
        help="sequences (default: %(default)s)",
    )
    add("--backend", default="auto", metavar="NAME", help="of sparse_attention (default: %(default)s)")
    for name, size, what in SIZES:
        add(
            f"--{name}",
            type=command_line.positive_integer,
            default=size,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    add(
        "--seed",
        type=command_line.seed,
        default=0,
        metavar="N",
        help="of the first draw, the next ones follow it (default: %(default)s)",
    )
    command_line.add_output(parser, NAME)
    options = parser.parse_args(arguments)
    command_line.check_output(parser, options, NAME)
    command_line.check_sizes(parser, options)
    command_line.check_backend(parser, options.backend, options.device)
    if options.shortest > options.longest:
        parser.error("--shortest is more than --longest")

    device = options.device
    env = environment.environment(device)
    try:
        folder = command_line.output_folder(options, env.slug)
    except ValueError as error:
        parser.error(str(error))
    print(env.about, flush=True)
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        of_batch = copy.copy(options)
        of_batch.batch = batch
        for row in measured(of_batch, env):
            rows.append({**plain_rows.run_of(env, "profiling.ragged", words), **row})
            path = plain_rows.write(rows, folder, options.name)
    print(f"wrote {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
