"""Transformers' continuous batching on compressed pages, beside `generate`."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
if not (5, 16) <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) <= (5, 17):
    pytest.skip("continuous batching is served with Transformers 5.16 and 5.17", allow_module_level=True)

from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, MistralConfig

from cute_kernels.integrations.transformers import SparseKVCache, _batching_options, batching, serve
from cute_kernels.integrations.transformers.batching import SparseKVBatching

TIE = 0.05  # of logits: what rounding of another order of sums may turn
GREEDY = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}


def llama(place: str = "cpu", dtype=torch.float16, **options):
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 256,
        **options,
    }
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=dtype).eval().to(place)


def prompts(rng, sizes: list[int]) -> list[list[int]]:
    return [[rng.randrange(1, 256) for _ in range(size)] for size in sizes]


def run(manager: SparseKVBatching, inputs: list[list[int]], new: list[int], prefix: str = "") -> list[list[int]]:
    """What a running manager generates, in the order of the inputs."""
    names = [f"{prefix}{i}" for i in range(len(inputs))]
    for name, tokens, count in zip(names, inputs, new):
        manager.add_request(tokens, request_id=name, max_new_tokens=count)
    found: dict[str, list[int]] = {}
    while len(found) < len(inputs):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            assert result.error is None
            found[result.request_id] = result.generated_tokens
        assert manager.is_running() or len(found) == len(inputs)
    return [found[name] for name in names]


def check(model, inputs, new: list[int], found: list[list[int]], cache=None) -> None:
    """Tokens are those of `generate`, up to the first where two are about as likely. cache: makes generate's."""
    for tokens, count, mine in zip(inputs, new, found):
        ids = torch.tensor([tokens], device=model.device)
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": count, **GREEDY}
        if cache is not None:
            options["past_key_values"] = cache()
        out = model.generate(ids, output_logits=True, return_dict_in_generate=True, **options)
        expected = out.sequences[0, len(tokens) :].tolist()
        assert len(mine) == len(expected) == count
        for i, (one, other) in enumerate(zip(mine, expected)):
            if one != other:
                logits = out.logits[i][0]
                assert logits[other] - logits[one] < TIE, (i, one, other)
                break


def manager_of(model, **options) -> SparseKVBatching:
    return SparseKVBatching(
        model, **{"memory": 48 << 20, "requests": 8, "generation_config": GenerationConfig(**GREEDY), **options}
    )


def test_tokens_are_those_of_generate(place, rng):
    """Everything kept; prompts of many lengths, some longer than a step's tokens."""
    model = llama(place)
    inputs, new = prompts(rng, [1, 5, 64, 65, 200, 333]), [80, 100, 70, 20, 130, 64]
    with manager_of(model, sparsity=0.0, batching=ContinuousBatchingConfig(max_batch_tokens=150)) as manager:
        found = run(manager, inputs, new)
        assert 47 << 20 < manager.memory <= 48 << 20
    assert model.config._attn_implementation == "sdpa"
    check(model, inputs, new, found)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_pruned_tokens_are_those_of_a_sparse_cache(place, codec, rng):
    """What is pruned is what SparseKVCache prunes, with the same dense window and about the same scales."""
    model = llama(place)
    inputs, new = prompts(rng, [30, 100, 260]), [120, 100, 90]
    options = {"sparsity": 0.6, "window": 20, "codec": codec}
    with manager_of(model, **options) as manager:
        found = run(manager, inputs, new)
    check(model, inputs, new, found, cache=lambda: SparseKVCache(model, **options))


def test_a_narrow_codec_has_more_blocks():
    model = llama()
    blocks = [manager_of(model, sparsity=0.5, codec=codec)._blocks for codec in (None, "int8", "int4")]
    assert blocks[1] > 1.4 * blocks[0] and blocks[2] > blocks[1]
    with pytest.raises(ValueError, match="codec"):
        manager_of(model, codec="int3")


