"""The documentation's table of generation: time, speed and memory of each cache at each batch."""

from __future__ import annotations

from collections.abc import Sequence

from profiling import units
from profiling.generation.rows import Row, cache_name, kv_of_dense, ratio
from profiling.readme import ReadmeError
from profiling.tables import markdown_table

BEGIN = "<!-- generation: begin (written by python -m profiling.report) -->"
END = "<!-- generation: end -->"
HEADER = ("batch", "cache", "first token, ms", "step, ms", "tokens/s", "KV, {unit}", "of dense", "peak, GiB")


def table_block(rows: Sequence[Row], link: str) -> str:
    """The sentence and the table of one GPU's rows, of the model and lengths of the newest sparse row; link: to all.

    Raises:
        ReadmeError: there is no sparse row beside dense ones.
    """
    compared = [row for row in rows if ratio(row, rows, "tokens_per_s")]
    if not compared:
        raise ReadmeError("no sparse row beside a dense one: python -m profiling.generate measures them")
    quoted = max(compared, key=lambda row: row.timestamp)
    settings = ("model", "prompt", "new_tokens", "dtype", "device")
    alike = [row for row in rows if all(getattr(row, name) == getattr(quoted, name) for name in settings)]
    sparse = ("key_keep", "value_keep", "window")
    alike = [
        row
        for row in alike
        if not row.side.startswith("sparse") or all(getattr(row, name) == getattr(quoted, name) for name in sparse)
    ]
    alike.sort(key=lambda row: (row.side.endswith("-graph"), row.largest, row.batch * (not row.largest)))
    sentence = (
        f"On one {quoted.device.removeprefix('NVIDIA ')}, {quoted.model}, {quoted.dtype}, prompts of {quoted.prompt} "
        f"tokens and {quoted.new_tokens} new ones,\ngreedily, with {quoted.key_keep} of {quoted.head_dim} channels of "
        f"keys and {quoted.value_keep} of values kept, window {quoted.window}, torch {quoted.torch}, Transformers\n"
        f"{quoted.transformers}; in brackets: relative to the best dense cache at this batch, the largest batch to "
        f"dense's\nlargest ([all columns, commands]({link})):"
    )
    unit = units.size(row.kv_bytes for row in alike)
    header = [name.format(unit=unit.name) for name in HEADER]
    return "\n".join([sentence, "", *markdown_table(header, [_cells(row, alike, unit) for row in alike]), ""])


def _cells(row: Row, rows: Sequence[Row], unit: units.Unit) -> tuple[str, ...]:
    def beside(text: str, field: str) -> str:
        found = ratio(row, rows, field)
        return f"{text} ({found}x)" if found else text

    return (
        f"{row.batch}" + " (largest)" * row.largest,
        cache_name(row),
        beside(f"{row.ttft_ms:.0f}", "ttft_ms"),
        f"{row.step_ms:.1f}",
        beside(f"{row.tokens_per_s:.0f}", "tokens_per_s"),
        unit.of(row.kv_bytes, ".2f"),
        kv_of_dense(row),
        "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.1f}",
    )
