"""Generation over meshes of GPUs: runs of profiling.generate, one for each mesh, and what the model expects of each."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from profiling.generation import rows as generated
from profiling.generation.mesh import HEADS, TOKENS, spelled
from profiling.scaling import model
from profiling.scaling.rows import NAME
from profiling.tables import aligned

Mesh = dict[str, int]


def meshes(gpus: Sequence[int]) -> Iterator[Mesh]:
    """Of each number of GPUs: heads spread, tokens spread, and both, two by the rest; {}: one GPU."""
    for count in gpus:
        if count == 1:
            yield {}
        else:
            yield {HEADS: count}
            yield {TOKENS: count}
        if count > 2 and count % 2 == 0:
            yield {HEADS: 2, TOKENS: count // 2}


def name(mesh: Mesh) -> str:
    """Of the file of rows."""
    return "-".join([f"{NAME}-{generated.NAME}", *(f"{dimension}{size}" for dimension, size in mesh.items())])


def command(mesh: Mesh, args: argparse.Namespace, folder: Path) -> list[str]:
    processes = 1
    for size in mesh.values():
        processes *= size
    side = "sparse-loop-graph" if args.device.type == "cuda" else "sparse"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if mesh else []
    words = [sys.executable, *launcher, "-m", "profiling.generate", *(["--mesh", spelled(mesh)] if mesh else [])]
    words += ["--random-config", args.random_config, "--prompt", str(args.prompt), "--new", str(args.new)]
    words += ["--prompt-chunk", str(args.prompt_chunk)] if args.device.type == "cuda" else []
    words += ["--batch", ",".join(map(str, args.batches)), "--side", side, "--repeats", "1", "--sdpa", "default"]
    return [*words, "--device", args.device.type, "--out", str(folder), "--name", name(mesh)]


def run(args: argparse.Namespace, folder: Path) -> int:
    """Exit status 0, or 1 where a run failed; the others' rows are written and printed."""
    failed = 0
    found: list[generated.Row] = []
    for mesh in meshes(args.gpus):
        if subprocess.run(command(mesh, args, folder), check=False).returncode:
            print(f"python -m profiling.scaling: generation over {spelled(mesh) or 'one GPU'} failed", file=sys.stderr)
            failed = 1
            continue
        found += generated.read(folder / f"{name(mesh)}.json")
    if found:
        print(aligned(table(found, args.random_config)), flush=True)
    return failed


def sizes(row: generated.Row) -> Mesh:
    """Of the mesh that a row was measured over."""
    pairs = (word.partition("=") for word in row.mesh.split(",") if word)
    return {dimension: int(size) for dimension, _, size in pairs}


def table(rows: Sequence[generated.Row], config: str) -> list[tuple[str, ...]]:
    """The header and a line for each row; speeds relative to as many sequences on one GPU."""
    lines = [("mesh", "batch", "prompt", "step, ms", "tokens/s", "speed-up", "model, ms", "to the model")]
    alone = {row.batch: row.tokens_per_s for row in rows if not row.mesh}
    for row in rows:
        expected, gpu = None, model.KINDS.get(row.device)
        if config == model.CONFIG and gpu is not None:
            expected = model.generation_ms(row.prompt + row.new_tokens // 2, row.batch, gpu=gpu, **sizes(row))
        lines.append(
            (
                row.mesh or "one GPU",
                str(row.batch),
                str(row.prompt),
                f"{row.step_ms:.2f}",
                f"{row.tokens_per_s:.1f}",
                f"{row.tokens_per_s / alone[row.batch]:.2f}" if row.mesh and row.batch in alone else "",
                "" if expected is None else f"{expected:.2f}",
                "" if expected is None else f"{row.step_ms / expected:.2f}",
            )
        )
    return lines
