"""The command: python -m cute_kernels.eval MODEL --tasks ... [--help].

Exit status: 0 done, 2 wrong arguments or something missing, 130 interrupted; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from cute_kernels import __version__
from cute_kernels.eval import arguments as arguments_module
from cute_kernels.eval import benchmarks, metrics, models, perplexity, recall, results
from cute_kernels.eval.settings import Setting, grid

Measured = dict[str, tuple[float, int]]  # row's task -> value, number of samples
EXIT_OK, EXIT_WRONG, EXIT_INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    args = arguments_module.parse(arguments)
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


@dataclass(frozen=True)
class Job:
    """A task with a setting. run: takes the title of its progress, gives what the rows are of."""

    setting: Setting
    task: str
    metric: str
    run: Callable[[str], Measured]


class Evaluation:
    """Everything a command asks for, checked and loaded; the model last, as it takes longest."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        models.check_folder(args.model)
        self.suites: list[benchmarks.Task] = []
        if "longbench" in args.tasks:
            metrics.require_longbench()
            self.suites += benchmarks.longbench(args.longbench, args.limit)
        if "ruler" in args.tasks:
            self.suites += benchmarks.ruler(args.ruler, args.limit)
        self.settings = grid(
            args.rules,
            args.parts,
            args.sparsity,
            window=args.window,
            granularity=args.granularity,
            evictions=args.evict,
            codecs=args.codec,
        )
        models.check(self.settings, args.cache)
        models.check_dtype(args.model, args.dtype, args.cache)
        self.store = results.Store(args.out, _identity(args))
        self.tokenizer = models.load_tokenizer(args.model)
        self.segments, self.questions = self._segments_and_questions()
        self.model = models.load_model(args.model, args.device, args.dtype)
        models.prepare(self.model, self.settings, args.cache)
        self.max_context = args.max_context or self.model.config.get_text_config().max_position_embeddings
        self.predictor = benchmarks.Predictor(self.model, self.tokenizer, self.max_context, args.chat)

    def _segments_and_questions(self) -> tuple[list[torch.Tensor], dict[str, list[recall.Question]]]:
        """(segments of the text, the questions of needle and recall); empty for tasks that are not asked for."""
        args, tokenizer, segments = self.args, self.tokenizer, []
        questions: dict[str, list[recall.Question]] = {}
        if "perplexity" in args.tasks or "needle" in args.tasks:
            ids = tokenizer(_read(args.text), add_special_tokens=False).input_ids
            text = torch.tensor(ids, dtype=torch.long)
        if "perplexity" in args.tasks:
            segments = perplexity.segments(text, args.context, args.limit)
        if "needle" in args.tasks:
            questions["needle"] = [
                question
                for length in args.lengths
                for question in recall.needles(tokenizer, text, length, args.depths, args.repeats, args.seed)
            ]
        if "recall" in args.tasks:
            questions["recall"] = list(recall.pairs(tokenizer, args.pairs, args.repeats * args.depths, args.seed))
        return segments, questions

    def run(self) -> None:
        jobs = [job for setting in self.settings for job in self._jobs(setting)]
        try:
            for number, job in enumerate(jobs, 1):
                if not self.store.has(job.setting, job.task):
                    found = job.run(f"[{number}/{len(jobs)}] {job.setting.name}, {job.task}")
                    self.store.add(
                        [results.row(job.setting, label, job.metric, *measured) for label, measured in found.items()]
                    )
        finally:
            self.store.write_tables()

    def _jobs(self, setting: Setting) -> list[Job]:
        make_cache = models.cache_maker(self.model, setting, self.args.cache)
        jobs = []
        if self.segments:
            jobs.append(Job(setting, "perplexity", "perplexity", partial(self._perplexity, make_cache)))
        for name in self.questions:
            jobs.append(Job(setting, name, "accuracy %", partial(self._recall, make_cache, name)))
        for task in self.suites:
            jobs.append(Job(setting, _label(task), "score", partial(self._suite, setting, make_cache, task)))
        return jobs

    def _perplexity(self, make_cache: models.CacheMaker, title: str) -> Measured:
        args, prefill = self.args, arguments_module.prefill_of(self.args)
        segments = [segment.to(self.model.device) for segment in self.segments]
        with _progress(title, len(segments), "segments") as done:
            found = perplexity.perplexity(self.model, make_cache, segments, prefill, args.chunk, done)
        return {"perplexity": found}

    def _recall(self, make_cache: models.CacheMaker, task: str, title: str) -> Measured:
        questions = self.questions[task]
        with _progress(title, len(questions), "questions") as done:
            share = recall.accuracy(self.model, make_cache, self.tokenizer, questions, done)
        return {task: (100 * share, len(questions))}

    def _suite(self, setting: Setting, make_cache: models.CacheMaker, task: benchmarks.Task, title: str) -> Measured:
        with (
            self.store.predictions(setting, task.suite, task.name) as (known, keep),
            _progress(title, len(task.examples), "examples") as done,
        ):
            scores = benchmarks.evaluate(
                task, lambda example: self.predictor.predict(task, example, make_cache), known, keep, done
            )
        return {f"{task.suite}/{label}": mean for label, mean in benchmarks.means(task, scores).items()}


def _label(task: benchmarks.Task) -> str:
    return f"{task.suite}/{task.name}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path}: not UTF-8: {error}") from None


def _identity(args: argparse.Namespace) -> results.Row:
    """What makes results comparable: everything but the settings, the tasks chosen and where files go."""
    import transformers

    apart = ("rules", "parts", "sparsity", "evict", "codec", "tasks", "out", "device")
    known = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    versions = {"cute_kernels": __version__, "transformers": transformers.__version__, "torch": torch.__version__}
    return {name: value for name, value in known.items() if name not in apart} | versions


@contextmanager
def _progress(title: str, total: int, of: str) -> Iterator[Callable[[], None]]:
    from tqdm import tqdm  # comes with Transformers

    with tqdm(total=total, desc=title, unit=of, file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        if bar.disable:
            print(f"{title}: {total} {of}", file=sys.stderr, flush=True)
        yield lambda: (bar.update(), None)[1]
