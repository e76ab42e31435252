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
from typing import Any

# Dense caches grow by a token at a time: without this, memory gets fragmented and less fits.
ALLOCATOR, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
os.environ.setdefault(ALLOCATOR, EXPANDABLE)

import torch

from profiling import command_line
from profiling.environment import environment
from profiling.generation import heads, measure, mesh, models, rows
from profiling.generation.measure import Side
from profiling.generation.options import parse
from profiling.generation.rows import Row
from profiling.progress import Progress

EXIT_OK, EXIT_FAILED, EXIT_MISSING, EXIT_INTERRUPTED = 0, 1, 2, 130


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
        folder = command_line.output_folder(args, env.slug)
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
    shared = {"sparsity": args.sparsity, "key_keep": args.key_keep, "value_keep": args.value_keep}
    shared |= {"window": args.window, "mesh": made, "chunk": args.prompt_chunk, "lookup": args.lookup}
    return [
        Side(name, sdpa=sdpa, codec=codec, **shared)
        for name in args.side
        for codec in (args.codec if name.startswith("sparse") else (None,))
        for sdpa in (args.sdpa if name in ("dense", "static-graph") else args.sdpa[:1])
    ]


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
        codec=side.codec or "",
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
        words += ["--window", side.window, *(["--codec", side.codec] if side.codec else [])]
    words += ["--dtype", args.dtype, "--device", args.device.type, "--seed", args.seed, "--repeats", args.repeats]
    allocator = os.environ[ALLOCATOR]
    return ("" if allocator == EXPANDABLE else f"{ALLOCATOR}={shlex.quote(allocator)} ") + shlex.join(map(str, words))


if __name__ == "__main__":
    sys.exit(main())
