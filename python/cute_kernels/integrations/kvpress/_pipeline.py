"""kvpress's pipeline, on a cache that stays compressed."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from kvpress import BasePress, KVPressTextGenerationPipeline
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.pipelines import PIPELINE_REGISTRY

from cute_kernels.integrations.kvpress._prefill import prefill
from cute_kernels.integrations.transformers import SparseKVCache

NAME = "sparse-kv-press-text-generation"
_OPTIONS = frozenset(inspect.signature(SparseKVCache).parameters) - {"config"}


class SparseKVPressPipeline(KVPressTextGenerationPipeline):
    """`KVPressTextGenerationPipeline` whose context is held in a `SparseKVCache` after the press.

        pipe = pipeline("sparse-kv-press-text-generation", model=model, tokenizer=tokenizer, sparsity=0.7)
        pipe(context, question=question, press=SnapKVPress(compression_ratio=0.5))["answer"]

    Takes what kvpress's pipeline takes but `cache`, and options of `SparseKVCache`, when it is made or called; `dtype`
    when it is called, as Transformers takes the one before for the model. Several questions each get a copy of the
    compressed context, so that no answer depends on the question before.

    Raises TypeError for an option that neither knows, ValueError for `cache`, and what `prefill` raises.
    """

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        options = {name: kwargs.pop(name) for name in _OPTIONS & set(kwargs)}
        known = inspect.signature(KVPressTextGenerationPipeline._sanitize_parameters).parameters
        unknown = sorted(set(kwargs) - set(known))
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {', '.join(unknown)}")
        if kwargs.get("cache") is not None:
            raise ValueError("cache is made here, a SparseKVCache: leave it out")
        preprocess, forward, postprocess = super()._sanitize_parameters(**kwargs)
        forward.pop("cache", None)
        return preprocess, forward | options, postprocess

    def _forward(
        self, input_tensors: dict[str, Any], max_new_tokens: int = 50, press: BasePress | None = None, **options: Any
    ) -> list[str]:
        """Of tokens "context_ids" (1, T) and "questions_ids", a list of (1, n)."""
        cache = prefill(self.model, input_tensors["context_ids"].to(self.model.device), press, **options)
        questions: list[Tensor] = input_tensors["questions_ids"]
        answers = []
        for left, question in zip(range(len(questions) - 1, -1, -1), questions):
            answers.append(
                self.generate_answer(
                    question_ids=question.to(self.model.device),
                    cache=copy.deepcopy(cache) if left else cache,
                    context_length=cache.get_seq_length(),
                    max_new_tokens=max_new_tokens,
                )
            )
        return answers


PIPELINE_REGISTRY.register_pipeline(NAME, pipeline_class=SparseKVPressPipeline, pt_model=AutoModelForCausalLM)
