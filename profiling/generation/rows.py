"""Rows of `python -m profiling.generate` and their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

from profiling import records, units
from profiling.tables import aligned, filled, markdown_table

NAME = "generate"
# What all rows of a run have in common.
OF_A_RUN = (
    "model",
    "parameters",
    "head_dim",
    "prompt",
    "new_tokens",
    "dtype",
    "device",
    "torch",
    "transformers",
    "driver",
    "isa",
    "commit",
    "timestamp",
)


# What rows beside each other have in common.
OF_A_CASE = (
    *("model", "prompt", "new_tokens", "dtype", "device", "isa", "mesh"),
    *("turn", "chunk", "lookup", "largest"),
)


@dataclass(frozen=True)
class Row:
    """One batch, generated once or a few times: times and speeds are medians."""

    model: str
    parameters: int
    side: str  # of measure.SIDES
    cache: str  # class of the cache
    key_keep: int | None  # channels kept of head_dim; None: dense
    value_keep: int | None
    window: int | None  # newest tokens that stay dense
    head_dim: int
    batch: int
    largest: bool  # whether the batch is the largest that fits beside the weights
    prompt: int  # tokens a sequence
    new_tokens: int
    dtype: str
    ttft_ms: float  # until the first tokens are on the host
    step_ms: float  # median of the later steps
    tokens_per_s: float  # of all sequences together, after the first token
    total_tokens_per_s: float  # the prompts' time counted too
    peak_bytes: int | None  # allocated on the device, weights included; None on a CPU
    kv_bytes: int  # of the cache at the end, all that it holds
    dense_kv_bytes: int  # as many tokens in 16 bits, without spare capacity
    device: str
    torch: str
    transformers: str
    driver: str
    commit: str
    timestamp: str
    command: str  # measures this row again
    # Older rows have these defaults.
    sdpa: str = "default"  # of measure.SDPA
    repeats: int = 1
    lowest_tokens_per_s: float | None = None  # of the repeats; None: not noted, tokens_per_s is of one run
    highest_tokens_per_s: float | None = None
    isa: str = ""  # CPU only: the instruction set of the kernels, such as "avx512bf16"
    mesh: str = ""  # such as "tp=2,cp=2": processes, of which the first one's bytes are noted
    turn: int = 0  # tokens of a second prompt, from which on times count: the first is in the cache
    chunk: int = 0  # tokens of a prompt that a pass takes; 0: all
    lookup: int = 0  # tokens that prompt lookup proposes for a step
    codec: str = ""  # of a sparse cache, if not that of dtype

    @property
    def key(self) -> tuple[object, ...]:
        """What was measured; a largest batch is the same case, however many it is."""
        return (
            self.model,
            self.side,
            self.sdpa,
            self.key_keep,
            self.value_keep,
            self.window,
            self.prompt,
            self.new_tokens,
            self.dtype,
            self.device,
            self.isa,
            self.mesh,
            self.turn,
            self.chunk,
            self.lookup,
            self.codec,
            self.largest,
            None if self.largest else self.batch,
        )


FIELDS = tuple(field.name for field in fields(Row))


def dense_beside(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The dense rows at the same batch, or, for the largest, at dense's own largest; of graphs those of graphs."""
    wanted = ("static-graph", "flashinfer-graph") if row.side.endswith("-graph") else ("dense",)
    return [
        other
        for other in rows
        if other.side in wanted
        and (row.largest or other.batch == row.batch)
        and all(getattr(other, name) == getattr(row, name) for name in OF_A_CASE)
    ]


def ratio(row: Row, rows: Sequence[Row], field: str) -> str:
    """A sparse row's to the best of the dense rows beside it; "" if there are none."""
    best = min if field.endswith("_ms") else max
    found = [getattr(other, field) for other in dense_beside(row, rows)] if row.side.startswith("sparse") else []
    return f"{getattr(row, field) / best(found):.2f}" if found else ""


def cache_name(row: Row) -> str:
    """For tables."""
    graph = "" if not row.side.endswith("-graph") else ", graphs=True" if row.side == "sparse-graph" else ", graph"
    return row.cache + graph + ", sdpa without cuDNN" * (row.sdpa == "no-cudnn")


def spread(row: Row) -> str:
    """tokens/s of the slowest and the fastest repeat; "" of a single run."""
    if row.repeats == 1 or row.lowest_tokens_per_s is None or row.highest_tokens_per_s is None:
        return ""
    return f"{row.lowest_tokens_per_s:.1f} to {row.highest_tokens_per_s:.1f} of {row.repeats}"


def kv_of_dense(row: Row) -> str:
    return f"{row.kv_bytes / row.dense_kv_bytes:.3f}"


