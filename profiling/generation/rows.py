"""Rows of `python -m profiling.generate` and their files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from profiling.tables import markdown_table

NAME = "generate"


@dataclass(frozen=True)
class Row:
    """One batch, generated once."""

    model: str
    parameters: int
    side: str                       # of measure.SIDES
    cache: str                      # class of the cache
    key_keep: int | None            # channels kept of head_dim; None: dense
    value_keep: int | None
    window: int | None              # newest tokens that stay dense
    head_dim: int
    batch: int
    largest: bool                   # whether the batch is the largest that fits beside the weights
    prompt: int                     # tokens a sequence
    new_tokens: int
    dtype: str
    ttft_ms: float                  # until the first tokens are on the host
    step_ms: float                  # median of the later steps
    tokens_per_s: float             # of all sequences together, after the first token
    total_tokens_per_s: float       # the prompts' time counted too
    peak_bytes: int | None          # allocated on the device, weights included; None on a CPU
    kv_bytes: int                   # of the cache at the end, all that it holds
    dense_kv_bytes: int             # as many tokens in 16 bits, with no room to spare
    device: str
    torch: str
    transformers: str
    driver: str
    commit: str
    timestamp: str
    command: str                    # measures this row again


FIELDS = tuple(field.name for field in fields(Row))
HEADER = ("model", "prompt + new", "batch", "cache", "kept K, V", "first token, ms", "to dense", "step, ms", "tokens/s",
          "to dense", "with prompts", "to dense", "KV, GiB", "of dense", "peak, GiB")


def dense_beside(row: Row, rows: Sequence[Row]) -> Row | None:
    """The dense row at the same batch, or, for the largest batch, at dense's own largest; of graphs the static cache's.
    """
    wanted = "static-graph" if row.side.endswith("-graph") else "dense"
    for other in rows:
        same = (other.model, other.prompt, other.new_tokens, other.dtype, other.device, other.largest) == \
               (row.model, row.prompt, row.new_tokens, row.dtype, row.device, row.largest)
        if other.side == wanted and same and (row.largest or other.batch == row.batch):
            return other
    return None


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    dense = dense_beside(row, rows)

    def ratio(field: str) -> str:
        return "" if dense is None or dense is row else f"{getattr(row, field) / getattr(dense, field):.2f}"

    kept = "" if row.key_keep is None else f"{row.key_keep}, {row.value_keep} of {row.head_dim}"
    cache = row.cache + (", graph" if row.side.endswith("-graph") else "")
    return (row.model, f"{row.prompt} + {row.new_tokens}", f"{row.batch}" + (" (largest)" if row.largest else ""),
            cache, kept, f"{row.ttft_ms:.1f}", ratio("ttft_ms"), f"{row.step_ms:.2f}", f"{row.tokens_per_s:.1f}",
            ratio("tokens_per_s"), f"{row.total_tokens_per_s:.1f}", ratio("total_tokens_per_s"),
            f"{row.kv_bytes / 2**30:.4g}", f"{row.kv_bytes / row.dense_kv_bytes:.3f}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}")


def markdown(rows: Sequence[Row]) -> str:
    settings = dict.fromkeys(
        f"{r.device}, {r.dtype}, torch {r.torch}, Transformers {r.transformers}, "
        + (f"driver {r.driver}, " if r.driver else "") + f"commit {r.commit}, {r.timestamp}" for r in rows)
    lines = ["# Generation", "", *(f"{setting}." for setting in settings), "",
             "Greedy generation by `model.generate` with sdpa attention, random prompts without padding; one run a row "
             "after a short one. tokens/s: all sequences, after the first token. Largest: the largest batch that was "
             "found to fit.",
             "To dense: against the dense cache at the same batch, the largest against dense's own largest. Graph: the "
             "steps are replays of one CUDA graph, captured after the second token, beside a StaticCache likewise.", ""]
    lines += markdown_table(HEADER, [_cells(row, rows) for row in rows])
    lines += ["", "Commands:", "", "```", *dict.fromkeys(row.command for row in rows), "```"]
    return "\n".join(lines) + "\n"


def terminal(rows: Sequence[Row]) -> str:
    table = [HEADER, *(_cells(row, rows) for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in table)


def one_line(row: Row) -> str:
    """For the progress of a run."""
    return (f"{row.cache}, batch {row.batch}: first token {row.ttft_ms:.0f} ms, {row.tokens_per_s:.1f} tokens/s, "
            f"KV {row.kv_bytes / 2**30:.4g} GiB")


def write(rows: Sequence[Row], folder: Path, name: str = NAME) -> list[Path]:
    """Writes NAME.csv, NAME.json and NAME.md; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{suffix}" for suffix in ("csv", "json", "md")]
    with paths[0].open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    paths[1].write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    paths[2].write_text(markdown(rows), encoding="utf-8")
    return paths
