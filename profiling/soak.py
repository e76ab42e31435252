"""Random operations on KVCaches beside a dense model of them: nothing lost, leaked or mixed up.

    python -m profiling.soak --ops 100000 --seed 1
    python -m profiling.soak --device cuda --ops 10000 --total 1000000 --processes 12 --minutes 10

Every operation is checked at once: lengths, and one sequence bit for bit; attention against float64; from time to time
everything, page tables and reference counts included. Prints the seed and the operation where something differs.

The second form does a million operations in pieces, and goes on where it ended when it is called again: each piece that
is done has a row with its seed in soak.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from profiling import command_line, environment, plain_rows, records
from profiling.progress import Progress
from profiling.soak_driver import SHAPES, Mismatch, Shape, Soak

NAME = "soak"
OPS_A_LINE = 2000


@contextmanager
def _one_thread() -> Iterator[None]:
    """The caches are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(ops: int, seed: int, device: str, backend: str = "auto", shapes: tuple[Shape, ...] = SHAPES) -> Counter[str]:
    """So many operations, shared out over `shapes`. Returns how often each was done; Mismatch if something differs."""
    done: Counter[str] = Counter()
    shares = [ops // len(shapes) + (number < ops % len(shapes)) for number in range(len(shapes))]
    with _one_thread(), Progress(sum(-(-share // OPS_A_LINE) for share in shares)) as progress:
        for number, (shape, share) in enumerate(zip(shapes, shares, strict=True)):
            rng = random.Random(f"{seed} {number}")
            torch.manual_seed(rng.randrange(2**31))
            soak = Soak(shape, rng, device, backend)
            started = time.monotonic()
            for i in range(share):
                try:
                    soak.step()
                except Exception as error:
                    message = f"seed {seed}, shape {number} {shape}, operation {i} (last: {soak.last}): {error}"
                    raise Mismatch(message) from error
                if (i + 1) % OPS_A_LINE == 0 or i + 1 == share:
                    rate = (i + 1) / (time.monotonic() - started)
                    progress.finish(f"shape {number}: {i + 1} of {share} operations, {rate:.0f} a second")
            soak.check_everything()
            soak.cache.reset()
            soak.model.rows = [None] * soak.cache.max_batch
            soak.check_everything()
            done += soak.counts
    return done


@dataclass(frozen=True)
class Piece:
    """What one process does at a time."""

    ops: int
    seed: int
    device: str
    backend: str

    def run(self) -> tuple[Counter[str], float]:
        """(how often each operation was done, seconds)."""
        started = time.monotonic()
        return run(self.ops, self.seed, self.device, self.backend), time.monotonic() - started


def run_pieces(
    first: Piece, processes: int, more: Callable[[int], bool]
) -> Iterator[tuple[Piece, Counter[str], float]]:
    """Pieces as they end, of the first one's seed and the next. more(pieces begun): whether another one is due."""
    if processes == 1:
        begun = 0
        while more(begun):
            piece = replace(first, seed=first.seed + begun)
            begun += 1
            yield piece, *piece.run()
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running: dict[Future[tuple[Counter[str], float]], Piece] = {}
        begun = 0
        while True:
            while len(running) < processes and more(begun):
                piece = replace(first, seed=first.seed + begun)
                running[pool.submit(piece.run)] = piece
                begun += 1
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), *future.result()


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="python -m profiling.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--ops",
        type=command_line.positive_integer,
        default=100_000,
        metavar="N",
        help="operations of a piece (default: %(default)s)",
    )
    add(
        "--total",
        type=command_line.positive_integer,
        metavar="N",
        help="pieces, with seeds that follow, until the file has so many operations of this device and commit "
        "(default: one piece)",
    )
    add("--minutes", type=command_line.positive_number, metavar="M", help="no piece begins later (default: no limit)")
    add(
        "--processes",
        type=command_line.positive_integer,
        default=1,
        metavar="N",
        help="that run pieces beside one another (default: %(default)s)",
    )
    add(
        "--seed",
        type=command_line.seed,
        metavar="N",
        help="of the first piece, its operations and their data (default: the next one to those of the file, else a "
        "new one)",
    )
    add("--device", type=command_line.device, default="cpu", metavar="NAME", help="cpu or cuda (default: %(default)s)")
    add("--backend", default="auto", metavar="NAME", help="of attend (default: %(default)s)")
    command_line.add_output(parser, NAME)
    options = parser.parse_args(arguments)
    command_line.check_output(parser, options, NAME)
    command_line.check_backend(parser, options.backend, options.device)
    env = environment.environment(options.device)
    try:
        path = command_line.output_folder(options, env.slug) / f"{options.name}.json"
        rows = records.read(path) if path.exists() else []
    except ValueError as error:
        parser.error(str(error))
    seed = options.seed
    if seed is None:
        seed = max((row["seed"] for row in rows), default=random.SystemRandom().randrange(2**31) - 1) + 1
    started = time.monotonic()
    shared = plain_rows.run_of(env, "profiling.soak", words)
    recorded = sum(row["operations"] for row in rows if (row["device"], row["commit"]) == (env.name, env.commit))

    def more(begun: int) -> bool:
        if begun and options.minutes is not None and time.monotonic() - started > 60 * options.minutes:
            return False
        return recorded + begun * options.ops < options.total if options.total else not begun

    if not more(0):
        print(f"{recorded} operations of this device and commit are in {path} already")
        return 0
    print(f"seed {seed}", file=sys.stderr)
    first = Piece(options.ops, seed, str(options.device), options.backend)
    done: Counter[str] = Counter()
    operations = 0
    for piece, counts, seconds in run_pieces(first, options.processes, more):
        done += counts
        operations += piece.ops
        row = {
            "seed": piece.seed,
            "operations": piece.ops,
            "seconds": round(seconds, 1),
            "a second": round(piece.ops / seconds),
            "done": _listed(counts),
        }
        rows.append({**shared, **row})
        plain_rows.write(rows, path.parent, options.name)
    seconds = time.monotonic() - started
    seeds = f"seed {seed}" if operations <= options.ops else f"seeds {seed} to {seed + operations // options.ops - 1}"
    print(f"{operations} operations on {options.device}, {seeds}, {seconds:.0f} s: all as the model")
    print(_listed(done), f"wrote {path}", sep="\n")
    return 0


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


if __name__ == "__main__":
    sys.exit(main())
