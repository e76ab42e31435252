"""Accuracy against bits an element of small trained models: every rule in every codec, beside dense caches of few bits.

    python -m profiling.recipes.frontier                      # a GPU: two sizes, three seeds, some minutes
    python -m profiling.recipes.frontier --sizes tiny --seconds 200     # a CPU, some minutes a seed

Trains a Llama-architecture model for each size and seed on recall, copying and hops (profiling.recipes.sequences), then
stores its cache in every way of profiling.recipes.study: the context is prefilled, tokens older than the window are
pruned and rounded, and what follows is read 16 tokens at a time. Rows (accuracy in percent; recall also by distance)
go to build/profiling/<device>/accuracy/, a folder a model as they come, and together as frontier.json. The same command
goes on where it was interrupted; seeds can run side by side. Needs the extra `eval`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from profiling import command_line

try:
    from cute_kernels.eval import models, results
    from profiling.environment import environment
    from profiling.recipes import options, study, training
    from profiling.recipes.associative_recall import accuracies, sequences_of_tasks
except ImportError as error:
    command_line.exit_unbuilt("profiling.recipes.frontier", error)

COMMAND = "python -m profiling.recipes.frontier"
NAME = "frontier"
SIZES = {"small": training.SMALL, "full": training.FULL, "tiny": training.TINY, "quick": training.QUICK}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    args.given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        models.require("transformers", "the recipe")
        where = environment(args.device)
        folder = options.folder(args, where)
        for seed in args.seeds:
            for size in args.sizes:
                run(size, seed, folder, args)
        path = folder / f"{NAME}.json"
        rows = study.gather(folder, f"{NAME}-*", path)
    except (ValueError, RuntimeError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    print(study.table(rows), f"wrote {path}", sep="\n")
    return 0


def run(name: str, seed: int, folder: Path, args: argparse.Namespace) -> None:
    """Trains one model and measures every setting that has no rows yet."""
    size, device = SIZES[name], args.device
    where = environment(device)
    identity = {"size": name, "seed": seed, "seconds": args.seconds, "sequences": args.sequences, "device": where.name}
    kept = results.Store(folder / f"{NAME}-{name}-{seed}", identity)
    settings = study.chosen_settings(size.head_dim)
    missing = [setting for setting in settings if not kept.has(setting, "hops")]
    if not missing:
        return
    say = lambda line: training.print_to_stderr(f"{name}, seed {seed}: {line}")  # noqa: E731
    model = training.build(size, seed).to(device)
    learnt = training.train(model, size, seed, args.seconds, say, not args.eager)
    model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    models.prepare(model, settings, "pruned")
    size = replace(size, pairs=learnt["pairs"] or size.pairs)
    drawn = sequences_of_tasks(size, args.sequences, torch.Generator(device).manual_seed(seed + 1))
    of_run = {
        "size": name,
        "seed": seed,
        "head_dim": size.head_dim,
        "context": drawn["recall"].context,
        "training_steps": learnt["steps"],
        "training_seconds": round(learnt["seconds"], 1),
    } | study.about(where, " ".join([COMMAND, *args.given]), model)
    for number, setting in enumerate(missing, 1):
        measured = accuracies(model, setting, drawn, args.batch)
        bits = round(study.bits_per_element(setting, size.head_dim), 3)
        kept.add(
            [
                results.row(setting, task, "accuracy %", round(value, 4), samples) | of_run | {"bits": bits}
                for task, (value, samples) in measured.items()
            ]
        )
        if number % 10 == 0 or number == len(missing):
            shown = ", ".join(f"{task} {measured[task][0]:.2f} %" for task in drawn)
            say(f"[{number}/{len(missing)}] {setting.name}, {bits:.2f} bits: {shown}")


def _sizes(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SIZES:
            raise argparse.ArgumentTypeError(f"'{name}' is none of {', '.join(SIZES)}")
    return names


def _seeds(text: str) -> list[int]:
    return [command_line.seed(word) for word in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(COMMAND, __doc__)
    options.add_training(parser, 90.0)
    add = parser.add_argument
    add(
        "--sizes",
        type=_sizes,
        default="small,full",
        metavar="LIST",
        help=f"of {', '.join(SIZES)} (default: %(default)s)",
    )
    add("--seeds", type=_seeds, default="0,1,2", metavar="LIST", help="of weights and sequences (default: %(default)s)")
    size = command_line.positive_integer
    add("--sequences", type=size, default=128, metavar="N", help="of each task to evaluate on (default: %(default)s)")
    add("--batch", type=size, default=384, metavar="N", help="sequences evaluated at a time (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
