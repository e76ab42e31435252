"""Plots, tables and the README's figures from measured rows: python -m profiling.report [FOLDER ...] [--help].

Exit status: 0 everything written that there are rows for, 1 the table or all plots left out, 2 wrong arguments or no
rows.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from profiling import ROOT, plots, readme, rows
from profiling.ceilings import ceilings
from profiling.generation import readme as generation_readme
from profiling.generation import rows as generation
from profiling.rows import Row

RESULTS = ROOT / "profiling" / "results"
GENERATED = f"{generation.NAME}*.json"

DESCRIPTION = """\
For each folder of rows (profiling/results/DEVICE by default): plots in its folder plots/, as PNG and SVG, of every row
in its *.json, the newest of each case; and the tables between the markers in the README, of the newest GPU rows: of
figures, and of generation from generate*.json."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.report", description=DESCRIPTION,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="folder with a sweep's JSON files")
    parser.add_argument("--plots", type=Path, metavar="DIR",
                        help="where plots go, for one folder (default: FOLDER/plots)")
    parser.add_argument("--no-plots", action="store_true")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE",
                        help="default: the project's")
    parser.add_argument("--no-readme", action="store_true")
    args = parser.parse_args(arguments)
    folders = args.folders or sorted(path for path in RESULTS.glob("*") if path.is_dir())
    if args.plots and len(folders) != 1:
        parser.error("--plots goes with one folder")
    try:
        found = {folder: folder_rows(folder) for folder in folders}
        generated = {folder: generation_rows(folder) for folder in folders}
    except ValueError as error:
        print(f"python -m profiling.report: error: {error}", file=sys.stderr)
        return 2
    if not any(found.values()):
        print("python -m profiling.report: error: no rows; python -m profiling.sweep measures them", file=sys.stderr)
        return 2
    problems = [] if args.no_plots else _plots(found, args.plots)
    if not args.no_readme:
        problems += _readme(found, args.readme) + _generation(generated, args.readme)
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


def folder_rows(folder: Path) -> list[Row]:
    """The newest row of each case in a folder's JSON files; ValueError for a file without rows."""
    paths = sorted(set(folder.glob("*.json")) - set(folder.glob(GENERATED)))
    return rows.newest(row for path in paths for row in rows.read(path))


def generation_rows(folder: Path) -> list[generation.Row]:
    """The newest row of each case in what `python -m profiling.generate` wrote; ValueError for a file without rows."""
    return generation.newest(row for path in sorted(folder.glob(GENERATED)) for row in generation.read(path))


def _plots(found: dict[Path, list[Row]], target: Path | None) -> list[str]:
    for folder, its_rows in found.items():
        try:
            paths, missing = plots.draw(its_rows, ceilings(its_rows, folder), target or folder / "plots")
        except plots.PlotsError as error:
            return [f"no plots: {error}"]
        print(*(f"wrote {path}" for path in paths), *(f"{folder}: no plot {reason}" for reason in missing), sep="\n")
    return []


def _readme(found: dict[Path, list[Row]], path: Path) -> list[str]:
    on_gpu = {folder: [row for row in its_rows if row.multiprocessors] for folder, its_rows in found.items()}
    on_gpu = {folder: its_rows for folder, its_rows in on_gpu.items() if its_rows}
    if not on_gpu:
        return [f"{path.name} left as it is: no rows of a GPU"]
    folder = _newest(on_gpu)
    return _write(path, "figures", lambda text: readme.updated(
        text, readme.figures_block(on_gpu[folder], _link(folder / f"{rows.NAME}.md"))))


def _generation(found: dict[Path, list[generation.Row]], path: Path) -> list[str]:
    on_gpu = {folder: [row for row in its_rows if row.peak_bytes is not None] for folder, its_rows in found.items()}
    on_gpu = {folder: its_rows for folder, its_rows in on_gpu.items() if its_rows}
    if not on_gpu:
        return []
    folder = _newest(on_gpu)
    return _write(path, "figures of generation", lambda text: readme.updated(
        text, generation_readme.table_block(on_gpu[folder], _link(folder / f"{generation.NAME}.md")),
        generation_readme.BEGIN, generation_readme.END))


def _newest(found: Mapping[Path, Sequence[Row] | Sequence[generation.Row]]) -> Path:
    return max(found, key=lambda name: max(row.timestamp for row in found[name]))


def _link(path: Path) -> str:
    path = path.absolute()
    return (path.relative_to(ROOT) if path.is_relative_to(ROOT) else path).as_posix()


def _write(path: Path, what: str, change: Callable[[str], str]) -> list[str]:
    try:
        before = path.read_text(encoding="utf-8")
        after = change(before)
    except (OSError, readme.ReadmeError) as error:
        return [f"{path.name} left as it is: {error}"]
    if after != before:
        path.write_text(after, encoding="utf-8")
    print(f"{path.name}: {what} " + ("written" if after != before else "are those of the rows already"))
    return []


if __name__ == "__main__":
    sys.exit(main())
