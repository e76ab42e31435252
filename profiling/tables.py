"""Rows as tables: markdown, the terminal, one line for a run's progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from profiling import units
from profiling.rows import Row

LIMITS_HEADER = ("op", "backend", "B,Hq,Hkv,Sq,T,D", "keep", "dtype", "kernel", "us", "limiter")


def table_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The header and a line for each row, without columns that are empty in all of them."""
    unit = units.rate(rate for row in rows for rate in (row.tb_per_s, row.cache_tb_per_s))
    columns: dict[str, Callable[[Row], str]] = {
        "op": lambda row: row.op,
        "backend": lambda row: f"{row.backend} {row.isa}" if row.backend == "cpu" and row.isa else row.backend,
        "B,Hq,Hkv,Sq,T,D": lambda row: str(row.shape),
        "keep": lambda row: str(row.keep),
        "dtype": _dtype,
        "data": _data,
        "us": lambda row: f"{row.median_us:.1f}",
        "IQR": lambda row: f"{row.iqr_us:.1f}",
        unit.name: lambda row: unit.of(row.tb_per_s, ".3g"),
        f"cache {unit.name}": lambda row: "" if row.cache_tb_per_s is None else unit.of(row.cache_tb_per_s, ".3g"),
        "el/clk/SM": lambda row: _number(row.elements_per_clk_sm, ".1f"),
        "bits/el": lambda row: f"{row.bits_per_element:.2f}",
        "peer": lambda row: f"{row.peer} ({row.peer_form})" if row.peer else row.peer_form,
        "peer us": lambda row: _number(row.peer_us, ".1f"),
        "ratio": lambda row: "" if row.ratio is None else _ratio(row.ratio) + (" ~" if row.noisy else ""),
        "rel err": lambda row: f"{row.rel_err:.1e}" + ("" if row.accurate else " !"),
    }
    return filled([tuple(columns), *(tuple(cell(row) for cell in columns.values()) for row in rows)])


def filled(table: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """A table, header first, without the columns that are empty below it."""
    kept = [i for i in range(len(table[0])) if any(line[i] for line in table[1:]) or len(table) == 1]
    return [tuple(line[i] for i in kept) for line in table]


def _data(row: Row) -> str:
    words = (
        row.data,
        row.codec,
        row.method,
        "warm" if row.cache == "warm" else "",
        "" if row.timing == "events" else row.timing,
        f"{row.stages_ahead} ahead" if row.stages_ahead else "",
    )
    return " ".join(word for word in words if word)


def _limit_cells(row: Row) -> tuple[str, ...]:
    return (
        row.op,
        row.backend,
        str(row.shape),
        str(row.keep),
        _dtype(row),
        row.ncu_kernel or "",
        _number(row.ncu_us, ".1f"),
        row.ncu_verdict or "",
    )


def _dtype(row: Row) -> str:
    if not row.scores:
        return row.dtype
    return f"{row.dtype}, {'logits' if row.op == 'sparse_qk' else 'p'} {row.scores}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def markdown(rows: Sequence[Row]) -> str:
    """The table, under a line for each device and software that rows were measured with; then the limiters."""
    header, *cells = table_of(rows)
    unit = units.rate(rate for row in rows for rate in (row.tb_per_s, row.cache_tb_per_s)).name
    settings = dict.fromkeys(
        f"{r.device}, "
        + (f"{r.isa}, " if r.isa else "")
        + f"torch {r.torch}, "
        + (f"driver {r.driver}, " if r.driver else "")
        + (f"{r.threads} threads, " if r.threads else "")
        + f"commit {r.commit}, {r.timestamp}"
        for r in rows
    )
    lines = [
        "# Sweep",
        "",
        *(f"{setting}." for setting in settings),
        "",
        (
            "Medians of single calls, cold cache unless data says otherwise. ratio = peer us / us. "
            f"{unit}: the cache as stored and the dense operands; cache {unit}: the cache alone."
        ),
        "`~` marks a ratio of widely scattered times, `!` a result beyond its tolerance.",
        "",
    ]
    lines += markdown_table(header, cells)
    counted = _counted(rows)
    if counted:
        lines += ["", "## Limiters", "", "Nsight Compute, share of each unit's peak over the kernel's time.", ""]
        lines += markdown_table(LIMITS_HEADER, map(_limit_cells, counted))
    return "\n".join(lines) + "\n"


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines)]


def terminal(rows: Sequence[Row]) -> str:
    return aligned(table_of(rows))


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Lines of cells, columns below one another."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in table)


def limits(rows: Iterable[Row]) -> str:
    """A line for each case with counters: what limits it and what would make it faster."""
    return "\n".join(f"{row.case}: {row.ncu_verdict}" for row in _counted(rows))


def _counted(rows: Iterable[Row]) -> list[Row]:
    """One row of each case that has counters."""
    return list({str(row.case): row for row in rows if row.ncu_verdict}.values())


def one_line(row: Row) -> str:
    """For the progress of a run."""
    mark = "" if row.accurate else f"  INACCURATE: rel err {row.rel_err:.1e} > {row.tolerance:.0e}"
    beside = f", {row.ratio:.2f}x {row.peer} ({row.peer_form})" if row.ratio is not None else ""
    return f"{row.median_us:.1f} us{beside}, {row.bits_per_element:.2f} bits/element{mark}"
