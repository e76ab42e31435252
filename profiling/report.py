"""Tables, CSV and plots from measured rows: python -m profiling.report [FOLDER ...] [--help].

Exit status: 0 everything written that there are rows for, 1 plots or a block of the documentation left out, 2 wrong
arguments or no rows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from profiling import ROOT, folders, plain_rows, plots, readme, records, rows, tables
from profiling.ceilings import DECODE_FILE, ceilings
from profiling.generation import readme as generation_readme
from profiling.generation import rows as generation
from profiling.rows import Row
from profiling.scaling import rows as scaling
from profiling.serving_load import readme as load_readme
from profiling.serving_load import rows as load

GENERATED = f"{generation.NAME}*.json"
SCALING = f"{scaling.NAME}*.json"
SCALING_GENERATED = f"{scaling.NAME}-{GENERATED}"  # over several GPUs, so not beside those of one in the documentation
LOAD = f"{load.NAME}*.json"
ACCURACY = Path("accuracy", "accuracy.json")  # of profiling.recipes.associative_recall
STUDIES = tuple(ACCURACY.with_name(f"{name}.json") for name in ("frontier", "language", "outputs"))  # of the recipes
ACCURACY_PLOTS = ("accuracy", "frontier")
DOCS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

DESCRIPTION = """\
For each folder of rows (those in profiling/results by default; a sweep's own are in build/profiling/DEVICE), a folder
of its name in build/profiling/report, which git ignores: every *.json as CSV and as a markdown table, and in plots/
every plot, of the newest row of each case.
With --update-docs, what is committed instead: the tables between the markers in README.md and docs/, of the GPU with
the most rows, and those plots beside the rows that these files show."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="folder with a sweep's JSON files")
    parser.add_argument(
        "--out",
        type=Path,
        default=folders.SCRATCH / "report",
        metavar="DIR",
        help="folder to write to (default: build/profiling/report)",
    )
    parser.add_argument("--no-plots", action="store_true", help="tables and CSV alone")
    parser.add_argument("--update-docs", action="store_true", help="rewrite what the documentation shows")
    parser.add_argument(
        "--docs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="that --update-docs rewrites (default: README.md and all of docs/)",
    )
    args = parser.parse_args(arguments)
    if args.docs and not args.update_docs:
        parser.error("--docs goes with --update-docs, which rewrites these files")
    for folder in args.folders:
        if not folder.is_dir():
            parser.error(f"there is no folder {folder}")
    found, documents = args.folders or folders.devices(), args.docs or DOCS
    try:
        problems, count = [], 0
        if args.update_docs:
            shown = "" if args.no_plots else "\n".join(path.read_text(encoding="utf-8") for path in documents)
            for folder in found:
                problems += _shown_plots(folder, shown)
            problems += update_docs(found, documents)
            count = len(found)
        else:
            for folder in found:
                target = args.out / folder.resolve().name
                count += write_tables(folder, target)
                problems += [] if args.no_plots else _plots(folder, target / "plots")
    except (OSError, ValueError) as error:
        print(f"python -m profiling.report: error: {error}", file=sys.stderr)
        return 2
    if not count:
        where = ", ".join(map(str, found))
        print(
            f"python -m profiling.report: error: no rows in {where}; python -m profiling.sweep measures them",
            file=sys.stderr,
        )
        return 2
    print(*problems, sep="\n", end="\n" if problems else "", file=sys.stderr)
    return 1 if problems else 0


# ---- Rows ------------------------------------------------------------------------------------------------------------


def sweep_files(folder: Path) -> list[Path]:
    others = {folder / DECODE_FILE, *folder.glob(GENERATED), *folder.glob(SCALING), *folder.glob(LOAD)}
    others |= {*plain_rows.files(folder)}
    return sorted(set(folder.glob("*.json")) - others)


def folder_rows(folder: Path) -> list[Row]:
    """The newest row of each case in a folder's JSON files; ValueError for a file without rows."""
    return rows.newest(row for path in sweep_files(folder) for row in rows.read(path))


def generation_rows(folder: Path) -> list[generation.Row]:
    """The newest row of each case in what `python -m profiling.generate` wrote; ValueError for a file without rows."""
    return rows.newest(row for path in sorted(folder.glob(GENERATED)) for row in generation.read(path))


def load_rows(folder: Path) -> list[load.Row]:
    """Of the file load.json alone: one load."""
    path = folder / f"{load.NAME}.json"
    return load.read(path) if path.is_file() else []


# ---- Tables, CSV and plots -------------------------------------------------------------------------------------------


def write_tables(folder: Path, target: Path) -> int:
    """Writes CSV and markdown of every file of rows in a folder; returns how many there are."""
    count = 0
    for path in sweep_files(folder):
        found = rows.read(path)
        rows.write_csv(found, target / f"{path.stem}.csv")
        count += _write_table(tables.markdown(found), target / f"{path.stem}.md")
    spread = sorted(folder.glob(SCALING_GENERATED))
    for path in sorted(set(folder.glob(SCALING)) - set(spread)):
        over = scaling.read(path)
        scaling.write_csv(over, target / f"{path.stem}.csv")
        count += _write_table(scaling.markdown(over), target / f"{path.stem}.md")
    for path in [*sorted(folder.glob(GENERATED)), *spread]:
        made = generation.read(path)
        generation.write_csv(made, target / f"{path.stem}.csv")
        count += _write_table(generation.markdown(made), target / f"{path.stem}.md")
    for path in sorted(folder.glob(LOAD)):
        served = load.read(path)
        load.write_csv(served, target / f"{path.stem}.csv")
        count += _write_table(load.markdown(served), target / f"{path.stem}.md")
    for path in plain_rows.files(folder):
        plain = records.read(path)
        records.write_csv(target / f"{path.stem}.csv", plain)
        count += _write_table(plain_rows.markdown(plain, path.stem), target / f"{path.stem}.md")
    if (folder / ACCURACY).is_file():
        from profiling.recipes import associative_recall as recipe

        accuracy = records.read(folder / ACCURACY)
        records.write_csv(target / f"{ACCURACY.stem}.csv", accuracy)
        count += _write_table(recipe.markdown(accuracy), target / f"{ACCURACY.stem}.md")
    for path in STUDIES:
        if (folder / path).is_file():
            from profiling.recipes import study

            found = records.read(folder / path)
            records.write_csv(target / f"{path.stem}.csv", found)
            count += _write_table(study.table(found, 2 if path.stem == "frontier" else 4), target / f"{path.stem}.md")
    return count


def study_rows(folder: Path) -> list[dict[str, Any]]:
    """Of what is lost against bits: all studies' in a folder."""
    return [row for path in STUDIES if (folder / path).is_file() for row in records.read(folder / path)]


def _write_table(text: str, path: Path) -> int:
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path} and {path.stem}.csv")
    return 1