@pytest.mark.gpu
@pytest.mark.parametrize("warmed", [False, True])
def test_graphs(warmed, rng):
    """Steps of decoding alone are replays, of a row to more than there are; prompts come in between."""
    model = llama("cuda")
    inputs = prompts(rng, [rng.randint(1, 300) for _ in range(9)])
    new = [rng.randint(1, 80) for _ in inputs]
    manager = manager_of(model, sparsity=0.0, requests=7)
    if warmed:
        manager.warmup()
    with manager:
        found = run(manager, inputs, new)
        graphs = manager.batch_processor.inputs_and_outputs.graphs._storage
        assert {key for (key,) in graphs} == {1, 2, 4, 7} if warmed else graphs
    check(model, inputs, new, found)
    eager = ContinuousBatchingConfig(use_cuda_graph=False)
    with manager_of(model, sparsity=0.0, requests=7, batching=eager) as manager:
        found = run(manager, inputs, new)
        assert not manager.batch_processor.inputs_and_outputs.graphs._storage
    check(model, inputs, new, found)


def test_little_memory(rng):
    """More requests than windows, and fewer blocks than they fill: requests wait, and start again."""
    model = llama()
    inputs, new = prompts(rng, [rng.randint(1, 180) for _ in range(20)]), [rng.randint(1, 150) for _ in range(20)]
    fixed, block = batching.memory_parts(manager_of(model, sparsity=0.0).page_config, 2, 3)
    memory = fixed + 9 * block
    with manager_of(model, sparsity=0.0, requests=3, memory=memory) as manager:
        found = run(manager, inputs, new)
        cache = manager.batch_processor.cache
        assert cache.num_blocks == 9 and sorted(cache._free) == [0, 1, 2] and cache.get_num_free_blocks() == 9
    check(model, inputs, new, found)


def test_prefixes_are_shared(rng):
    """Full blocks of a prompt that came before are read, not computed again; a prompt that is known whole as well."""
    model = llama()
    common = prompts(rng, [192])[0]
    inputs = [common + tail for tail in prompts(rng, [10, 70, 0])]
    with manager_of(model, sparsity=0.0) as manager:
        found = [run(manager, [tokens], [60], prefix=f"{i}_")[0] for i, tokens in enumerate(inputs)]
        assert manager.batch_processor.cache._total_prefix_length == 192 + 128
    check(model, inputs, [60] * 3, found)


def test_cancelled_requests_leave_nothing_behind(rng):
    model = llama()
    inputs = prompts(rng, [100, 150, 70])
    with manager_of(model, sparsity=0.0, requests=2) as manager:
        for i in range(4):
            manager.add_request(inputs[0], request_id=f"gone{i}", max_new_tokens=400)
        for i in range(4):
            manager.cancel_request(f"gone{i}")
        found = run(manager, inputs, [60] * 3)
        assert sorted(manager.batch_processor.cache._free) == [0, 1]
    check(model, inputs, [60] * 3, found)


def test_a_second_start(rng):
    """generate_batch of Transformers takes the manager that a model has."""
    model = llama()
    inputs = prompts(rng, [50, 90])
    manager = manager_of(model, sparsity=0.0)
    model._cached_continuous_batching_manager = manager
    results = model.generate_batch(inputs, max_new_tokens=40, persistent_manager=True, warmup=False)
    check(model, inputs, [40, 40], [result.generated_tokens for result in results.values()])
    again = model.generate_batch(inputs, max_new_tokens=40, warmup=False)
    check(model, inputs, [40, 40], [result.generated_tokens for result in again.values()])


# ---- The server ------------------------------------------------------------------------------------------------------


