"""Decoding on several GPUs: what a model expects, and, with --measure, what this host's GPUs take.

Exit status: 0 done, 1 a measurement failed or a result was inaccurate, 2 wrong arguments or something missing, 130
interrupted (the rows finished so far are written).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from profiling import command_line
from profiling.command_line import positive_integer, positive_integers
from profiling.environment import Environment, environment
from profiling.scaling import attention, generation, model, rows
from profiling.scaling.rows import Row
from profiling.tables import aligned

EXIT_OK, EXIT_FAILED, EXIT_MISSING, EXIT_INTERRUPTED = 0, 1, 2, 130
MEASURED_TOKENS = (131072, 1 << 20, 4 << 20)
SMALL_TOKENS = (1024, 4096)  # on a CPU

DESCRIPTION = """\
A model of decoding on several H200s, with 38 of 128 channels kept: bytes, gather, merge and latency of a layer's
attention where the tokens are spread over G GPUs (cp).
--measure measures that attention on 1, 2, 4, ... GPUs of this host, the model's expectation beside it; --generate also
the Llama-3-8B shape over tp, cp and both, by profiling.generate in CUDA graphs."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    sources = "\n".join(f"  {name}: {source}" for name, source in model.SOURCES.items())
    parser = argparse.ArgumentParser(
        prog="python -m profiling.scaling",
        description=DESCRIPTION,
        epilog=f"where the model's figures come from:\n{sources}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--tokens",
        type=positive_integers,
        metavar="LIST",
        help="a sequence (default: 1 M, 10 M; measured: 128 K, 1 M, 4 M)",
    )
    add(
        "--gpus",
        type=positive_integers,
        metavar="LIST",
        help="along cp (default: 1,2,8,64; measured: 1,2,4,... of this host)",
    )
    add("--batch", type=positive_integer, default=1, metavar="N", help="sequences (default: %(default)s)")
    add("--query-heads", type=positive_integer, default=32, metavar="N", help="of a GPU (default: %(default)s)")
    add("--kv-heads", type=positive_integer, default=8, metavar="N", help="of a GPU (default: %(default)s)")
    add("--layers", type=positive_integer, default=32, metavar="N", help="of the model (default: %(default)s)")
    add(
        "--weights-gb",
        type=command_line.count,
        default=16,
        metavar="GB",
        help="of a GPU, to tell what fits (default: %(default)s)",
    )
    add("--plot", type=Path, metavar="FILE", help="also draw the model's plot, as PNG")
    add("--measure", action="store_true", help="measure attention")
    add("--generate", action="store_true", help="with --measure: generation over meshes, too")
    add("--prompt", type=positive_integer, default=32768, metavar="N", help="tokens, generated from (%(default)s)")
    add(
        "--prompt-chunk",
        type=positive_integer,
        default=2048,
        metavar="N",
        help="tokens of a prompt a pass (%(default)s)",
    )
    add("--new", type=positive_integer, default=128, metavar="N", help="tokens to generate (default: %(default)s)")
    add("--batches", type=positive_integers, default=[1, 32], metavar="LIST", help="generated at once (default: 1,32)")
    add("--random-config", default="llama3-8b", metavar="NAME", help="to generate with (default: %(default)s)")
    add("--head-dim", type=positive_integer, default=model.HEAD_DIM, metavar="N", help="measured (%(default)s)")
    add("--keep", type=positive_integer, default=model.KEEP, metavar="N", help="channels kept, measured (%(default)s)")
    add("--window", type=command_line.count, default=32, metavar="N", help="dense tokens, measured (%(default)s)")
    add("--repeats", type=positive_integer, default=20, metavar="N", help="of a measurement (default: %(default)s)")
    add("--seed", type=command_line.seed, default=0, metavar="N", help="of the tokens (default: 0)")
    command_line.add_device(parser)
    command_line.add_output(parser, rows.NAME)
    args = parser.parse_args(arguments)
    if args.query_heads % args.kv_heads:
        parser.error(f"--query-heads: must be a multiple of --kv-heads {args.kv_heads}, got {args.query_heads}")
    if args.plot is not None and args.plot.suffix != ".png":
        parser.error(f"--plot: must end in .png, got {args.plot}")
    if args.measure:
        _check_measured(args, parser)
    elif args.generate:
        parser.error("--generate goes with --measure")
    args.tokens = args.tokens or list(model.TOKENS)
    args.gpus = args.gpus or list(model.GPUS)
    return args


