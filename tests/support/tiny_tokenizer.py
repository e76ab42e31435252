"""A tokenizer of characters, for tiny models that read and write text."""

from __future__ import annotations

import pytest

CHARACTERS = ("<s>", "</s>", "<unk>", *map(chr, range(32, 127)), "\n")


def make():
    transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    tokenizer = Tokenizer(WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
