"""English text in the public domain, from Python packages: six translations of the Bible, book by book.

The King James Version (1769), Webster's (1833), Young's (1862), Darby's (1890), the American Standard (1901) and the
World English Bible (2000): 25 MB. Books that are held out are so in every translation, and are read in the first.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from cute_kernels.eval.models import Missing

TRANSLATIONS = ("kjv", "wbs", "ylt", "dar", "asv", "web")
REQUIREMENT = f"pythonbible[{','.join(TRANSLATIONS)}]"
_HELD_OUT = 6, 3  # of the 66 books every sixth, from Leviticus, the third
_IN_A_BOOK = 10**6  # a verse's number is that of its book, chapter and verse: BBCCCVVV


@dataclass(frozen=True)
class Corpus:
    """UTF-8. training: books of all translations; held_out: books of the first."""

    training: list[bytes]
    held_out: list[bytes]


def load() -> Corpus:
    """Raises Missing, which names the requirement, where a package is not there."""
    training, held_out = [], []
    for translation in TRANSLATIONS:
        for number, book in _books(translation).items():
            if number % _HELD_OUT[0] != _HELD_OUT[1]:
                training.append(book)
            elif translation == TRANSLATIONS[0]:
                held_out.append(book)
    return Corpus(training, held_out)


def _books(translation: str) -> dict[int, bytes]:
    """Number, from 1 -> text."""
    try:
        bible = importlib.import_module(f"pythonbible_{translation}.plain_text_readers_bible").bible
    except ImportError as error:
        raise Missing(
            f"the text comes from packages that are not installed ({error}): pip install '{REQUIREMENT}'"
        ) from None
    first: dict[int, int] = {}
    for verse, start in bible.verse_start_indices.items():
        number = verse // _IN_A_BOOK
        first[number] = min(start, first.get(number, start))
    ends = [*sorted(first.values())[1:], len(bible.scripture_content)]
    return {
        number: bible.scripture_content[start:end].strip().encode()
        for (number, start), end in zip(sorted(first.items()), ends, strict=True)
    }
