"""Generates with a dense and with a compressed KV cache: python -m profiling.generate [--help].

Exit status: 0 all measured, 1 the device failed, 2 wrong arguments, an unsupported model or something missing, 130
interrupted (the rows finished so far are written).
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Dense caches grow by a token at a time: without this, memory gets fragmented and less fits.
ALLOCATOR, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
os.environ.setdefault(ALLOCATOR, EXPANDABLE)

import torch

from profiling import command_line, folders
from profiling.command_line import positive_integer
from profiling.environment import environment
from profiling.generation import heads, measure, mesh, models, rows
from profiling.generation.measure import Side
from profiling.generation.rows import Row
from profiling.progress import Progress

EXIT_OK, EXIT_FAILED, EXIT_MISSING, EXIT_INTERRUPTED = 0, 1, 2, 130
PROMPT, NEW_TOKENS, BATCHES, SPARSITY, WINDOW, REPEATS = 4096, 512, "1,8,max", 0.7, 32, 3
QUICK = {"prompt": 200, "new": 24, "batch": "1,2"}

DESCRIPTION = """\
Generate with Transformers, greedily, from random prompts, and measure the time to the first token, tokens a second,
memory, and the largest batch that fits: with a dense cache (sdpa attention, DynamicCache) and with a SparseKVCache on
the same model. Random weights have the true size, so that speed and memory are real without a download; what they
write is not."""

EPILOG = """\
random configs: {configs}

--batch max is the largest batch that fits, found from the peak memory of two smaller ones (of --batch, else 1 and 2)
and tried; where it does not fit, batches of 5 % less each. Every cache has its own. It needs a GPU.

Rows go to build/profiling/DEVICE/NAME.json, which git ignores, after every row; --out DIR names another folder. With
--commit-results they go to profiling/results/DEVICE/. python -m profiling.report FOLDER makes tables and CSV of
them."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    epilog = EPILOG.format(configs=", ".join(models.RANDOM_CONFIGS))
    parser = argparse.ArgumentParser(
        prog="python -m profiling.generate",
        description=DESCRIPTION,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="DIR", help="folder of a model, as save_pretrained writes it")
    source.add_argument(
        "--random-config",
        choices=models.RANDOM_CONFIGS,
        metavar="NAME",
        help="shape of a model with random weights (default: llama3-8b; without a GPU or with --quick tiny)",
    )
    add("--prompt", type=positive_integer, metavar="N", help=f"tokens of each prompt (default: {PROMPT})")
    add(
        "--prompt-chunk",
        type=positive_integer,
        metavar="N",
        help="tokens of a prompt that a pass takes (default: all)",
    )
    add(
        "--turn",
        type=positive_integer,
        metavar="N",
        help="tokens of a second prompt, which follows the first in the same cache: times count from it on",
    )
    add(
        "--lookup",
        type=positive_integer,
        metavar="N",
        help="prompt lookup proposes so many tokens for a step, of prompts that repeat themselves; batch 1",
    )
    add("--new", type=_at_least_3, metavar="N", help=f"new tokens of each sequence (default: {NEW_TOKENS})")
    add("--batch", type=_batches, metavar="LIST", help=f"sequences, or max (default: {BATCHES}; without a GPU 1,2)")
    add(
        "--side",
        action="append",
        choices=measure.SIDES,
        help="what to measure, may be repeated (default: dense, sparse); sparse-graph: SparseKVCache(graphs=True); "
        "others of graphs: steps are replays of a CUDA graph in a loop of our own, sparse-loop-graph with a "
        "SparseKVCache, static-graph with a StaticCache, flashinfer-graph with pages that FlashInfer attends to (the "
        "extra peers)",
    )
    add(
        "--sdpa",
        type=_sdpa,
        metavar="LIST",
        help="of default (torch chooses the backend) and no-cudnn; dense and static-graph are measured with each, "
        "others with the first (default: default,no-cudnn; without a GPU default)",
    )
    add(
        "--mesh",
        type=mesh.sizes,
        metavar="SIZES",
        help="as tp=2, cp=4 or tp=2,cp=2: heads and tokens over as many processes, started by torchrun; tp by the "
        "model's own plan. With cp sparse caches only. Bytes and parameters are those of the first process",
    )
    add("--sparsity", type=float, metavar="S", help=f"share of channels pruned (default: {SPARSITY})")
    add("--key-keep", type=positive_integer, metavar="N", help="channels kept of keys, in place of --sparsity")
    add("--value-keep", type=positive_integer, metavar="N", help="channels kept of values, in place of --sparsity")
    add(
        "--window",
        type=command_line.count,
        default=WINDOW,
        metavar="N",
        help=f"newest tokens kept dense (default: {WINDOW})",
    )
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of the model (default: %(default)s)")
    add(
        "--device",
        type=command_line.device,
        default=command_line.default_device(),
        metavar="NAME",
        help="cpu or cuda (default: cuda if there is one)",
    )
    add(
        "--repeats",
        type=positive_integer,
        metavar="N",
        help="runs whose medians make a row, the sides in turn but for --batch max "
        f"(default: {REPEATS}; without a GPU or with --quick 1)",
    )
    add("--seed", type=command_line.seed, default=0, metavar="N", help="of weights and prompts (default: 0)")
    add("--quick", action="store_true", help="a tiny model and short texts: a smoke test, no figures to quote")
    add("--out", type=Path, metavar="DIR", help="folder for the file (default: see below)")
    add("--commit-results", action="store_true", help="write to the committed results of this GPU")
    add(
        "--name",
        type=_file_name,
        default=rows.NAME,
        metavar="NAME",
        help="of the file (default: %(default)s); profiling.report reads those that begin with generate",
    )
    args = parser.parse_args(arguments)
    if (args.key_keep is None) != (args.value_keep is None):
        parser.error("--key-keep and --value-keep come together")
    if args.sparsity is not None and args.key_keep is not None:
        parser.error("give --sparsity or --key-keep and --value-keep, not both")
    if args.sparsity is not None and not 0 <= args.sparsity < 1:
        parser.error(f"--sparsity must be at least 0 and below 1, got {args.sparsity}")
    if args.commit_results and (args.out or args.quick):
        parser.error("--commit-results goes without --out and --quick")
    return _complete(args, parser)


