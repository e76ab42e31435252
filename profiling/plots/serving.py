"""Where a compressed cache pays: attention's speed-up over dense, by batch and cached tokens, as a heat map."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from profiling.ceilings import Ceilings
from profiling.plots import choose, style
from profiling.rows import Row
from profiling.suites import SERVING_OPS

NEEDS = "rows of attend, with a dense peer, at two batches and two numbers of tokens at least (--suite serving)"
TITLES = {"sparse_attention": "sparse_attention", "attend": "KVCache.attend"}
_FASTEST, _DARK = 2.5, 1.9  # times as fast or slow: the ends of the colours, and where they are dark


def figure(rows: Sequence[Row], limits: Ceilings) -> Figure | None:
    usual = [row for row in choose.plain(rows, SERVING_OPS) if math.isfinite(choose.peer_us(row))]
    heads = {(row.Hq, row.Hkv, row.D, row.keep) for row in usual if row.op == "attend"}
    heads = {each for each in heads if _is_grid([row for row in usual if _heads(row) == each and row.op == "attend"])}
    if not heads:
        return None
    backend = choose.backends(usual)[-1]
    usual = [row for row in usual if row.backend == backend]
    ordered = sorted(heads, key=lambda each: (each[2] != 128, each[2], -each[0], -each[1]))
    drawn, axes = style.grid(len(ordered), len(SERVING_OPS))
    image = None
    for line, each in zip(axes, ordered, strict=True):
        for axis, op in zip(line, SERVING_OPS, strict=True):
            own = [row for row in usual if _heads(row) == each and row.op == op]
            image = _panel(axis, own, f"{TITLES[op]}, Hq {each[0]}, Hkv {each[1]}, D {each[2]}") or image
    assert image is not None
    drawn.colorbar(image, ax=[axis for line in axes for axis in line], label="time of the fastest dense call over ours")
    kept = ", ".join(sorted({f"{each[3]} of {each[2]}" for each in ordered}))
    drawn.suptitle(f"{choose.device(usual)}, {backend}, {kept} kept, fp16, one query token, cold cache", fontsize=10)
    return drawn


def _heads(row: Row) -> tuple[int, int, int, int]:
    return row.Hq, row.Hkv, row.D, row.keep


def _is_grid(rows: Sequence[Row]) -> bool:
    return len({row.B for row in rows}) >= 2 and len({row.T for row in rows}) >= 2


def _panel(axis: Axes, rows: Sequence[Row], title: str) -> object | None:
    """A cell for each batch and number of tokens with the ratio in it; cells without a row stay empty."""
    axis.set_title(title, fontsize=9)
    axis.grid(False)
    fastest: dict[tuple[int, int], float] = {}
    for row in rows:
        ratio = choose.peer_us(row) / row.median_us
        fastest[row.B, row.T] = min(ratio, fastest.get((row.B, row.T), math.inf))
    if not fastest:
        axis.set_axis_off()
        return None
    batches, tokens = sorted({b for b, _ in fastest}), sorted({t for _, t in fastest})
    cells = [[fastest.get((b, t), math.nan) for t in tokens] for b in batches]
    image = axis.imshow(cells, cmap="RdBu", norm=TwoSlopeNorm(1.0, 1 / _FASTEST, _FASTEST), aspect="auto")
    for y, line in enumerate(cells):
        for x, ratio in enumerate(line):
            if not math.isnan(ratio):
                color = "white" if abs(math.log(ratio)) > math.log(_DARK) else "black"
                axis.text(x, y, f"{ratio:.2f}", ha="center", va="center", fontsize=6, color=color)
    axis.set_xticks(range(len(tokens)), [choose.size(t) for t in tokens], rotation=45, fontsize=7)
    axis.set_yticks(range(len(batches)), [str(b) for b in batches], fontsize=7)
    axis.set(xlabel="cached tokens", ylabel="batch")
    return image
