"""Users of mixed requests at Transformers' continuous batching, compressed beside dense.

    python -m profiling.serving_load                                     # on a GPU: the shape of Llama-3-8B
    python -m profiling.serving_load --device cpu --model tiny --memory-mib 24 --under-way 8 --users 1,4 --seconds 2

A user sends a request, and the next one when the answer is complete. Prompts and answers have log-normal lengths;
random weights, greedy. All sides have as many bytes of cache and serve the same requests, with 1 user first and more in
turn, each number for a window of time. Time to first token counts from sending a request, waiting included. Under way:
requests between their first and last token. A request that hits a prefix is alone.

Sides: sparse, CUDA graphs for steps of decoding; sparse-eager, without; sdpa and flash, Transformers' own attention, as
it comes; sdpa-no-cudnn, without cuDNN, which makes a plan for every new length. sparse and flash need a GPU.

Exit status: 0 all measured, 1 a side failed, 2 wrong arguments or something missing, 130 interrupted (the rows finished
so far are written).
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from profiling import command_line
from profiling.environment import Environment, environment
from profiling.generation.models import RANDOM_CONFIGS
from profiling.serving_load import rows
from profiling.serving_load.requests import Lengths, Requests
from profiling.serving_load.rows import Row

EXIT_OK, EXIT_FAILED, EXIT_MISSING, EXIT_INTERRUPTED = 0, 1, 2, 130
SIDES = ("sparse", "sparse-eager", *rows.DENSE)
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TAIL, REPEATS = 64, 5  # tokens behind a shared prefix; hits


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.serving_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    device = command_line.default_device()
    add("--device", type=command_line.device, default=device, metavar="NAME", help="(default: %(default)s)")
    add("--model", choices=("tiny", *RANDOM_CONFIGS), default="llama3-8b", help="(default: %(default)s)")
    add("--side", choices=SIDES, action="append", help="one or more (default: all that can run)")
    add(
        "--users",
        type=command_line.positive_integers,
        default=[1, 8, 32, 96],
        metavar="LIST",
        help="numbers of users (default: 1,8,32,96)",
    )
    for name, size, what in (
        ("memory-mib", 8192, "MiB of cache a side"),
        ("under-way", 96, "requests at most"),
        ("step-tokens", 2048, "tokens of a step at most"),
        ("prompt", 1000, "tokens of a prompt, median"),
        ("answer", 200, "tokens of an answer, median"),
        ("longest", 4000, "tokens of either at most"),
    ):
        add(f"--{name}", type=command_line.positive_integer, default=size, metavar="N", help=f"{what} (%(default)s)")
    add("--prefix", type=command_line.count, default=8192, metavar="N", help="tokens that requests share (%(default)s)")
    for name, seconds, what in (("seconds", 8.0, "of a window"), ("settle", 6.0, "before a window at most")):
        add(f"--{name}", type=command_line.positive_number, default=seconds, metavar="S", help=f"{what} (%(default)s)")
    add("--sparsity", type=float, default=0.7, help="of the sparse side (default: %(default)s)")
    add("--spread", type=float, default=0.6, help="standard deviation of the lengths' logarithms (%(default)s)")
    add("--seed", type=command_line.seed, default=0, metavar="N", help="(default: %(default)s)")
    command_line.add_output(parser, rows.NAME)
    add("--resume", action="store_true", help="keep rows of this state and these sizes, and measure the others")
    args = parser.parse_args(arguments)
    if not 0 <= args.sparsity <= 1:
        parser.error(f"--sparsity: must be from 0 to 1, got {args.sparsity}")
    if not 0 <= args.spread < math.inf:
        parser.error(f"--spread: must be a number of at least 0, got {args.spread}")
    command_line.check_output(parser, args, rows.NAME)
    if max(args.users) > args.under_way:
        print(f"of {max(args.users)} users {args.under_way} are under way at most (--under-way)", file=sys.stderr)
    return args


def make_model(name: str, device: torch.device, seed: int) -> Any:
    import transformers

    kind, sizes = ("LlamaConfig", TINY) if name == "tiny" else RANDOM_CONFIGS[name]
    config = getattr(transformers, kind)(**sizes)
    torch.manual_seed(seed)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


class Measurement:
    """Of all sides; rows are written as they come."""

    def __init__(self, args: argparse.Namespace, env: Environment, command: str, folder: Path) -> None:
        self._args, self._env, self._command, self._folder = args, env, command, folder
        path = folder / f"{args.name}.json"
        self.rows: list[Row] = rows.read(path) if args.resume and path.is_file() else []
        self._begun = time.perf_counter()

    def side(self, model: Any, side: str) -> None:
        from profiling.serving_load import sides
        from profiling.serving_load.session import Session

        args = self._args
        users = [count for count in args.users if self._new(side, count)]
        prefix = args.prefix and self._new(side, 0)
        if not users and not prefix:
            return
        lengths = Lengths(args.prompt, args.answer, args.spread, args.longest)
        sizes = sides.Sizes(args.memory_mib << 20, args.under_way, args.step_tokens, args.sparsity)
        requests = Requests(lengths, model.config.get_text_config().vocab_size, args.seed)
        with sides.attention(side), Session(sides.make(model, side, sizes), requests) as session:
            if prefix:
                miss, hit = session.prefix_hits(args.prefix, TAIL, REPEATS)
                self._add(side, 0, first_token_p50_ms=hit * 1e3, first_tokens=REPEATS, miss_ms=miss * 1e3)
            for count in users:
                load = session.load(count, args.seconds, args.settle)
                self._add(
                    side,
                    count,
                    tokens_per_s=load.tokens / load.seconds,
                    first_token_p50_ms=_milliseconds(load.first_token_p50),
                    first_token_p99_ms=_milliseconds(load.first_token_p99),
                    first_tokens=load.first_tokens,
                    waiting=load.waiting,
                    under_way=load.under_way,
                    used=load.used,
                    step_ms=load.seconds * 1e3 / load.steps if load.steps else None,
                )

    def _new(self, side: str, users: int) -> bool:
        return self._row(side, users).case not in {row.case for row in self.rows}

    def _add(self, side: str, users: int, **values: Any) -> None:
        row = self._row(side, users, **{k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()})
        self.rows.append(row)
        rows.write(self.rows, self._folder, self._args.name)
        print(f"{time.perf_counter() - self._begun:.0f} s\n{rows.terminal([row])}", file=sys.stderr, flush=True)

    def _row(self, side: str, users: int, **values: Any) -> Row:
        import transformers

        args, env = self._args, self._env
        measured = dict.fromkeys(
            (
                *("tokens_per_s", "first_token_p50_ms", "first_token_p99_ms", "waiting", "under_way", "used"),
                *("step_ms", "miss_ms"),
            )
        )
        return Row(
            side=side,
            users=users,
            model=args.model,
            prompt=args.prompt,
            answer=args.answer,
            spread=args.spread,
            longest=args.longest,
            memory=args.memory_mib << 20,
            under_way_at_most=args.under_way,
            step_tokens=args.step_tokens,
            sparsity=args.sparsity,
            prefix=args.prefix,
            device=env.name,
            torch=env.torch,
            transformers=transformers.__version__,
            driver=env.driver,
            isa=env.isa,
            commit=env.commit,
            timestamp=env.timestamp,
            command=self._command,
            **{"first_tokens": 0, **measured, **values},
        )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    env = environment(args.device)
    try:
        folder = command_line.output_folder(args, env.slug)
        from profiling.serving_load import sides

        on_gpu = args.device.type == "cuda"
        found = args.side or [side for side in SIDES if not sides.missing(side, on_gpu)]
        if lacking := [f"{side}: {reason}" for side in found if (reason := sides.missing(side, on_gpu))]:
            raise ValueError("; ".join(lacking))
        command = shlex.join(["python", "-m", "profiling.serving_load", *(arguments or sys.argv[1:])])
        measurement = Measurement(args, env, command, folder)
    except (ImportError, ValueError) as error:
        print(f"python -m profiling.serving_load: error: {error}", file=sys.stderr)
        return EXIT_MISSING
    print(env.about, flush=True)
    model, status = make_model(args.model, args.device, args.seed), EXIT_OK
    try:
        for side in found:
            measurement.side(model, side)
    except KeyboardInterrupt:
        status = EXIT_INTERRUPTED
    except Exception as error:  # of a side: memory that does not suffice, or the device
        print(f"python -m profiling.serving_load: {side}: {type(error).__name__}: {error}", file=sys.stderr)
        status = EXIT_FAILED
    if measurement.rows:
        print(rows.terminal(measurement.rows), f"wrote {folder / args.name}.json", sep="\n", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
