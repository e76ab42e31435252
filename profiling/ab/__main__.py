"""Compares the speed of two builds: python -m profiling.ab BASE_CHECKOUT [NEW_CHECKOUT] [--help].

Each checkout, with its extension built in place, runs in a process of its own. Their calls take turns, case by case, so
that drift of clocks and load meets both alike; every call finds a cold cache. Results are not checked: the sweep and
the tests do that.

Exit status: 0 no case slower than the limit, 1 some are, 2 wrong arguments or nothing measured, 130 interrupted (the
cases finished so far are written).
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from profiling import ROOT, command_line, environment, folders, records
from profiling.ab.run import AbError, Comparison, Side, measure, package_folder
from profiling.ab.tasks import OPS, SUITES, Sizes, Task, choose
from profiling.command_line import positive_integer
from profiling.progress import Progress

EXIT_OK, EXIT_SLOWER, EXIT_NOTHING, EXIT_INTERRUPTED = 0, 1, 2, 130
NAME = "ab"


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    device = args.device or command_line.default_device()
    sizes = Sizes(**{name: given for name in ("batches", "tokens", "heads") if (given := getattr(args, name))})
    tasks, large = choose(args.suite or list(SUITES), sizes, device, args.op or ())
    if large:
        print(f"{len(large)} cases left out: too large", file=sys.stderr)
    if args.list or not tasks:
        print(*tasks, sep="\n")
        return EXIT_OK if tasks else EXIT_NOTHING
    flush_bytes = None if args.flush_mib is None else args.flush_mib << 20
    try:
        if device == "cuda" and command_line.default_device() != "cuda":
            raise AbError("--device cuda: no CUDA device")
        checkouts = {name: path.resolve() for name, path in (("base", args.base), ("new", args.new))}
        for path in checkouts.values():
            package_folder(path)
        if args.out is not None:
            command_line.folder_for(args.out.parent)  # fails now rather than after the measurements
        with (
            Side("base", checkouts["base"], device, args.backend, flush_bytes) as base,
            Side("new", checkouts["new"], device, args.backend, flush_bytes) as new,
        ):
            return _compare(base, new, tasks, args)
    except (AbError, ValueError) as error:
        print(f"python -m profiling.ab: error: {error}", file=sys.stderr)
        return EXIT_NOTHING


def _compare(base: Side, new: Side, tasks: Sequence[Task], args: argparse.Namespace) -> int:
    for side in (base, new):
        state = side.about["backends"].get(args.backend, "no such backend")
        if args.backend != "auto" and state != "ok":
            raise AbError(f"--backend {args.backend}: {state} in {side.name}, {side.checkout}")
    for side in (base, new):
        print(
            f"{side.name}: {side.about['package']}, {environment.commit(side.checkout)}, {side.about['device']}, "
            f"torch {side.about['torch']}",
            flush=True,
        )
    done: dict[Task, Comparison] = {}
    skipped: dict[str, int] = {}
    stopped: BaseException | None = None
    try:
        with Progress(len(tasks)) as progress:
            for task in tasks:
                progress.start(str(task))
                found = measure(task, base, new, args.rounds, args.samples)
                if isinstance(found, Comparison):
                    done[task] = found
                else:
                    skipped[found] = skipped.get(found, 0) + 1
                progress.finish(str(found) if isinstance(found, Comparison) else f"skipped {task}: {found}")
        for _ in range(args.again):  # noise does not come back, a slower kernel does
            slower = [task for task, found in done.items() if found.ratio > args.limit]
            print(f"{len(slower)} cases above {args.limit:.2f}" + (", measured again:" if slower else ""), flush=True)
            for number, task in enumerate(slower, 1):
                more = measure(task, base, new, 2 * args.rounds, args.samples)
                if isinstance(more, Comparison):
                    done[task] = done[task].with_more(more)
                    print(f"[{number}/{len(slower)}] {done[task]}", flush=True)
    except (KeyboardInterrupt, AbError) as error:
        stopped = error
    found = list(done.values())
    if found:
        print(summary(found, args.limit))
        print(f"wrote {write(found, base, new, args.out or folders.SCRATCH / f'{NAME}.json')}")
    for reason, count in skipped.items():
        print(f"skipped {count} cases: {reason}")
    if isinstance(stopped, AbError):
        raise stopped
    if stopped is not None:
        return EXIT_INTERRUPTED
    if not found:
        return EXIT_NOTHING
    return EXIT_SLOWER if any(each.ratio > args.limit for each in found) else EXIT_OK


def summary(found: Sequence[Comparison], limit: float) -> str:
    """A line for each operation and one for all: how many cases, the median ratio and the extremes."""
    ops = dict.fromkeys(each.task.op for each in found)
    groups = {op: [each for each in found if each.task.op == op] for op in ops}
    lines = ["new time / base time:"]
    for name, group in {**groups, "all": list(found)}.items():
        ordered = sorted(group, key=lambda each: each.ratio)
        mean = math.exp(math.fsum(math.log(each.ratio) for each in group) / len(group))
        middle = statistics.median(each.ratio for each in group)
        lines.append(
            f"{name}: {len(group)} cases, median {middle:.3f}, geometric mean {mean:.3f}, best "
            f"{ordered[0].ratio:.3f}, worst {ordered[-1].ratio:.3f} ({ordered[-1].task})"
        )
    above = [each for each in found if each.ratio > limit]
    lines.append(f"{len(above)} of {len(found)} cases above {limit:.2f}")
    return "\n".join([*lines, *map(str, above)])


def write(found: Sequence[Comparison], base: Side, new: Side, path: Path) -> Path:
    """Writes a row for each case; returns the path."""
    shared = {"device": base.about["device"], "driver": base.about["driver"]}
    for side in (base, new):
        shared |= {f"{side.name}_commit": environment.commit(side.checkout), f"{side.name}_torch": side.about["torch"]}
    records.write(path, [each.to_object() | shared for each in found], tuple(shared))
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.ab",
        description=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("base", type=Path, metavar="BASE_CHECKOUT", help="checkout, or folder with the package, to compare with")
    add("new", type=Path, nargs="?", default=ROOT, metavar="NEW_CHECKOUT", help="the other (default: this one)")
    add("--suite", action="append", choices=SUITES, help="cases to compare, may be repeated (default: all)")
    add("--op", action="append", choices=OPS, help="of these operations only")
    add("--batches", type=_integers, metavar="LIST", help="of suite serving, such as 1,8,64")
    add("--tokens", type=_integers, metavar="LIST", help="of suite serving, such as 1024,65536")
    add("--heads", type=_heads, metavar="LIST", help="query and KV heads of suite serving, such as 32/8,64/8")
    add("--device", choices=("cpu", "cuda"), help="to compare on (default: cuda if there is one)")
    add("--backend", default="auto", metavar="NAME", help="of products and attention (default: %(default)s)")
    add(
        "--rounds",
        type=positive_integer,
        default=6,
        metavar="N",
        help="turns of each build a case (default: %(default)s)",
    )
    add("--samples", type=positive_integer, default=5, metavar="N", help="timed calls a turn (default: %(default)s)")
    add(
        "--limit",
        type=command_line.positive_number,
        default=1.02,
        metavar="X",
        help="ratio above which a case counts as slower (default: %(default)s)",
    )
    add(
        "--again",
        type=command_line.count,
        default=2,
        metavar="N",
        help="times that slower cases are measured again (default: %(default)s)",
    )
    add(
        "--flush-mib",
        type=positive_integer,
        metavar="N",
        help="read between calls (default: twice the last-level cache)",
    )
    add("--list", action="store_true", help="print the cases and stop")
    add("--out", type=Path, metavar="FILE.json", help=f"file of the rows (default: {NAME}.json in build/profiling/)")
    return parser


def _integers(text: str) -> tuple[int, ...]:
    return tuple(positive_integer(word) for word in text.split(","))


def _heads(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [tuple(positive_integer(part) for part in word.split("/")) for word in text.split(",")]
    if any(len(pair) != 2 or pair[0] % pair[1] for pair in pairs):
        raise argparse.ArgumentTypeError(f"'{text}' is no list such as 32/8,64/8, query heads a multiple of KV heads")
    return tuple(pairs)


if __name__ == "__main__":
    sys.exit(main())
