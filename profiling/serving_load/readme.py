"""The documentation's table of a load: what users get on each side, and what a hit of a shared prefix takes."""

from __future__ import annotations

from collections.abc import Sequence

from profiling.readme import ReadmeError
from profiling.serving_load.rows import DENSE, Row, ratio
from profiling.tables import markdown_table

BEGIN = "<!-- load: begin (written by python -m profiling.report) -->"
END = "<!-- load: end -->"
HEADER = ("users", "attention", "tokens/s", "under way", "cache in use, GiB", "first token, ms: p50", "p99", "waiting")


def table_block(rows: Sequence[Row], link: str) -> str:
    """The sentence and the table of the newest sparse row of each load, and of dense ones beside them; link: to all.

    Raises:
        ReadmeError: there is no sparse row beside a dense one.
    """
    compared = [row for row in rows if row.users and ratio(row, rows, "tokens_per_s") is not None]
    if not compared:
        raise ReadmeError("no sparse row beside a dense one: python -m profiling.serving_load measures them")
    first = max(compared, key=lambda row: row.timestamp)
    alike = [row for row in rows if (row.load[2:], row.sparsity) == (first.load[2:], first.sparsity)]
    newest = {(row.side, row.users): row for row in sorted(alike, key=lambda row: row.timestamp)}
    run = list(newest.values())
    loads = sorted((row for row in run if row.users), key=lambda row: (row.users, row.side in DENSE, row.side))
    prefix = {row.side: row for row in run if not row.users}
    sentence = (
        f"On one {first.device.removeprefix('NVIDIA ')}, the shape of {first.model}, random weights, bfloat16, torch "
        f"{first.torch}, Transformers {first.transformers}: log-normal prompts\nand answers of {first.prompt} and "
        f"{first.answer} tokens (medians, at most {first.longest}), {first.memory / 2**30:g} GiB of cache on each "
        f"side, at most {first.under_way_at_most} requests under way; in\nbrackets: to the best dense side "
        f"([all columns, command]({link})):"
    )
    lines = [sentence, "", *markdown_table(HEADER, [_cells(row, run) for row in loads])]
    if "sparse" in prefix:
        lines += ["", _hits(prefix["sparse"], [row for side, row in prefix.items() if side in DENSE], run)]
    return "\n".join([*lines, ""])


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    def beside(text: str, field: str) -> str:
        found = ratio(row, rows, field)
        return text if found is None else f"{text} ({found:.2g}x)"

    return (
        str(row.users),
        row.side,
        beside(f"{row.tokens_per_s:.0f}", "tokens_per_s"),
        f"{row.under_way:.0f}",
        f"{(row.used or 0) / 2**30:.1f}",
        _milliseconds(row.first_token_p50_ms),
        _milliseconds(row.first_token_p99_ms),
        str(row.waiting),
    )


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _hits(own: Row, dense: Sequence[Row], rows: Sequence[Row]) -> str:
    beside = ", ".join(f"{row.side} {row.first_token_p50_ms:.0f} (without it {row.miss_ms:.0f})" for row in dense)
    return (
        f"A request whose first {own.prefix} tokens are in shared blocks has its first token after "
        f"{own.first_token_p50_ms:.0f} ms (without the\nprefix {own.miss_ms:.0f}); {beside}: "
        f"{ratio(own, rows, 'first_token_p50_ms'):.2f}x of the best."
    )
