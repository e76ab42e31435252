"""Grids: cases from lists of sizes, as words of the command line or as a YAML or JSON file.

A grid names lists for B, Hq, Hkv, Sq, T, D, keep or sparsity, ahead (stages), dtype, data, scores, cache, timing, op
and backend; it stands for every combination. Sizes may be ranges: 1024..65536 doubles from one end to the other,
16..128+16 counts in steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from profiling import cases
from profiling.cases import Block, Load, Shape

SIZES = {"B": (1,), "Hq": (32,), "Hkv": (8,), "Sq": (1,), "T": (4096,), "D": (128,)}  # and what they are by default
CHOICES = {
    "dtype": cases.DTYPES,
    "data": cases.DATA,
    "scores": ("", "float16", "bfloat16", "float32"),
    "cache": cases.CACHES,
    "timing": cases.TIMINGS,
    "op": cases.OPS,
}
KEYS = (*SIZES, "keep", "sparsity", "ahead", *CHOICES, "backend")
MAX_LENGTH = 10_000
_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\+(\d+))?")


def from_words(words: Iterable[str]) -> Block:
    """["T=1024..8192", "keep=38,64"] -> Block; ValueError says what is wrong."""
    lists: dict[str, Any] = {}
    for word in words:
        key, separator, values = word.partition("=")
        if not separator or not values:
            raise ValueError(f"grid: '{word}' is not KEY=VALUE,VALUE; keys are {', '.join(KEYS)}")
        if key in lists:
            raise ValueError(f"grid: {key} is given twice")
        lists[key] = values.split(",")
    return block(lists)


def from_file(path: Path) -> tuple[list[str], list[Block]]:
    """(suites, blocks) of a file with the keys `suites`, a list of names, and `grids`, a list of grids.

    Raises:
        ValueError: the file is missing or wrong, or PyYAML is not installed; JSON needs none.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    content = _parsed(path, text)
    if not isinstance(content, Mapping) or not content or not content.keys() <= {"suites", "grids"}:
        raise ValueError(f"{path}: expected the keys 'suites' and 'grids', got {content!r:.60}")
    suites, grids = content.get("suites") or [], content.get("grids") or []
    if not all(isinstance(grid, Mapping) for grid in grids):
        raise ValueError(f"{path}: 'grids' is a list of mappings such as {{T: [1024, 4096], keep: 38}}")
    return [str(name) for name in suites], [block(grid) for grid in grids]


def _parsed(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: {error}") from None
    try:
        import yaml
    except ImportError:
        raise ValueError(
            f"{path}: reading YAML needs PyYAML (pip install 'cute-kernels[profile]' or pyyaml); "
            "a .json file of the same content needs nothing"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None


def block(lists: Mapping[str, Any]) -> Block:
    """A grid's block; ValueError names a wrong key or value."""
    if unknown := sorted(lists.keys() - set(KEYS)):
        raise ValueError(f"grid: unknown key {', '.join(unknown)}; keys are {', '.join(KEYS)}")
    if "keep" in lists and "sparsity" in lists:
        raise ValueError("grid: give keep or sparsity, not both")
    words = {key: [str(value) for value in _list(values)] for key, values in lists.items()}
    for key, allowed in CHOICES.items():
        if wrong := [value for value in words.get(key, ()) if value not in allowed]:
            raise ValueError(f"grid: {key} {', '.join(wrong)}: takes {', '.join(filter(None, allowed))}")
    sizes = {
        key: [n for word in words[key] for n in _sizes(key, word)] if key in words else default
        for key, default in SIZES.items()
    }
    if (count := prod(map(len, sizes.values()))) > MAX_LENGTH:
        raise ValueError(f"grid: {count} shapes are more than {MAX_LENGTH}")
    shapes = [Shape(*combination) for combination in product(*sizes.values())]
    loads = tuple(
        Load(shape, keep, dtype, data)
        for shape in shapes
        for keep in _keeps(words, shape.head_dim)
        for dtype in words.get("dtype", cases.DTYPES[:1])
        for data in words.get("data", cases.DATA[:1])
    )
    return Block(
        tuple(words.get("op", cases.SPARSE_OPS)),
        loads,
        tuple(words.get("backend", ())),
        tuple(words.get("scores", ("",))),
        tuple(words.get("cache", cases.CACHES[:1])),
        tuple(words.get("timing", cases.TIMINGS[:1])),
        tuple(n for word in words.get("ahead", ()) for n in _sizes("ahead", word)) or (0,),
    )


def _list(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _sizes(key: str, word: str) -> list[int]:
    if found := _RANGE.fullmatch(word):
        first, last, step = int(found[1]), int(found[2]), int(found[3] or 0)
        if 1 <= first <= last and (step or not found[3]):
            return list(range(first, last + 1, step)) if step else _doubling(first, last)
    elif word.isdigit() and int(word) > 0:
        return [int(word)]
    raise ValueError(
        f"grid: {key} '{word}' is neither a positive integer nor a range such as 1024..65536 or 16..128+16"
    )


def _doubling(first: int, last: int) -> list[int]:
    return [first << i for i in range(last.bit_length()) if first << i <= last]


def _keeps(words: Mapping[str, list[str]], head_dim: int) -> list[int]:
    if "sparsity" in words:
        try:
            return [cases.keep_of(float(word), head_dim) for word in words["sparsity"]]
        except ValueError as error:
            raise ValueError(f"grid: {error}") from None
    if "keep" in words:
        return [n for word in words["keep"] for n in _sizes("keep", word)]
    return list(cases.usual_keeps(head_dim))
