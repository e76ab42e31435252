"""Bad input: the class of the error, and a message that names the argument. Nothing may be launched before it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels._runtime.extension import _C
from tests.support import oracle

B, HQ, HKV, SQ, T, D = 2, 4, 2, 3, 70, 64


def dense(*shape, dtype=torch.float16):
    return oracle.gaussian(*(shape or (B, HKV, T, D)), dtype=dtype)


X = dense()
K, V = ck.compress_kv(X, X, keep=20)
BF16_V = ck.compress(X.bfloat16(), role="value", keep=20)
SHORT_V = ck.compress(X[:, :, :60], role="value", keep=20)
Q = dense(B, HQ, SQ, D)
P = torch.rand(B, HQ, SQ, T)
LOGITS = torch.empty(B, HQ, SQ, T)
OUT = torch.empty(B, HQ, SQ, D, dtype=torch.float16)
META = torch.device("meta")
NESTED = torch.nested.nested_tensor([X[0], X[1, :, :9]])  # says that its layout is strided
HUGE = 10**5000  # more digits than Python writes
PAIR = np.array([1, 2])  # of which neither == nor `in` makes a bool
NAN, INF = float("nan"), float("inf")


def column_major(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def overlapping_out() -> dict:
    """q and out in one piece of memory, 8 elements of each in common."""
    memory = torch.zeros(B * HQ * SQ * (D + T), dtype=torch.float16)
    q = memory[: Q.numel()].view(Q.shape)
    return {"q": q, "out": memory[Q.numel() - 8 :][: LOGITS.numel()].view(LOGITS.shape), "out_dtype": torch.float16}


def overlapping_av() -> dict:
    memory = torch.zeros(B * HQ * SQ * (D + T), dtype=torch.float16)
    return {"p": memory[: P.numel()].view(P.shape), "out": memory[P.numel() - 8 :][: OUT.numel()].view(OUT.shape)}


# What every function that prunes refuses of its dense argument.
BAD_DENSE = [
    (TypeError, [1.0]),
    (TypeError, None),
    (TypeError, X.numpy()),
    (TypeError, X.float()),
    (TypeError, X.double()),
    (TypeError, X.to(torch.int16)),
    (TypeError, X.to_sparse()),
    (TypeError, NESTED),
    (ValueError, X[0]),
    (ValueError, X[None]),
    (ValueError, dense(B, HKV, T, 60)),
    (ValueError, dense(B, HKV, T, 0)),
    (ValueError, dense(B, HKV, T, 264)),
    (ValueError, column_major(X)),
    (ValueError, X.repeat_interleave(2, -1)[..., ::2]),
    (ValueError, X[..., :1].expand(B, HKV, T, D)),
    (ValueError, X.to(META)),
]
BAD_AMOUNTS = [
    (TypeError, "sparsity", {"sparsity": "0.5"}),
    (TypeError, "sparsity", {"sparsity": True}),
    (TypeError, "sparsity", {"sparsity": torch.tensor(0.5)}),
    (ValueError, "sparsity", {"sparsity": -0.01}),
    (ValueError, "sparsity", {"sparsity": 1.01}),
    (ValueError, "sparsity", {"sparsity": NAN}),
    (ValueError, "sparsity", {"sparsity": INF}),
    (TypeError, "keep", {"keep": 1.0}),
    (TypeError, "keep", {"keep": "38"}),
    (TypeError, "keep", {"keep": True}),
    (TypeError, "keep", {"keep": torch.tensor(True)}),
    (ValueError, "keep", {"keep": 0}),
    (ValueError, "keep", {"keep": -1}),
    (ValueError, "keep", {"keep": D + 1}),
    (ValueError, "keep", {"keep": 2**70}),
    (ValueError, "keep", {"keep": HUGE}),
    (TypeError, "keep", {"keep": PAIR}),
    (TypeError, "keep", {"keep": torch.tensor(20, device=META)}),
    (TypeError, "sparsity", {"sparsity": PAIR}),
    (ValueError, "sparsity and keep", {"keep": 20, "sparsity": 0.5}),
    (ValueError, "sparsity and keep", {"keep": HUGE, "sparsity": 0.5}),
    (ValueError, "'magnitude'", {"method": "largest"}),
    (ValueError, "'magnitude'", {"method": None}),
    (ValueError, "'magnitude'", {"method": ["magnitude"]}),
    (ValueError, "'magnitude'", {"method": PAIR}),
    (ValueError, "'magnitude'", {"method": HUGE}),
]


def refused(error, mentions: str | None, call, *args, **kwargs) -> str:
    with pytest.raises(error, match=mentions and re.escape(mentions)) as caught:
        call(*args, **kwargs)
    assert caught.type is error
    return str(caught.value)


@pytest.mark.parametrize("error, x", BAD_DENSE, ids=range(len(BAD_DENSE)))
def test_dense_argument(error, x):
    refused(error, "x must", ck.prune, x, keep=20)
    refused(error, "x must", ck.compress, x, role="key", keep=20)
    refused(error, "k must", ck.compress_kv, x, X, keep=20)
    refused(error, "v must", ck.compress_kv, X, x, keep=20)


@pytest.mark.parametrize("error, mentions, arguments", BAD_AMOUNTS, ids=range(len(BAD_AMOUNTS)))
def test_amounts(error, mentions, arguments):
    refused(error, mentions, ck.prune, X, **arguments)
    refused(error, mentions, ck.compress, X, role="key", **arguments)
    refused(error, mentions, ck.compress_kv, X, X, **arguments)


@pytest.mark.parametrize("role", ["query", "keys", "", None, 0, ["key"], HUGE, PAIR], ids=range(8))
def test_role(role):
    refused(ValueError, "role must be 'key' or 'value'", ck.compress, X, role=role)


def test_role_is_required():
    refused(TypeError, "role", ck.compress, X)


def test_options_are_keywords():
    refused(TypeError, None, ck.prune, X, 0.5)
    refused(TypeError, None, ck.compress, X, "key")
    refused(TypeError, None, ck.sparse_qk, Q, K, 1.0)


@pytest.mark.parametrize("name", ["key_keep", "value_keep"])
def test_amounts_of_a_pair(name):
    refused(ValueError, name, ck.compress_kv, X, X, **{name: 0})
    refused(ValueError, name, ck.compress_kv, X, X, **{name: D + 1})
    refused(TypeError, name, ck.compress_kv, X, X, **{name: 0.5})


def test_pair_must_agree():
    refused(TypeError, "v must be float16", ck.compress_kv, X, X.bfloat16(), keep=20)
    refused(ValueError, "v must have the shape of k", ck.compress_kv, X, X[:, :, :-1], keep=20)
    refused(ValueError, "v must have the shape of k", ck.compress_kv, X, X[..., :56], keep=20)


@pytest.mark.parametrize("value", [None, X, "kv"])
def test_decompress(value):
    refused(TypeError, "kv must be a SparseKV", ck.decompress, value)


QK = [
    (TypeError, "k must be a SparseKV", {"k": X}),
    (TypeError, "k must be a SparseKV", {"k": None}),
    (ValueError, "k must be a SparseKV of role 'key'", {"k": V}),
    (TypeError, "q must be a torch.Tensor", {"q": Q.numpy()}),
    (TypeError, "q must be", {"q": Q.to_sparse()}),
    (TypeError, "q must be", {"q": NESTED}),
    (TypeError, "q must be float16", {"q": Q.float()}),
    (TypeError, "q must be float16", {"q": Q.bfloat16()}),
    (ValueError, "q must have shape", {"q": Q[0]}),
    (ValueError, "q must have shape", {"q": Q[:1]}),
    (ValueError, "q must have shape", {"q": Q[..., :56]}),
    (ValueError, "Hkv = 2", {"q": Q[:, :3]}),
    (ValueError, "stride 1", {"q": column_major(Q)}),
    (ValueError, "q must be on the device of k", {"q": Q.to(META)}),
    (TypeError, "scale", {"scale": "1"}),
    (TypeError, "scale", {"scale": None}),
    (TypeError, "scale", {"scale": 1j}),
    (TypeError, "scale", {"scale": True}),
    (TypeError, "scale", {"scale": torch.ones(())}),
    (TypeError, "scale", {"scale": PAIR}),
    (ValueError, "scale", {"scale": NAN}),
    (ValueError, "scale", {"scale": INF}),
    (ValueError, "scale", {"scale": -INF}),
    (ValueError, "scale", {"scale": 1e39}),
    (TypeError, "out_dtype", {"out_dtype": torch.float64}),
    (TypeError, "out_dtype", {"out_dtype": torch.int8}),
    (TypeError, "out_dtype", {"out_dtype": "float32"}),
    (TypeError, "out_dtype", {"out_dtype": None}),
    (TypeError, "out_dtype", {"out_dtype": PAIR}),
    (TypeError, "out_dtype", {"out_dtype": HUGE}),
    (TypeError, "out must be a torch.Tensor", {"out": [1]}),
    (TypeError, "out must be float32", {"out": LOGITS.half()}),
    (TypeError, "out must be float16", {"out": LOGITS, "out_dtype": torch.float16}),
    (ValueError, "out must have shape", {"out": LOGITS[..., :-1]}),
    (ValueError, "out must have shape", {"out": LOGITS[None]}),
    (ValueError, "out must be contiguous", {"out": column_major(LOGITS)}),
    (ValueError, "out must be contiguous", {"out": torch.empty(1).expand(LOGITS.shape)}),
    (ValueError, "out must be on the device", {"out": LOGITS.to(META)}),
    (ValueError, "out must not have a pending negation", {"out": torch._neg_view(LOGITS)}),
    (ValueError, "out must not share memory with q", overlapping_out()),
    (TypeError, "backend", {"backend": None}),
    (ValueError, "backend", {"backend": "cuda"}),
]
AV = [
    (TypeError, "v must be a SparseKV", {"v": X}),
    (ValueError, "v must be a SparseKV of role 'value'", {"v": K}),
    (TypeError, "p must be a torch.Tensor", {"p": P.tolist()}),
    (TypeError, "p must be float32", {"p": P.double()}),
    (TypeError, "p must be float32", {"p": P.int()}),
    (ValueError, "p must have shape", {"p": P[0]}),
    (ValueError, "p must have shape", {"p": P[:1]}),
    (ValueError, "p must have shape", {"p": P[..., :-1]}),
    (ValueError, "Hkv = 2", {"p": P[:, :3]}),
    (ValueError, "stride 1", {"p": column_major(P)}),
    (ValueError, "p must be on the device of v", {"p": P.to(META)}),
    (TypeError, "out must be float16", {"out": OUT.float()}),
    (TypeError, "out must be bfloat16", {"out": OUT, "v": BF16_V}),
    (ValueError, "out must have shape", {"out": OUT[..., :-1]}),
    (ValueError, "out must be contiguous", {"out": column_major(OUT)}),
    (ValueError, "out must be on the device", {"out": OUT.to(META)}),
    (ValueError, "out must not have a pending negation", {"out": torch._neg_view(OUT)}),
    (ValueError, "out must not share memory with p", overlapping_av()),
    (TypeError, "backend", {"backend": 80}),
    (TypeError, "backend", {"backend": PAIR}),
    (ValueError, "backend", {"backend": "SM80"}),
]
WINDOW = dense(B, HKV, 5, D)
SEQ_LENS = torch.tensor([T, 3], dtype=torch.int32)
ATTENTION = [
    (TypeError, "k must be a SparseKV", {"k": X}),
    (TypeError, "v must be a SparseKV", {"v": X}),
    (ValueError, "role 'key'", {"k": V}),
    (ValueError, "role 'value'", {"v": K}),
    (TypeError, "v must have the dtype of k", {"v": BF16_V}),
    (TypeError, "q must be a dense", {"q": Q.to_sparse()}),
    (TypeError, "q must be a dense", {"q": NESTED}),
    (ValueError, "v must have the shape of k", {"v": SHORT_V}),
    (TypeError, "q must be float16", {"q": Q.float()}),
    (ValueError, "q must have shape", {"q": Q[..., :56]}),
    (ValueError, "Hkv = 2", {"q": Q[:, :3]}),
    (ValueError, "stride 1", {"q": column_major(Q)}),
    (TypeError, "scale", {"scale": "1"}),
    (TypeError, "scale", {"scale": PAIR}),
    (TypeError, "scale", {"scale": Q}),
    (ValueError, "scale", {"scale": NAN}),
    (TypeError, "window", {"window": WINDOW}),
    (TypeError, "window[0]", {"window": (NESTED, NESTED)}),
    (TypeError, "window", {"window": True}),
    (ValueError, "window", {"window": (WINDOW,)}),
    (TypeError, "window[1]", {"window": (WINDOW, None)}),
    (TypeError, "window[0]", {"window": (WINDOW.float(), WINDOW)}),
    (TypeError, "window[1]", {"window": (WINDOW, WINDOW.to_sparse())}),
    (ValueError, "window[0]", {"window": (WINDOW[:1], WINDOW)}),
    (ValueError, "window[1]", {"window": (WINDOW, WINDOW[..., :56])}),
    (ValueError, "window[1]", {"window": (WINDOW, WINDOW[:, :, :4])}),
    (ValueError, "window[1]", {"window": (WINDOW, column_major(WINDOW))}),
    (ValueError, "window[0]", {"window": (WINDOW.to(META), WINDOW)}),
    (TypeError, "seq_lens", {"seq_lens": [T, 3]}),
    (TypeError, "seq_lens", {"seq_lens": SEQ_LENS.long()}),
    (TypeError, "seq_lens", {"seq_lens": SEQ_LENS.to_sparse()}),
    (ValueError, "seq_lens", {"seq_lens": SEQ_LENS[:1]}),
    (ValueError, "seq_lens", {"seq_lens": SEQ_LENS[:, None]}),
    (ValueError, "seq_lens", {"seq_lens": SEQ_LENS.to(META)}),
    (TypeError, "seq_lens", {"seq_lens": NESTED}),
    (ValueError, "seq_lens", {"seq_lens": SEQ_LENS + 1}),
    (ValueError, "seq_lens", {"seq_lens": SEQ_LENS - 4}),
    (TypeError, "causal", {"causal": 1}),
    (TypeError, "causal", {"causal": None}),
    (TypeError, "causal", {"causal": torch.tensor([True, True])}),
    (TypeError, "return_lse", {"return_lse": "yes"}),
    (TypeError, "return_lse", {"return_lse": PAIR}),
    (TypeError, "num_splits", {"num_splits": 1.5}),
    (TypeError, "num_splits", {"num_splits": PAIR}),
    (ValueError, "num_splits", {"num_splits": HUGE}),
    (ValueError, "num_splits", {"num_splits": 0}),
    (TypeError, "out must be float16", {"out": OUT.float()}),
    (ValueError, "out must have shape", {"out": OUT[..., :-1]}),
    (ValueError, "out must not share memory with q", {"out": Q}),
    (ValueError, "out must not have a pending negation", {"out": torch._neg_view(OUT)}),
    (ValueError, "out must be contiguous", {"out": column_major(OUT)}),
    (TypeError, "backend", {"backend": None}),
    (TypeError, "backend", {"backend": PAIR}),
    (ValueError, "backend", {"backend": "flash"}),
]


@pytest.mark.parametrize("error, mentions, changes", QK, ids=range(len(QK)))
def test_sparse_qk(error, mentions, changes):
    refused(error, mentions, ck.sparse_qk, **{"q": Q, "k": K, **changes})


@pytest.mark.parametrize("error, mentions, changes", AV, ids=range(len(AV)))
def test_sparse_av(error, mentions, changes):
    refused(error, mentions, ck.sparse_av, **{"p": P, "v": V, **changes})


@pytest.mark.parametrize("error, mentions, changes", ATTENTION, ids=range(len(ATTENTION)))
def test_sparse_attention(error, mentions, changes):
    refused(error, mentions, ck.sparse_attention, **{"q": Q, "k": K, "v": V, "backend": "reference", **changes})


@pytest.mark.parametrize("error, mentions, changes", ATTENTION, ids=range(len(ATTENTION)))
def test_sparse_attention_after_a_right_call(error, mentions, changes, monkeypatch):
    """As without it, word by word."""
    k, v = (ck.SparseKV.from_state_dict(kv.state_dict()) for kv in (K, V))
    right = {"q": Q, "k": k, "v": v, "scale": 1.0, "window": (WINDOW, WINDOW), "seq_lens": SEQ_LENS, "num_splits": 2}
    wrong = {**right, "backend": "cpu", **changes}
    first = refused(error, mentions, ck.sparse_attention, **wrong)
    for _ in range(2):
        ck.sparse_attention(**right, backend="cpu")
    monkeypatch.setattr(_C.cpu, "attention", lambda *_: pytest.fail("launched"))
    assert refused(error, mentions, ck.sparse_attention, **wrong) == first


def test_an_array_in_a_right_call_does_not_spoil_the_next():
    k, v = (ck.SparseKV.from_state_dict(kv.state_dict()) for kv in (K, V))
    first = ck.sparse_attention(Q, k, v, num_splits=np.array(2), backend="cpu")
    refused(TypeError, "num_splits", ck.sparse_attention, Q, k, v, num_splits=PAIR, backend="cpu")
    assert torch.equal(ck.sparse_attention(Q, k, v, num_splits=2, backend="cpu"), first)


NOT_DEVICES = [
    (TypeError, (1,)),
    (TypeError, None),
    (TypeError, True),
    (TypeError, PAIR),
    (TypeError, X),
    (ValueError, "meta"),
    (ValueError, "gpu"),
    (ValueError, "cuda:300"),  # which torch takes for cuda:44
    (ValueError, -1),
    (ValueError, 300),
    (ValueError, 2**70),
    (ValueError, HUGE),
]


@pytest.mark.parametrize("error, device", NOT_DEVICES, ids=range(len(NOT_DEVICES)))
def test_device(error, device):
    refused(error, "device must", K.to, device)
    refused(error, "device must", ck.SparseKV.preallocate, (1, 1, 64, 64), role="key", device=device)
    refused(error, "device must", ck.KVCache, max_batch=1, kv_heads=1, head_dim=64, capacity=64, device=device)


def test_the_cpu_has_no_number():
    assert K.to("cpu:0") is K
    cache = ck.KVCache(max_batch=B, kv_heads=HKV, head_dim=D, capacity=T, device="cpu:0")
    cache.prefill(X, X)
    assert cache.device == X.device


@pytest.mark.gpu
def test_a_gpu_that_is_not_there():
    refused(ValueError, "device must be one of torch's", K.to, "cuda:99")
    refused(ValueError, "device must be one of torch's", K.to, 99)
    assert K.to(np.int64(0)).device == torch.device("cuda", 0)


def test_what_the_tables_start_from_is_right():
    ck.sparse_qk(Q, K, out=LOGITS)
    ck.sparse_av(P, V, out=OUT)
    ck.sparse_attention(Q, K, V, window=(WINDOW, WINDOW), seq_lens=SEQ_LENS, num_splits=2, out=OUT, backend="reference")


def test_refused_calls_write_nothing():
    out = torch.full_like(LOGITS, 5)
    refused(ValueError, "scale", ck.sparse_qk, Q, K, scale=NAN, out=out)
    refused(ValueError, "backend", ck.sparse_qk, Q, K, backend="none", out=out)
    assert (out == 5).all()


def test_messages_say_what_was_given():
    assert "got float32" in refused(TypeError, "q", ck.sparse_qk, Q.float(), K)
    assert "(2, 4, 3, 56)" in refused(ValueError, "q", ck.sparse_qk, Q[..., :56], K)
    assert "got 3" in refused(ValueError, "q", ck.sparse_qk, Q[:, :3], K)
    assert "got 60" in refused(ValueError, "x", ck.prune, dense(B, HKV, T, 60))
    assert "'largest'" in refused(ValueError, "method", ck.prune, X, method="largest")


@pytest.mark.gpu
def test_devices_must_agree():
    on_gpu = K.to("cuda")
    refused(ValueError, "q must be on the device of k", ck.sparse_qk, Q, on_gpu)
    refused(ValueError, "q must be on the device of k", ck.sparse_qk, Q.cuda(), K)
    refused(ValueError, "p must be on the device of v", ck.sparse_av, P.cuda(), V)
    refused(ValueError, "out must be on the device", ck.sparse_qk, Q.cuda(), on_gpu, out=LOGITS)
    refused(ValueError, "v must be on the device of k", ck.compress_kv, X, X.cuda())
    refused(ValueError, "v must be on the device of k", ck.sparse_attention, Q, K, V.to("cuda"), backend="reference")
    refused(ValueError, "seq_lens", ck.sparse_attention, Q, K, V, seq_lens=SEQ_LENS.cuda(), backend="reference")
