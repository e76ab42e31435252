"""Rows of commands that need no class for them: objects whose columns are shown as they are.

What a run's rows share (`OF_A_RUN`) stands above their table, everything else in it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from profiling import command_line, records
from profiling.environment import Environment
from profiling.tables import aligned, filled, markdown_table

Rows = Sequence[Mapping[str, Any]]

OF_A_RUN = ("device", "isa", "torch", "driver", "commit", "timestamp", "command")
# The first letters of the files' names -> what stands above their tables.
TITLES = {
    "steps": "Decoding steps that store tiles",
    "ragged": "Attention over sequences of different lengths",
    "soak": "Random operations on a KVCache beside a dense model",
}


def files(folder: Path) -> list[Path]:
    return sorted(path for name in TITLES for path in folder.glob(f"{name}*.json"))


def run_of(env: Environment, module: str, words: Sequence[str]) -> dict[str, str]:
    """What all rows of a run begin with. words: arguments of the module, of which those that say where rows go are left
    out of the command that measures them again."""
    output = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    command_line.add_output(output, "")
    command = shlex.join(["python", "-m", module, *output.parse_known_args(words)[1]])
    return {
        "device": env.name,
        "isa": env.isa,
        "torch": env.torch,
        "driver": env.driver,
        "commit": env.commit,
        "timestamp": env.timestamp,
        "command": command,
    }


def write(rows: Rows, folder: Path, name: str) -> Path:
    """Writes NAME.json; returns its path."""
    path = folder / f"{name}.json"
    records.write(path, rows, OF_A_RUN)
    return path


def table_of(rows: Rows) -> list[tuple[str, ...]]:
    """The header and a line for each row, without columns that are empty in all of them."""
    names = [name for name in records.columns(rows, {}) if name not in OF_A_RUN]
    return filled([tuple(names), *(tuple(_cell(row.get(name, "")) for name in names) for row in rows)])


def terminal(rows: Rows) -> str:
    return aligned(table_of(rows))


def markdown(rows: Rows, file_name: str) -> str:
    title = next(title for name, title in TITLES.items() if file_name.startswith(name))
    header, *cells = table_of(rows)
    return "\n".join([f"# {title}", "", *_settings(rows), "", *markdown_table(header, cells)]) + "\n"


def _settings(rows: Rows) -> Iterable[str]:
    return dict.fromkeys(
        ", ".join(filter(None, (r["device"], r["isa"], f"torch {r['torch']}", r["driver"] and f"driver {r['driver']}")))
        + f", commit {r['commit']}, {r['timestamp']}: `{r['command']}`"
        for r in rows
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
