"""vLLM's real engine on a CPU with blocks of compressed tiles, beside its own attention. Each engine has a process."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import profiling
from tests.support import vllm_child

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm has an environment for it")

SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 64}
EXACT = {"sparsity": 0.0}
TIE = 0.02  # of log-probabilities: what rounding of another order of sums may turn


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    vllm_child.make_model(folder, **SIZES)
    return folder


def engine(model: Path, requests: list[dict], sparse: dict | None, tmp_path: Path, **options) -> dict:
    """What the child wrote, and its log. refused: the engine must not start."""
    refused = options.pop("refused", False)
    environment = options.pop("environment", {})
    job = {"again": options.pop("again", False), "registers": options.pop("registers", True)}
    arguments = {"model": str(model), "block_size": 64, "max_model_len": 1024, "max_num_seqs": 8, **options}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    job |= {"engine": arguments, "sparse": sparse, "requests": requests}
    result = tmp_path / "result.json"
    result.unlink(missing_ok=True)
    paths = [*environment.pop("paths", []), str(profiling.ROOT / "python"), str(profiling.ROOT)]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": os.pathsep.join(paths), **environment}
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.vllm_child", str(result)],
        input=json.dumps(job),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    log = child.stdout + child.stderr
    assert result.exists() != refused, log
    return {"log": log, **(json.loads(result.read_text()) if result.exists() else {})}


def prompts(rng: random.Random, sizes: list[int], new: int | list[int]) -> list[dict]:
    counts = new if isinstance(new, list) else [new] * len(sizes)
    return [{"prompt": [rng.randrange(256) for _ in range(size)], "new": count} for size, count in zip(sizes, counts)]


def same_but_for_ties(found: list[dict], expected: list[dict]) -> None:
    """Tokens are equal up to the first where two are about as likely."""
    for one, other in zip(found, expected, strict=True):
        assert len(one["tokens"]) == len(other["tokens"])
        for i, (a, b) in enumerate(zip(one["tokens"], other["tokens"])):
            if a != b:
                top = other["top"][i]
                assert str(a) in top and top[str(b)] - top[str(a)] < TIE, (i, a, b, top)
                break


@cache
def mixed(seed: int) -> list[dict]:
    rng = random.Random(seed)
    return prompts(rng, [1, 5, 64, 65, 128, 200, 333, 500], [80, 100, 70, 20, 130, 5, 64, 1])


def test_tokens_are_those_of_vllm(model, tmp_path, rng):
    """Everything kept; chunks of prompts beside decoding requests that arrive one after the other."""
    requests = [request | {"arrives": 7 * i} for i, request in enumerate(mixed(rng.randrange(1000)))]
    expected = engine(model, requests, None, tmp_path)
    for options in ({}, {"max_num_batched_tokens": 96, "max_num_seqs": 4}):
        found = engine(model, requests, EXACT, tmp_path, **options)
        same_but_for_ties(found["runs"][0], expected["runs"][0])
        assert all(result["finished"] for result in found["runs"][0])


def test_preemption(model, tmp_path, rng):
    """Fewer blocks than running requests fill: some are pre-empted and come back."""
    requests = prompts(rng, [100, 90, 120, 110], 200)
    expected = engine(model, requests, None, tmp_path)
    found = engine(model, requests, EXACT, tmp_path, max_model_len=512, num_gpu_blocks_override=14)
    assert found["preemptions"] > 0
    same_but_for_ties(found["runs"][0], expected["runs"][0])


def test_prefix_hits(model, tmp_path, rng):
    """Requests with a common beginning, at once and again: full blocks are found, and give the same tokens."""
    common = prompts(rng, [320], 1)[0]["prompt"]
    requests = [
        {"prompt": common + request["prompt"], "new": 90, "arrives": 30 * i}
        for i, request in enumerate(prompts(rng, [10, 70, 1], 1))
    ]
    expected = engine(model, requests, None, tmp_path)
    found = engine(model, requests, EXACT, tmp_path, again=True)
    first, again = found["runs"]
    assert [result["cached"] >= 320 for result in first] == [False, True, True]
    assert all(result["cached"] >= 320 for result in again)
    for results in (first, again):
        same_but_for_ties(results, expected["runs"][0])


def test_prefix_hits_of_pruned_tiles(model, tmp_path, rng):
    """A hit reads the tiles that the first request stored: the same prompt gives the same tokens again and again."""
    requests = [prompts(rng, [400], 60)[0] | {"arrives": 70 * i} for i in range(1)]
    found = engine(model, [*requests, requests[0] | {"arrives": 80}, requests[0] | {"arrives": 160}], {}, tmp_path)
    _, second, third = found["runs"][0]
    assert second["cached"] == third["cached"] >= 384
    same_but_for_ties([third], [second])


def test_aborts(model, tmp_path, rng):
    """Requests that end early leave nothing behind for those that take their place."""
    requests = prompts(rng, [200, 150, 70, 300, 130, 64], 120)
    for i, request in enumerate(requests):
        request |= {"arrives": 10 * i, "aborts": 25 + 10 * i if i % 2 == 0 else None}
    options = {"max_num_seqs": 2}
    expected = engine(model, requests, None, tmp_path, **options)
    found = engine(model, requests, EXACT, tmp_path, **options)
    whole = [i for i in range(len(requests)) if i % 2]
    same_but_for_ties([found["runs"][0][i] for i in whole], [expected["runs"][0][i] for i in whole])


def test_many_requests(model, tmp_path, rng):
    """200 requests of mixed lengths through a cache that is too small for those that run."""
    sizes = [min(600, 1 + int(rng.lognormvariate(4, 1))) for _ in range(200)]
    requests = prompts(rng, sizes, [1 + int(rng.lognormvariate(2.5, 0.8)) for _ in sizes])
    requests = [request | {"arrives": i // 4} for i, request in enumerate(requests)]
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 60}
    found = engine(model, requests, EXACT, tmp_path, **options)
    assert [len(result["tokens"]) for result in found["runs"][0]] == [request["new"] for request in requests]
    same_but_for_ties(found["runs"][0], engine(model, requests, None, tmp_path, **options)["runs"][0])


def cache_tokens(log: str) -> int:
    return int(re.search(r"KV cache size: ([\d,]+) tokens", log)[1].replace(",", ""))


def test_more_tokens_fit(tmp_path, rng):
    """By the engine's own log, with 38 of 128 elements kept."""
    folder = tmp_path / "model"
    vllm_child.make_model(folder, heads=4, kv_heads=2, head_dim=128)
    requests = prompts(rng, [10], 2)
    dense, sparse = (engine(folder, requests, options, tmp_path) for options in (None, {"keep": 38}))
    assert cache_tokens(sparse["log"]) >= 2.2 * cache_tokens(dense["log"])


