"""The scores of LongBench, which are lm-evaluation-harness's, by hand; RULER's beside the harness's."""

from __future__ import annotations

import pytest

for module in ("lm_eval", "jieba", "fuzzywuzzy", "rouge"):
    pytest.importorskip(module, reason=f"{module} is not installed (the extra longbench)")

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


@pytest.mark.parametrize(
    "dataset, prediction, references, score",
    [
        ("hotpotqa", "The Cat, sat!", ["a cat sat"], 1),
        ("hotpotqa", "cat dog bird", ["fish", "the dog"], 2 * (1 / 3) / (1 / 3 + 1)),
        ("triviaqa", "\nParis\nQuestion: next", ["rome", "paris"], 1),
        ("narrativeqa", "Paris", [], 0),
        # Longest common subsequence "police killed gunman" without "the": 2 of 4 and 2 of 4 words.
        ("gov_report", "police kill the gunman", ["police killed the gunman"], 3 / 4),
        ("samsum", "the cat sat\nDialogue: next", ["the cat sat"], 1),
        ("trec", "Color or Other", ["Color"], 0.5),
        ("passage_count", "5, 7 and 5", ["5"], 2 / 3),
        ("passage_retrieval_en", "Paragraph 12", ["Paragraph 12"], 1),
        ("passage_retrieval_zh", "段落3 or 4", ["段落3"], 0.5),
        ("multifieldqa_zh", "北京。", ["北京"], 1),
        ("dureader", "北京", ["北京"], 1),
        ("lcc", "# comment\n```\nreturn x", ["return x"], 1),
    ],
)
def test_longbench(dataset, prediction, references, score):
    classes = ["Food", "Animal food", "Color", "Other"]
    assert metrics.longbench(dataset, prediction, references, classes) == pytest.approx(score)


@pytest.mark.parametrize("task, most", [("niah_multivalue", 4), ("vt", 4), ("qa_1", 1)])
def test_ruler(rng, task, most):
    score = ruler.process_results_part if task.startswith("qa") else ruler.process_results
    for _ in range(50):
        prediction = " ".join(rng.choices(WORDS, k=rng.randint(0, 30)))
        references = rng.choices(WORDS, k=rng.randint(1, most))
        expected = score({"max_length": 4096, "outputs": references}, [prediction])["4096"]
        assert metrics.ruler(task, prediction, references) == pytest.approx(expected)


def test_where_they_differ():
    """RULER's question answering counts any reference, the harness the share of them."""
    assert metrics.ruler("qa_1", "by the sea", ["sea", "lake"]) == 1.0
    assert ruler.process_results_part({"max_length": 4096, "outputs": ["sea", "lake"]}, ["by the sea"])["4096"] == 0.5
