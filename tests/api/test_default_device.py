"""torch.set_default_device and `with torch.device(...)`: the package names the device of every tensor that it makes."""

from __future__ import annotations

import copy

import pytest
import torch

import cute_kernels as ck
from tests.support import oracle

SIZES = {"max_batch": 3, "kv_heads": 2, "head_dim": 64, "capacity": 512, "keep": 20}
CASES = pytest.mark.parametrize(
    "device, default",
    [
        ("cpu", "meta"),  # a tensor that is made without a device has no data
        pytest.param("cuda", "meta", marks=pytest.mark.gpu),
        pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
        pytest.param("cpu", "cuda", marks=pytest.mark.gpu),
    ],
)


@CASES
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_operations(device, default, backend, rng):
    x, y = (oracle.gaussian(2, 2, 100, 64).to(device) for _ in range(2))
    q = oracle.gaussian(2, 4, 1, 64).to(device)
    lens = torch.tensor([100, 50], dtype=torch.int32, device=device)

    def drive() -> list[torch.Tensor]:
        k, v = ck.compress_kv(x, y, keep=20)
        again = ck.SparseKV.preallocate(x.shape, x.dtype, role="key", keep=20, device=device)
        ck.compress(x, role="key", keep=20, out=again)
        k.validate()
        copies = ck.SparseKV.from_state_dict(v.state_dict()), copy.deepcopy(k), again.to_exact_size()
        out, lse = ck.sparse_attention(
            q, k, v, window=(x[:, :, :5], y[:, :, :5]), seq_lens=lens, return_lse=True, backend=backend
        )
        p = torch.softmax(ck.sparse_qk(q, k, backend=backend), -1)
        rules = [ck.prune(x, keep=20, method=rule, role="value") for rule in ("random", "channel-magnitude", "thinv")]
        attention = ck.rules.OutputAware(attention=ck.rules.attention_mass(q, x))
        return [
            *(out, lse, p, ck.sparse_av(p, v, backend=backend), *rules),
            *(ck.prune(x, keep=20, method=attention, role="value"), ck.prune(x, keep=20)),
            *(ck.decompress(copied) for copied in copies),
        ]

    expected = drive()
    with torch.device(default):
        found = drive()
    assert all(oracle.same_bits(one, other) for one, other in zip(found, expected, strict=True))


@CASES
def test_codecs(device, default, rng):
    x = oracle.gaussian(1, 2, 70, 64, device=device)
    expected = ck.decompress(ck.compress(x, role="key", keep=20, codec="fp8"))
    with torch.device(default):
        kv = ck.compress(x, role="key", keep=20, codec="fp8")
        kv.validate()
        q = torch.ones(1, 2, 1, 64, dtype=torch.float16, device=device)
        ck.sparse_qk(q, kv, backend="reference")
        assert oracle.same_bits(ck.decompress(kv), expected)


@CASES
@pytest.mark.parametrize("rule", ["magnitude", "random"])
def test_caches(device, default, rule, rng):
    k, v = (oracle.gaussian(2, 2, 200, 64).to(device) for _ in range(2))
    q = oracle.gaussian(2, 4, 1, 64).to(device)

    def drive() -> list[torch.Tensor]:
        cache = ck.KVCache(**SIZES, value_rule=rule, device=device)
        cache.prefill(k, v, lengths=[200, 130])
        cache.append(k[:, :, :70], v[:, :, :70])
        cache.step(q, k[:, :, :1], v[:, :, :1])
        cache.fork(0)
        cache.crop([150, 90, 120])
        cache.reorder([2, 0, 1])
        cache.grow(capacity=1024)
        cache.select([1, 0])
        cache.reserve(10)
        both = [cache.attend(q, backend=backend) for backend in ("auto", "reference")]
        copied = copy.deepcopy(cache)
        cache.reset()
        return [*both, copied.attend(q), *copied.dense(1), copied.lengths]

    expected = drive()
    with torch.device(default):
        found = drive()
    assert all(oracle.same_bits(one, other) for one, other in zip(found, expected, strict=True))
