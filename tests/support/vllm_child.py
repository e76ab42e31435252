"""Runs one engine of vLLM on a CPU: reads a job as JSON from stdin, writes what came out as JSON to a file.

job: {"engine": arguments of LLM, "sparse": options of the backend or null for vLLM's own, "requests": [{"prompt": token
ids, "new": tokens to generate, "arrives": step, "aborts": step or null}], "again": whether to run them once more,
"registers": whether to register the backend here}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

TOP = 5  # log-probabilities kept of every token


def make_model(folder: Path, heads: int, kv_heads: int, head_dim: int, **options) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(options.pop("seed", 0))
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=256,
        max_position_embeddings=4096,
        **options,
    )
    AutoModelForCausalLM.from_config(config).half().save_pretrained(folder)


def run(engine, requests: list[dict], parameters, prefix: str) -> list[dict]:
    """Every request's tokens, their most likely ones, and how many tokens of its prompt were in the prefix cache."""
    results: list[dict] = [{} for _ in requests]
    step = 0
    while step == 0 or engine.has_unfinished_requests() or any(r.get("arrives", 0) >= step for r in requests):
        for i, request in enumerate(requests):
            if request.get("arrives", 0) == step:
                prompt = {"prompt_token_ids": request["prompt"]}
                engine.add_request(f"{prefix}{i}", prompt, parameters(request["new"]))
            if request.get("aborts") == step:
                engine.abort_request([f"{prefix}{i}"])
        for output in engine.step():
            tokens = output.outputs[0].token_ids
            top = [{token: entry.logprob for token, entry in each.items()} for each in output.outputs[0].logprobs or []]
            number = int(output.request_id.split("-")[0].removeprefix(prefix))
            results[number] = {
                "tokens": list(tokens),
                "top": top,
                "cached": output.num_cached_tokens,
                "finished": output.finished,
            }
        step += 1
    return results


def main(job: dict, to: Path) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    sparse = job["sparse"]
    if sparse is not None:
        from cute_kernels.integrations.vllm import CPU_VARIABLE, register

        os.environ[CPU_VARIABLE] = "1"
        if job.get("registers", True):
            register()
        job["engine"]["additional_config"] = {"cute_kernels": sparse}
    from vllm import LLM, SamplingParams

    def parameters(new: int):
        options = {"temperature": 0, "ignore_eos": True, "detokenize": False, "logprobs": TOP}
        return SamplingParams(max_tokens=new, **options)

    llm = LLM(skip_tokenizer_init=True, enforce_eager=True, dtype="float16", disable_log_stats=False, **job["engine"])
    runs = [
        run(llm.llm_engine, job["requests"], parameters, f"{name}_") for name in "ab"[: 1 + job.get("again", False)]
    ]
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    to.write_text(json.dumps({"runs": runs, "preemptions": metrics.get("vllm:num_preemptions")}))


if __name__ == "__main__":
    main(json.load(sys.stdin), Path(sys.argv[1]))