def ask(url: str, job: object) -> tuple[int, dict]:
    data = json.dumps(job).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_server(rng):
    model = llama()
    inputs = prompts(rng, [20, 80, 130, 64])
    answers: list = [None] * len(inputs)
    with manager_of(model, sparsity=0.0, requests=2) as manager:
        server = serve.make_server(serve.Completions(manager, None, 256), "127.0.0.1", 0)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"

        def client(i: int) -> None:
            answers[i] = ask(f"{url}/v1/completions", {"prompt": inputs[i], "max_tokens": 30})

        threads = [threading.Thread(target=client, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for job, message in (
            ({"prompt": [1, 256]}, "prompt must be text or a list of token ids from 0 to 255"),
            ({"prompt": "text"}, "prompt must be token ids: the model has no tokenizer"),
            ({"prompt": [1], "max_tokens": 0}, "max_tokens must be a positive integer, got 0"),
            ([1], 'a request must be an object with a "prompt"'),
        ):
            status, answer = ask(f"{url}/v1/completions", job)
            assert status == 400 and message in answer["error"]
        assert ask(f"{url}/nothing", {})[0] == 404
        with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
            assert json.load(answer) == {"status": "ok"}
        server.shutdown()
        server.server_close()
    assert all(status == 200 for status, _ in answers)
    found = [answer["choices"][0]["tokens"] for _, answer in answers]
    check(model, inputs, [30] * 4, found)
    assert answers[1][1]["usage"] == {"prompt_tokens": 80, "completion_tokens": 30, "total_tokens": 110}


def test_server_arguments():
    options = serve.parser().parse_args(["--model", "folder", "--memory", "8G"])
    assert options.memory == 8 << 30 and options.sparsity == 0.7
    for wrong in ("8", "G", "-1G", "8T"):
        with pytest.raises(SystemExit):
            serve.parser().parse_args(["--model", "folder", f"--memory={wrong}"])


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"sparsity": 2.0}, ValueError, "sparsity must be from 0 to 1"),
        ({"window": -1}, ValueError, "window must be at least 0"),
        ({"requests": 0}, ValueError, "requests must be at least 1"),
        ({"memory": 1000}, ValueError, "memory must hold a block and the dense windows of 8 requests"),
        ({"memory": "8G"}, TypeError, "memory"),
        ({"batching": {}}, TypeError, "batching must be a ContinuousBatchingConfig"),
        ({"batching": ContinuousBatchingConfig(use_cuda_graph=True)}, ValueError, "use_cuda_graph needs a model on a"),
        (
            {"batching": ContinuousBatchingConfig(use_cuda_graph=(True, True))},
            ValueError,
            "batching.use_cuda_graph: steps with prompts",
        ),
        ({"batching": ContinuousBatchingConfig(block_size=32)}, ValueError, "batching.block_size"),
        ({"batching": ContinuousBatchingConfig(use_async_batching=True)}, ValueError, "batching.use_async_batching"),
        (
            {"generation_config": GenerationConfig(do_sample=True, num_return_sequences=2)},
            ValueError,
            "num_return_sequences must be 1",
        ),
    ],
)
def test_refused(options, error, message):
    model = llama()
    with pytest.raises(error, match=message):
        manager_of(model, **options)
    assert model.config._attn_implementation == "sdpa"


def test_models_that_are_refused():
    sliding = AutoModelForCausalLM.from_config(
        MistralConfig(
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
            sliding_window=32,
        ),
        dtype=torch.float16,
    )
    with pytest.raises(ValueError, match="full attention only"):
        manager_of(sliding)
    with pytest.raises(ValueError, match="model must compute in float16 or bfloat16, got float32"):
        manager_of(llama(dtype=torch.float32))
    with pytest.raises(TypeError, match="model must be a Transformers model"):
        manager_of(torch.nn.Linear(2, 2))


def test_attention_outside_of_a_manager():
    model = llama()
    model.set_attn_implementation(batching.ATTENTION)
    with pytest.raises(RuntimeError, match="runs in a SparseKVBatching only"):
        model(torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize("version", ["5.15.0", "5.18.0"])
def test_other_versions_are_refused(version, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(ImportError, match=f"serves Transformers 5.16 to 5.17, found {version}"):
        _batching_options.check_version()
