"""Measures cute_kernels beside its dense peers: python -m profiling.sweep [--help].

Exit status: 0 all rows within tolerance, 1 a row's result is inaccurate, the device failed or counters were not to be
had, 2 wrong arguments or nothing measured, 130 interrupted (the rows finished so far are written).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from profiling import folders, options
from profiling.command_line import exit_unbuilt, folder_for

try:
    import cute_kernels as ck
    from profiling import compare, rows, selection, tables
    from profiling.cases import Case
    from profiling.counters import collect
    from profiling.run import Run
except ImportError as error:
    exit_unbuilt("profiling.sweep", error)

EXIT_OK, EXIT_FAILED, EXIT_NOTHING, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    args = options.parse(arguments)
    backends = ck.backends()
    try:
        chosen = selection.choose(args, backends)
        earlier = rows.read(args.resume) if args.resume and args.resume.exists() else []
        old = rows.read(args.compare) if args.compare else []
        if not args.list:  # what would fail after the measurements fails now
            if args.ncu and chosen:
                collect.check(chosen, _counting(args))
            for folder in filter(None, (args.out, args.resume and args.resume.parent)):
                folder_for(folder)
    except collect.CountersError as error:
        print(f"python -m profiling.sweep: error: --ncu: {error}", file=sys.stderr)
        return EXIT_NOTHING
    except ValueError as error:
        print(f"python -m profiling.sweep: error: {error}", file=sys.stderr)
        return EXIT_NOTHING
    if args.list and chosen:
        print(*(case.command for case in chosen), sep="\n")
        return EXIT_OK
    for line in selection.left_out(args, backends):
        print(line, flush=True)
    if not chosen:
        print("nothing to measure: no case passes the filters; --shape and --grid measure others than the suites'")
        return EXIT_NOTHING
    run = Run(backends, args.peer, earlier)
    status = measure(run, chosen, args)
    if old:
        print(f"against {args.compare}:", compare.summary(old, run.rows), sep="\n")
    return status


def measure(run: Run, chosen: Sequence[Case], args: argparse.Namespace) -> int:
    """Measures the cases and writes the rows; returns the exit status."""
    remaining = run.remaining(chosen)
    if len(remaining) < len(chosen):
        print(f"{len(chosen) - len(remaining)} of {len(chosen)} cases are in {args.resume} already", flush=True)
    elif args.resume is not None and not args.resume.exists():
        print(f"there is no {args.resume} yet: all {len(chosen)} cases are measured", flush=True)
    complete = interrupted = False
    counted = True
    try:
        run.measure(remaining, lambda: run.save(*_target(run, args)))
        complete = not run.device_lost
        if args.ncu and complete and run.rows:
            run.save(*_target(run, args))  # before a tool that may fail
            counted = add_counters(run, chosen, args)
    except KeyboardInterrupt:
        interrupted = True
    finally:  # whatever happened, finished rows are kept
        if run.rows:
            path = run.save(*_target(run, args, complete and not interrupted))
            print(tables.terminal(run.rows), f"wrote {path}", sep="\n", flush=True)
    status = _conclude(run, interrupted)
    return EXIT_FAILED if status == EXIT_OK and not counted else status


def add_counters(run: Run, chosen: Sequence[Case], args: argparse.Namespace) -> bool:
    """Joins hardware counters to the rows, or says why there are none. Returns whether there are."""
    try:
        run.join(collect.collect(run.forms(chosen), _counting(args)))
    except collect.CountersError as error:
        print(f"no counters: {error}", file=sys.stderr, flush=True)
        return False
    print(tables.limits(run.rows), flush=True)
    return True


def _counting(args: argparse.Namespace) -> collect.Options:
    return collect.Options(args.ncu_path, args.clock_control, args.ncu_report, tuple(args.plugin))


def _target(run: Run, args: argparse.Namespace, complete: bool = False) -> tuple[Path, str]:
    """(folder, name) of the file. complete: the rows are those of all chosen cases."""
    name = selection.results_name(args) or rows.NAME
    if args.out is not None:
        return args.out, name
    if args.resume is not None:
        return args.resume.parent, args.resume.stem
    return folders.of_device(run.slug, args.commit_results and complete), name


def _conclude(run: Run, interrupted: bool) -> int:
    """Prints what is not in the table; returns the exit status."""
    for reason, count in run.missing.items():
        print(f"peer missing beside {count} cases: {reason}")
    for reason, count in run.skipped.items():
        print(f"skipped {count} cases: {reason}")
    if interrupted:
        print(
            f"interrupted: kept the {len(run.rows)} rows measured so far"
            if run.rows
            else "interrupted before the first row"
        )
        return EXIT_INTERRUPTED
    inaccurate = [row for row in run.rows if not row.accurate]
    for row in inaccurate:
        print(f"INACCURATE: relative error {row.rel_err:.2e} > {row.tolerance:.0e}: {row.command}")
    if inaccurate or run.device_lost:
        return EXIT_FAILED
    if not run.rows:
        print("nothing measured: every case was skipped")
    return EXIT_OK if run.rows else EXIT_NOTHING


if __name__ == "__main__":
    sys.exit(main())
