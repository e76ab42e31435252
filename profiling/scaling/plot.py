"""The model's plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from profiling.scaling.model import Step


def draw(steps: Sequence[Step], path: Path) -> Path:
    """Microseconds a layer against the number of GPUs; a panel for each number of tokens."""
    from profiling.plots import style

    counts = list(dict.fromkeys(each.tokens for each in steps))
    with style.settings():
        figure, axes = style.panels(len(counts))
        for tokens, axis in zip(counts, axes, strict=True):
            mine = [each for each in steps if each.tokens == tokens]
            gpus = [each.gpus for each in mine]
            first = mine[0].total_us * mine[0].gpus
            series = (
                ("a layer", style.BLUE, [each.total_us for each in mine]),
                ("attention", style.GREEN, [each.attention_us for each in mine]),
                ("gather and merge", style.ORANGE, [each.gather_us + each.merge_us or None for each in mine]),
            )
            for label, color, values in series:
                axis.plot(gpus, [math.nan if v is None else v for v in values], "o-", color=color, label=label)
            axis.plot(gpus, [first / count for count in gpus], "--", color=style.GREY, label="evenly divided")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(gpus, [str(count) for count in gpus])
            axis.set_title(f"{tokens / (1 << 20):g} M tokens, a model")
            axis.set_xlabel("GPUs along cp")
        axes[0].set_ylabel("us a layer and step")
        style.shared_legend(figure, axes)
        return style.save(figure, path.parent, path.stem)