def _check_measured(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    on_gpu = args.device.type == "cuda"
    if not torch.distributed.is_available():
        parser.error("--measure needs torch.distributed, which this torch does not have")
    command_line.check_output(parser, args, rows.NAME)
    there = torch.cuda.device_count() if on_gpu else 2
    args.gpus = args.gpus or [1 << i for i in range(there.bit_length())]
    if on_gpu and max(args.gpus) > there:
        parser.error(f"--gpus: this host has {there}, got {max(args.gpus)}")
    args.tokens = args.tokens or list(MEASURED_TOKENS if on_gpu else SMALL_TOKENS)
    command_line.check_sizes(parser, args)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    if args.measure:
        return _measure(args, sys.argv[1:] if arguments is None else list(arguments))
    shape = {name: getattr(args, name) for name in ("batch", "query_heads", "kv_heads", "layers")}
    steps = [model.step(tokens, gpus, **shape) for tokens in args.tokens for gpus in args.gpus]
    print(aligned(model.table(steps, args.weights_gb)))
    print("A model, not a measurement: --help says where its figures come from.")
    if args.plot is not None:
        try:
            from profiling.scaling.plot import draw

            print(f"wrote {draw(steps, args.plot)}")
        except (ImportError, OSError) as error:
            print(f"python -m profiling.scaling: error: {error}", file=sys.stderr)
            return EXIT_MISSING
    return EXIT_OK


def _measure(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    env = environment(args.device)
    try:
        folder = command_line.output_folder(args, env.slug)
    except ValueError as error:
        print(f"python -m profiling.scaling: error: {error}", file=sys.stderr)
        return EXIT_MISSING
    sizes = args.batch, args.query_heads, args.kv_heads, args.head_dim, args.keep, args.window
    problems = [attention.Problem(tokens, *sizes) for tokens in args.tokens]
    command = shlex.join(["python", "-m", "profiling.scaling", *arguments])
    done: list[Row] = []
    status = EXIT_OK
    try:
        for gpus in args.gpus:
            measured = attention.measure(problems, gpus, args.device.type, args.repeats, args.seed)
            for problem, times in zip(problems, measured):
                done.append(_row(problem, gpus, times, env, command))
                rows.write(done, folder, args.name)
                print(f"{gpus} GPUs, {problem.tokens} tokens: {times.attend:.1f} us", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print(f"interrupted: kept the {len(done)} rows measured so far", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except Exception as error:  # of a rank, such as a device that failed
        print(f"python -m profiling.scaling: {error}", file=sys.stderr)
        status = EXIT_FAILED
    if done:
        print(rows.terminal(done), f"wrote {rows.write(done, folder, args.name)}", sep="\n", flush=True)
    if any(not row.accurate for row in done):
        status = status or EXIT_FAILED
    if args.generate and status == EXIT_OK:
        status = generation.run(args, folder)
    return status


def _row(problem: attention.Problem, gpus: int, times: attention.Times, env: Environment, command: str) -> Row:
    return Row(
        gpus=gpus,
        tokens=problem.tokens,
        batch=problem.batch,
        query_heads=problem.query_heads,
        kv_heads=problem.kv_heads,
        head_dim=problem.head_dim,
        keep=problem.keep,
        window=problem.window,
        attend_us=times.attend,
        step_us=times.step,
        attention_us=times.attention,
        gather_us=times.gather,
        merge_us=times.merge,
        rel_err=times.rel_err,
        dtype="float16",
        device=env.name,
        torch=env.torch,
        driver=env.driver,
        isa=env.isa,
        commit=env.commit,
        timestamp=env.timestamp,
        command=command,
    )


if __name__ == "__main__":
    sys.exit(main())
