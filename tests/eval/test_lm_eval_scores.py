"""The scorers beside those of lm-evaluation-harness, on random texts; and where they differ."""

from __future__ import annotations

import pytest

for module in ("lm_eval", "jieba", "fuzzywuzzy", "rouge", "rapidfuzz"):
    pytest.importorskip(module, reason=f"{module} is not installed (lm_eval[longbench] and the extra eval)")

from lm_eval.tasks.longbench import metrics as longbench
from lm_eval.tasks.ruler import common_utils as ruler

from cute_kernels.eval import metrics

WORDS = [
    "The",
    "keeper",
    "of",
    "a",
    "light,",
    "lived",
    "in",
    "an",
    "old",
    "town",
    "by",
    "the",
    "sea.",
    "12",
    "Paragraph",
    "3",
    "(no)",
    "yes",
]
SIGNS = "在海边的小镇上住着一位守灯人。段落3他每天都点灯、"
CLASSES = ["Number", "Number of people", "Date", "City", "Capital city"]
# Without empty lines, over which lm_eval 0.4.13 passes and 0.4.12 does not.
CODE = ["# a comment", "  a = b(c)", "return x // y", "foo(bar)"]


def text(rng, least, most, parts=WORDS, between=" "):
    return between.join(rng.choices(parts, k=rng.randint(least, most)))


def of_words(rng):
    return text(rng, 0, 30), [text(rng, 1, 9) for _ in range(rng.randint(1, 3))]


def of_signs(rng):
    return text(rng, 0, 20, SIGNS, ""), [text(rng, 1, 9, SIGNS, "")]


# data set: (prediction and references, the harness's score)
DATASETS = {
    "hotpotqa": (of_words, longbench.get_qa_f1_score),
    "gov_report": (of_words, longbench.get_rouge_score),
    "multifieldqa_zh": (of_signs, longbench.get_qa_f1_zh_score),
    "dureader": (of_signs, longbench.get_rouge_zh_score),
    "trec": (lambda rng: (text(rng, 1, 3, CLASSES), [rng.choice(CLASSES)]), longbench.get_classification_score),
    "passage_count": (lambda rng: (text(rng, 0, 20), ["12"]), longbench.get_count_score),
    "passage_retrieval_en": (lambda rng: (text(rng, 0, 20), ["Paragraph 3"]), longbench.get_retrieval_score),
    "passage_retrieval_zh": (lambda rng: (text(rng, 0, 20, SIGNS, ""), ["段落3"]), longbench.get_retrieval_zh_score),
    "lcc": (lambda rng: (text(rng, 1, 4, CODE, "\n"), ["a = b(d)"]), longbench.get_code_sim_score),
}


@pytest.mark.parametrize("dataset", DATASETS)
def test_longbench(rng, dataset):
    make, score = DATASETS[dataset]
    for _ in range(50):
        prediction, references = make(rng)
        (expected,) = score({"answers": references, "all_classes": CLASSES}, [prediction]).values()
        assert metrics.longbench(dataset, prediction, references, CLASSES) == pytest.approx(expected)


@pytest.mark.parametrize("task, most", [("niah_multivalue", 4), ("vt", 4), ("qa_1", 1)])
def test_ruler(rng, task, most):
    score = ruler.process_results_part if task.startswith("qa") else ruler.process_results
    for _ in range(50):
        prediction, references = text(rng, 0, 30), rng.choices(WORDS, k=rng.randint(1, most))
        expected = score({"max_length": 4096, "outputs": references}, [prediction])["4096"]
        assert metrics.ruler(task, prediction, references) == pytest.approx(expected)


def test_where_they_differ():
    """RULER's question answering counts any reference, the harness the share of them."""
    assert metrics.ruler("qa_1", "by the sea", ["sea", "lake"]) == 1.0
    assert ruler.process_results_part({"max_length": 4096, "outputs": ["sea", "lake"]}, ["by the sea"])["4096"] == 0.5
