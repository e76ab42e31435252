"""Measures cute_kernels beside its dense peers: python -m profiling.sweep [--help].

Exit status: 0 all rows within tolerance, 1 a row's result is inaccurate or the device failed, 2 wrong arguments or
nothing measured, 130 interrupted (the rows finished so far are written).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from profiling import ROOT, cases, report
from profiling.cases import Case, Shape
from profiling.progress import Progress

try:
    import torch

    import cute_kernels as ck
    from profiling.environment import Environment, environment
    from profiling.measure import is_fatal, measure_case
except ImportError as error:
    print(f"python -m profiling.sweep: {error}\nBuild cute_kernels first: make build", file=sys.stderr)
    sys.exit(2)

EXIT_OK, EXIT_FAILED, EXIT_NOTHING, EXIT_INTERRUPTED = 0, 1, 2, 130
REPEATS, QUICK_REPEATS = 30, 10
RESULTS = ROOT / "profiling" / "results"  # complete default sweeps
SCRATCH = ROOT / "build" / "sweep"        # everything else: quick, filtered, interrupted

DESCRIPTION = """\
Measure sparse_qk, sparse_av and compress beside what one would run without them: the dense product (cuBLAS on a GPU,
torch in bfloat16 on a CPU), for compress a copy of as many bytes. Every result is checked against a float64
computation. Times are medians of single calls with a cold cache; ratio is the peer's time over ours."""

EPILOG = """\
Without filters the default list of the device runs: the project's figures on a GPU, smaller shapes on a CPU. --op,
--backend, --keep, --dtype and --data select from it; --shape replaces it by the given shapes, each with 30 % and 50 %
of its channels kept, float16 and gaussian unless --keep, --dtype, --data say otherwise. These options may be repeated.

Files: sweep.csv, sweep.json, sweep.md. A complete default sweep writes to profiling/results/DEVICE/; a quick, filtered
or interrupted one to build/sweep/DEVICE/, so it never replaces committed rows; --out DIR overrides both.

Exit status: 0 every row within tolerance; 1 a result was inaccurate or the device failed; 2 wrong arguments or nothing
measured; 130 interrupted, the finished rows are written."""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m profiling.sweep", description=DESCRIPTION, epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    ops = [*cases.BACKENDS, *cases.LEFT_OUT]
    backends = list(dict.fromkeys(b for names in cases.BACKENDS.values() for b in names))
    add = parser.add_argument
    add("--op", action="append", choices=ops, help="operation to measure (default: all)")
    add("--backend", action="append", choices=backends,
        help="backend to measure (default: all of the device); products have cpu, sm80, sm90 and reference, compress "
             "has cpu and cuda")
    add("--shape", action="append", type=_shape, metavar="B,Hq,Hkv,Sq,T,D",
        help="batch, query heads, KV heads, query tokens, cached tokens, head dim; such as 8,32,8,1,16384,128")
    add("--keep", action="append", type=_positive, metavar="N", help="channels kept of each token")
    add("--dtype", action="append", choices=cases.DTYPES, help="of cache, queries, weights and outputs")
    add("--data", action="append", choices=cases.DATA,
        help="gaussian; outlier: lognormal channel scales; equal: every value stream equally long, so no padding")
    add("--quick", action="store_true", help="a short list of small shapes: a smoke test, no figures to quote")
    add("--repeats", type=_positive, metavar="N",
        help=f"timed calls a row (default: {REPEATS}, with --quick {QUICK_REPEATS})")
    add("--seed", type=int, default=0, metavar="N", help="of all random inputs (default: 0)")
    add("--out", type=Path, metavar="DIR", help="folder for the files (default: see below)")
    add("--list", action="store_true", help="print the cases, each as the command that measures it alone, and stop")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    backends = ck.backends()
    try:
        chosen = choose_cases(args, backends)
    except ValueError as error:
        print(f"python -m profiling.sweep: error: {error}", file=sys.stderr)
        return EXIT_NOTHING
    if args.list:
        print(*(case.command for case in chosen), sep="\n")
        return EXIT_OK if chosen else EXIT_NOTHING
    for line in left_out(args, backends):
        print(line, flush=True)
    if not chosen:
        print("nothing to measure: no case passes the filters; --shape measures shapes outside the default list")
        return EXIT_NOTHING
    return run(chosen, backends, args.out, is_default=not is_partial(args))


# ---- Cases -----------------------------------------------------------------------------------------------------------


def is_partial(args: argparse.Namespace) -> bool:
    """Whether the rows are anything but the complete default sweep."""
    filters = (args.op, args.backend, args.shape, args.keep, args.dtype, args.data)
    return args.quick or any(filters) or args.repeats is not None or args.seed != 0


def choose_cases(args: argparse.Namespace, backends: dict[str, str]) -> list[Case]:
    """The cases that the arguments ask for; ValueError if they contradict each other."""
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    names = args.backend or default_backends(backends)
    if args.shape:
        loads = cases.own_loads(args.shape, args.keep, args.dtype, args.data)
    else:
        device = "cuda" if any(device_of(name) == "cuda" for name in names) else "cpu"
        loads = cases.select(cases.default_loads(device, args.quick), args.keep, args.dtype, args.data)
    return cases.expand(loads, args.op or cases.BACKENDS, names, args.seed, repeats)