def _plots(folder: Path, target: Path, names: Sequence[str] = plots.NAMES) -> list[str]:
    """Draws plots of a folder's rows; returns why there are none."""
    try:
        if names and (found := folder_rows(folder)):
            paths, missing = plots.draw(found, ceilings(found, folder), target, names)
            print(
                *(f"wrote {path}" for path in paths), *(f"{folder}: no plot {reason}" for reason in missing), sep="\n"
            )
        if names == plots.NAMES and (folder / ACCURACY).is_file():
            print(*(f"wrote {path}" for path in plots.draw_accuracy(records.read(folder / ACCURACY), target)), sep="\n")
        if names == plots.NAMES and study_rows(folder):
            print(f"wrote {plots.draw_frontier(study_rows(folder), target)}")
        if names == plots.NAMES and any(row.users for row in load_rows(folder)):
            print(f"wrote {plots.draw_load(load_rows(folder), target)}")
    except plots.PlotsError as error:
        return [f"no plots: {error}"]
    return []


# ---- Documentation ---------------------------------------------------------------------------------------------------


def committed_plots(folder: Path) -> dict[str, Path]:
    """Name -> where the plot is, if the documentation shows it."""
    return {
        **{name: folder / "plots" / f"{name}.png" for name in plots.NAMES},
        **{name: folder / ACCURACY.parent / "plots" / f"{name}.png" for name in ACCURACY_PLOTS},
        load.NAME: folder / "plots" / f"{load.NAME}.png",
    }


