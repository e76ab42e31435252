"""What users ask for: prompts and answers of log-normal lengths."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Lengths:
    """Tokens. prompt, answer: medians. spread: standard deviation of logarithms. longest: of either."""

    prompt: int
    answer: int
    spread: float
    longest: int


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    answer: int  # tokens


class Requests:
    """One after another, the same for every side."""

    def __init__(self, lengths: Lengths, vocabulary: int, seed: int) -> None:
        self._lengths, self._vocabulary, self._rng = lengths, vocabulary, random.Random(seed)

    def next(self, share: float = 1.0) -> Request:
        """share: of the answer's length."""
        prompt, answer = self._length(self._lengths.prompt), self._length(self._lengths.answer)
        return Request(self.tokens(prompt), max(1, round(share * answer)))

    def first(self) -> Request:
        """Of a user who was there before the measurement: what is left of the answer."""
        return self.next(self._rng.random())

    def tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self._vocabulary), k=count)

    def _length(self, median: int) -> int:
        drawn = median * math.exp(self._rng.gauss(0, self._lengths.spread))
        return min(self._lengths.longest, max(1, round(drawn)))
