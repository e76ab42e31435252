"""Tables in JSON files that stay small and whose diffs show what changed: a row is a line.

    {"format": 3,
    "runs": [
    {"device": "...", "commit": "..."}
    ],
    "columns": ["run", "op", ...],
    "rows": [
    [0, "sparse_qk", ...],
    ...
    ]}

`runs` holds once what all rows of a run share; a row begins with the index of its own. Columns in which every row has
the default are left out. Format 2 was a list of objects, which is read as well.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

FORMAT = 3


def write(
    path: Path, objects: Sequence[Mapping[str, Any]], shared: Collection[str], defaults: Mapping[str, Any] | None = None
) -> None:
    """Writes rows with equal keys such that the file is never seen half written.

    shared: keys whose values all rows of a run have in common. defaults: of columns to leave out.
    """
    names = columns(objects, defaults or {})
    runs: dict[str, int] = {}
    own = [name for name in names if name not in shared]
    lines = []
    for values in objects:
        run = json.dumps({name: values[name] for name in names if name in shared})
        lines.append(json.dumps([runs.setdefault(run, len(runs)), *(values[name] for name in own)]))
    text = (
        f'{{"format": {FORMAT},\n"runs": [\n'
        + ",\n".join(runs)
        + '\n],\n"columns": '
        + json.dumps(["run", *own])
        + ',\n"rows": [\n'
        + ",\n".join(lines)
        + "\n]}\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; ValueError says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if isinstance(content, dict):
        try:
            runs, (_, *names) = content["runs"], content["columns"]
            content = [dict(zip(names, values, strict=True)) | runs[run] for run, *values in content["rows"]]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: expected rows of format {FORMAT}: {error!r}") from None
    if not isinstance(content, list) or not all(isinstance(values, dict) for values in content):
        raise ValueError(f"{path}: expected a list of rows")
    return content


def write_rows(path: Path, rows: Sequence[DataclassInstance], shared: Collection[str]) -> Path:
    """`write` of rows of one class; returns the path."""
    write(path, [asdict(row) for row in rows], shared)
    return path


def read_rows(path: Path, row: type[T], command: str) -> list[T]:
    """The rows of a file as objects of the class that `command` writes; ValueError says what is wrong with it."""
    try:
        return [row(**values) for values in read(path)]
    except TypeError as error:
        raise ValueError(f"{path}: no rows of {command}: {error}") from None


def columns(objects: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> list[str]:
    """The keys of the rows, without those in which every row has the default."""
    names = dict.fromkeys(name for values in objects for name in values)
    return [name for name in names if name not in defaults or any(values[name] != defaults[name] for values in objects)]


def write_csv(path: Path, objects: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any] | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns(objects, defaults or {}), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(objects)