def plug_in(tmp_path: Path) -> dict:
    """An environment in which vLLM finds the backend by its entry point, in every process of its own."""
    package = tmp_path / "packages" / "cute_kernels-0.1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: cute-kernels\nVersion: 0.1.0\n")
    entry = re.search(
        r'\[project\.entry-points\."vllm\.general_plugins"\]\n(.*)', (profiling.ROOT / "pyproject.toml").read_text()
    )
    name, value = (part.strip().strip('"') for part in entry[1].split("="))
    (package / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {value}\n")
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "paths": [str(package.parent)]}


def test_the_entry_point(model, tmp_path, rng):
    """vLLM finds the plug-in by itself, in the process of its core."""
    requests = prompts(rng, [100, 3], 70)
    found = engine(model, requests, EXACT, tmp_path, registers=False, environment=plug_in(tmp_path))
    same_but_for_ties(found["runs"][0], engine(model, requests, None, tmp_path)["runs"][0])
    dense = engine(model, requests, None, tmp_path)
    assert cache_tokens(found["log"]) != cache_tokens(dense["log"])  # slots of all elements take more


def test_tensor_parallel(model, tmp_path, rng):
    """Heads over two processes, each with the tiles of its own."""
    requests = [request | {"arrives": 5 * i} for i, request in enumerate(prompts(rng, [100, 3, 200], 70))]
    environment = plug_in(tmp_path) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    options = {"tensor_parallel_size": 2, "registers": False, "environment": environment}
    found = engine(model, requests, EXACT, tmp_path, **options)
    assert "Worker_TP0" in found["log"]
    same_but_for_ties(found["runs"][0], engine(model, requests, None, tmp_path)["runs"][0])


@pytest.mark.parametrize(
    "sparse, options, message",
    [
        ({}, {"block_size": 128}, "--block-size must be 64, the tokens of a tile, got 128"),
        ({"sparsty": 0.5}, {}, "--additional-config: cute_kernels has no option 'sparsty'"),
        ({"keep": 65}, {}, "--additional-config: cute_kernels: keep must be from 1 to D = 64"),
        ({}, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype"),
        (
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "--speculative-config is not served",
        ),
    ],
)
def test_engines_that_are_refused(model, tmp_path, sparse, options, message):
    found = engine(model, [], sparse, tmp_path, refused=True, **options)
    assert message in found["log"]


def test_a_sliding_window_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM, MistralConfig

    folder = tmp_path / "model"
    config = MistralConfig(
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=64,
        sliding_window=128,
    )
    AutoModelForCausalLM.from_config(config).to(torch.float16).save_pretrained(folder)
    found = engine(folder, [], {}, tmp_path, refused=True)
    assert "a sliding window (128 tokens) is not served" in found["log"]
