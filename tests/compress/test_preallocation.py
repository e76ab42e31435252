"""SparseKV.preallocate, and compress and compress_kv with `out`: the storage that they would make without."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels._storage.tile_reader import decompress as decompress_reference
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle

ROLES = ["key", "value"]
TENSORS = ["blocks", "row_offsets", "token_order", "channel_order"]


def same(a: ck.SparseKV, b: ck.SparseKV) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first["metadata"] == second["metadata"] and all(
        torch.equal(first[n].cpu(), second[n].cpu()) for n in TENSORS
    )


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("shape", [(2, 3, 200, 128), (1, 2, 65, 80), (2, 2, 0, 64), (0, 1, 5, 256)])
@pytest.mark.parametrize("keep", [None, 3, 20])
def test_starts_as_zeros(shape, role, keep, device):
    kv = ck.SparseKV.preallocate(shape, torch.bfloat16, role=role, keep=keep, device=device)
    assert tuple(kv.shape) == shape and kv.dtype == torch.bfloat16 and kv.role == role
    assert kv.device.type == device.type and kv.nnz == 0
    kv.validate()
    assert not ck.decompress(kv).any() and not decompress_reference(storage_of(kv, "kv")).any()
    assert same(kv, ck.compress(torch.zeros(shape, dtype=torch.bfloat16), role=role)) or shape[2] % 64


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 80, 128, 256])
@pytest.mark.parametrize("role", ROLES)
def test_fills_as_often_as_one_likes(role, head_dim, dtype, device, rng):
    shape = (2, 2, rng.randrange(1, 300), head_dim)
    keep = rng.randrange(1, head_dim + 1)
    out = ck.SparseKV.preallocate(shape, dtype, role=role, keep=keep, device=device)
    for x in (
        oracle.gaussian(*shape, dtype=dtype),
        torch.zeros(shape, dtype=dtype),
        oracle.random_bits(*shape, dtype=dtype),
        torch.ones(shape, dtype=dtype),
    ):
        for kept in (keep, 1):
            expected = ck.compress(x, role=role, keep=kept)
            assert ck.compress(x.to(device), role=role, keep=kept, out=out) is out
            assert same(out, expected)
            assert out.nnz == expected.nnz and out.nbytes == expected.nbytes
            assert out.max_tile_rows == expected.max_tile_rows and out.bits_per_element == expected.bits_per_element
            assert oracle.same_bits(ck.decompress(out), oracle.prune(x, kept))
    out.validate()
    assert repr(out) == repr(out.to_exact_size())


@pytest.mark.parametrize("keep", [None, 20])
@pytest.mark.parametrize("shape", [(2, 3, 200, 128), (1, 2, 0, 64)])
def test_copies_are_preallocated_alike(shape, keep, device, rng):
    """And pickles hold no more than the content."""
    out = ck.SparseKV.preallocate(shape, role="value", keep=keep, device=device)
    x, y = (oracle.gaussian(*shape).to(device) for _ in range(2))
    ck.compress(x, role="value", keep=10, out=out)
    pickled = pickle.dumps(out)
    assert len(pickled) < out.nbytes + 10_000
    for other in (pickle.loads(pickled), copy.deepcopy(out)):
        assert same(other, out) and other.device == out.device
        storage, of = storage_of(other, "other"), storage_of(out, "out")
        assert (storage.keep, storage.max_tile_rows) == (of.keep, of.max_tile_rows)
        assert storage.blocks.shape == of.blocks.shape
        assert ck.compress(y, role="value", keep=20, out=other) is other
        assert same(other, ck.compress(y, role="value", keep=20))
        other.validate()
        if keep:
            with pytest.raises(ValueError, match="preallocated for 20 elements a token, 21 are to be kept"):
                ck.compress(y, role="value", keep=21, out=other)
    assert same(out, ck.compress(x, role="value", keep=10))


def test_made_in_inference_mode(device, rng):
    """It is written to outside of it, and so are its copies."""
    x = oracle.gaussian(1, 2, 100, 64).to(device)
    with torch.inference_mode():
        made = ck.SparseKV.preallocate(x.shape, role="key", device=device)
        copies = made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))
    for out in copies:
        ck.compress(x, role="key", out=out)
        assert oracle.same_bits(ck.decompress(out), x)


@pytest.mark.parametrize("role", ROLES)
def test_takes_any_pattern_without_keep(role, device, rng):
    shape = (1, 2, 130, 128)
    out = ck.SparseKV.preallocate(shape, role=role, device=device)
    for x in (oracle.random_bits(*shape), oracle.gaussian(*shape).abs() + 1):
        for keep in (None, 128, 38):
            assert same(ck.compress(x.to(device), role=role, keep=keep, out=out), ck.compress(x, role=role, keep=keep))


def test_pair(device, rng):
    k, v = oracle.gaussian(2, 2, 150, 128), oracle.random_bits(2, 2, 150, 128)
    out = (
        ck.SparseKV.preallocate(k.shape, role="key", keep=64, device=device),
        ck.SparseKV.preallocate(k.shape, role="value", sparsity=0.7, device=device),
    )
    for _ in range(2):
        filled = ck.compress_kv(k.to(device), v.to(device), key_keep=64, value_keep=38, out=out)
        assert filled[0] is out[0] and filled[1] is out[1]
        expected = ck.compress_kv(k, v, key_keep=64, value_keep=38)
        assert same(filled[0], expected[0]) and same(filled[1], expected[1])
        k, v = v, k


def test_products(backend, rng):
    x = oracle.gaussian(2, 2, 150, 128)
    q, p = oracle.gaussian(2, 8, 1, 128).to(backend.device), torch.rand(2, 8, 1, 150).to(backend.device)
    k, v = (ck.SparseKV.preallocate(x.shape, role=role, keep=38, device=backend.device) for role in ROLES)
    ck.compress_kv(x.to(backend.device), x.to(backend.device), keep=38, out=(k, v))
    dense = oracle.prune(x, 38)
    assert oracle.relative_error(ck.sparse_qk(q, k, backend=backend.name), oracle.qk(q, dense)) <= 1e-3
    assert oracle.relative_error(ck.sparse_av(p, v, backend=backend.name), oracle.av(p, dense)) <= 2e-3


def test_exact_copies(device, rng):
    x = oracle.gaussian(1, 2, 150, 64)
    out = ck.SparseKV.preallocate(x.shape, role="key", keep=20, device=device)
    first = ck.compress(x.to(device), role="key", keep=20, out=out).to_exact_size()
    assert first.to_exact_size() is first and same(first, out) and first.to("cpu").nnz == out.nnz
    assert out.to(device) is out
    loaded = ck.SparseKV.from_state_dict(out.state_dict())
    assert same(loaded, first)
    ck.compress(2 * x.to(device), role="key", keep=20, out=out)
    assert oracle.same_bits(ck.decompress(first), oracle.prune(x, 20)), "the copy is one"


# ---- Refusals --------------------------------------------------------------------------------------------------------

X = torch.ones(1, 2, 100, 64, dtype=torch.float16)


def preallocated(shape=X.shape, dtype=torch.float16, role="key", keep=20) -> ck.SparseKV:
    return ck.SparseKV.preallocate(shape, dtype, role=role, keep=keep, device="cpu")


@pytest.mark.parametrize(
    "error, mentions, make",
    [
        (TypeError, "out must be a SparseKV", lambda: X),
        (ValueError, "preallocate", lambda: ck.compress(X, role="key", keep=20)),
        (ValueError, "role 'key'", lambda: preallocated(role="value")),
        (TypeError, "out must be float16", lambda: preallocated(dtype=torch.bfloat16)),
        (ValueError, "shape of x", lambda: preallocated((1, 2, 101, 64))),
        (ValueError, "shape of x", lambda: preallocated((1, 2, 100, 56))),
        (ValueError, "19 elements a token", lambda: preallocated(keep=19)),
    ],
)
def test_out_that_does_not_fit(error, mentions, make):
    with pytest.raises(error, match=mentions):
        ck.compress(X, role="key", keep=20, out=make())


def test_out_without_bound():
    with pytest.raises(ValueError, match="all nonzeros"):
        ck.compress(X, role="key", out=preallocated())


@pytest.mark.parametrize(
    "error, make",
    [
        (TypeError, lambda: preallocated()),
        (ValueError, lambda: (preallocated(),)),
        (ValueError, lambda: (preallocated(), preallocated())),
        (TypeError, lambda: (preallocated(), None)),
    ],
)
def test_pair_that_does_not_fit(error, make):
    with pytest.raises(error, match="out"):
        ck.compress_kv(X, X, keep=20, out=make())


@pytest.mark.parametrize(
    "error, arguments",
    [
        (TypeError, {"shape": 5}),
        (TypeError, {"shape": (1, 2, 3.5, 64)}),
        (ValueError, {"shape": (1, 2, 64)}),
        (ValueError, {"shape": (1, 2, -1, 64)}),
        (ValueError, {"shape": (1, 2, 3, 63)}),
        (ValueError, {"shape": (1 << 15, 1 << 15, 64, 64)}),
        (ValueError, {"shape": (1, 2, 3, 2**70)}),
        (ValueError, {"shape": (0, 2, 2**70, 64)}),
        (ValueError, {"shape": (0, 2, 2**62, 64)}),
        (ValueError, {"shape": (2**40, 1, 0, 64)}),
        (ValueError, {"shape": (2**31 - 1, 2**31 - 1, 0, 64)}),
        (TypeError, {"shape": b"1234"}),
        (TypeError, {"dtype": torch.float32}),
        (TypeError, {"dtype": np.array([1, 2])}),
        (ValueError, {"role": "query"}),
        (ValueError, {"keep": 0}),
        (ValueError, {"keep": 20, "sparsity": 0.5}),
        (ValueError, {"device": "meta"}),
    ],
)
def test_arguments_of_preallocate(error, arguments):
    (name, *_) = arguments
    with pytest.raises(error, match=name):
        ck.SparseKV.preallocate(**{"shape": (1, 2, 3, 64), "role": "key", "device": "cpu", **arguments})
