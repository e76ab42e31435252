"""A load of requests of mixed lengths through Transformers' continuous batching, compressed beside dense.

    python -m profiling.serving_load                                     # on a GPU: the shape of Llama-3-8B
    python -m profiling.serving_load --device cpu --model tiny --requests 12 --memory-mib 8 --prompt 60 --answer 20

Prompts and answers have log-normal lengths. Both sides serve the same requests with as many bytes of cache, one after
the other, and generate greedily; random weights. `rate` is requests that arrive a second, 0: all at once. Time to first
token counts from a request's arrival, waiting included. Under way: requests between their first and last token. The
dense side needs a GPU: Transformers finds no memory for it on a CPU."""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from profiling import command_line, environment
from profiling.generation.models import RANDOM_CONFIGS

SIDES = ("sparse", "sdpa")
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
BLOCK_TOKENS = 64


def draw_requests(options: argparse.Namespace, vocabulary: int) -> list[tuple[float, list[int], int]]:
    """(seconds after the start, prompt, tokens to generate) of every request."""
    rng = random.Random(options.seed)

    def length(median: int, most: int) -> int:
        return min(most, max(1, round(median * math.exp(rng.gauss(0, options.spread)))))

    arrival, requests = 0.0, []
    for _ in range(options.requests):
        prompt = [rng.randrange(vocabulary) for _ in range(length(options.prompt, options.longest))]
        requests.append((arrival, prompt, length(options.answer, options.longest)))
        arrival += rng.expovariate(options.rate) if options.rate else 0
    return requests


def make_model(name: str, device: torch.device) -> Any:
    import transformers

    kind, sizes = ("LlamaConfig", TINY) if name == "tiny" else RANDOM_CONFIGS[name]
    config = getattr(transformers, kind)(**sizes)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def manager(model: Any, side: str, options: argparse.Namespace) -> Any:
    """A manager of continuous batching, not started, with options.memory_mib of cache."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from cute_kernels.integrations.transformers.batching import SparseKVBatching

    greedy = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory, tokens = options.memory_mib << 20, options.step_tokens
    if side == "sparse":
        batching = ContinuousBatchingConfig(max_batch_tokens=tokens)
        sizes = {"sparsity": options.sparsity, "requests": options.under_way, "memory": memory}
        return SparseKVBatching(model, generation_config=greedy, batching=batching, **sizes)
    text = model.config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    token = 2 * text.num_hidden_layers * text.num_key_value_heads * head_dim * model.dtype.itemsize
    batching = ContinuousBatchingConfig(
        block_size=BLOCK_TOKENS,
        num_blocks=memory // (token * BLOCK_TOKENS),
        max_batch_tokens=tokens,
        max_requests_per_batch=options.under_way,
        use_cuda_graph=False,
        use_async_batching=False,
    )
    model.set_attn_implementation(f"paged|{side}")
    return model.init_continuous_batching(generation_config=greedy, continuous_batching_config=batching)


def serve(model: Any, side: str, options: argparse.Namespace, requests: list[tuple[float, list[int], int]]) -> dict:
    """What one side does with all requests."""
    made = manager(model, side, options)
    made.start()
    results, sent, start = {}, {}, time.perf_counter()
    pending = list(enumerate(requests))
    while len(results) < len(requests):
        while pending and time.perf_counter() - start >= pending[0][1][0]:
            i, (_, prompt, new) = pending.pop(0)
            sent[str(i)] = time.perf_counter()
            made.add_request(prompt, request_id=str(i), max_new_tokens=new, record_timestamps=True)
        result = made.get_result(timeout=0.001 if pending else 0.1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"{side}: {result.error}")
            results[result.request_id] = result
        if not made.is_running():
            raise RuntimeError(f"{side}: the manager stopped: {made.background_thread_status.fatal_error}")
    end = max(result.timestamps[-1] for result in results.values())
    made.stop(block=True)
    made.destroy()
    spans = [(result.timestamps[0], result.timestamps[-1]) for result in results.values()]
    changes = sorted([(first, 1) for first, _ in spans] + [(last, -1) for _, last in spans])
    under_way = most = 0
    for _, change in changes:
        under_way += change
        most = max(most, under_way)
    first_tokens = sorted(results[name].timestamps[0] - sent[name] for name in sent)
    tokens = sum(len(result.generated_tokens) for result in results.values())
    return {
        "side": side,
        "tokens_per_s": tokens / (end - start),
        "first_token_p50_s": first_tokens[len(first_tokens) // 2],
        "first_token_p99_s": first_tokens[min(len(first_tokens) - 1, len(first_tokens) * 99 // 100)],
        "under_way_at_most": most,
        "requests": len(requests),
        "tokens": tokens,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.serving_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    device = command_line.default_device()
    add("--device", type=command_line.device, default=device, metavar="NAME", help="(default: %(default)s)")
    add("--model", choices=("tiny", *RANDOM_CONFIGS), default="llama3-8b", help="(default: %(default)s)")
    add("--side", choices=SIDES, action="append", help="one or more (default: all of them)")
    for name, size, what in (
        ("requests", 200, "in all"),
        ("memory-mib", 8192, "MiB of cache a side"),
        ("under-way", 256, "requests at most"),
        ("step-tokens", 2048, "tokens of a step at most"),
        ("prompt", 1000, "tokens of a prompt, median"),
        ("answer", 200, "tokens of an answer, median"),
        ("longest", 4000, "tokens of either at most"),
    ):
        add(f"--{name}", type=command_line.positive_integer, default=size, metavar="N", help=f"{what} (%(default)s)")
    add("--sparsity", type=float, default=0.7, help="of the sparse side (default: %(default)s)")
    add("--spread", type=float, default=0.6, help="standard deviation of the lengths' logarithms (%(default)s)")
    add("--rate", type=float, default=0.0, help="requests a second, 0: all at once (default: %(default)s)")
    add("--seed", type=command_line.seed, default=0, metavar="N", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if not 0 <= options.sparsity <= 1:
        parser.error(f"--sparsity: must be from 0 to 1, got {options.sparsity}")
    for name in ("spread", "rate"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            parser.error(f"--{name}: must be a number of at least 0, got {value}")

    print(environment.environment(options.device).about, flush=True)
    torch.manual_seed(options.seed)
    model = make_model(options.model, options.device)
    requests = draw_requests(options, model.config.get_text_config().vocab_size)
    for side in options.side or SIDES:
        serve(model, side, options, requests[: min(2, len(requests))])  # what is slow only once
        row = serve(model, side, options, requests)
        print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
