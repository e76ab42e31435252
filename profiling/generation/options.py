"""Options of `python -m profiling.generate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from profiling import command_line
from profiling.cases import CODECS
from profiling.command_line import positive_integer
from profiling.generation import measure, mesh, models, rows

PROMPT, NEW_TOKENS, BATCHES, SPARSITY, WINDOW, REPEATS = 4096, 512, "1,8,max", 0.7, 32, 3
OWN_CODEC = "dtype"
QUICK = {"prompt": 200, "new": 24, "batch": "1,2"}

DESCRIPTION = """\
Generate with Transformers, greedily, from random prompts, and measure the time to the first token, tokens a second,
memory, and the largest batch that fits: with a dense cache (sdpa attention, DynamicCache) and with a SparseKVCache on
the same model. Random weights have the true size, so that speed and memory are real without a download; what they
write is not."""

EPILOG = """\
random configs: {configs}

--batch max is the largest batch that fits, found from the peak memory of two smaller ones (of --batch, else 1 and 2)
and tried; where it does not fit, batches of 5 % less each. Every cache has its own. It needs a GPU.

Rows go to build/profiling/DEVICE/NAME.json, which git ignores, after every row; --out DIR names another folder. With
--commit-results they go to profiling/results/DEVICE/. python -m profiling.report FOLDER makes tables and CSV of
them."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    epilog = EPILOG.format(configs=", ".join(models.RANDOM_CONFIGS))
    parser = argparse.ArgumentParser(
        prog="python -m profiling.generate",
        description=DESCRIPTION,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", type=Path, metavar="DIR", help="folder of a model, as save_pretrained writes it")
    source.add_argument(
        "--random-config",
        choices=models.RANDOM_CONFIGS,
        metavar="NAME",
        help="shape of a model with random weights (default: llama3-8b; without a GPU or with --quick tiny)",
    )
    add("--prompt", type=positive_integer, metavar="N", help=f"tokens of each prompt (default: {PROMPT})")
    add(
        "--prompt-chunk",
        type=positive_integer,
        metavar="N",
        help="tokens of a prompt that a pass takes (default: all)",
    )
    add(
        "--turn",
        type=positive_integer,
        metavar="N",
        help="tokens of a second prompt, which follows the first in the same cache: times count from it on",
    )
    add(
        "--lookup",
        type=positive_integer,
        metavar="N",
        help="prompt lookup proposes so many tokens for a step, of prompts that repeat themselves; batch 1",
    )
    add("--new", type=_at_least_3, metavar="N", help=f"new tokens of each sequence (default: {NEW_TOKENS})")
    add("--batch", type=_batches, metavar="LIST", help=f"sequences, or max (default: {BATCHES}; without a GPU 1,2)")
    add(
        "--side",
        action="append",
        choices=measure.SIDES,
        help="what to measure, may be repeated (default: dense, sparse); sparse-graph: SparseKVCache(graphs=True); "
        "others of graphs: steps are replays of a CUDA graph in a loop of our own, sparse-loop-graph with a "
        "SparseKVCache, static-graph with a StaticCache, flashinfer-graph with pages that FlashInfer attends to (the "
        "extra peers)",
    )
    add(
        "--sdpa",
        type=_sdpa,
        metavar="LIST",
        help="of default (torch chooses the backend) and no-cudnn; dense and static-graph are measured with each, "
        "others with the first (default: default,no-cudnn; without a GPU default)",
    )
    add(
        "--mesh",
        type=mesh.sizes,
        metavar="SIZES",
        help="as tp=2, cp=4 or tp=2,cp=2: heads and tokens over as many processes, started by torchrun; tp by the "
        "model's own plan. With cp sparse caches only. Bytes and parameters are those of the first process",
    )
    add("--sparsity", type=float, metavar="S", help=f"share of channels pruned (default: {SPARSITY})")
    add("--key-keep", type=positive_integer, metavar="N", help="channels kept of keys, in place of --sparsity")
    add("--value-keep", type=positive_integer, metavar="N", help="channels kept of values, in place of --sparsity")
    add(
        "--codec",
        type=_codecs,
        metavar="LIST",
        help=f"of {', '.join((OWN_CODEC, *CODECS))}: sparse caches are measured with each (default: {OWN_CODEC}, its "
        "own)",
    )
    add(
        "--window",
        type=command_line.count,
        default=WINDOW,
        metavar="N",
        help=f"newest tokens kept dense (default: {WINDOW})",
    )
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of the model (default: %(default)s)")
    command_line.add_device(parser)
    add(
        "--repeats",
        type=positive_integer,
        metavar="N",
        help="runs whose medians make a row, the sides in turn but for --batch max "
        f"(default: {REPEATS}; without a GPU or with --quick 1)",
    )
    add("--seed", type=command_line.seed, default=0, metavar="N", help="of weights and prompts (default: 0)")
    add("--quick", action="store_true", help="a tiny model and short texts: a smoke test, no figures to quote")
    add("--out", type=Path, metavar="DIR", help="folder for the file (default: see below)")
    add("--commit-results", action="store_true", help="write to the committed results of this GPU")
    add(
        "--name",
        type=_file_name,
        default=rows.NAME,
        metavar="NAME",
        help="of the file (default: %(default)s); profiling.report reads those that begin with generate",
    )
    args = parser.parse_args(arguments)
    if (args.key_keep is None) != (args.value_keep is None):
        parser.error("--key-keep and --value-keep come together")
    if args.sparsity is not None and args.key_keep is not None:
        parser.error("give --sparsity or --key-keep and --value-keep, not both")
    if args.sparsity is not None and not 0 <= args.sparsity < 1:
        parser.error(f"--sparsity must be at least 0 and below 1, got {args.sparsity}")
    if args.commit_results and (args.out or args.quick):
        parser.error("--commit-results goes without --out and --quick")
    return _complete(args, parser)


def _complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Fills in what depends on the device."""
    on_cpu = args.device.type == "cpu"
    if args.commit_results and on_cpu:
        parser.error("--commit-results needs a GPU")
    small = args.quick or on_cpu
    args.random_config = args.random_config or ("tiny" if small else "llama3-8b")
    args.repeats = args.repeats or (1 if small else REPEATS)
    args.prompt = args.prompt or (QUICK["prompt"] if small else PROMPT)
    args.new = args.new or (QUICK["new"] if small else NEW_TOKENS)
    args.batch = args.batch or _batches(QUICK["batch"] if small else BATCHES)
    if "max" in args.batch and on_cpu:
        parser.error("--batch max needs a GPU: a CPU's memory is the system's")
    for option, value in (("--turn", args.turn), ("--lookup", args.lookup)):
        if value and (loops := [side for side in args.side or () if _loops(side)]):
            parser.error(f"{option} goes without --side {' '.join(loops)}, whose loop is ours")
    if args.lookup and args.batch != [1]:
        parser.error("--lookup goes with --batch 1")
    if args.mesh and (alone := set(args.side or ()) & {"sparse-graph", "flashinfer-graph"}):
        parser.error(f"--mesh goes without --side {' '.join(sorted(alone))}, which are of one device")
    if on_cpu and any(side.endswith("-graph") for side in args.side or ()):
        parser.error(f"--side {' '.join(args.side)}: CUDA graphs need a GPU")
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model}: no config.json there")
    spread = mesh.TOKENS in (args.mesh or ())
    args.side = list(dict.fromkeys(args.side or (("sparse",) if spread else ("dense", "sparse"))))
    if spread and any(not side.startswith("sparse") for side in args.side):
        parser.error("--mesh with cp spreads sparse caches only: --side sparse")
    if args.mesh and "max" in args.batch:
        parser.error("--batch max goes without --mesh")
    args.codec = args.codec or (None,)
    args.sdpa = args.sdpa or (measure.SDPA[:1] if on_cpu else measure.SDPA)
    if args.sparsity is None and args.key_keep is None:
        args.sparsity = SPARSITY
    return args


def _loops(side: str) -> bool:
    """Whether it generates in a loop of our own."""
    return side.endswith("-graph") and side != "sparse-graph"


def _at_least_3(text: str) -> int:
    """So many tokens have a median step."""
    if (value := positive_integer(text)) < 3:
        raise argparse.ArgumentTypeError(f"at least 3 new tokens are needed, got {value}")
    return value


def _file_name(text: str) -> str:
    if Path(text).name != text:
        raise argparse.ArgumentTypeError(f"'{text}' is not the name of a file: --out names its folder")
    return text


def _sdpa(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [name for name in names if name not in measure.SDPA]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join(measure.SDPA)}, got {unknown[0]!r}")
    return names


def _codecs(text: str) -> tuple[str | None, ...]:
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if unknown := [name for name in names if name not in (OWN_CODEC, *CODECS)]:
        raise argparse.ArgumentTypeError(f"must be of {', '.join((OWN_CODEC, *CODECS))}, got {unknown[0]!r}")
    return tuple(None if name == OWN_CODEC else name for name in names)


def _batches(text: str) -> list[int | str]:
    return list(dict.fromkeys("max" if word.strip() == "max" else positive_integer(word) for word in text.split(",")))
