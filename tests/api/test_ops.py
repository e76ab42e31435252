"""torch.ops.cute_kernels: what torch.compile, FakeTensorMode, torch.export and torch.library.opcheck make of them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels as ck
from cute_kernels._storage.arguments import pack
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle
from tests.support.op_recorder import Recorder

OPS = torch.ops.cute_kernels
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass
class Inputs:
    q: Tensor
    k: ck.SparseKV
    v: ck.SparseKV
    window: tuple[Tensor, Tensor]
    seq_lens: Tensor


def make(device, *, tokens=100, queries=3, room=5, head_dim=64, dtype=torch.float16) -> Inputs:
    x, y = (oracle.gaussian(2, 2, tokens, head_dim, dtype=dtype).to(device) for _ in range(2))
    k, v = ck.compress_kv(x, y, keep=20)
    q = oracle.gaussian(2, 4, queries, head_dim, dtype=dtype).to(device)
    window = tuple(oracle.gaussian(2, 2, room, head_dim, dtype=dtype).to(device) for _ in range(2))
    return Inputs(q, k, v, window, torch.tensor([tokens, tokens // 2], dtype=torch.int32, device=device))


def products(x: Inputs) -> Tensor:
    """A model's attention by products, with elementwise operations that a compiler fuses."""
    p = torch.softmax(ck.sparse_qk(x.q * 2, x.k, scale=0.125), dim=-1)
    return ck.sparse_av(p, x.v) + x.q


def products_out(x: Inputs) -> Tensor:
    logits = torch.empty(2, 4, x.q.shape[2], x.k.shape[2], device=x.q.device)
    ck.sparse_qk(x.q, x.k, scale=0.125, out=logits)
    return ck.sparse_av(torch.softmax(logits, dim=-1), x.v, out=torch.empty_like(x.q)) * 2


def attention(x: Inputs) -> Tensor:
    return ck.sparse_attention(x.q * 2, x.k, x.v, window=x.window, seq_lens=x.seq_lens) + x.q


def attention_lse(x: Inputs) -> tuple[Tensor, ...]:
    return ck.sparse_attention(x.q, x.k, x.v, return_lse=True, causal=False, num_splits=2)


def attention_out(x: Inputs) -> tuple[Tensor, ...]:
    out = torch.empty_like(x.q)
    _, lse = ck.sparse_attention(x.q + 1, x.k, x.v, window=x.window, out=out, return_lse=True)
    return out * 2, lse, ck.sparse_attention(x.q, x.k, x.v, out=torch.empty_like(out))


FUNCTIONS = pytest.mark.parametrize(
    "function", [products, products_out, attention, attention_lse, attention_out], ids=lambda f: f.__name__
)


def assert_close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@DEVICES
@FUNCTIONS
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_compiles_whole(function, dtype, device, rng):
    x = make(device, dtype=dtype)
    assert_close(torch.compile(function, backend="aot_eager", fullgraph=True)(x), function(x))


@DEVICES
@FUNCTIONS
def test_inductor(function, device, rng):
    if not (shutil.which(os.environ.get("CXX", "g++")) if device == "cpu" else importlib.util.find_spec("triton")):
        pytest.skip("inductor has no compiler here")
    x = make(device)
    assert_close(torch.compile(function, fullgraph=True)(x), function(x))


@DEVICES
@pytest.mark.parametrize("backend", ["reference", "cpu", "sm80"])
def test_backends_by_name(backend, device, rng):
    """A backend that cannot serve the call says so when the compiled function runs."""
    x = make(device)

    def function(x):
        return ck.sparse_attention(x.q, x.k, x.v, backend=backend)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    if backend != "reference" and (backend == "cpu") != (device == "cpu"):
        with pytest.raises(RuntimeError, match=f"backend '{backend}'"):
            compiled(x)
    else:
        assert_close(compiled(x), function(x))


