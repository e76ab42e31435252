"""Decoding steps of KVCaches in which some sequences fill a tile and store it, beside steps that store none.

    python -m profiling.steps                                                      # on a GPU
    python -m profiling.steps --device cpu --shape 2,4,2,200 --repeats 2

A step is append and attend of every layer, `KVCache.step`, one CUDA graph of as many layers as leave the device's cache
cold; on a CPU it is the calls. Times are of a layer. Stores: `none` of the sequences stores a tile in that step, `one`
does, `all` do; `spread`: sequences as far out of phase as 64 steps allow, as those of a server are, whose row is the
mean of 64 steps that follow one another. Ratio: to the step that stores none. A GPU prepares tiles in the steps before
the one that stores them: these are made, too, but not timed; in the step that stores none nothing is prepared, either.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import cute_kernels as ck
from cute_kernels._cache.rows import core_of
from profiling import command_line, environment, plain_rows, timing
from profiling.cases import CODECS, keep_of

NAME = "steps"
TILE = 64
SHAPES = ("8,32,8,4096", "64,32,8,1024", "1,32,8,1024")  # B, Hq, Hkv, T
LEAST_LAYERS = 8
KINDS = ("none", "one", "all", "spread")
STEPS_BEFORE = 8  # that prepare a tile

Shape = tuple[int, int, int, int]


def shape(text: str) -> Shape:
    """ "8,32,8,4096" (B,Hq,Hkv,T)."""
    try:
        sizes = tuple(command_line.positive_integer(word) for word in text.split(","))
        batch, query_heads, kv_heads, tokens = sizes
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"'{text}' is not four positive integers B,Hq,Hkv,T") from None
    if query_heads % kv_heads:
        raise argparse.ArgumentTypeError(f"'{text}': Hq = {query_heads} is not a multiple of Hkv = {kv_heads}")
    return batch, query_heads, kv_heads, tokens


class Layers:
    """The caches of all layers and one step of them. Each sequence has T compressed tokens and a window that holds
    between `window` and `window` + 63 before the step."""

    def __init__(self, case: Shape, options: argparse.Namespace, cache_bytes: int) -> None:
        self.batch, query_heads, kv_heads, tokens = case
        self.window, self.device = options.window, options.device
        self._options, self._kv_heads = options, kv_heads
        self._dtype, self._compressed = getattr(torch, options.dtype), -(-tokens // TILE) * TILE
        first = self._cache()
        used = first.statistics()
        nbytes = (used["pages"] - used["pages_free"]) * used["page_bytes"]
        self.count = options.layers or max(LEAST_LAYERS, timing.copies_for_cold_cache(nbytes, cache_bytes))
        self.caches = [first, *(self._cache() for _ in range(self.count - 1))]
        self._q = self._normal(query_heads, 1)
        self._k, self._v = self._normal(kv_heads, 1), self._normal(kv_heads, 1)
        self._new = self._normal(kv_heads, TILE), self._normal(kv_heads, TILE)
        self._lengths = torch.full((self.batch,), self._compressed, dtype=torch.int32, device=self.device)
        for cache in self.caches:
            cache.reserve(TILE + 1)
            core_of(cache).captured = True  # `begin` changes lengths behind the host's back
        self.step = self._captured() if self.device.type == "cuda" else self._step

    def begin(self, held: Sequence[int]) -> None:
        """As before any step, with windows that hold so many tokens."""
        windows = torch.tensor(held, dtype=torch.int32, device=self.device)
        for cache in self.caches:
            storage = core_of(cache).storage
            storage.lengths.copy_(self._lengths)
            storage.windows.lengths.copy_(windows)

    def next_tokens(self, step: int) -> None:
        """Those of a step, others each time: equal ones would make a tile that no token order evens out."""
        for mine, new in zip((self._k, self._v), self._new):
            mine.copy_(new[:, :, step % TILE : step % TILE + 1])

    def stored(self) -> list[int]:
        """Tiles of every sequence of the last layer, beyond those of the beginning."""
        more = core_of(self.caches[-1]).storage.lengths - self._lengths
        return (more // TILE).tolist()

    def check(self) -> None:
        for cache in self.caches:
            if int(core_of(cache).storage.pool.error):
                raise RuntimeError("a step left tokens out")

    def _step(self) -> None:
        for cache in self.caches:
            cache.step(self._q, self._k, self._v)

    def _captured(self) -> Callable[[], object]:
        self.begin([self.window] * self.batch)
        self._step()  # loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph.replay

    def _cache(self) -> ck.KVCache:
        tokens = self._compressed + self.window + TILE - 1
        cache = ck.KVCache(
            max_batch=self.batch,
            kv_heads=self._kv_heads,
            head_dim=self._options.head_dim,
            dtype=self._dtype,
            capacity=tokens + TILE + 1,
            keep=keep_of(self._options.sparsity, self._options.head_dim),
            codec=self._options.codec,
            window=self.window,
            max_append=1,
            device=self.device,
        )
        cache.prefill(self._normal(self._kv_heads, tokens), self._normal(self._kv_heads, tokens))
        return cache

    def _normal(self, heads: int, tokens: int) -> torch.Tensor:
        shape = self.batch, heads, tokens, self._options.head_dim
        return torch.randn(shape, dtype=self._dtype, device=self.device)


def phases(kind: str, batch: int, window: int) -> list[int]:
    """Tokens that each sequence's window holds before the first step. One that holds `window` + 63 stores a tile."""
    full = window + TILE - 1
    if kind == "all":
        return [full] * batch
    held = [window + TILE * i // batch % TILE for i in range(batch)]
    if kind == "spread":
        return held
    held = [min(tokens, full - 1) for tokens in held]
    if kind == "one":
        return [full, *held[1:]]
    return [tokens - 1 if tokens == TILE - 1 else tokens for tokens in held]  # none begins to prepare a tile


def measure(layers: Layers, kind: str, repeats: int, clock: Any) -> tuple[float, float, float]:
    """(microseconds of a step and layer, their interquartile range, sequences that store a tile)."""
    samples: list[float] = []
    held = phases(kind, layers.batch, layers.window)
    if kind == "spread":
        for timed in range(1 + max(1, repeats // TILE)):  # the first of them prepares what the next stores
            layers.begin(held)
            for step in range(TILE):
                layers.next_tokens(step)
                if timed:
                    samples.append(clock.sample(layers.step) / layers.count)
                else:
                    layers.step()
        us, stored = statistics.fmean(samples), sum(layers.stored()) / TILE
    else:
        before = 0 if kind == "none" else min(layers.window, STEPS_BEFORE)
        for step in range(repeats):
            layers.begin([tokens - before for tokens in held])
            for i in range(before):
                layers.next_tokens(step * (before + 1) + i)
                layers.step()
            layers.next_tokens(step * (before + 1) + before)
            samples.append(clock.sample(layers.step) / layers.count)
        us, stored = statistics.median(samples), float(sum(layers.stored()))
    layers.check()
    return us, timing.Timing.of(samples).iqr_us, stored


def rows_of(case: Shape, options: argparse.Namespace, env: environment.Environment) -> list[dict[str, Any]]:
    layers = Layers(case, options, env.cache_bytes)
    clock = timing.timer(options.device, env.clock_mhz)
    layers.begin(phases("none", layers.batch, layers.window))
    clock.warm_up([layers.step] * timing.WARM_UP_CALLS)
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        us, iqr, stored = measure(layers, kind, options.repeats, clock)
        rows.append(
            {
                **plain_rows.run_of(env, "profiling.steps", options.words),
                "B,Hq,Hkv,T,D": ",".join(map(str, (*case, options.head_dim))),
                "keep": layers.caches[0].key_keep,
                "dtype": options.dtype,
                "codec": options.codec or "",
                "window": options.window,
                "layers": layers.count,
                "stores": kind,
                "tiles a step": stored,
                "step, us": round(us, 2),
                "iqr, us": round(iqr, 2),
                "ratio": round(us / rows[0]["step, us"], 3) if rows else 1.0,
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m profiling.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--shape",
        type=shape,
        action="append",
        metavar="B,Hq,Hkv,T",
        help=f"T: compressed tokens, may be repeated (default: {', '.join(SHAPES)})",
    )
    add("--head-dim", type=command_line.positive_integer, default=128, metavar="D", help="(default: %(default)s)")
    add("--sparsity", type=float, default=0.7, metavar="S", help="share of channels pruned (default: %(default)s)")
    add("--codec", choices=CODECS, help="of the caches (default: that of --dtype)")
    add(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="of q and the caches (default: %(default)s)",
    )
    add(
        "--window",
        type=command_line.count,
        default=32,
        metavar="N",
        help="newest tokens kept dense (default: %(default)s)",
    )
    add("--layers", type=command_line.positive_integer, metavar="N", help="(default: as leave the device's cache cold)")
    add(
        "--repeats",
        type=command_line.positive_integer,
        default=TILE,
        metavar="N",
        help="timed steps of each row; spread: at least 64 (default: %(default)s)",
    )
    add("--seed", type=command_line.seed, default=0, metavar="N", help="of the data (default: %(default)s)")
    command_line.add_device(parser)
    command_line.add_output(parser, NAME)
    options = parser.parse_args(arguments)
    options.words = words
    command_line.check_output(parser, options, NAME)
    if not 0 <= options.sparsity < 1:
        parser.error(f"--sparsity must be at least 0 and below 1, got {options.sparsity}")
    options.query_heads, options.kv_heads = 1, 1
    command_line.check_sizes(parser, options)
    command_line.check_backend(parser, "auto", options.device)
    env = environment.environment(options.device)
    try:
        folder = command_line.output_folder(options, env.slug)
    except ValueError as error:
        parser.error(str(error))
    print(env.about, flush=True)
    torch.manual_seed(options.seed)
    rows: list[dict[str, Any]] = []
    for case in options.shape or map(shape, SHAPES):
        rows += rows_of(case, options, env)
        path = plain_rows.write(rows, folder, options.name)
    print(plain_rows.terminal(rows), f"wrote {path}", sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