def _complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Fills in what depends on the device."""
    on_cpu = args.device.type == "cpu"
    if args.commit_results and on_cpu:
        parser.error("--commit-results needs a GPU")
    small = args.quick or on_cpu
    args.random_config = args.random_config or ("tiny" if small else "llama3-8b")
    args.repeats = args.repeats or (1 if small else REPEATS)
    args.prompt = args.prompt or (QUICK["prompt"] if small else PROMPT)
    args.new = args.new or (QUICK["new"] if small else NEW_TOKENS)
    args.batch = args.batch or _batches(QUICK["batch"] if small else BATCHES)
    if "max" in args.batch and on_cpu:
        parser.error("--batch max needs a GPU: a CPU's memory is the system's")
    for option, value in (("--turn", args.turn), ("--lookup", args.lookup)):
        if value and (loops := [side for side in args.side or () if _loops(side)]):
            parser.error(f"{option} goes without --side {' '.join(loops)}, whose loop is ours")
    if args.lookup and args.batch != [1]:
        parser.error("--lookup goes with --batch 1")
    if args.mesh and (alone := set(args.side or ()) & {"sparse-graph", "flashinfer-graph"}):
        parser.error(f"--mesh goes without --side {' '.join(sorted(alone))}, which are of one device")
    if on_cpu and any(side.endswith("-graph") for side in args.side or ()):
        parser.error(f"--side {' '.join(args.side)}: CUDA graphs need a GPU")
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there")
    spread = mesh.TOKENS in (args.mesh or ())
    args.side = list(dict.fromkeys(args.side or (("sparse",) if spread else ("dense", "sparse"))))
    if spread and any(not side.startswith("sparse") for side in args.side):
        parser.error("--mesh with cp spreads sparse caches only: --side sparse")
    if args.mesh and "max" in args.batch:
        parser.error("--batch max goes without --mesh")
    args.sdpa = args.sdpa or (measure.SDPA[:1] if on_cpu else measure.SDPA)
    if args.sparsity is None and args.key_keep is None:
        args.sparsity = SPARSITY
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        import transformers

        from cute_kernels.integrations.transformers import SparseKVCache  # noqa: F401
    except ImportError as error:
        print(f"python -m profiling.generate: {error}", file=sys.stderr)
        return EXIT_MISSING
    transformers.logging.set_verbosity_error()
    if not args.mesh:
        return _generate(args, None)
    try:
        mesh.check_processes(args.mesh, args.device)
        made, args.device = mesh.start(args.mesh, args.device)
    except (ValueError, RuntimeError) as error:
        print(f"python -m profiling.generate: error: {error}", file=sys.stderr)
        return EXIT_MISSING
    try:
        return _generate(args, made)
    finally:
        torch.distributed.destroy_process_group()


def _generate(args: argparse.Namespace, made: Any) -> int:
    """made: the DeviceMesh of --mesh; its first process writes the rows."""
    first = made is None or torch.distributed.get_rank() == 0
    sides = _sides(args, made)
    try:  # what would fail between the measurements fails now
        env = environment(args.device)
        folder = args.out or folders.of_device(env.slug, args.commit_results)
        command_line.folder_for(folder)
        _check_kept(args, models.head_dim(models.config_of(args.model, args.random_config)))
        model = models.load(args.model, args.random_config, getattr(torch, args.dtype), args.device, args.seed)
        if made is not None and mesh.HEADS in args.mesh:
            heads.spread(model, made[mesh.HEADS] if made.ndim > 1 else made)
        for side in sides:
            side.check(model, args.prompt + (args.turn or 0) + args.new)
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        print(f"python -m profiling.generate: error: {error}", file=sys.stderr)
        return EXIT_MISSING
    done: list[Row] = []
    status = EXIT_OK
    try:
        with Progress(len(sides) * len(args.batch), quiet=not first) as progress:
            for row in _rows(args, sides, model, env, progress):
                done.append(row)
                if first:
                    rows.write(done, folder, args.name)
    except KeyboardInterrupt:
        print(f"interrupted: kept the {len(done)} rows measured so far", file=sys.stderr)
        status = EXIT_INTERRUPTED
    except (ValueError, RuntimeError) as error:  # such as a device that failed
        print(f"python -m profiling.generate: {error}", file=sys.stderr)
        status = EXIT_FAILED
    if done and first:
        path = rows.write(done, folder, args.name)
        print(rows.terminal(done), f"wrote {path}", sep="\n", flush=True)
    return status


def _check_kept(args: argparse.Namespace, head_dim: int) -> None:
    for option, kept in (("--key-keep", args.key_keep), ("--value-keep", args.value_keep)):
        if kept is not None and kept > head_dim:
            raise ValueError(f"{option} must be from 1 to the model's head dim {head_dim}, got {kept}")


def _sides(args: argparse.Namespace, made: Any) -> list[Side]:
    sides = []
    for name in args.side:
        for sdpa in args.sdpa if name in ("dense", "static-graph") else args.sdpa[:1]:
            sides.append(
                Side(
                    name,
                    args.sparsity,
                    args.key_keep,
                    args.value_keep,
                    args.window,
                    sdpa,
                    made,
                    args.prompt_chunk,
                    args.lookup,
                )
            )
    return sides


def _rows(args: argparse.Namespace, sides: Sequence[Side], model: Any, env: Any, progress: Progress) -> Iterator[Row]:
    """Smaller batches first: they tell how much memory a sequence takes. At a batch the sides take turns: what slows
    the host down for a while meets all of them. Each has a largest batch of its own."""
    peaks: dict[Side, dict[int, int]] = {side: {} for side in sides}
    case = args.prompt, args.new, args.seed, args.turn or 0
    for batch in sorted(size for size in args.batch if size != "max"):
        results: dict[Side, list[measure.Result]] = {side: [] for side in sides}
        for repeat in range(1, args.repeats + 1):
            for side in sides:
                progress.start(f"{side.name}, batch {batch}, {repeat} of {args.repeats}")
                result = measure.run(model, side, batch, *case)
                results[side].append(result)
                if result.peak_bytes is not None:
                    peaks[side][batch] = result.peak_bytes
                if repeat == args.repeats:
                    row = _row(args, model, env, side, batch, False, results[side])
                    progress.finish(rows.one_line(row))
                    yield row
    for side in sides if "max" in args.batch else ():
        progress.start(f"{side.name}, batch max, 1 of {args.repeats}")
        for probe in (1, 2):
            if len(peaks[side]) < 2 and probe not in peaks[side]:
                peaks[side][probe] = measure.run(model, side, probe, *case).peak_bytes
        batch, result = measure.run_largest(model, side, peaks[side], *case)
        repeats = [result]
        for repeat in range(2, args.repeats + 1):
            progress.start(f"{side.name}, batch {batch}, {repeat} of {args.repeats}")
            repeats.append(measure.run(model, side, batch, *case))
        row = _row(args, model, env, side, batch, True, repeats)
        progress.finish(rows.one_line(row))
        yield row


def _row(
    args: argparse.Namespace,
    model: Any,
    env: Any,
    side: Side,
    batch: int,
    largest: bool,
    results: Sequence[measure.Result],
) -> Row:
    import transformers

    result, speeds = measure.median(results), [round(each.tokens_per_s, 2) for each in results]

    head_dim = models.head_dim(model.config)
    kept = (None, None)
    if side.sparse:
        kept = side.key_keep, side.value_keep
        if side.sparsity is not None:
            kept = (max(1, int(head_dim * (1 - side.sparsity) + 1e-6)),) * 2
    name = str(args.model) if args.model is not None else f"{args.random_config}, random weights"
    tokens = args.prompt + (args.turn or 0) + args.new - 1  # the last one is not fed back
    return Row(
        model=name,
        parameters=models.parameters(model),
        side=side.name,
        cache=result.cache,
        key_keep=kept[0],
        value_keep=kept[1],
        window=side.window if side.sparse else None,
        head_dim=head_dim,
        batch=batch,
        largest=largest,
        prompt=args.prompt,
        new_tokens=args.new,
        dtype=args.dtype,
        ttft_ms=round(result.ttft_ms, 3),
        step_ms=round(result.step_ms, 4),
        tokens_per_s=round(result.tokens_per_s, 2),
        total_tokens_per_s=round(result.total_tokens_per_s, 2),
        peak_bytes=result.peak_bytes,
        kv_bytes=result.kv_bytes,
        dense_kv_bytes=batch * models.dense_kv_bytes(model, tokens),
        device=env.name,
        torch=env.torch,
        transformers=transformers.__version__,
        driver=env.driver,
        commit=env.commit,
        timestamp=env.timestamp,
        command=_command(args, side, "max" if largest else str(batch)),
        sdpa=side.sdpa,
        repeats=len(results),
        lowest_tokens_per_s=min(speeds),
        highest_tokens_per_s=max(speeds),
        isa=env.isa,
        mesh=mesh.spelled(args.mesh or {}),
        turn=args.turn or 0,
        chunk=args.prompt_chunk or 0,
        lookup=args.lookup or 0,
    )


def _command(args: argparse.Namespace, side: Side, batch: str) -> str:
    model = ["--model", str(args.model)] if args.model is not None else ["--random-config", args.random_config]
    processes = math.prod((args.mesh or {}).values())
    words = [
        *(["torchrun", "--nproc-per-node", processes] if args.mesh else ["python"]),
        "-m",
        "profiling.generate",
        *(["--mesh", mesh.spelled(args.mesh)] if args.mesh else []),
        *model,
        "--prompt",
        args.prompt,
        *(["--prompt-chunk", args.prompt_chunk] if args.prompt_chunk else []),
        *(["--turn", args.turn] if args.turn else []),
        *(["--lookup", args.lookup] if args.lookup else []),
        "--new",
        args.new,
        "--batch",
        batch,
        "--side",
        side.name,
        "--sdpa",
        side.sdpa,
    ]
    if side.sparse:
        words += (
            ["--sparsity", side.sparsity]
            if side.sparsity is not None
            else ["--key-keep", side.key_keep, "--value-keep", side.value_keep]
        )
        words += ["--window", side.window]
    words += ["--dtype", args.dtype, "--device", args.device.type, "--seed", args.seed, "--repeats", args.repeats]
    allocator = os.environ[ALLOCATOR]
    return ("" if allocator == EXPANDABLE else f"{ALLOCATOR}={shlex.quote(allocator)} ") + shlex.join(map(str, words))


def _loops(side: str) -> bool:
    """Whether it generates in a loop of our own."""
    return side.endswith("-graph") and side != "sparse-graph"


def _at_least_3(text: str) -> int:
    """So many tokens have a median step."""
    if (value := positive_integer(text)) < 3:
        raise argparse.ArgumentTypeError(f"at least 3 new tokens are needed, got {value}")
    return value


def _file_name(text: str) -> str:
    if Path(text).name != text:
        raise argparse.ArgumentTypeError(f"'{text}' is not the name of a file: --out names its folder")
    return text


def _sdpa(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [name for name in names if name not in measure.SDPA]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(measure.SDPA)}, got {unknown[0]!r}")
    return names


def _batches(text: str) -> list[int | str]:
    return list(dict.fromkeys("max" if word.strip() == "max" else positive_integer(word) for word in text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
