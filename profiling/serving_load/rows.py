"""Rows of `python -m profiling.serving_load` and their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from profiling import records
from profiling.tables import aligned, filled, markdown_table

NAME = "load"
DENSE = ("sdpa", "sdpa-no-cudnn", "flash")  # sides
OF_A_RUN = (
    *("model", "prompt", "answer", "spread", "longest", "memory", "under_way_at_most", "step_tokens", "sparsity"),
    *("prefix", "device", "torch", "transformers", "driver", "isa", "commit", "timestamp", "command"),
)


@dataclass(frozen=True)
class Row:
    """A number of users on one side, or, with 0 users, hits of a shared prefix. Sizes in tokens and bytes, times in
    milliseconds; see requests.Lengths, sides.Sizes, session.Load."""

    side: str
    users: int
    tokens_per_s: float | None
    first_token_p50_ms: float | None
    first_token_p99_ms: float | None
    first_tokens: int
    waiting: int | None
    under_way: float | None
    used: int | None
    step_ms: float | None
    miss_ms: float | None  # without the prefix
    model: str
    prompt: int
    answer: int
    spread: float
    longest: int
    memory: int
    under_way_at_most: int
    step_tokens: int
    sparsity: float
    prefix: int
    device: str
    torch: str
    transformers: str
    driver: str
    isa: str
    commit: str
    timestamp: str
    command: str

    @property
    def load(self) -> tuple[object, ...]:
        """What was served, by either side."""
        sizes = self.model, self.prompt, self.answer, self.spread, self.longest, self.memory, self.under_way_at_most
        what = self.step_tokens, self.device, self.isa, self.torch, self.transformers
        return self.users, self.prefix if not self.users else 0, *sizes, *what

    @property
    def case(self) -> tuple[object, ...]:
        """What was measured, at which state."""
        return self.side, self.sparsity, self.commit, *self.load

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """The dense rows of the same load; of any state, as they are none of our code."""
        return [r for r in rows if r.side in DENSE and r.load == self.load]


def ratio(row: Row, rows: Sequence[Row], field: str) -> float | None:
    """Of a sparse row to the best of the dense rows beside it; of times, how many times as long."""
    own, found = getattr(row, field), [getattr(other, field) for other in row.beside(rows)]
    dense = [value for value in found if value is not None]
    if row.side in DENSE or own is None or not dense:
        return None
    return own / (max if field == "tokens_per_s" else min)(dense)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def table_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header and a line for each row, without columns that are empty in all of them."""
    columns: dict[str, Callable[[Row], str]] = {
        "users": lambda r: str(r.users) if r.users else f"prefix of {r.prefix}",
        "side": lambda r: r.side,
        "tokens/s": lambda r: _text(r.tokens_per_s, ".0f"),
        "to dense": lambda r: _text(ratio(r, rows, "tokens_per_s") if r.users else None, ".2f"),
        "under way": lambda r: _text(r.under_way, ".1f"),
        "cache in use, GiB": lambda r: "" if r.used is None else f"{r.used / 2**30:.2f}",
        "step, ms": lambda r: _text(r.step_ms, ".1f"),
        "first token p50, ms": lambda r: _text(r.first_token_p50_ms, ".0f"),
        "p50 to dense": lambda r: _text(ratio(r, rows, "first_token_p50_ms"), ".2f"),
        "p99, ms": lambda r: _text(r.first_token_p99_ms, ".0f"),
        "p99 to dense": lambda r: _text(ratio(r, rows, "first_token_p99_ms") if r.users else None, ".2f"),
        "first tokens": lambda r: str(r.first_tokens),
        "waiting": lambda r: _text(r.waiting, "d"),
        "without the prefix, ms": lambda r: _text(r.miss_ms, ".0f"),
    }
    return filled([tuple(columns), *(tuple(cell(row) for cell in columns.values()) for row in rows)])


def markdown(rows: Sequence[Row]) -> str:
    settings = dict.fromkeys(
        f"{r.device}, "
        + (f"{r.isa}, " if r.isa else "")
        + f"{r.model}, torch {r.torch}, Transformers {r.transformers}, "
        + (f"driver {r.driver}, " if r.driver else "")
        + f"commit {r.commit}, {r.timestamp}: prompts and answers of {r.prompt} and {r.answer} tokens (medians, "
        f"log-normal, deviation {r.spread}, at most {r.longest}), {r.memory / 2**30:g} GiB of cache, steps of at most "
        f"{r.step_tokens} tokens, sparsity {r.sparsity}: `{r.command}`"
        for r in rows
    )
    header, *cells = table_of(rows)
    return "\n".join(["# Continuous batching", "", *settings, "", *markdown_table(header, cells)]) + "\n"


def terminal(rows: Sequence[Row]) -> str:
    return aligned(table_of(rows))


def write(rows: Sequence[Row], folder: Path, name: str = NAME) -> Path:
    """Writes NAME.json; returns its path."""
    return records.write_rows(folder / f"{name}.json", rows, OF_A_RUN)


def read(path: Path) -> list[Row]:
    """The rows of a JSON file; ValueError says what is wrong with it."""
    return records.read_rows(path, Row, "profiling.serving_load")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    records.write_csv(path, [asdict(row) for row in rows])
