"""python -m tests.fuzz: all targets for some minutes, or one case again."""

from __future__ import annotations

import argparse
import math
import random
import sys
from pathlib import Path

import torch

import cute_kernels as ck
from tests.fuzz import driver, targets
from tests.fuzz.worker import Job, attempt


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def index(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return number


def target(text: str) -> str:
    try:
        targets.find(text)
    except (ValueError, ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Random cases beside independent oracles; see CONTRIBUTING.md. Ends with 1 if any failed.",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=positive, default=30, help="of all targets together (default: %(default)g)")
    length.add_argument("--cases", type=count, help="of every target, in place of --minutes")
    length.add_argument("--case", type=index, help="one case alone, in this process; takes --target and --seed")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    names = f"{', '.join(targets.TARGETS)}, or module:function"
    parser.add_argument("--target", type=target, action="append", help=f"{names}; may be repeated (default: all)")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: the CPU, then the GPU where there is one")
    parser.add_argument(
        "--patience", type=positive, default=driver.PATIENCE, help="seconds that a case may take (default: %(default)g)"
    )
    chosen = parser.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device")
    if chosen.case is not None and (chosen.seed is None or len(chosen.target or ()) != 1):
        parser.error("--case takes --seed and one --target")
    return chosen


def main() -> int:
    chosen = options()
    devices = [chosen.device] if chosen.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if chosen.case is not None:
        failure = attempt(Job(chosen.target[0], devices[0], chosen.seed), chosen.case)
        print(failure or "passed", file=sys.stderr)
        return int(failure is not None)
    seed = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    print(f"seed {seed}, cute_kernels of {Path(ck.__file__).parent}", file=sys.stderr)
    pairs = [(name, device) for device in devices for name in chosen.target or targets.TARGETS]
    length = {"end": chosen.cases} if chosen.cases else {"seconds": 60 * chosen.minutes / len(pairs)}
    outcomes = driver.run([Job(name, device, seed, **length) for name, device in pairs], chosen.patience)
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    print(f"seed {seed}: {sum(o.cases for o in outcomes)} cases, {len(failures)} failed", file=sys.stderr)
    for failure in failures:
        print(f"to repeat: {failure.command}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
