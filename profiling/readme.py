"""The table of figures in the README: one line a shape, ratio and time of each operation at 30 % and 50 % kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from profiling.cases import DECODE_OPS, Shape, usual_keeps
from profiling.operations import WINDOW
from profiling.plots.choose import peer_us, plain
from profiling.rows import Row
from profiling.suites import figures
from profiling.tables import markdown_table

BEGIN = "<!-- figures: begin (written by python -m profiling.report) -->"
END = "<!-- figures: end -->"


class ReadmeError(RuntimeError):
    """The table cannot be written; the message says why."""


def updated(text: str, block: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with `block` between its markers.

    Raises:
        ReadmeError: a marker is missing, there twice or in the wrong order.
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ReadmeError(f"expected one line '{begin}' and after it one '{end}'")
    return text[: text.index(begin) + len(begin)] + "\n" + block + text[text.index(end) :]


def figures_block(rows: Sequence[Row], link: str) -> str:
    """The sentence and the table of one GPU's rows; link: to all rows, from the file that shows them.

    Raises:
        ReadmeError: rows of the suite readme are missing.
    """
    wanted = [row for row in plain(rows) if row.ratio is not None and row.accurate]
    backend = best_backend(wanted)
    cells = _cells(wanted, backend)
    first = next(iter(cells.values()))
    name, head_dim = first.device.removeprefix("NVIDIA "), first.D
    low, half = usual_keeps(head_dim)
    header = ["B, Hq, Hkv, T"]
    for op in DECODE_OPS:
        kept = f"{low} of {head_dim} kept" if op == DECODE_OPS[0] else f"{low} kept"
        header += [f"`{op}`, {kept}", f"{half} kept"]
    lines = [
        [f"{s.batch}, {s.query_heads}, {s.kv_heads}, {s.tokens}"]
        + [_cell(cells[op, s, keep]) for op in DECODE_OPS for keep in (low, half)]
        for s in figures("cuda")
    ]
    sentence = (
        f"On one {name}, `{backend}` backend, D {head_dim}, fp16 in and out, one query token, Gaussian data, "
        "cold L2: speed-up over the dense\ncache in the same run, with cuBLAS for the products and the fastest "
        f"of {_dense_attention(wanted)} for\nattention (with a dense window of {WINDOW} tokens), and the time "
        f"([all rows]({link})).\nB sequences of T cached tokens, Hq query and Hkv KV heads:"
    )
    return "\n".join([sentence, "", *markdown_table(header, lines), ""])


def best_backend(rows: Sequence[Row]) -> str:
    """The backend with all cells whose ratios' geometric mean is the highest. ReadmeError if none has them all."""
    complete = {}
    for backend in dict.fromkeys(row.backend for row in rows):
        try:
            complete[backend] = math.fsum(math.log(row.ratio) for row in _cells(rows, backend).values())
        except ReadmeError as error:
            reason = error
    if not complete:
        raise ReadmeError(str(reason) if rows else "no rows of products in fp16 beside a dense peer")
    return max(complete, key=lambda backend: complete[backend])


def _cells(rows: Sequence[Row], backend: str) -> dict[tuple[str, Shape, int], Row]:
    """(operation, shape, keep) -> row."""
    found: dict[tuple[str, Shape, int], Row] = {}
    for row in rows:
        if row.backend == backend and peer_us(row) < math.inf:
            key = row.op, row.shape, row.keep
            found[key] = min(found.get(key, row), row, key=peer_us)  # beside the fastest peer
    wanted = [
        (op, shape, keep) for shape in figures("cuda") for op in DECODE_OPS for keep in usual_keeps(shape.head_dim)
    ]
    if missing := [key for key in wanted if key not in found]:
        op, shape, keep = missing[0]
        raise ReadmeError(
            f"{len(missing)} of {len(wanted)} rows are missing for {backend}, such as {op} {shape} keep "
            f"{keep}: python -m profiling.sweep --suite readme measures them"
        )
    return {key: found[key] for key in wanted}


def _cell(row: Row) -> str:
    return f"{row.ratio:.2f}x ({row.median_us:.1f} us)"


def _dense_attention(rows: Sequence[Row]) -> str:
    """The peers of attention in the cache's dtype."""
    names = sorted({row.peer for row in rows if row.op == "sparse_attention" and peer_us(row) < math.inf})
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else "".join(names)
