"""LongBench and RULER from folders of JSON lines: prompts, predictions, scores.

LongBench: a folder of <data set>.jsonl or <data set>_e.jsonl with fields input, context, answers, all_classes, length,
and the project's dataset2prompt.json and dataset2maxlen.json in it, in its config/ or in a config/ beside it.

RULER: a folder of <task>.jsonl or <task>/<any>.jsonl with fields input, outputs and maybe answer_prefix, as its
data/prepare.py writes them. Any other test of the kind "do these strings come" fits that form too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_kernels.eval import metrics
from cute_kernels.eval.decoding import generate
from cute_kernels.eval.models import CacheMaker

_WITHOUT_TEMPLATE = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")  # examples and code go in as they are
_ONE_LINE = ("samsum",)  # ends with the line
_RULER_TOKENS = {"niah": 128, "vt": 30, "variable_tracking": 30, "cwe": 120, "fwe": 50, "qa": 32}
_RULER_OTHER_TOKENS = 128
TEMPLATE_ROOM = 64  # tokens that a chat template may add
LENGTHS = (("0-4k", 4000), ("4-8k", 8000), ("8k+", float("inf")))  # words, as LongBench-E reports them


@dataclass(frozen=True)
class Example:
    prompt: str
    references: tuple[str, ...]
    classes: tuple[str, ...] = ()
    length: int = 0


@dataclass(frozen=True)
class Task:
    """suite: "longbench" or "ruler". by_length: whether scores are also reported by the examples' length."""

    suite: str
    name: str
    examples: tuple[Example, ...]
    new_tokens: int
    by_length: bool = False

    def score(self, prediction: str, example: Example) -> float:
        if self.suite == "ruler":
            return metrics.ruler(self.name, prediction, example.references)
        return metrics.longbench(self.name.removesuffix("_e"), prediction, example.references, example.classes)


def longbench(folder: Path, limit: int | None = None) -> list[Task]:
    """Raises ValueError for a folder, data set or field that is not as described above."""
    prompts, lengths = (_config(folder, name) for name in ("dataset2prompt.json", "dataset2maxlen.json"))
    tasks = []
    for path in _files(folder, "*.jsonl"):
        dataset = path.stem.removesuffix("_e")
        if dataset not in metrics.LONGBENCH or dataset not in prompts or dataset not in lengths:
            raise ValueError(f"{path}: {dataset!r} is no data set of LongBench with a prompt and a length")
        examples = tuple(
            Example(
                prompts[dataset].format(**row),
                tuple(row["answers"]),
                tuple(row.get("all_classes") or ()),
                int(row.get("length", 0)),
            )
            for row in _rows(path, ("input", "context", "answers"), limit)
        )
        tasks.append(Task("longbench", path.stem, examples, int(lengths[dataset]), path.stem.endswith("_e")))
    return tasks


def ruler(folder: Path, limit: int | None = None) -> list[Task]:
    """Raises ValueError for a folder or field that is not as described above."""
    tasks = []
    for path in _files(folder, "*.jsonl") + _files(folder, "*/*.jsonl", optional=True):
        name = path.stem if path.parent == folder else path.parent.name
        examples = tuple(
            Example(row["input"] + row.get("answer_prefix", ""), tuple(row["outputs"]), (), int(row.get("length", 0)))
            for row in _rows(path, ("input", "outputs"), limit)
        )
        tokens = next((n for kind, n in _RULER_TOKENS.items() if name.startswith(kind)), _RULER_OTHER_TOKENS)
        tasks.append(Task("ruler", name, examples, tokens))
    names = [task.name for task in tasks]
    if not tasks or len(set(names)) < len(names):
        raise ValueError(f"{folder} must hold one .jsonl file a task, got {', '.join(names) or 'none'}")
    return tasks


class Predictor:
    """Greedy predictions of a model. max_context: tokens of prompt and answer together."""

    def __init__(self, model: Any, tokenizer: Any, max_context: int, chat: bool) -> None:
        if chat and not tokenizer.chat_template:
            raise ValueError("--chat: the model's tokenizer has no chat template")
        self._model, self._tokenizer, self._max_context, self._chat = model, tokenizer, max_context, chat

    def predict(self, task: Task, example: Example, make_cache: CacheMaker) -> str:
        ids = self.prompt_ids(task, example)
        ends = self._model.generation_config.eos_token_id
        end_tokens = [ends] if isinstance(ends, int) else list(ends or ())
        if task.name.removesuffix("_e") in _ONE_LINE:
            end_tokens += self._tokenizer("\n", add_special_tokens=False).input_ids[-1:]
        tokens = generate(self._model, make_cache, ids.to(self._model.device), task.new_tokens, end_tokens)
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def prompt_ids(self, task: Task, example: Example) -> Tensor:
        """LongBench's prompts that are too long lose their middle; RULER's raise ValueError."""
        chat = self._chat and task.name.removesuffix("_e") not in _WITHOUT_TEMPLATE
        room = self._max_context - task.new_tokens - (TEMPLATE_ROOM if chat else 0)
        prompt = example.prompt
        ids = self._tokenizer(prompt).input_ids
        if len(ids) > room:
            half = room // 2
            if task.suite == "ruler" or half < 1:
                raise ValueError(
                    f"{task.name}: a prompt of {len(ids)} tokens and an answer of {task.new_tokens} do not fit the "
                    f"model's {self._max_context}: see --max-context"
                )
            prompt = "".join(
                self._tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:])
            )
            ids = self._tokenizer(prompt).input_ids
        if chat:
            messages = [{"role": "user", "content": prompt}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
        return torch.tensor(ids, dtype=torch.long, device="cpu")


def evaluate(
    task: Task,
    predict: Callable[[Example], str],
    known: Sequence[str],
    keep: Callable[[int, str], None],
    done: Callable[[], None],
) -> list[float]:
    """Every example's score. known: predictions of an earlier run for the first examples; keep takes each new one."""
    scores = []
    for i, example in enumerate(task.examples):
        prediction = known[i] if i < len(known) else predict(example)
        if i >= len(known):
            keep(i, prediction)
        scores.append(task.score(prediction, example))
        done()
    return scores


def means(task: Task, scores: Sequence[float]) -> dict[str, tuple[float, int]]:
    """The mean score in percent and how many examples it is of, also by length for LongBench-E."""
    groups = {task.name: list(scores)}
    if task.by_length:
        below = 0.0
        for name, limit in LENGTHS:
            part = [s for s, example in zip(scores, task.examples) if below <= example.length < limit]
            groups[f"{task.name} {name}"], below = part, limit
    return {name: (100 * sum(part) / len(part), len(part)) for name, part in groups.items() if part}


def _files(folder: Path, pattern: str, optional: bool = False) -> list[Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder")
    paths = sorted(folder.glob(pattern))
    if not paths and not optional and not any(folder.glob("*/*.jsonl")):
        raise ValueError(f"{folder} has no .jsonl files")
    return paths


def _config(folder: Path, name: str) -> dict[str, Any]:
    places = (folder / name, folder / "config" / name, folder.parent / "config" / name)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ValueError(f"LongBench's {name} is needed beside the data: put it at {places[0]} or {places[1]}")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _rows(path: Path, fields: Sequence[str], limit: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(rows) == limit:
                break
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
            missing = [field for field in fields if not isinstance(row, dict) or field not in row]
            if missing:
                raise ValueError(f"{path}:{number}: field {', '.join(missing)} is missing")
            rows.append(row)
    if not rows:
        raise ValueError(f"{path} has no examples")
    return rows
