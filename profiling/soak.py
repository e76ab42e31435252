"""Random operations on KVCaches beside a dense model of them: nothing lost, leaked or mixed up.

    python -m profiling.soak --ops 100000 --seed 1 --device cpu

Every operation is checked at once: lengths, and one sequence bit for bit; attention against float64; from time to time
everything, page tables and reference counts included. Prints the seed and the operation where something differs.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from profiling import command_line
from profiling.progress import Progress
from profiling.soak_driver import SHAPES, Mismatch, Shape, Soak

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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ops", type=command_line.positive_integer, default=100_000, metavar="N", help="in all (default: %(default)s)")
    add("--seed", type=command_line.seed, metavar="N", help="of the operations and their data (default: a new one)")
    add("--device", type=command_line.device, default="cpu", metavar="NAME", help="cpu or cuda (default: %(default)s)")
    add("--backend", default="auto", metavar="NAME", help="of attend (default: %(default)s)")
    options = parser.parse_args(arguments)
    command_line.check_backend(parser, options.backend, options.device)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr)
    started = time.monotonic()
    done = run(options.ops, seed, str(options.device), options.backend)
    seconds = time.monotonic() - started
    counts = ", ".join(f"{name} {count}" for name, count in done.most_common())
    print(f"{options.ops} operations on {options.device}, seed {seed}, {seconds:.0f} s: all as the model")
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
