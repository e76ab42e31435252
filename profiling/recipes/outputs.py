"""Relative error of attention's output, by how the cache is stored, on data that is hard to store.

    python -m profiling.recipes.outputs                       # a minute

Draws queries, keys and values, stores keys and values in every way of profiling.recipes.study, and attends to them in
float64. The error is ||output - dense output|| / ||dense output||, the mean over draws, with its standard error. Data:
gaussian; heavy-tailed (Student's t, 4 degrees of freedom); outlier-channels (4 channels 16 times as large);
channel-sizes (channels of lognormal size, sigma 1). Rows go to build/profiling/<device>/accuracy/outputs.json. Needs
the extra `eval`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from profiling import command_line, records

try:
    from cute_kernels.eval import models
    from cute_kernels.eval.settings import Setting
    from profiling.environment import environment
    from profiling.recipes import options, study
    from profiling.recipes.training import print_to_stderr
except ImportError as error:
    command_line.exit_unbuilt("profiling.recipes.outputs", error)

COMMAND = "python -m profiling.recipes.outputs"
NAME = "outputs"
KV_HEADS, GROUP, QUERIES = 2, 4, 4  # heads of keys; heads of queries of each; queries of each of those
OUTLIERS = 4  # channels


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        models.require("transformers", "the recipe")
        where = environment(args.device)
        folder = options.folder(args, where)
        settings = study.chosen_settings(args.head_dim, window=0)
        of_run = {"size": f"{args.tokens} tokens", "seed": 0, "head_dim": args.head_dim}
        of_run |= study.about(where, " ".join([COMMAND, *given]))
        rows = []
        for data in DATA:
            draws = [
                errors(settings, data, args.tokens, args.head_dim, seed, args.device) for seed in range(args.draws)
            ]
            found = torch.tensor(draws, dtype=torch.float64)
            for setting, value, deviation in zip(settings, found.mean(0).tolist(), found.std(0).tolist(), strict=True):
                about = {"setting": setting.name, "part": setting.part, "rule": setting.rule, "codec": setting.codec}
                about |= {"bits": round(study.bits_per_element(setting, args.head_dim), 3), "task": data}
                of_value = {"metric": "relative error", "value": value, "error": deviation / args.draws**0.5}
                rows.append(of_run | about | of_value | {"samples": args.draws})
            print_to_stderr(f"{data}: {args.draws} draws, {len(settings)} ways to store them")
        path = folder / f"{NAME}.json"
        records.write(path, rows, study.OF_A_RUN)
    except (ValueError, RuntimeError) as error:
        print(f"{COMMAND}: error: {error}", file=sys.stderr)
        return 2
    print(study.table(rows, digits=4), f"wrote {path}", sep="\n")
    return 0


def _gaussian(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _heavy_tailed(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    squares = _gaussian((*shape, 4), generator).square().mean(-1)
    return _gaussian(shape, generator) / squares.sqrt()


def _outlier_channels(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    sizes = torch.ones(shape[0], shape[1], 1, shape[3], dtype=torch.float64)
    large = torch.rand(sizes.shape, generator=generator).argsort(-1)[..., :OUTLIERS]
    return _gaussian(shape, generator) * sizes.scatter(3, large, 16.0)


def _channel_sizes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return _gaussian(shape, generator) * _gaussian((shape[0], shape[1], 1, shape[3]), generator).exp()


DATA = {
    "gaussian": _gaussian,
    "heavy-tailed": _heavy_tailed,
    "outlier-channels": _outlier_channels,
    "channel-sizes": _channel_sizes,
}


def errors(
    settings: Sequence[Setting], data: str, tokens: int, head_dim: int, seed: int, device: torch.device
) -> list[float]:
    """Of one draw, for each setting. Logits have a standard deviation of about 1 whatever the data."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, KV_HEADS, tokens, head_dim)
    k, v = (DATA[data](shape, generator).half().to(device) for _ in range(2))
    q = _gaussian((1, KV_HEADS, GROUP * QUERIES, head_dim), generator).to(device)
    q = q / k.double().square().sum(3).mean().sqrt()
    exact = attend(q, k.double(), v.double())
    found = [attend(q, *(x.double() for x in store(setting, k.clone(), v.clone()))) for setting in settings]
    return [float((stored - exact).norm() / exact.norm()) for stored in found]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(2, 3)).softmax(-1) @ v


def store(setting: Setting, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, Hkv, T, D) as the evaluation's cache holds them once all have left the window."""
    from cute_kernels.eval.pruned_cache import PrunedLayer

    layer = PrunedLayer(setting)
    layer.update(k, v)
    keys, values = layer.update(k[:, :, :1], v[:, :, :1])  # the next update prunes
    return keys[:, :, : k.shape[2]], values[:, :, : v.shape[2]]


def _parser() -> argparse.ArgumentParser:
    parser = options.parser(COMMAND, __doc__)
    add = parser.add_argument
    size = command_line.positive_integer
    add("--tokens", type=size, default=4096, metavar="N", help="of a cache (default: %(default)s)")
    add("--head-dim", type=size, default=128, metavar="N", help="(default: %(default)s)")
    add("--draws", type=size, default=3, metavar="N", help="of data (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
