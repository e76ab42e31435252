"""What a call takes of the host: microseconds until it returns, its kernels queued.

    python -m profiling.host_cost                # on a GPU, beside torch's scaled_dot_product_attention
    python -m profiling.host_cost --no-launch    # without the extension's part, on a GPU or, without one, on the CPU

Every call is timed by itself, the functions in turn, and nothing waits for the device while the clock runs: it catches
up after every round of calls. A quiet machine matters: the host's other work shows in all columns but the median.

A step: append and attend as the layers of a Transformers model ask for them, together. A layer: where Transformers is
installed, what a Llama layer does in a step between its projections (layer_step.py).

Columns: median, 90th percentile and mean. append's mean has the steps in it in which a tile gets full, once in 64."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from unittest import mock

import torch
import torch.nn.functional as F

import cute_kernels as ck
from cute_kernels._cache import page_pool
from cute_kernels._runtime.extension import _C
from profiling import command_line, environment

KEEP, WINDOW = 38, 64
ROUND_CALLS = 16  # of each function before the device catches up
WARM_UP_ROUNDS = 4
SIZES = (
    ("rounds", 64, f"of {ROUND_CALLS} calls each"),
    ("batch", 8, "sequences"),
    ("query-heads", 32, "a multiple of --kv-heads"),
    ("kv-heads", 8, "heads of the caches"),
    ("tokens", 1024, "cached tokens of a sequence"),
    ("head-dim", 128, "D"),
)
LAUNCHES = ("sparse_qk", "sparse_av", "attention", "append")


def functions(options: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], object]]:
    """What is measured, by name, on data of its own."""
    batch, heads, kv_heads, head_dim = options.batch, options.query_heads, options.kv_heads, options.head_dim

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=torch.float16, device=device)

    k, v = (normal(batch, kv_heads, options.tokens, head_dim) for _ in range(2))
    keys, values = ck.compress_kv(k, v, keep=min(KEEP, head_dim))
    q, p = normal(batch, heads, 1, head_dim), normal(batch, heads, 1, options.tokens).softmax(-1)
    window = normal(batch, kv_heads, WINDOW, head_dim), normal(batch, kv_heads, WINDOW, head_dim)
    out = torch.empty_like(q)
    calls = (options.rounds + WARM_UP_ROUNDS) * ROUND_CALLS
    cache, stepped = (
        ck.KVCache(
            max_batch=batch,
            kv_heads=kv_heads,
            head_dim=head_dim,
            capacity=options.tokens + calls,
            keep=min(KEEP, head_dim),
            device=device,
        )
        for _ in range(2)
    )
    cache.prefill(k, v)
    stepped.prefill(k, v)
    new = normal(batch, kv_heads, 1, head_dim), normal(batch, kv_heads, 1, head_dim)
    measured: dict[str, Callable[[], object]] = {
        "sparse_qk": lambda: ck.sparse_qk(q, keys),
        "sparse_av": lambda: ck.sparse_av(p, values),
        "sparse_attention": lambda: ck.sparse_attention(q, keys, values),
        "sparse_attention, window": lambda: ck.sparse_attention(q, keys, values, window=window),
        "sparse_attention, window, out": lambda: ck.sparse_attention(q, keys, values, window=window, out=out),
        "KVCache.append": lambda: cache.append(*new),
        "KVCache.attend": lambda: cache.attend(q),
        "KVCache.step": lambda: stepped.step(q, *new),
    }
    if not options.no_launch:
        gqa = {"enable_gqa": heads != kv_heads}
        measured["scaled_dot_product_attention"] = lambda: F.scaled_dot_product_attention(q, k, v, **gqa)
    if find_spec("transformers"):
        from profiling import layer_step

        capacity = options.tokens + -(-calls // layer_step.LAYERS)
        measured["SparseKVCache, layer"] = layer_step.sparse(heads, k, v, min(KEEP, head_dim), capacity)
        if not options.no_launch:
            measured["DynamicCache and sdpa, layer"] = layer_step.dense(heads, k, v)
    return measured


@contextmanager
def launches_left_out(device: torch.device) -> Iterator[None]:
    """The extension's functions for decoding do nothing."""

    def nothing(*_: object) -> None:
        pass

    module = getattr(_C, device.type)
    places = [(module, name) for name in LAUNCHES if hasattr(module, name)]
    if device.type == "cpu":
        places.append((page_pool, "append_on_cpu"))
    else:
        places.append((_C.cuda.DecodingStep, "run"))
    with ExitStack() as stack:
        for place, name in places:
            stack.enter_context(mock.patch.object(place, name, nothing))
        yield


def measure(calls: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Microseconds of every call after the warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(-WARM_UP_ROUNDS, rounds):
        for name, call in calls.items():
            for _ in range(ROUND_CALLS):
                start = time.perf_counter_ns()
                call()
                end = time.perf_counter_ns()
                if i >= 0:
                    samples[name].append((end - start) / 1e3)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    return samples


def table(samples: dict[str, list[float]]) -> str:
    width = max(map(len, samples))
    lines = [f"{'us a call':{width}} {'median':>8} {'90 %':>8} {'mean':>8}"]
    for name, values in samples.items():
        ninth = statistics.quantiles(values, n=10)[-1]
        lines.append(f"{name:{width}} {statistics.median(values):8.1f} {ninth:8.1f} {statistics.fmean(values):8.1f}")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.host_cost", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    parser.add_argument("--no-launch", action="store_true", help="leave the extension's functions out")
    for name, size, what in SIZES:
        parser.add_argument(
            f"--{name}",
            type=command_line.positive_integer,
            default=size,
            metavar="N",
            help=f"{what} (default: %(default)s)",
        )
    options = parser.parse_args(arguments)
    command_line.check_sizes(parser, options)
    if not options.no_launch and not torch.cuda.is_available():
        parser.error("no CUDA device: --no-launch measures without one")
    if not torch.cuda.is_available():
        command_line.check_isa(parser)
    return options


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    env = environment.environment(device)
    print(
        f"{env.about}, B {options.batch}, Hq {options.query_heads}, "
        f"Hkv {options.kv_heads}, T {options.tokens}, D {options.head_dim}"
        f"{', extension left out' if options.no_launch else ''}"
    )
    calls = functions(options, device)
    with launches_left_out(device) if options.no_launch else nullcontext():
        print(table(measure(calls, options.rounds, device)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
