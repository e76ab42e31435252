"""The command: python -m cute_kernels.eval MODEL --tasks ... [--help].

Exit status: 0 done, 2 wrong arguments or something missing, 130 interrupted; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from cute_kernels import __version__
from cute_kernels._runtime import checks
from cute_kernels.eval import benchmarks, models, perplexity, recall, results
from cute_kernels.eval.settings import PARTS, WINDOW, Setting, grid

TASKS = ("perplexity", "needle", "recall", "longbench", "ruler")
EXIT_OK, EXIT_WRONG, EXIT_INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        evaluation = Evaluation(args)
        evaluation.run()
    except (ValueError, models.Missing, OSError) as error:
        print(f"python -m cute_kernels.eval: error: {error}", file=sys.stderr)
        return EXIT_WRONG
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(results.table(results.with_averages(evaluation.store.rows)), end="")
    return EXIT_OK


class Evaluation:
    """Everything a command asks for, checked and loaded."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        if "needle" in args.tasks or "perplexity" in args.tasks:
            _needed(args.text, "--text", "perplexity and needle")
        # Suites first: a mistake in them shows before the model is loaded.
        self.suites: list[benchmarks.Task] = []
        if "longbench" in args.tasks:
            self.suites += benchmarks.longbench(_needed(args.longbench, "--longbench", "longbench"), args.limit)
        if "ruler" in args.tasks:
            self.suites += benchmarks.ruler(_needed(args.ruler, "--ruler", "ruler"), args.limit)
        self.settings = grid(args.rules, args.parts, args.sparsity, window=args.window, granularity=args.granularity)
        try:
            device = checks.kernel_device(args.device)
        except RuntimeError as error:
            raise ValueError(f"--device: {error}") from None
        self.tokenizer = models.load_tokenizer(args.model)
        self.model = models.load_model(args.model, device, args.dtype)
        models.prepare(self.model, self.settings, args.cache)
        self.max_context = args.max_context or self.model.config.get_text_config().max_position_embeddings
        self.predictor = benchmarks.Predictor(self.model, self.tokenizer, self.max_context, args.chat)
        self.store = results.Store(args.out, _identity(args))

    def run(self) -> None:
        try:
            for setting in self.settings:
                for name, metric, prepare in self._jobs(setting):
                    if not self.store.has(setting, name):
                        self.store.add(
                            [
                                results.row(setting, label, metric, value, samples)
                                for label, (value, samples) in prepare().items()
                            ]
                        )
        finally:
            self.store.write_tables()

    def _jobs(self, setting: Setting) -> Iterator[tuple[str, str, Callable[[], dict[str, tuple[float, int]]]]]:
        """(task, metric, what gives a value and its number of samples for every row)."""
        make_cache = models.cache_maker(self.model, setting, self.args.cache)
        simple: dict[str, tuple[str, Callable[[], tuple[float, int]]]] = {
            "perplexity": ("perplexity", lambda: self._perplexity(setting, make_cache)),
            "needle": ("accuracy %", lambda: self._recall(setting, make_cache, "needle")),
            "recall": ("accuracy %", lambda: self._recall(setting, make_cache, "recall")),
        }
        for name, (metric, job) in simple.items():
            if name in self.args.tasks:
                yield name, metric, lambda name=name, job=job: {name: job()}  # type: ignore[misc]
        for task in self.suites:
            yield _label(task), "score", lambda task=task: self._suite(setting, make_cache, task)  # type: ignore[misc]

    @cached_property
    def _text(self) -> torch.Tensor:
        text = self.args.text.read_text(encoding="utf-8")
        return torch.tensor(self.tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.long, device="cpu")

    def _perplexity(self, setting: Setting, make_cache: models.CacheMaker) -> tuple[float, int]:
        args = self.args
        prefill = args.prefill or args.context // 2
        if not 1 <= prefill < args.context:
            raise ValueError(f"--prefill must be from 1 to below --context {args.context}, got {prefill}")
        segments = perplexity.segments(self._text.to(self.model.device), args.context, args.limit)
        with _progress(f"{setting.name} perplexity", len(segments)) as done:
            return perplexity.perplexity(self.model, make_cache, segments, prefill, args.chunk, done)

    def _recall(self, setting: Setting, make_cache: models.CacheMaker, task: str) -> tuple[float, int]:
        args = self.args
        if task == "needle":
            questions = [
                question
                for length in args.lengths
                for question in recall.needles(self.tokenizer, self._text, length, args.depths, args.repeats, args.seed)
            ]
        else:
            questions = list(recall.pairs(self.tokenizer, args.pairs, args.repeats * args.depths, args.seed))
        with _progress(f"{setting.name} {task}", len(questions)) as done:
            share = recall.accuracy(self.model, make_cache, self.tokenizer, questions, done)
        return 100 * share, len(questions)

    def _suite(
        self, setting: Setting, make_cache: models.CacheMaker, task: benchmarks.Task
    ) -> dict[str, tuple[float, int]]:
        with (
            self.store.predictions(setting, task.suite, task.name) as (known, keep),
            _progress(f"{setting.name} {_label(task)}", len(task.examples)) as done,
        ):
            scores = benchmarks.evaluate(
                task, lambda example: self.predictor.predict(task, example, make_cache), known, keep, done
            )
        return {f"{task.suite}/{label}": mean for label, mean in benchmarks.means(task, scores).items()}


