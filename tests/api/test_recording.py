"""Calls that are recorded or run on tensors without data: they work as operations, or raise; no kernel gets a null
pointer, and nothing is recorded that gives other results later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cute_kernels as ck
from cute_kernels._storage import tile_reader
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle

SHAPE = (2, 2, 100, 64)
SIZES = {"max_batch": 3, "kv_heads": 2, "head_dim": 64, "capacity": 256, "keep": 20, "device": "cpu"}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def x(rng) -> Tensor:
    return oracle.gaussian(*SHAPE)


def memory(role: str = "key") -> ck.SparseKV:
    return ck.SparseKV.preallocate(SHAPE, torch.float16, role=role, keep=20, device="cpu")


def there_and_back(x: Tensor) -> Tensor:
    return ck.decompress(ck.compress(x, role="key", keep=20))


def into(out: ck.SparseKV) -> Callable[[Tensor], Tensor]:
    return lambda x: ck.decompress(ck.compress(x, role="key", keep=20, out=out))


def pair_into(keys: ck.SparseKV, values: ck.SparseKV) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        pair = ck.compress_kv(x, x * 2, keep=20, out=(keys, values))
        return ck.decompress(pair[0]) + ck.decompress(pair[1])

    return call


def pruned(x: Tensor) -> Tensor:
    return ck.prune(x, keep=20)


RECORDERS: dict[str, Callable[[Callable[[Tensor], Any], Tensor], Any]] = {
    "compile": lambda f, x: torch.compile(f, backend="aot_eager", fullgraph=True),
    "make_fx": lambda f, x: make_fx(f)(x),
    "trace": lambda f, x: torch.jit.trace(f, x),
    "functionalize": lambda f, x: torch.func.functionalize(f),
}
RECORDED = pytest.mark.parametrize("recorder", RECORDERS)
QUIET = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")


@QUIET
@RECORDED
def test_recorded_functions_serve_other_inputs(recorder, x):
    others = oracle.gaussian(*SHAPE)
    kv = ck.compress(x, role="key", keep=20)
    functions = [pruned, lambda x: ck.decompress(kv) + x]
    if recorder in ("compile", "make_fx"):
        functions += [into(memory()), pair_into(memory(), memory("value"))]
    for function in functions:
        recorded = RECORDERS[recorder](function, x)
        assert oracle.same_bits(recorded(others), function(others))


def cache_methods() -> dict[str, Callable[[ck.KVCache, Tensor], Any]]:
    return {
        "prefill": lambda cache, x: cache.prefill(x[:1], x[:1], sequences=[2]),
        "crop": lambda cache, x: cache.crop(50),
        "dense": lambda cache, x: cache.dense(0),
        "fork": lambda cache, x: cache.fork(0),
        "free": lambda cache, x: cache.free(0),
        "reset": lambda cache, x: cache.reset(),
        "reserve": lambda cache, x: cache.reserve(64),
        "grow": lambda cache, x: cache.grow(capacity=512),
        "reorder": lambda cache, x: cache.reorder(list(range(cache.batch))[::-1]),
        "statistics": lambda cache, x: cache.statistics(),
    }


def filled(x: Tensor) -> ck.KVCache:
    cache = ck.KVCache(**SIZES)
    cache.prefill(x, x)
    return cache


@QUIET
@RECORDED
@pytest.mark.parametrize("method", cache_methods())
def test_what_is_no_operation_of_a_cache_raises(recorder, method, x):
    """And changes nothing."""
    cache = filled(x)
    if method == "prefill":
        cache.add()
    before, call = cache.statistics(), cache_methods()[method]
    with pytest.raises(Exception, match="cannot be part of a compiled or traced function") as caught:
        RECORDERS[recorder](lambda x: (call(cache, x), x * 2)[1], x)(x)
    assert isinstance(caught.value, RuntimeError)  # Dynamo's Unsupported is one
    assert cache.statistics() == before and cache.lengths[:2].tolist() == [100, 100]
    torch.testing.assert_close(cache.dense(0)[0], filled(x).dense(0)[0])


@QUIET
@RECORDED
def test_storage_of_unknown_size_is_not_recorded(recorder, x):
    with pytest.raises(RuntimeError, match=r"pass out=SparseKV\.preallocate"):
        RECORDERS[recorder](there_and_back, x)(x)


@QUIET
def test_a_trace_does_not_lose_writes(x):
    cache, out = filled(x), torch.empty(2, 4, 1, 64, dtype=torch.float16)
    kv, q = ck.compress(x, role="value", keep=20), oracle.gaussian(2, 4, 1, 64)
    for call in (
        into(memory()),
        lambda x: cache.step(q, x[:, :, :1], x[:, :, :1]),
        lambda x: ck.sparse_av(torch.ones(2, 4, 1, 100), kv, out=out),
    ):
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
            torch.jit.trace(call, x)
    assert cache.lengths[:2].tolist() == [100, 100]


@pytest.mark.parametrize("function", [there_and_back, pruned, lambda x: filled(x).dense(0)[0] + 1])
def test_compilers_that_may_leave_parts_out_run_everything(function, x):
    compiled = torch.compile(function, backend="aot_eager")
    assert oracle.same_bits(compiled(x), function(x))


def test_fake_tensors_become_fake_results():
    with FakeTensorMode():
        fake = torch.empty(SHAPE, dtype=torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)
        result = ck.prune(fake, sparsity=0.7)
        assert (result.shape, result.dtype) == (SHAPE, torch.bfloat16) and result.is_contiguous()


def test_fake_tensors_meet_real_caches(x):
    cache, kv, out = filled(x), ck.compress(x, role="key", keep=20), memory()
    cache.add()
    before = cache.statistics()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(x)
        assert ck.decompress(kv).shape == SHAPE
        assert ck.compress(fake, role="key", keep=20, out=out) is out
        with pytest.raises(RuntimeError, match=r"pass out=SparseKV\.preallocate"):
            ck.compress(fake, role="key", keep=20)
        for call in cache_methods().values():
            with pytest.raises(RuntimeError, match="cannot be part of a compiled or traced function"):
                call(cache, fake)
        assert cache.step(fake[:, :, :1], fake[:, :, :1], fake[:, :, :1]).shape == (2, 2, 1, 64)
    assert cache.statistics() == before and out.nnz == 0


def test_tensors_without_data_never_reach_a_kernel(x):
    """Caches made under FakeTensorMode."""
    with FakeTensorMode():
        kv = memory()
        with pytest.raises(RuntimeError, match="a KVCache holds memory"):
            ck.KVCache(**SIZES)
    with pytest.raises((RuntimeError, AssertionError)):  # torch's, of tensors that are and are not fake
        ck.compress(x, role="key", keep=20, out=kv)
    with pytest.raises(RuntimeError, match="kernels need tensors with data"):
        storage_of(kv, "kv").view()


def test_tables_are_real_after_a_fake_first_use(x):
    """They are made once and stay."""
    kv = ck.compress(x[..., :40].contiguous(), role="key")
    tile_reader.tile_layout.cache_clear()
    with FakeTensorMode():
        tile_reader.tile_layout("key", 64, "fp16", torch.device("cpu"))
    assert kv.nnz == int((x[..., :40] != 0).sum())
