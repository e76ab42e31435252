"""The scores of LongBench (arXiv 2308.14508) and RULER (arXiv 2404.06654), 0 to 1 for one prediction and one reference.

ROUGE-L comes from `rouge`, edit similarity from `rapidfuzz`, Chinese words from `jieba`, the first two with the extra
`eval`. Where the published scorers have accidents, these follow the definition: a class name that another one contains
is always taken out, and nothing is scored 0 because a library failed, but an empty text is.
"""

from __future__ import annotations

import re
import string
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from cute_kernels.eval.models import require

Metric = Callable[[str, str, Sequence[str]], float]  # prediction, reference, class names


def qa_f1(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of words, without case, punctuation and articles."""
    return _f1(_words(prediction), _words(reference))


def qa_f1_chinese(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of jieba's words, without punctuation."""
    return _f1(_chinese_words(prediction), _chinese_words(reference))


def rouge_l(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L's F measure, as the package `rouge` computes it."""
    require("rouge", "ROUGE-L")
    from rouge import Rouge

    if not prediction.strip(". \n\t\r") or not reference.strip(". \n\t\r"):
        return 0.0
    limit = sys.getrecursionlimit()
    # It recurses once a word, and published scorers count a text that is too long for it as 0.
    sys.setrecursionlimit(max(limit, 1000 + 2 * (len(prediction.split()) + len(reference.split()))))
    try:
        return float(Rouge(metrics=["rouge-l"]).get_scores([prediction], [reference], avg=True)["rouge-l"]["f"])
    finally:
        sys.setrecursionlimit(limit)


def rouge_l_chinese(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """ROUGE-L of jieba's words."""
    return rouge_l(*(" ".join(_cut(text)) for text in (prediction, reference)))


def classification(prediction: str, reference: str, classes: Sequence[str]) -> float:
    """1 / n if the reference is among the n class names that occur in the prediction, but those within its own name."""
    named = [name for name in classes if name in prediction and (name == reference or name not in reference)]
    return 1.0 / len(named) if reference in named else 0.0


def count(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers that are the reference."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(reference.strip()) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the prediction's numbers that are the paragraph's of the reference: "Paragraph 3", in Chinese 段落3."""
    found = re.search(r"(?:Paragraph |段落)(\d+)", reference)
    if found is None:
        raise ValueError(f"a reference of passage retrieval must name a paragraph, got {reference!r}")
    return count(prediction, found[1])


def code_similarity(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Edit similarity of the first line that is neither comment nor markup, in whole percents."""
    require("rapidfuzz", "edit similarity")
    from rapidfuzz import fuzz

    lines = prediction.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(code, reference)) / 100 if code and reference else 0.0


def string_match(prediction: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Whether the reference occurs in the prediction, without case."""
    return float(reference.lower() in prediction.lower())


LONGBENCH: dict[str, Metric] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), rouge_l),
    **dict.fromkeys(("dureader", "vcsum"), rouge_l_chinese),
    **dict.fromkeys(("trec", "lsht"), classification),
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), retrieval),
    **dict.fromkeys(("lcc", "repobench-p"), code_similarity),
    "multifieldqa_zh": qa_f1_chinese,
    "passage_count": count,
}
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # few-shot tasks: what follows is the model's next example


def longbench(dataset: str, prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """The best score over the references. dataset: its name, without LongBench-E's "_e"."""
    if dataset in _FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return max((LONGBENCH[dataset](prediction, reference, classes) for reference in references), default=0.0)


def ruler(task: str, prediction: str, references: Sequence[str]) -> float:
    """Question answering: whether any reference occurs; every other task: the share of references that do."""
    prediction = re.sub(r"[\x00-\x1f]", "\n", prediction).strip()
    matches = [string_match(prediction, reference) for reference in references]
    if not matches:
        return 0.0
    return max(matches) if task.startswith("qa") else sum(matches) / len(matches)


def _f1(prediction: list[str], reference: list[str]) -> float:
    common = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * common / (len(prediction) + len(reference)) if common else 0.0


def _words(text: str) -> list[str]:
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _cut(text: str) -> list[str]:
    require("jieba", "a Chinese data set")
    import jieba

    return list(jieba.cut(text, cut_all=False))


def _chinese_words(text: str) -> list[str]:
    words = ("".join(c for c in word.lower() if unicodedata.category(c)[0] not in "PSZC") for word in _cut(text))
    return [word for word in words if word]
