"""Trains a small Llama-architecture model on recall, copying and hops, and measures what pruning its cache costs.

    python -m profiling.recipes.associative_recall            # a GPU: four million parameters, two minutes
    python -m profiling.recipes.associative_recall --quick    # a CPU: a model of 80 000, a few minutes

Rows (accuracy in percent of the tokens that follow from the context) go to build/profiling/<device>/accuracy/ as
accuracy.json; with --commit-results, to profiling/results/<device>/accuracy/. python -m profiling.report makes the
table, CSV and the plot of them. Every rule prunes keys, values or both: the context is prefilled, its tokens older than
the window are pruned, and what follows is read 16 tokens at a time. Magnitude also on what eviction of tokens with
little attention leaves (H2O). Narrow codecs: profiling.recipes.frontier. Needs the extra `eval`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from profiling import command_line, records

try:
    from cute_kernels.eval import models, results
    from cute_kernels.eval.settings import PARTS, Setting, grid
    from profiling.environment import Environment, environment
    from profiling.recipes import options, study, training
    from profiling.recipes.sequences import TASKS, Sequences, draw
except ImportError as error:
    command_line.exit_unbuilt("profiling.recipes.associative_recall", error)

RULES = ("magnitude", "output-aware", "channel-magnitude", "think", "random")
SPARSITIES = (0.5, 0.7, 0.8, 0.9)
EVICTED = (0.1, 0.25, 0.5)  # shares of the context
CHUNK = 16
BY_DISTANCE = ("recall",)  # tasks with rows of their own by how far back the answer was told, in halves of the context
_QUARTERS = ("nearest quarter", "second quarter", "third quarter", "farthest quarter")
COMMAND = "python -m profiling.recipes.associative_recall"
NAME = "accuracy"
# What all rows of a run have in common.
OF_A_RUN = (
    "parameters",
    "head_dim",
    "context",
    "dtype",
    "training_steps",
    "seed",
    "device",
    "driver",
    "torch",
    "commit",
    "timestamp",
    "command",
)
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    args.given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        models.require("transformers", "the recipe")
        device = args.device
        where = environment(device)
        folder = options.folder(args, where)  # fails now rather than after the training
        if args.save:
            command_line.folder_for(args.save)
        size = training.QUICK if args.quick else training.FULL
        model = training.build(size, args.seed).to(device)
        learnt = training.train(model, size, args.seed, args.seconds, training.print_to_stderr, not args.eager)
        if args.save:
            model.save_pretrained(args.save)
        model = model.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
        settings = chosen_settings()
        rows = evaluate(model, size, settings, args, where, learnt)
    except (ValueError, RuntimeError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    print(markdown(rows), f"wrote {write(rows, folder)}", sep="\n")
    return 0


def chosen_settings() -> list[Setting]:
    """Every rule, and magnitude on what eviction leaves."""
    evicted = grid(("magnitude",), ("both",), SPARSITIES, evictions=EVICTED)
    return grid(RULES, PARTS, SPARSITIES) + [setting for setting in evicted if setting.evicted]


def evaluate(
    model: Any,
    size: training.Size,
    settings: list[Setting],
    args: argparse.Namespace,
    where: Environment,
    learnt: dict[str, float],
) -> list[Row]:
    """A row a setting and task, on the same sequences for all settings."""
    models.prepare(model, settings, "pruned")
    generator = torch.Generator(model.device).manual_seed(args.seed + 1)
    drawn = sequences_of_tasks(size, args.sequences, generator)
    about: Row = {
        "head_dim": size.head_dim,
        "context": drawn["recall"].context,
        "training_steps": learnt["steps"],
        "seed": args.seed,
    } | study.about(where, " ".join([COMMAND, *args.given]), model)
    rows = []
    for number, setting in enumerate(settings, 1):
        measured = accuracies(model, setting, drawn, args.batch)
        rows += [results.row(setting, task, "accuracy %", *found) | about for task, found in measured.items()]
        training.print_to_stderr(
            f"[{number}/{len(settings)}] {setting.name}: "
            + ", ".join(f"{task} {value:.2f} %" for task, (value, _) in measured.items())
        )
    return rows


def accuracies(model: Any, setting: Setting, drawn: dict[str, Sequences], batch: int) -> dict[str, tuple[float, int]]:
    """(percent right, of how many tokens) of every task; the tasks' sequences are equally long and read together."""
    from cute_kernels.eval.decoding import correct

    make_cache = models.cache_maker(model, setting)
    ids = torch.cat([sequences.ids for sequences in drawn.values()])
    context = next(iter(drawn.values())).context
    right = torch.cat([correct(model, make_cache, part, context, CHUNK) for part in ids.split(batch)])
    counted = [sequences.counted[:, context:] for sequences in drawn.values()]
    parts = right.split([len(mask) for mask in counted])
    found = {}
    for (task, sequences), part, mask in zip(drawn.items(), parts, counted, strict=True):
        together = part[mask].unflatten(0, (-1, sequences.together)).all(1)
        found[task] = _percent(together)
        if task in BY_DISTANCE:  # from next to it to twice the context
            far = sequences.distances[:, context:][mask] // (context // 2)
            for quarter in far.unique().tolist():
                found[f"{task}, {_QUARTERS[quarter]}"] = _percent(together[far == quarter])
    return found


def _percent(right: torch.Tensor) -> tuple[float, int]:
    return 100 * right.double().mean().item(), len(right)


def sequences_of_tasks(size: training.Size, count: int, generator: torch.Generator) -> dict[str, Sequences]:
    return {task: draw(task, size.pairs, size.symbols, count, generator) for task in TASKS}


def write(rows: list[Row], folder: Path) -> Path:
    """Writes accuracy.json; returns its path."""
    path = folder / f"{NAME}.json"
    records.write(path, rows, OF_A_RUN)
    return path


def markdown(rows: list[Row]) -> str:
    """What was measured and where, and the table."""
    row = rows[0]
    return (
        f"Accuracy in percent: a Llama-architecture model of {row['parameters'] / 1e6:.2g} million parameters, "
        f"head dim {row['head_dim']}, trained {row['training_steps']} steps, {row['dtype']}, context {row['context']} "
        f"tokens, window {row['window']}; {row['device']}, torch {row['torch']}, commit {row['commit'][:7]}.\n\n"
        f"`{row['command']}`\n\n" + results.table(rows)
    )


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(COMMAND, __doc__)
    options.add_training(parser, 90.0)
    add = parser.add_argument
    add("--quick", action="store_true", help="a smaller model and shorter sequences")
    size = command_line.positive_integer
    add("--sequences", type=size, default=128, metavar="N", help="of each task to evaluate on (default: %(default)s)")
    add("--batch", type=size, default=256, metavar="N", help="sequences evaluated at a time (default: %(default)s)")
    add(
        "--seed",
        type=command_line.seed,
        default=0,
        metavar="N",
        help="of weights and sequences (default: %(default)s)",
    )
    add("--save", type=Path, metavar="DIR", help="keep the trained model in this folder")
    return parser


if __name__ == "__main__":
    sys.exit(main())