def _label(task: benchmarks.Task) -> str:
    return f"{task.suite}/{task.name}"


def _needed(path: Path | None, option: str, tasks: str) -> Path:
    if path is None:
        raise ValueError(f"{option} is needed for {tasks}")
    return path


def _identity(args: argparse.Namespace) -> results.Row:
    """What makes results comparable: everything but the settings, the tasks chosen and where files go."""
    import transformers

    apart = ("rules", "parts", "sparsity", "tasks", "out", "device")
    known = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    versions = {"cute_kernels": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    return {name: value for name, value in known.items() if name not in apart} | versions


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[], None]]:
    from tqdm import tqdm  # comes with Transformers

    with tqdm(total=total, desc=name, file=sys.stderr, disable=None if sys.stderr.isatty() else True) as bar:
        if bar.disable:
            print(f"{name}: {total}", file=sys.stderr, flush=True)
        yield lambda: (bar.update(), None)[1]


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        return [kind(item) for item in text.split(",")]

    parse.__name__ = f"list of {kind.__name__}"
    return parse


def _task(text: str) -> str:
    if text not in TASKS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(TASKS)}")
    return text


def _shares(text: str) -> float | tuple[float, float]:
    keys, colon, values = text.partition(":")
    return (float(keys), float(values)) if colon else float(keys)


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cute_kernels.eval",
        description="What pruning the KV cache does to a local model's answers. The dense cache comes first, then "
        "every combination of --rules, --parts and --sparsity. An interrupted run goes on when it is given again.",
        epilog="example: python -m cute_kernels.eval ~/models/Llama-3.1-8B --tasks perplexity,needle --text book.txt "
        "--sparsity 0.5,0.7 --parts keys,values,both --out results",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, help="folder of a model and its tokenizer in Hugging Face's format")
    add("--tasks", type=_list(_task), required=True, metavar="LIST", help=f"of {', '.join(TASKS)}")
    add("--out", type=Path, default=Path("eval-results"), help="folder of results, predictions and tables")
    pruning = parser.add_argument_group("pruning")
    pruning.add_argument(
        "--rules",
        type=_list(str),
        default=["magnitude"],
        metavar="LIST",
        help="of cute_kernels.rules; think: keys by ThinK, values by ThinV; KEYS+VALUES: one each",
    )
    pruning.add_argument("--parts", type=_list(str), default=["both"], metavar="LIST", help=f"of {', '.join(PARTS)}")
    pruning.add_argument(
        "--sparsity",
        type=_list(_shares),
        default=[0.5, 0.7],
        metavar="LIST",
        help="shares to drop; KEYS:VALUES for different ones",
    )
    pruning.add_argument("--window", type=int, default=WINDOW, help="newest tokens that stay dense")
    pruning.add_argument(
        "--granularity",
        type=_count,
        default=1,
        help="tokens that leave the window at a time, or more if a rule prunes groups; 64: as the kernels' caches do",
    )
    pruning.add_argument(
        "--cache",
        choices=models.CACHES,
        default="pruned",
        help="pruned: dense memory, pruned values, every rule; sparse: the compressed cache and kernels, for rules "
        "that prune tile by tile",
    )
    model = parser.add_argument_group("model")
    model.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of torch")
    model.add_argument("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"), help="of weights")
    model.add_argument("--chat", action="store_true", help="put prompts of longbench and ruler in the chat template")
    model.add_argument(
        "--max-context",
        type=_count,
        default=None,
        help="tokens of prompt and answer for longbench and ruler (default: what the model was made for)",
    )
    tasks = parser.add_argument_group("tasks")
    tasks.add_argument("--text", type=Path, help="UTF-8 text, for perplexity and as haystack")
    tasks.add_argument("--longbench", type=Path, help="folder of LongBench's .jsonl files with its dataset2*.json")
    tasks.add_argument("--ruler", type=Path, help="folder of RULER's .jsonl files")
    tasks.add_argument("--limit", type=_count, default=None, help="segments of the text, examples of each data set")
    tasks.add_argument("--context", type=_count, default=2048, help="perplexity: tokens of a segment")
    tasks.add_argument(
        "--prefill",
        type=_count,
        default=None,
        help="perplexity: tokens of a segment read densely, not scored (default: half)",
    )
    tasks.add_argument(
        "--chunk", type=_count, default=16, help="perplexity: tokens read at a time; 1: exactly as in decoding, slower"
    )
    tasks.add_argument("--lengths", type=_list(_count), default=[1024, 4096], metavar="LIST", help="needle: tokens")
    tasks.add_argument("--depths", type=_count, default=5, help="needle: places in the haystack")
    tasks.add_argument("--repeats", type=_count, default=4, help="needle, recall: questions a place")
    tasks.add_argument("--pairs", type=_count, default=50, help="recall: lines of the list")
    tasks.add_argument("--seed", type=int, default=0, help="of needles and lists")
    return parser