def default_backends(backends: dict[str, str]) -> list[str]:
    """A GPU's backends that work, else the CPU's."""
    on_gpu = [name for name in ("sm80", "sm90") if backends.get(name) == "ok"]
    return [*on_gpu, "cuda"] if on_gpu else ["cpu"]


def device_of(backend: str) -> str:
    """The kind of device that a backend is measured on; reference runs on either and is measured on the GPU, if any."""
    if backend == "reference":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if backend == "cpu" else "cuda"


def unavailable(backend: str, backends: dict[str, str]) -> str | None:
    """Why a backend cannot run here, or None. compress's "cuda" works when any GPU backend does."""
    names = ("sm80", "sm90") if backend == "cuda" else (backend,)
    states = [backends.get(name, "unknown to this build") for name in names]
    return None if "ok" in states else states[0]


def left_out(args: argparse.Namespace, backends: dict[str, str]) -> list[str]:
    """What a user might miss among the rows, and why."""
    lines = []
    if not args.backend:
        measured = default_backends(backends)
        others = [f"{name} ({state if state != 'ok' else f'measured with --backend {name}'})"
                  for name, state in backends.items() if name not in measured]
        where = "the CPU backend" if measured == ["cpu"] else "the GPU backends"
        if others:
            lines.append(f"measuring {where}; left out: {', '.join(others)}")
    lines += [f"left out: {op}: {why}" for op, why in cases.LEFT_OUT.items() if not args.op or op in args.op]
    return lines


# ---- Run -------------------------------------------------------------------------------------------------------------


def run(chosen: Sequence[Case], backends: dict[str, str], out: Path | None, is_default: bool) -> int:
    """Measures the cases and writes the rows; returns the exit status."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)  # fails now rather than after the measurements
    sweep = Sweep(backends)
    interrupted = complete = False
    try:
        sweep.measure(chosen)
        complete = is_default and not sweep.device_lost
    except KeyboardInterrupt:
        interrupted = True
    finally:  # whatever happened, finished rows are kept
        rows = sweep.rows
        if rows:
            folder = out or (RESULTS if complete else SCRATCH) / sweep.slug
            paths = report.write(rows, folder)
            print(report.terminal(rows), "wrote " + ", ".join(map(str, paths)), sep="\n", flush=True)
    for reason, count in sweep.skipped.items():
        print(f"skipped {count} cases: {reason}")
    if interrupted:
        print(f"interrupted: kept the {len(rows)} rows measured so far" if rows else "interrupted before the first row")
        return EXIT_INTERRUPTED
    inaccurate = [row for row in rows if not row.accurate]
    for row in inaccurate:
        print(f"INACCURATE: relative error {row.rel_err:.2e} > {row.tolerance:.0e}: {row.command}")
    if inaccurate or sweep.device_lost:
        return EXIT_FAILED
    if not rows:
        print("nothing measured: every case was skipped")
    return EXIT_OK if rows else EXIT_NOTHING


class Sweep:
    """The state of one run: its rows so far, and the devices it met."""

    def __init__(self, backends: dict[str, str]) -> None:
        self.rows: list[report.Row] = []
        self.skipped: dict[str, int] = {}  # reason -> cases
        self.device_lost = False
        self.slug = "unknown"  # of the device of the latest row
        self._backends = backends
        self._environments: dict[str, Environment] = {}

    def measure(self, chosen: Sequence[Case]) -> None:
        """Adds the rows of each case; a case that cannot run is skipped with its reason."""
        with Progress(len(chosen)) as progress:
            for case in chosen:
                progress.start(str(case))
                reason = unavailable(case.backend, self._backends)
                try:
                    new = [] if reason else measure_case(case, self._environment(case))
                except (RuntimeError, ValueError) as error:  # the backend does not serve the case, or memory is short
                    reason = " ".join(str(error).split())
                    if is_fatal(error):
                        self.device_lost = True
                        progress.finish(f"FAILED {case}: {reason}; the device is lost, stopping")
                        return
                if reason:
                    self.skipped[reason] = self.skipped.get(reason, 0) + 1
                    progress.finish(f"skipped {case}: {reason}")
                    continue
                self.rows += new
                progress.finish(f"{case}: " + "; ".join(report.one_line(row) for row in new))

    def _environment(self, case: Case) -> Environment:
        kind = device_of(case.backend)
        if kind not in self._environments:
            index = torch.cuda.current_device() if kind == "cuda" else None
            self._environments[kind] = environment(torch.device(kind, index))
        self.slug = self._environments[kind].slug
        return self._environments[kind]


# ---- Arguments' types ------------------------------------------------------------------------------------------------


def _shape(text: str) -> Shape:
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return value


if __name__ == "__main__":
    sys.exit(main())