def read(path: Path) -> list[Row]:
    """The rows of a JSON file, of this format or an older one; ValueError says what is wrong with it."""
    objects = records.read(path)
    needed = [field.name for field in fields(Row) if field.default is MISSING]
    for i, values in enumerate(objects):
        if missing := [name for name in needed if name not in values]:
            raise ValueError(f"{path}: row {i}: lacks {', '.join(missing)}")
    return [Row(**{name: value for name, value in values.items() if name in FIELDS}) for values in objects]


def table_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header and a line for each row, without columns that are empty in all of them."""
    unit = units.size(row.kv_bytes for row in rows)
    columns: dict[str, Callable[[Row], str]] = {
        "model": lambda row: row.model,
        "prompt + new": lambda row: " + ".join(map(str, filter(None, (row.prompt, row.turn, row.new_tokens)))),
        "chunk": lambda row: str(row.chunk or ""),
        "lookup": lambda row: str(row.lookup or ""),
        "batch": lambda row: f"{row.batch}" + (" (largest)" if row.largest else ""),
        "cache": cache_name,
        "mesh": lambda row: row.mesh,
        "codec": lambda row: row.codec,
        "kept K, V": lambda row: "" if row.key_keep is None else f"{row.key_keep}, {row.value_keep} of {row.head_dim}",
        "first token, ms": lambda row: f"{row.ttft_ms:.1f}",
        "first token to dense": lambda row: ratio(row, rows, "ttft_ms"),
        "step, ms": lambda row: f"{row.step_ms:.2f}",
        "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
        "lowest to highest": spread,
        "tokens/s to dense": lambda row: ratio(row, rows, "tokens_per_s"),
        "with prompts": lambda row: f"{row.total_tokens_per_s:.1f}",
        "with prompts to dense": lambda row: ratio(row, rows, "total_tokens_per_s"),
        f"KV, {unit.name}": lambda row: unit.of(row.kv_bytes, ".4g"),
        "KV of dense": kv_of_dense,
        "peak, GiB": lambda row: "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}",
    }
    return filled([tuple(columns), *(tuple(cell(row) for cell in columns.values()) for row in rows)])


def markdown(rows: Sequence[Row]) -> str:
    settings = dict.fromkeys(
        f"{r.device}, "
        + (f"{r.isa}, " if r.isa else "")
        + f"{r.dtype}, torch {r.torch}, Transformers {r.transformers}, "
        + (f"driver {r.driver}, " if r.driver else "")
        + f"commit {r.commit}, {r.timestamp}"
        for r in rows
    )
    lines = [
        "# Generation",
        "",
        *(f"{setting}." for setting in settings),
        "",
        (
            "Greedy generation by `model.generate` with sdpa attention, random prompts without padding; every run "
            "after a short one. One run a row, or the medians of as many as the spread of its tokens/s names, in "
            "which the caches at a fixed batch took turns. tokens/s: all sequences, after the first token. Largest: "
            "the largest batch that was found to fit."
        ),
        (
            "To dense: against the dense cache at the same batch, the largest against dense's own largest, of several "
            "dense rows the best one. Graph: the steps are replays of one CUDA graph, captured after the second "
            "token, in a loop without `generate`; of dense caches with a StaticCache, or with pages that FlashInfer's "
            "kernel reads, whose plan is made on the host before each step. graphs=True: `generate` with "
            "SparseKVCache(graphs=True). Sdpa without cuDNN: torch may prefer cuDNN, which makes a plan for "
            "every new length of the keys. Three numbers of prompt + new: the first prompt is in the cache, and times "
            "count from the second on. Chunk: tokens of a prompt that a pass takes. Lookup: tokens that prompt lookup "
            "proposes for a step, of prompts that repeat themselves; a step may give several."
        ),
        "",
    ]
    header, *cells = table_of(rows)
    lines += markdown_table(header, cells)
    lines += ["", "Commands:", "", "```", *dict.fromkeys(row.command for row in rows), "```"]
    return "\n".join(lines) + "\n"


def terminal(rows: Sequence[Row]) -> str:
    return aligned(table_of(rows))


def one_line(row: Row) -> str:
    """For the progress of a run."""
    unit = units.size([row.kv_bytes])
    return (
        f"{cache_name(row)}, batch {row.batch}: first token {row.ttft_ms:.0f} ms, {row.tokens_per_s:.1f} tokens/s, "
        f"KV {unit.of(row.kv_bytes, '.4g')} {unit.name}"
    )


def write(rows: Sequence[Row], folder: Path, name: str = NAME) -> Path:
    """Writes NAME.json; returns its path."""
    return records.write_rows(folder / f"{name}.json", rows, OF_A_RUN)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    records.write_csv(path, [asdict(row) for row in rows])
