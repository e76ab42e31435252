"""Types and checks of command-line arguments that several commands share. Every message names the option."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

import torch

from profiling import folders

LARGEST = 2**31 - 1  # of a size: kernels count in 32 bits
LARGEST_SEED = 2**62  # commands add to it, and torch takes 64 bits


def positive_integer(text: str) -> int:
    return _integer(text, 1, LARGEST, "a positive integer")


def positive_integers(text: str) -> list[int]:
    """Distinct ones, from a list with commas, in ascending order."""
    return sorted({positive_integer(word) for word in text.split(",")})


def count(text: str) -> int:
    return _integer(text, 0, LARGEST, "an integer of at least 0")


def seed(text: str) -> int:
    return _integer(text, 0, LARGEST_SEED, f"an integer from 0 to {LARGEST_SEED}")


def positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive number")
    return value


def device(text: str) -> torch.device:
    """A CPU or a CUDA device that is there."""
    try:
        found = torch.device(text)
    except RuntimeError:
        found = torch.device("meta")
    if found.type not in ("cpu", "cuda") or (found.type == "cpu" and found.index):
        raise argparse.ArgumentTypeError(f"'{text}' is neither cpu nor cuda")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found.type == "cuda" and not devices:
        raise argparse.ArgumentTypeError(f"'{text}': no CUDA device: --device cpu runs without one")
    if found.type == "cuda" and (found.index or 0) >= devices:
        raise argparse.ArgumentTypeError(f"'{text}': there are {devices} CUDA devices, counted from 0")
    return found


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device, a torch.device."""
    parser.add_argument(
        "--device",
        type=device,
        default=default_device(),
        metavar="NAME",
        help="cpu or cuda (default: cuda if there is one)",
    )


def exit_unbuilt(module: str, error: ImportError) -> NoReturn:
    """Ends a command whose imports failed, as they do before the extension is built."""
    print(f"python -m {module}: {error}\nBuild cute_kernels first: make build", file=sys.stderr)
    sys.exit(2)


def check_backend(parser: argparse.ArgumentParser, name: str, target: torch.device) -> None:
    """Ends the command unless a backend, by --backend, serves tensors on the device."""
    from cute_kernels._runtime import backends

    try:
        backends.resolve(backends.check_name(name), target)
    except (ValueError, RuntimeError) as error:
        parser.error(f"argument --backend: {error}")
    if target.type == "cpu":
        check_isa(parser)


def check_isa(parser: argparse.ArgumentParser) -> None:
    """Ends the command if CUTE_KERNELS_CPU_ISA names what this CPU does not have."""
    from cute_kernels._runtime.extension import _C

    try:
        _C.cpu.isa()
    except RuntimeError as error:
        parser.error(str(error))


def check_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the command unless --query-heads, --kv-heads, --head-dim and, if there is one, --keep go together."""
    from cute_kernels._runtime.extension import _C

    largest, head_dim = max(_C.format.HEAD_DIMS), options.head_dim
    if head_dim > largest or not _C.format.padded_head_dim(head_dim):
        parser.error(f"argument --head-dim: must be a multiple of 8 from 8 to {largest}, got {head_dim}")
    if options.query_heads % options.kv_heads:
        parser.error(
            f"argument --query-heads: must be a multiple of --kv-heads {options.kv_heads}, got {options.query_heads}"
        )
    if getattr(options, "keep", 1) > head_dim:
        parser.error(f"argument --keep: must be at most --head-dim {head_dim}, got {options.keep}")


def add_output(parser: argparse.ArgumentParser, name: str) -> None:
    """--out, --commit-results and --name: where rows go; `check_output` looks at them."""
    add = parser.add_argument
    add("--out", type=Path, metavar="DIR", help="folder for the rows (default: build/profiling/DEVICE)")
    add("--commit-results", action="store_true", help="write to the committed results of this GPU")
    add("--name", default=name, metavar="NAME", help="of the rows' file (default: %(default)s)")


def check_output(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> None:
    """Ends the command unless rows go to files that `profiling.report` finds by their first letters, `name`."""
    if options.commit_results and (options.out or options.device.type != "cuda"):
        parser.error("--commit-results needs a GPU, and goes without --out")
    if Path(options.name).name != options.name or not options.name.startswith(name):
        parser.error(f"--name: must begin with {name}, got {options.name}")


def output_folder(options: argparse.Namespace, slug: str) -> Path:
    """Makes the folder for the rows: that of --out, else the device's, committed with --commit-results.

    Raises:
        ValueError: it cannot be made; the message says why.
    """
    return folder_for(options.out or folders.of_device(slug, options.commit_results))


def folder_for(path: Path) -> Path:
    """Makes a folder, and those above it, to be written to.

    Raises:
        ValueError: it cannot be made; the message says why.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {path}: {error.strerror}") from None
    return path


def _integer(text: str, low: int, high: int, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}")
    if value > high:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {high}")
    return value
