"""The scores of LongBench (arXiv 2308.14508) and RULER (arXiv 2404.06654), 0 to 1 for one prediction.

LongBench's are those of lm-evaluation-harness, of which no more is used (extra `longbench`). RULER's are two lines: in
question answering any reference counts, as its authors have it, where the harness takes the share of them.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Sequence

from cute_kernels.eval.models import Missing

_HARNESS = "lm_eval.tasks.longbench.metrics"
LONGBENCH = {  # data set: function of the harness
    **dict.fromkeys(
        ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "triviaqa"), "get_qa_f1_score"
    ),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "get_rouge_score"),
    **dict.fromkeys(("dureader", "vcsum"), "get_rouge_zh_score"),
    **dict.fromkeys(("trec", "lsht"), "get_classification_score"),
    **dict.fromkeys(("lcc", "repobench-p"), "get_code_sim_score"),
    "multifieldqa_zh": "get_qa_f1_zh_score",
    "passage_retrieval_en": "get_retrieval_score",
    "passage_retrieval_zh": "get_retrieval_zh_score",
    "passage_count": "get_count_score",
}
_FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # few-shot tasks: what follows is the model's next example


def require_longbench() -> None:
    """Raises Missing where the harness, or what it scores with, cannot be imported."""
    try:
        importlib.import_module(_HARNESS)
    except ImportError as error:
        raise Missing(f"LongBench's scores need lm_eval ({error}): pip install 'cute-kernels[longbench]'") from None


def longbench(dataset: str, prediction: str, references: Sequence[str], classes: Sequence[str]) -> float:
    """The best score over the references. dataset: its name, without LongBench-E's "_e"."""
    if dataset in _FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    require_longbench()
    score = getattr(importlib.import_module(_HARNESS), LONGBENCH[dataset])
    (found,) = score({"answers": list(references), "all_classes": list(classes)}, [prediction]).values()
    return float(found)


def ruler(task: str, prediction: str, references: Sequence[str]) -> float:
    """Question answering: whether any reference occurs; every other task: the share of references that do."""
    prediction = re.sub(r"[\x00-\x1f]", "\n", prediction).strip().lower()
    matches = [float(reference.lower() in prediction) for reference in references]
    if not matches:
        return 0.0
    return max(matches) if task.startswith("qa") else sum(matches) / len(matches)
