"""What an evaluation leaves in its folder, and takes up again when it is run once more.

| file | content |
| --- | --- |
| run.json | what was evaluated: model, tasks' parameters, versions |
| rows.jsonl | a row a setting and task, written when it is finished |
| predictions/<setting>/<suite>/<task>.jsonl | an example's prediction a line |
| results.csv, results.json, results.md | all rows; the table has a line a setting |
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cute_kernels.eval.settings import Setting

Row = dict[str, Any]
_COLUMNS = ("setting", "part", "rule", "key_sparsity", "value_sparsity", "window", "granularity", "evicted", "codec")


def row(setting: Setting, task: str, metric: str, value: float, samples: int) -> Row:
    fields = asdict(setting)
    known: Row = {"setting": setting.name, "part": setting.part, "rule": setting.rule}
    known |= {name: fields[name] for name in _COLUMNS[3:]}
    return known | {"task": task, "metric": metric, "value": value, "samples": samples}


class Store:
    """The folder. Raises ValueError if it holds the results of something else."""

    def __init__(self, folder: Path, identity: Row) -> None:
        self._folder, self._identity = folder, identity
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "run.json"
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            other = [name for name in {**earlier, **identity} if earlier.get(name) != identity.get(name)]
            if other:
                raise ValueError(
                    f"{folder} holds the results of another run, which differs in "
                    + "; ".join(f"{name}: {earlier.get(name)!r} there, {identity.get(name)!r} now" for name in other)
                    + ": choose another --out"
                )
        self.rows: list[Row] = _complete_lines(folder / "rows.jsonl")

    def has(self, setting: Setting, task: str) -> bool:
        return any(r["task"] == task and r["setting"] == setting.name for r in self.rows)

    def _begin(self) -> None:
        """From the first result on the folder is this run's."""
        text = json.dumps(self._identity, indent=2) + "\n"
        (self._folder / "run.json").write_text(text, encoding="utf-8")

    def add(self, new: list[Row]) -> None:
        self._begin()
        with (self._folder / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in new))
        self.rows += new

    @contextmanager
    def predictions(
        self, setting: Setting, suite: str, task: str
    ) -> Iterator[tuple[list[str], Callable[[int, str], None]]]:
        """(earlier predictions, a function that keeps one more)."""
        self._begin()
        path = self._folder / "predictions" / setting.name / suite / f"{task}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = [str(line["prediction"]) for line in _complete_lines(path)]
        with path.open("a", encoding="utf-8") as file:

            def keep(index: int, prediction: str) -> None:
                file.write(json.dumps({"index": index, "prediction": prediction}, ensure_ascii=False) + "\n")
                file.flush()

            yield known, keep

    def write_tables(self) -> list[Path]:
        rows = with_averages(self.rows)
        paths = [self._folder / f"results.{suffix}" for suffix in ("csv", "json", "md")]
        with paths[0].open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*_COLUMNS, "task", "metric", "value", "samples"])
            writer.writeheader()
            writer.writerows(rows)
        paths[1].write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        paths[2].write_text(table(rows), encoding="utf-8")
        return paths


def with_averages(rows: list[Row]) -> list[Row]:
    """The rows, and each suite's mean over its tasks for settings that have them all; parts by length do not count."""
    result = list(rows)
    for suite in dict.fromkeys(r["task"].split("/")[0] for r in rows if "/" in r["task"]):
        by_setting: dict[str, list[Row]] = {}
        for r in rows:
            if r["task"].startswith(f"{suite}/") and " " not in r["task"]:
                by_setting.setdefault(r["setting"], []).append(r)
        tasks = max(map(len, by_setting.values()))
        for members in by_setting.values():
            if len(members) == tasks:
                mean = sum(r["value"] for r in members) / tasks
                samples = sum(r["samples"] for r in members)
                result.append({**members[0], "task": f"{suite} average", "value": mean, "samples": samples})
    return result


def table(rows: list[Row]) -> str:
    """Markdown: a line a setting, a column a task."""
    tasks = list(dict.fromkeys((r["task"], r["metric"]) for r in rows))
    settings = list(dict.fromkeys(r["setting"] for r in rows))
    values = {(r["setting"], r["task"]): r["value"] for r in rows}
    lines = [
        "| cache | " + " | ".join(f"{task} ({metric})" for task, metric in tasks) + " |",
        "| --- " * (len(tasks) + 1) + "|",
    ]
    for setting in settings:
        cells = (f"{values[setting, task]:.4g}" if (setting, task) in values else "" for task, _ in tasks)
        lines.append(f"| {setting} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def read_lines(path: Path) -> list[Row]:
    """Lines that were written whole."""
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def _complete_lines(path: Path) -> list[Row]:
    """Lines that were written whole; a last one that an interruption cut is taken off the file."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return read_lines(path)
