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
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
    share = -(-ops // len(shapes))
    with _one_thread(), Progress(len(shapes) * -(-share // OPS_A_LINE)) as progress:
        for number, shape in enumerate(shapes):
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
                    progress.finish(f"shape {number}: {i + 1} operations, {rate:.0f} a second")
            soak.check_everything()
            soak.cache.reset()
            soak.model.rows = [None] * soak.cache.max_batch
            soak.check_everything()
            done += soak.counts
    return done


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m profiling.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ops", type=int, default=100_000, help="operations in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="of attend (default: %(default)s)")
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    started = time.monotonic()
    done = run(options.ops, options.seed, options.device, options.backend)
    seconds = time.monotonic() - started
    counts = ", ".join(f"{name} {count}" for name, count in done.most_common())
    print(f"{options.ops} operations on {options.device}, seed {options.seed}, {seconds:.0f} s: all as the model")
    print(counts)


if __name__ == "__main__":
    main()
