"""Rows of `python -m profiling.scaling --measure` and their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from profiling import records
from profiling.scaling import model
from profiling.tables import aligned, filled, markdown_table

NAME = "scaling"
OF_A_RUN = ("dtype", "device", "torch", "driver", "isa", "commit", "timestamp", "command")
TOLERANCE = 2e-3  # of float16 results: the API's contract


@dataclass(frozen=True)
class Row:
    """One call of attention over the tokens of all GPUs. Times in microseconds, see attention.Times."""

    gpus: int
    tokens: int
    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    keep: int
    window: int
    attend_us: float
    step_us: float
    attention_us: float
    gather_us: float
    merge_us: float
    rel_err: float
    dtype: str
    device: str
    torch: str
    driver: str
    isa: str
    commit: str
    timestamp: str
    command: str

    @property
    def accurate(self) -> bool:
        return self.rel_err <= TOLERANCE

    @property
    def exchange_us(self) -> float:
        """What attend takes longer than attention to the slowest rank's own tokens."""
        return self.attend_us - self.attention_us

    @property
    def model_us(self) -> float | None:
        """What the model expects of attend; None: it does not know the GPU, the head dim or what is kept."""
        gpu = model.KINDS.get(self.device)
        if gpu is None or (self.head_dim, self.keep) != (model.HEAD_DIM, model.KEEP):
            return None
        heads = {"query_heads": self.query_heads, "kv_heads": self.kv_heads}
        return model.step(self.tokens, self.gpus, batch=self.batch, gpu=gpu, **heads).total_us

    def alone(self, rows: Sequence[Row]) -> Row | None:
        """The same on one GPU."""
        sizes = ("tokens", "batch", "query_heads", "kv_heads", "head_dim", "keep", "window", "device", "commit")
        same = [r for r in rows if r.gpus == 1 and all(getattr(r, name) == getattr(self, name) for name in sizes)]
        return same[-1] if same else None


def table_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header and a line for each row."""

    def ratio(row: Row, field: str) -> str:
        alone = row.alone(rows)
        return f"{getattr(alone, field) / getattr(row, field):.2f}" if alone and row.gpus > 1 else ""

    columns: dict[str, Callable[[Row], str]] = {
        "B,Hq,Hkv,T,D": lambda r: f"{r.batch},{r.query_heads},{r.kv_heads},{r.tokens},{r.head_dim}",
        "kept": lambda r: str(r.keep),
        "GPUs": lambda r: str(r.gpus),
        "attend, us": lambda r: f"{r.attend_us:.1f}",
        "speed-up": lambda r: ratio(r, "attend_us"),
        "attention, us": lambda r: f"{r.attention_us:.1f}" if r.gpus > 1 else "",
        "exchange, us": lambda r: f"{r.exchange_us:.1f}" if r.gpus > 1 else "",
        "gather, us": lambda r: f"{r.gather_us:.1f}" if r.gpus > 1 else "",
        "merge, us": lambda r: f"{r.merge_us:.1f}" if r.gpus > 1 else "",
        "with append, us": lambda r: f"{r.step_us:.1f}",
        "its speed-up": lambda r: ratio(r, "step_us"),
        "model, us": lambda r: "" if r.model_us is None else f"{r.model_us:.1f}",
        "to the model": lambda r: "" if r.model_us is None else f"{r.attend_us / r.model_us:.2f}",
        "rel err": lambda r: f"{r.rel_err:.1e}" + ("" if r.accurate else " !"),
    }
    return filled([tuple(columns), *(tuple(cell(row) for cell in columns.values()) for row in rows)])


def markdown(rows: Sequence[Row]) -> str:
    settings = dict.fromkeys(
        f"{r.device}, {r.dtype}, torch {r.torch}, "
        + (f"driver {r.driver}, " if r.driver else "")
        + f"commit {r.commit}, {r.timestamp}: `{r.command}`"
        for r in rows
    )
    header, *cells = table_of(rows)
    lines = ["# Attention over several GPUs", "", *settings, "", *markdown_table(header, cells)]
    return "\n".join(lines) + "\n"


def terminal(rows: Sequence[Row]) -> str:
    return aligned(table_of(rows))


def write(rows: Sequence[Row], folder: Path, name: str = NAME) -> Path:
    """Writes NAME.json; returns its path."""
    return records.write_rows(folder / f"{name}.json", rows, OF_A_RUN)


def read(path: Path) -> list[Row]:
    """The rows of a JSON file; ValueError says what is wrong with it."""
    return records.read_rows(path, Row, "profiling.scaling")


def write_csv(rows: Sequence[Row], path: Path) -> None:
    records.write_csv(path, [asdict(row) for row in rows])
