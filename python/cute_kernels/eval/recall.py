"""Retrieval from a long context: needles in a haystack of text, and lists of keys and values.

The context is prefilled, its older tokens are pruned, then the question is read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels.eval.decoding import answer
from cute_kernels.eval.models import CacheMaker


@dataclass(frozen=True)
class Question:
    """context and question: token ids (n,) and (m,). answer: the text that must come."""

    context: Tensor
    question: Tensor
    answer: str


def needles(tokenizer: Any, text: Tensor, length: int, depths: int, repeats: int, seed: int) -> Iterator[Question]:
    """A sentence with a number of seven digits, at `depths` evenly spread places of `length` tokens of a text."""
    ask = _ids(tokenizer, "\nWhat is the special number? The special number is")
    rng = random.Random(seed)
    for _ in range(repeats):
        for i in range(depths):
            number = str(rng.randrange(10**6, 10**7))
            needle = _ids(tokenizer, f"\nThe special number is {number}. Remember it.\n")
            room = length - len(needle) - len(ask)
            if room < 1 or len(text) < room:
                raise ValueError(
                    f"a needle test of {length} tokens needs a text of {max(room, 1)} tokens and at least "
                    f"{len(needle) + len(ask) + 1} tokens in all, the text has {len(text)}"
                )
            first = rng.randrange(len(text) - room + 1)
            at = round(room * i / max(1, depths - 1))
            hay = text[first : first + room]
            yield Question(_begun(tokenizer, torch.cat([hay[:at], needle, hay[at:]])), ask, number)


def pairs(tokenizer: Any, count: int, questions: int, seed: int) -> Iterator[Question]:
    """Lists of `count` lines with a key of six digits and a value of five; the question is the beginning of a line."""
    rng = random.Random(seed)
    for _ in range(questions):
        keys = rng.sample(range(10**5, 10**6), count)
        values = [rng.randrange(10**4, 10**5) for _ in keys]
        wanted = rng.randrange(count)
        lines = "".join(f"\nThe value of {key} is {value}." for key, value in zip(keys, values))
        question = f"\nThe value of {keys[wanted]} is"
        yield Question(_begun(tokenizer, _ids(tokenizer, lines)), _ids(tokenizer, question), str(values[wanted]))


def accuracy(
    model: Any, make_cache: CacheMaker, tokenizer: Any, questions: list[Question], done: Callable[[], None]
) -> float:
    """Share of answers that begin with what was asked for."""
    right = 0
    for question in questions:
        device = model.device
        # After a space or not, digits may be split into more tokens than here: a few more are read.
        length = len(_ids(tokenizer, f" {question.answer}")) + 2
        tokens = answer(
            model, make_cache, question.context[None].to(device), question.question[None].to(device), length
        )
        said = tokenizer.decode(tokens[0], skip_special_tokens=True).replace(" ", "")
        right += said.strip().startswith(question.answer)
        done()
    return right / len(questions)


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.long, device="cpu")


def _begun(tokenizer: Any, ids: Tensor) -> Tensor:
    """With the token that texts begin with, where the tokenizer has one."""
    if tokenizer.bos_token_id is None:
        return ids
    return torch.cat([torch.tensor([tokenizer.bos_token_id], device="cpu"), ids])
