"""Options that recipes share."""

from __future__ import annotations

import argparse
from pathlib import Path

from profiling import command_line, folders
from profiling.environment import Environment


def parser(command: str, about: str | None) -> argparse.ArgumentParser:
    """With --device, and --out and --commit-results, of which `folder` makes where rows go."""
    made = argparse.ArgumentParser(
        prog=command, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command_line.add_device(made)
    add = made.add_argument
    add("--out", type=Path, metavar="DIR", help="folder for the rows (default: of the device, in build/profiling)")
    add("--commit-results", action="store_true", help="write to the committed results of this device")
    return made


def add_training(made: argparse.ArgumentParser, seconds: float) -> None:
    """--seconds, and --eager."""
    made.add_argument(
        "--seconds",
        type=command_line.positive_number,
        default=seconds,
        metavar="S",
        help="of training, at most (default: %(default)g)",
    )
    made.add_argument("--eager", action="store_true", help="train without CUDA graphs")


def folder(args: argparse.Namespace, where: Environment) -> Path:
    """Where rows go, made if need be. Raises ValueError if it cannot be."""
    return command_line.folder_for(args.out or folders.of_device(where.slug, args.commit_results) / "accuracy")
