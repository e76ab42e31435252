"""The arguments of python -m cute_kernels.eval: what can be wrong with them without a model is said here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from cute_kernels import rules
from cute_kernels._runtime import checks
from cute_kernels.eval import models
from cute_kernels.eval.baselines import BASELINES
from cute_kernels.eval.rounding import CODECS
from cute_kernels.eval.settings import PARTS, WINDOW

TASKS = ("perplexity", "needle", "recall", "longbench", "ruler")
NEEDS = (("text", ("perplexity", "needle")), ("longbench", ("longbench",)), ("ruler", ("ruler",)))  # option, tasks


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    args = parser.parse_args(arguments)
    for option, tasks in NEEDS:
        asked = [task for task in tasks if task in args.tasks]
        if asked and getattr(args, option) is None:
            parser.error(f"--{option} is needed for {' and '.join(asked)}")
    if any(args.evict) and {"longbench", "ruler"} & set(args.tasks):
        parser.error("--evict is not for longbench and ruler")
    args.granularity = args.granularity or models.GRANULARITY[args.cache]
    if not 1 <= prefill_of(args) < args.context:
        parser.error(f"--prefill must be from 1 to below --context {args.context}, got {prefill_of(args)}")
    return args


def prefill_of(args: argparse.Namespace) -> int:
    """Tokens of a segment that are read densely."""
    return args.prefill or args.context // 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cute_kernels.eval",
        description="What pruning the KV cache does to a local model's answers. The dense cache comes first, then "
        "every combination of --rules, --parts and --sparsity. An interrupted run goes on when it is given again.",
        epilog="example: python -m cute_kernels.eval ~/models/Llama-3.1-8B --tasks perplexity,needle --text book.txt "
        "--sparsity 0.5,0.7 --parts keys,values,both --out results",
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL", help="folder of a model and its tokenizer in Hugging Face's format")
    add("--tasks", type=_list(_one_of(TASKS)), required=True, metavar="LIST", help=f"of {', '.join(TASKS)}")
    add(
        "--out",
        type=Path,
        default=Path("eval-results"),
        metavar="DIR",
        help="folder of results, predictions and tables (default: %(default)s)",
    )
    _pruning(parser.add_argument_group("pruning").add_argument)
    _model(parser.add_argument_group("model").add_argument)
    _tasks(parser.add_argument_group("tasks").add_argument)
    return parser


# Defaults of lists are texts: they are parsed like what is given, and read well in the help.


def _pruning(add: Callable[..., object]) -> None:
    add(
        "--rules",
        type=_list(_rules),
        default="magnitude",
        metavar="LIST",
        help=f"of {', '.join(rules.RULES)}; think: keys by ThinK, values by ThinV; KEYS+VALUES: one each "
        "(default: %(default)s)",
    )
    add(
        "--parts",
        type=_list(_one_of(PARTS)),
        default="both",
        metavar="LIST",
        help=f"of {', '.join(PARTS)} (default: %(default)s)",
    )
    add(
        "--sparsity",
        type=_list(_shares),
        default="0.5,0.7",
        metavar="LIST",
        help="shares to drop; KEYS:VALUES for different ones (default: %(default)s)",
    )
    add(
        "--evict",
        type=_list(_share),
        default="0",
        metavar="LIST",
        help="shares of a prompt's tokens to evict first, those of least attention (H2O); not for longbench and ruler "
        "(default: %(default)s)",
    )
    add(
        "--codec",
        type=_list(_codec),
        default="own",
        metavar="LIST",
        help=f"how what leaves the window is stored: own (as it is), {', '.join(CODECS)}; dense caches to compare "
        f"with: {', '.join(BASELINES)} (default: %(default)s)",
    )
    add(
        "--window",
        type=_integer(0),
        default=WINDOW,
        metavar="N",
        help="newest tokens that stay dense (default: %(default)s)",
    )
    add(
        "--granularity",
        type=_integer(1),
        metavar="N",
        help="tokens that leave the window at a time, or more if a rule prunes groups "
        f"(default: {models.GRANULARITY['pruned']}; with --cache sparse {models.GRANULARITY['sparse']}, as kernels do)",
    )
    add(
        "--cache",
        choices=models.CACHES,
        default="pruned",
        help="pruned: a dense cache with zeros, every rule; sparse: the compressed cache and kernels, for rules "
        "that prune tile by tile (default: %(default)s)",
    )


def _model(add: Callable[..., object]) -> None:
    add(
        "--device",
        type=_device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        metavar="NAME",
        help="cpu or cuda (default: cuda if there is one)",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16"),
        help="of weights; auto: as they are stored (default: %(default)s)",
    )
    add("--chat", action="store_true", help="put prompts of longbench and ruler in the chat template")
    add(
        "--max-context",
        type=_integer(1),
        metavar="N",
        help="tokens of prompt and answer for longbench and ruler (default: what the model was made for)",
    )


def _tasks(add: Callable[..., object]) -> None:
    add("--text", type=Path, metavar="FILE", help="UTF-8 text, for perplexity and as haystack")
    add("--longbench", type=Path, metavar="DIR", help="LongBench's .jsonl files with its dataset2*.json")
    add("--ruler", type=Path, metavar="DIR", help="RULER's .jsonl files")
    add("--limit", type=_integer(1), metavar="N", help="segments of the text, examples of each data set (default: all)")
    for name, size, what in (
        ("context", 2048, "perplexity: tokens of a segment"),
        ("chunk", 16, "perplexity: tokens read at a time; 1: exactly as in decoding, slower"),
        ("depths", 5, "needle: places in the haystack"),
        ("repeats", 4, "needle, recall: questions a place"),
        ("pairs", 50, "recall: lines of the list"),
    ):
        add(f"--{name}", type=_integer(1), default=size, metavar="N", help=f"{what} (default: %(default)s)")
    add(
        "--prefill",
        type=_integer(1),
        metavar="N",
        help="perplexity: tokens of a segment read densely, not scored (default: half)",
    )
    add(
        "--lengths",
        type=_list(_integer(1)),
        default="1024,4096",
        metavar="LIST",
        help="needle: tokens (default: %(default)s)",
    )
    add("--seed", type=_integer(0), default=0, metavar="N", help="of needles and lists (default: %(default)s)")


# ---- Types -----------------------------------------------------------------------------------------------------------


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(item.strip()) for item in text.split(",")]


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"'{text}' is none of {', '.join(names)}")
        return text

    return parse


def _rules(text: str) -> str:
    for name in text.split("+", 1):
        _one_of(tuple(rules.RULES))(name)
    return text


def _codec(text: str) -> str:
    """As `Setting` takes it."""
    return "" if text == "own" else _one_of((*CODECS, *BASELINES))(text)


def _shares(text: str) -> float | tuple[float, float]:
    try:
        shares = [float(share) for share in text.split(":", 1)]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share < 1 for share in shares):
        raise argparse.ArgumentTypeError(f"'{text}' is no share from 0 to below 1, or two of them as KEYS:VALUES")
    return (shares[0], shares[1]) if len(shares) > 1 else shares[0]


def _share(text: str) -> float:
    share = _shares(text)
    if isinstance(share, tuple):
        raise argparse.ArgumentTypeError(f"'{text}' is no share from 0 to below 1")
    return share


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not an integer of at least {least}")
        return value

    return parse


def _device(text: str) -> torch.device:
    try:
        found = checks.kernel_device(text)
    except (ValueError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error}") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"'{text}': there are {torch.cuda.device_count()} CUDA devices")
    return found
