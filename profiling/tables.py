"""Rows as tables: markdown, the terminal, one line for a run's progress."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from profiling.rows import Row

HEADER = (
    "op",
    "backend",
    "B,Hq,Hkv,Sq,T,D",
    "keep",
    "dtype",
    "data",
    "us",
    "IQR",
    "TB/s",
    "cache TB/s",
    "el/clk/SM",
    "bits/el",
    "peer",
    "peer us",
    "ratio",
    "rel err",
)
LIMITS_HEADER = ("op", "backend", "B,Hq,Hkv,Sq,T,D", "keep", "dtype", "kernel", "us", "limiter")


def _cells(row: Row) -> tuple[str, ...]:
    data = " ".join(
        word
        for word in (
            row.data,
            "warm" if row.cache == "warm" else "",
            "" if row.timing == "events" else row.timing,
            f"{row.stages_ahead} ahead" if row.stages_ahead else "",
        )
        if word
    )
    error = f"{row.rel_err:.1e}" + ("" if row.accurate else " !")
    return (
        row.op,
        row.backend,
        str(row.shape),
        str(row.keep),
        _dtype(row),
        data,
        f"{row.median_us:.1f}",
        f"{row.iqr_us:.1f}",
        f"{row.tb_per_s:.3g}",
        _number(row.cache_tb_per_s, ".3g"),
        _number(row.elements_per_clk_sm, ".1f"),
        f"{row.bits_per_element:.2f}",
        f"{row.peer} ({row.peer_form})" if row.peer else row.peer_form,
        _number(row.peer_us, ".1f"),
        "" if row.ratio is None else f"{row.ratio:.2f}" + (" ~" if row.noisy else ""),
        error,
    )


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


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def markdown(rows: Sequence[Row]) -> str:
    """The table, under a line for each device and software that rows were measured with; then the limiters."""
    settings = dict.fromkeys(
        f"{r.device}, torch {r.torch}, "
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
            "Medians of single calls, cold cache unless data says otherwise. ratio = peer us / us. TB/s: the cache as "
            "stored and the dense operands; cache TB/s: the cache alone."
        ),
        "`~` marks a ratio of widely scattered times, `!` a result beyond its tolerance.",
        "",
    ]
    lines += markdown_table(HEADER, map(_cells, rows))
    counted = _counted(rows)
    if counted:
        lines += ["", "## Limiters", "", "Nsight Compute, share of each unit's peak over the kernel's time.", ""]
        lines += markdown_table(LIMITS_HEADER, map(_limit_cells, counted))
    return "\n".join(lines) + "\n"


def markdown_table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines)]


def terminal(rows: Iterable[Row]) -> str:
    return aligned([HEADER, *(_cells(row) for row in rows)])


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
    beside = f", {row.ratio:.2f}x {row.peer}" if row.ratio is not None else ""
    return f"{row.median_us:.1f} us{beside}, {row.bits_per_element:.2f} bits/element{mark}"