def test_sizes_change_without_end():
    """Caches and queries that grow: a few graphs serve them all."""
    torch.manual_seed(0)  # which of a cache's numbers happen to be alike decides what is held fixed at first
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x: (products(x), attention(x)), backend=counter, fullgraph=True)
    sizes = [(tokens, queries) for tokens in (100, 130, 131, 200, 1000, 64, 65) for queries in (1, 2, 5)]
    with torch._dynamo.config.patch(recompile_limit=len(sizes)):
        for tokens, queries in sizes:
            x = make("cpu", tokens=tokens, queries=queries, room=tokens // 9)
            assert_close(compiled(x), (products(x), attention(x)))
    assert counter.frame_count <= len(sizes) // 2


def test_bad_arguments_raise_as_they_do_uncompiled(rng):
    x = make("cpu")
    for error, bad in (
        (ValueError, lambda x: ck.sparse_qk(x.q[..., :-8], x.k)),
        (ValueError, lambda x: ck.sparse_qk(x.q, x.v)),
        (ValueError, lambda x: ck.sparse_qk(x.q, x.k, backend="none")),
        (ValueError, lambda x: ck.sparse_av(x.q, x.v)),
        (TypeError, lambda x: ck.sparse_attention(x.q.float(), x.k, x.v)),
        (ValueError, lambda x: ck.sparse_attention(x.q, x.k, x.v, num_splits=0)),
    ):
        with pytest.raises(error, match="must"):
            torch.compile(bad, backend="eager")(x)


# ---- The operations themselves ---------------------------------------------------------------------------------------


def calls(x: Inputs, backend: str = "auto") -> dict[str, tuple]:
    """The arguments of every operation."""
    keys, values = pack(storage_of(x.k, "k")), pack(storage_of(x.v, "v"))
    tokens, head_dim = x.k.shape[2:]
    p = torch.rand(*x.q.shape[:3], tokens, device=x.q.device)
    call = x.q, *keys, *values, *x.window, x.seq_lens, tokens, 0.125, True, 0, backend
    bare = x.q, *keys, *values, None, None, None, tokens, 0.125, False, 3, backend
    lse = torch.empty(x.q.shape[:3], device=x.q.device)
    shape = torch.Size((2, 2, 100, 64))
    dense = [oracle.gaussian(*shape, dtype=x.q.dtype).to(x.q.device) for _ in range(2)]
    codec = {torch.float16: "fp16", torch.bfloat16: "bf16"}[x.q.dtype]

    def memory(role):
        storage = storage_of(ck.SparseKV.preallocate(shape, x.q.dtype, role=role, device=x.q.device), role)
        return [*storage.tensors().values(), storage.totals], storage.max_tile_rows

    return {
        "prune": (dense[0].transpose(0, 1), 20),
        "compress_out": (dense[0], "value", 20, False, codec, *memory("value")),
        "compress_kv_out": (*dense, 20, False, codec, *memory("key"), 10, False, codec, *memory("value")),
        "decompress": (*keys, "key", tokens, head_dim),
        "sparse_qk": (x.q, *keys, tokens, 0.5, torch.bfloat16, backend),
        "sparse_qk_out": (x.q, *keys, 0.5, backend, torch.empty_like(p)),
        "sparse_av": (p, *values, head_dim, backend),
        "sparse_av_out": (p, *values, backend, torch.empty_like(x.q)),
        "sparse_attention": call,
        "sparse_attention_lse": bare,
        "sparse_attention_out": (*call, torch.empty_like(x.q), lse),
    }


@DEVICES
@pytest.mark.parametrize("name", calls(make("cpu")))
def test_opcheck(name, device, rng):
    x = make(device)
    torch.library.opcheck(getattr(OPS, name).default, calls(x)[name])
    x.q.requires_grad_()
    torch.library.opcheck(getattr(OPS, name).default, calls(x)[name])


def results(function, x: Inputs) -> list[Tensor]:
    found = function(x)
    return list(found) if isinstance(found, tuple) else [found]


@DEVICES
@FUNCTIONS
def test_calls_without_torch_library(function, device, rng):
    """Plain tensors go to the kernels at once, with the same bits as by the operations; whoever watches sees these."""
    x = make(device)
    with torch.profiler.profile() as profile:
        dispatched = results(function, x)
    assert any(event.key.startswith("cute_kernels::") for event in profile.key_averages())
    with Recorder() as recorder:
        recorded = results(function, x)
    assert all(name in calls(x) for name in recorder.names) and recorder.names
    direct = results(function, x)
    for others in (dispatched, recorded):
        assert all(oracle.same_bits(a, b) for a, b in zip(direct, others, strict=True))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("transform", ["functionalize", "trace", "subclass"])
def test_transforms(transform, rng):
    x = make("cpu")

    def function(q):
        return ck.sparse_attention(q, x.k, x.v) + ck.sparse_av(torch.softmax(ck.sparse_qk(q, x.k), -1), x.v)

    with torch.no_grad():
        if transform == "functionalize":
            actual = torch.func.functionalize(function)(x.q)
        elif transform == "trace":
            actual = torch.jit.trace(function, x.q)(x.q)
        else:
            actual = function(x.q.as_subclass(type("Subclass", (Tensor,), {}))).as_subclass(Tensor)
        assert_close(actual, function(x.q))


def test_every_operation_is_checked():
    names = {
        name.removeprefix("cute_kernels::") for name in torch._C._dispatch_get_all_op_names() if "cute_ker" in name
    }
    assert {name.split(".")[0] for name in names} >= set(calls(make("cpu")))


@pytest.mark.parametrize("queries, tokens, room", [(0, 100, 5), (3, 0, 0), (1, 65, 0)])
def test_fake_tensors(queries, tokens, room, rng):
    """Shapes, dtypes and strides of results without data are those of results with data."""
    x = make("cpu", queries=queries, tokens=tokens, room=room)
    mode = FakeTensorMode()

    def fake(value):
        if isinstance(value, list):
            return [fake(item) for item in value]
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    for name, arguments in calls(x).items():
        real = getattr(OPS, name).default(*arguments)
        with mode:
            pretended = getattr(OPS, name).default(*map(fake, arguments))
        for one, other in zip(*(r if isinstance(r, (tuple, list)) else (r,) for r in (real, pretended))):
            if one is not None:
                assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_public_functions_take_fake_tensors(rng):
    x = make("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q = mode.from_tensor(x.q)
        assert ck.sparse_attention(q, x.k, x.v, window=x.window).shape == q.shape
        assert ck.sparse_qk(q, x.k).shape == (2, 4, 3, 100)
        assert ck.sparse_qk(q, x.k, out=q.new_empty(2, 4, 3, 100, dtype=torch.float32)).shape == (2, 4, 3, 100)


def test_export(rng):
    """A module that holds its caches."""
    x = make("cpu")

    class Attention(torch.nn.Module):
        def forward(self, q):
            return ck.sparse_attention(q, x.k, x.v)

    program = torch.export.export(Attention(), (x.q,), strict=False)
    assert any(node.target is OPS.sparse_attention.default for node in program.graph.nodes)
    assert_close(program.module()(x.q), ck.sparse_attention(x.q, x.k, x.v))


def test_an_operation_checks_what_only_data_show(rng):
    x = make("cpu")
    arguments = calls(x)
    with pytest.raises(ValueError, match="out must not share memory with q"):
        OPS.sparse_attention_out(*arguments["sparse_attention_out"][:-2], x.q, None)
    with pytest.raises(RuntimeError, match="sm90"):
        OPS.sparse_qk(*arguments["sparse_qk"][:-1], "sm90")
    x.seq_lens[0] = 101
    with pytest.raises(ValueError, match="seq_lens must be from 0 to T = 100, got 50 to 101"):
        OPS.sparse_attention(*arguments["sparse_attention"])
