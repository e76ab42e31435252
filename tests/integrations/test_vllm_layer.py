"""Attention of a layer over blocks and tensors as vLLM lays them out, against float64. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cute_kernels import paged
from cute_kernels.integrations._serving.step import Requests
from cute_kernels.integrations.vllm import _options
from cute_kernels.integrations.vllm._requests import RequestsByBlock
from tests.support import oracle
from tests.support.vllm_steps import Request, Scheduler


def make(device, *, scheduler=None, **options) -> Scheduler:
    sizes = {"kv_heads": 2, "head_dim": 64, "sparsity": 0.5, "window": 32, "max_append": 1, **options}
    return Scheduler(paged.configure(**sizes), device, **(scheduler or {}))


@pytest.mark.parametrize("names_requests", [True, False])
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, window", [(64, 0), (128, 32), (256, 70)])
def test_mixed_steps(device, head_dim, window, dtype, names_requests, rng):
    """Prompts in chunks of any size beside decoding requests, in any order."""
    options = {"head_dim": head_dim, "window": window, "dtype": dtype}
    scheduler = make(device, **options, scheduler={"names_requests": names_requests})
    requests = [Request(row, rng.randrange(1, 300)) for row in rng.sample(range(5), k=4)]
    for _ in range(25):
        rows = []
        for request in rng.sample(requests, k=4):
            left = request.prompt - request.tokens
            rows.append((request, rng.randint(1, min(left, 130)) if left > 0 else 1))
        scheduler.run(rows)


@pytest.mark.parametrize("names_requests", [True, False])
def test_prefixes_and_preemption(device, names_requests, rng):
    """Full blocks serve other requests, and their own one once it comes back; rows of the table change hands."""
    scheduler = make(device, scheduler={"names_requests": names_requests})
    one = Request(0, 128)
    scheduler.run([(one, 128)])
    two = scheduler.sharing(one, 1, 128, 200)  # at the very token where the first one decodes on
    scheduler.run([(one, 1), (two, 30)])
    scheduler.run([(two, 42), (one, 1)])
    for _ in range(70):
        scheduler.run([(one, 1), (two, 1)])
    one = scheduler.resumed(one, 2)
    three = Request(0, 20)  # in the first one's row
    scheduler.run([(three, 20), (two, 1)])
    scheduler.run([(one, one.prompt - one.tokens), (two, 1), (three, 1)])
    scheduler.finish(two)
    for _ in range(50):
        scheduler.run([(three, 1), (one, 1)])


def test_padding(device, rng):
    """Rows and tokens behind those of requests change nothing."""
    scheduler = make(device)
    requests = [Request(row, 5) for row in (3, 1)]
    scheduler.run([(request, 5) for request in requests])
    before = scheduler.layer.pool.blocks.clone()
    for _ in range(3):
        scheduler.run([(request, 1) for request in requests], padding=2)
    step = scheduler.steps.padding(4)
    query, key, value, output = scheduler.tensors(4)
    scheduler.layer.forward(step, query, key, value, scheduler.kv_cache, output)
    assert not output.any() and torch.equal(scheduler.layer.pool.blocks, before)
    scheduler.run([(request, 1) for request in requests])


@pytest.mark.gpu
def test_graph(rng):
    """A graph of a padded step, captured before any request, replays steps of fewer requests."""
    scheduler = make("cuda")
    tensors = scheduler.tensors(4)
    query, key, value, output = tensors
    scheduler.kv_cache.zero_()
    warm = scheduler.steps.padding(4)
    scheduler.layer.forward(warm, query, key, value, scheduler.kv_cache, output)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scheduler.layer.forward(warm, query, key, value, scheduler.kv_cache, output)
    requests = [Request(row, rng.randrange(2, 130)) for row in (4, 0, 2)]
    scheduler.run([(request, request.prompt) for request in requests])
    for _ in range(100):
        rows = [(request, 1) for request in requests]
        scheduler.describe(rows, padding=1)
        for fixed, new in zip(tensors, scheduler.tensors(3, padding=1)):
            fixed.copy_(new)
        graph.replay()
        scheduler.check(rows, *tensors)


def test_a_lost_window_is_an_error():
    """A request cannot go on in the middle of a block whose dense tokens are not there."""
    requests = Requests(32, 3)
    number, one = np.array([1]), np.array([0, 1])
    requests.step(number, np.array([0, 70]), np.array([70]), np.array([True]))
    with pytest.raises(RuntimeError, match="goes on after 71 tokens, but its dense window is not known"):
        requests.step(number, one, np.array([72]), np.array([False]))
    names = RequestsByBlock(2)
    begins = np.array([False])
    row = names.rows(np.array([[5, 6]]), np.array([70]), np.array([71]), begins)
    assert begins.all()
    with pytest.raises(RuntimeError, match="goes on after 70 tokens"):
        requests.step(row, one, np.array([71]), begins)


def test_rows_of_requests_that_are_gone_are_given_away(rng):
    names = RequestsByBlock(2)
    for block in range(10):
        begins = np.array([True])
        names.rows(np.array([[block]]), np.array([0]), np.array([10]), begins)
    begins = np.array([False, True])
    rows = names.rows(np.array([[9], [11]]), np.array([10, 0]), np.array([11, 5]), begins)
    assert begins.tolist() == [False, True] and sorted(rows) == [0, 1]


# ---- What is refused -------------------------------------------------------------------------------------------------


def engine(**changes) -> SimpleNamespace:
    """A configuration as vLLM has it."""
    cache = SimpleNamespace(block_size=changes.pop("block_size", 64), cache_dtype=changes.pop("cache_dtype", "auto"))
    names = "decode_context_parallel_size", "prefill_context_parallel_size"
    parallel = SimpleNamespace(**{name: changes.pop(name, 1) for name in names}, enable_dbo=changes.pop("dbo", False))
    fields = {
        "additional_config": {},
        "speculative_config": None,
        "kv_transfer_config": None,
        "use_v2_model_runner": True,
        "device_config": SimpleNamespace(device_type="cuda"),
        **changes,
    }
    return SimpleNamespace(cache_config=cache, parallel_config=parallel, **fields)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 128}, "--block-size must be 64"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype must be one of auto, float16, bfloat16, got fp8"),
        ({"speculative_config": object()}, "--speculative-config is not served"),
        ({"kv_transfer_config": object()}, "--kv-transfer-config is not served"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size must be 1"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size must be 1"),
        ({"dbo": True}, "--enable-dbo is not served"),
        ({"use_v2_model_runner": False}, "VLLM_USE_V2_MODEL_RUNNER must be 1"),
    ],
)
def test_engines_that_are_not_served(changes, message):
    _options.check_engine(engine())
    with pytest.raises(ValueError, match=message):
        _options.check_engine(engine(**changes))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"sparsty": 0.7}, "cute_kernels has no option 'sparsty'; it has sparsity"),
        ({"sparsity": 2}, "cute_kernels: sparsity must be from 0 to 1, got 2"),
        ({"sparsity": "0.7"}, "cute_kernels: sparsity"),
        ({"keep": 65}, "cute_kernels: keep must be from 1 to D = 64"),
        ({"window": -1}, "cute_kernels: window must be at least 0"),
        ([0.7], "cute_kernels must be an object of options"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=f"--additional-config: {message}"):
        _options.page_config(engine(additional_config={"cute_kernels": options}), 2, 64, torch.float16)


def test_options():
    config = _options.page_config(engine(), 2, 128, torch.bfloat16)
    assert (config.key_keep, config.value_keep, config.recent, config.max_append) == (38, 38, 32, 1)
    chosen = {"cute_kernels": {"key_keep": 20, "value_keep": 30, "window": 0}}
    config = _options.page_config(engine(additional_config=chosen), 2, 64, torch.float16)
    assert (config.key_keep, config.value_keep, config.recent) == (20, 30, 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"attn_type": "encoder_decoder"}, "attention of type 'encoder_decoder' is not served"),
        ({"sliding_window": 4096}, r"a sliding window \(4096 tokens\) is not served"),
        ({"alibi_slopes": [1.0]}, "alibi_slopes are not served"),
        ({"logits_soft_cap": 30.0}, r"a logits_soft_cap \(30.0\) is not served"),
        ({"kv_sharing_target_layer_name": "model.layers.0"}, "share the cache of another"),
        ({"others": {"sinks": torch.zeros(4)}}, "sinks is not served"),
    ],
)
def test_layers_that_are_not_served(changes, message):
    layer = {
        "alibi_slopes": None,
        "sliding_window": None,
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "others": {"use_alibi_sqrt": False},
    }
    _options.check_layer(**layer)
    with pytest.raises(ValueError, match=message):
        _options.check_layer(**{**layer, **changes})


def test_blocks_of_another_size_are_refused(rng):
    scheduler = make("cpu")
    scheduler.kv_cache = scheduler.kv_cache[..., :-128]
    with pytest.raises(RuntimeError, match="kv_cache must be contiguous"):
        scheduler.run([(Request(0, 5), 5)])