def _shown_plots(folder: Path, text: str) -> list[str]:
    """Draws those plots beside their rows that a text shows."""
    shown = [
        name
        for name, path in committed_plots(folder).items()
        if path.resolve().is_relative_to(ROOT) and path.resolve().relative_to(ROOT).as_posix() in text
    ]
    problems = _plots(folder, folder / "plots", [name for name in shown if name in plots.NAMES])
    if "accuracy" in shown and not problems:
        plots.draw_accuracy(records.read(folder / ACCURACY), folder / ACCURACY.parent / "plots")
    if "frontier" in shown and not problems:
        plots.draw_frontier(study_rows(folder), folder / ACCURACY.parent / "plots")
    if load.NAME in shown and not problems:
        plots.draw_load(load_rows(folder), folder / "plots")
    return problems


def blocks(found: Sequence[Path]) -> list[tuple[str, str, Callable[[Path], str]]]:
    """(first marker, last marker, document -> what it has in between) of the GPU with the most rows.

    Raises:
        ReadmeError: rows are missing.
    """
    figures = {folder: [row for row in folder_rows(folder) if row.multiprocessors] for folder in found}
    # Of plain prompts: times of turns, chunks and lookups are others.
    made = {
        folder: [
            row
            for row in generation_rows(folder)
            if row.peak_bytes is not None and not (row.turn or row.chunk or row.lookup)
        ]
        for folder in found
    }
    served = {folder: [row for row in load_rows(folder) if not row.isa] for folder in found}
    return [
        (
            readme.BEGIN,
            readme.END,
            lambda document: readme.figures_block(figures[_shown(figures)], _link(_shown(figures), document)),
        ),
        (
            generation_readme.BEGIN,
            generation_readme.END,
            lambda document: generation_readme.table_block(
                made[_shown(made)], _link(_shown(made) / f"{generation.NAME}.json", document)
            ),
        ),
        (
            load_readme.BEGIN,
            load_readme.END,
            lambda document: load_readme.table_block(
                served[_shown(served)], _link(_shown(served) / f"{load.NAME}.json", document)
            ),
        ),
    ]


def updated(text: str, document: Path, found: Sequence[Path]) -> str:
    """A document's text with the blocks that it has markers of written anew.

    Raises:
        ReadmeError: rows are missing, or a marker has no counterpart.
    """
    for begin, end, block in blocks(found):
        if begin in text or end in text:
            text = readme.updated(text, block(document), begin, end)
    return text


def update_docs(found: Sequence[Path], documents: Sequence[Path]) -> list[str]:
    """Rewrites the documents; returns why one is left as it is."""
    problems = []
    for path in documents:
        before = path.read_text(encoding="utf-8")
        try:
            after = updated(before, path, found)
        except readme.ReadmeError as error:
            problems.append(f"{path.name} left as it is: {error}")
            continue
        if after != before:
            path.write_text(after, encoding="utf-8")
        print(f"{path.name}: " + ("written" if after != before else "has the rows' figures already"))
    return problems


def _shown(found: Mapping[Path, Sequence[Row] | Sequence[generation.Row] | Sequence[load.Row]]) -> Path:
    """The folder of the GPU with the most rows, of several the newest: a part of them on another one shows nothing."""
    measured = {folder: its_rows for folder, its_rows in found.items() if its_rows}
    if not measured:
        raise readme.ReadmeError("no rows of a GPU")
    return max(measured, key=lambda each: (len(measured[each]), max(row.timestamp for row in measured[each])))


def _link(path: Path, document: Path) -> str:
    """From a document to a file."""
    return Path(os.path.relpath(path.resolve(), document.resolve().parent)).as_posix()


if __name__ == "__main__":
    sys.exit(main())
