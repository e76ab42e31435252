"""What the studies of accuracy against bits have in common: the ways to store a cache, their bits, and rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cute_kernels as ck
from cute_kernels.eval import results
from cute_kernels.eval.baselines import BASELINES
from cute_kernels.eval.settings import Setting, grid, kept_elements
from profiling import records
from profiling.environment import Environment
from profiling.recipes import means
from profiling.recipes.means import of_full_length

STORED = ("", "int4", "fp8", "int8")  # codecs of the package; "": 16 bits
SPARSITIES = {  # by rule, for keys, values and both
    "magnitude": (0.5, 0.7, 0.8),
    "2of4": (0.5,),
    "magnitude-2of4": (0.7, 0.8),
}
OF_BOTH_ONLY = {"channel-magnitude": (0.5, 0.7, 0.8)}
BITS_TOKENS = 4096  # of the cache that bits are counted of
# What all rows of a run have in common.
OF_A_RUN = (
    *("size", "seed", "parameters", "head_dim", "context", "dtype", "training_steps", "training_seconds"),
    *("device", "driver", "torch", "commit", "timestamp", "command"),
)
Row = dict[str, Any]


def chosen_settings(head_dim: int, **options: Any) -> list[Setting]:
    """The dense cache, the dense ones of few bits whose groups divide head_dim, then every rule with every codec.
    options: as `grid` takes them."""
    baselines = [name for name, baseline in BASELINES.items() if not baseline.group or head_dim % baseline.group == 0]
    chosen = grid(("magnitude",), ("both",), (0.0,), codecs=(*STORED, *baselines), **options)
    for rule, sparsities in (SPARSITIES | OF_BOTH_ONLY).items():
        chosen += grid((rule,), ("both",), sparsities, codecs=STORED, **options)[1:]
    for codec in STORED:  # of a run that is cut short these are missing
        for rule, sparsities in SPARSITIES.items():
            chosen += grid((rule,), ("keys", "values"), sparsities, codecs=(codec,), **options)[1:]
    return chosen


def bits_per_element(setting: Setting, head_dim: int) -> float:
    """That keys and values take on average, all counted. What is pruned: of Gaussian data, as compression stores it.
    What is not: a dense cache, in the codec with its scale a token and one a channel, or a baseline."""
    if setting.codec in BASELINES:
        return BASELINES[setting.codec].bits
    dense = _value_bits(setting.codec) + (16 / head_dim + 16 / BITS_TOKENS if setting.codec else 0)
    return sum(
        _stored_bits(role, rule, sparsity, setting.codec, head_dim) if sparsity else dense
        for role in ("key", "value")
        for rule, sparsity in (setting.rule_of(role),)
    ) / 2  # fmt: skip


def _value_bits(codec: str) -> int:
    """Of one value."""
    return {"": 16, "fp8": 8, "int8": 8, "int4": 4}[codec]


@functools.cache
def _stored_bits(role: str, rule: str, sparsity: float, codec: str, head_dim: int) -> float:
    x = torch.randn(1, 1, BITS_TOKENS, head_dim, generator=torch.Generator().manual_seed(0)).half()
    keep = None if rule == "2of4" else kept_elements(head_dim, sparsity)  # two of four are half
    return ck.compress(x, role=role, keep=keep, method=rule, codec=codec or None).bits_per_element


def about(where: Environment, command: str, model: Any = None) -> Row:
    """What a row says of where it was measured, and of the model, if there is one."""
    of_model: Row = {}
    if model is not None:
        of_model["parameters"] = sum(p.numel() for p in model.parameters())
        of_model["dtype"] = str(model.dtype).removeprefix("torch.")
    return of_model | {
        "device": where.name,
        "driver": where.driver,
        "torch": where.torch,
        "commit": where.commit,
        "timestamp": where.timestamp,
        "command": command,
    }


def gather(folder: Path, pattern: str, path: Path) -> list[Row]:
    """All rows of stores `pattern` in a folder, written to path as one file."""
    rows = [row for found in sorted(folder.glob(pattern)) for row in results.read_lines(found / "rows.jsonl")]
    records.write(path, rows, OF_A_RUN)
    return rows


def table(rows: Sequence[Row], digits: int = 2) -> str:
    """Markdown: a line a setting with its bits, a column a size and task: the mean over seeds that learnt the full
    length, its standard error."""
    rows = of_full_length(rows)
    columns = list(dict.fromkeys((row["size"], row["task"]) for row in rows))
    bits = {row["setting"]: row["bits"] for row in rows}
    lines = [
        "| cache | bits | " + " | ".join(f"{size}: {task}" for size, task in columns) + " |",
        "| --- " * (len(columns) + 2) + "|",
    ]
    for setting, of_setting in sorted(bits.items(), key=lambda item: item[1]):
        cells = []
        for column in columns:
            found = [row for row in rows if row["setting"] == setting and (row["size"], row["task"]) == column]
            value, error = mean(found)
            cells.append(f"{value:.{digits}f} ± {error:.{digits}f}" if found else "")
        lines.append(f"| {setting} | {of_setting:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def mean(rows: Sequence[Row]) -> tuple[float, float]:
    """(mean, its standard error) of the values of rows that differ in their seed alone; of one row its own error."""
    if not rows:
        return float("nan"), float("nan")
    value, error = means.mean([row["value"] for row in rows])
    return value, error if len(rows) > 1 else float(rows[0].get("error") or 0.0)
