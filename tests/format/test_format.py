"""compress and decompress: exact round trips, the documented format, and its size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels._storage.tile_reader import decompress as decompress_reference
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle

ROLES = ["key", "value"]


def check_round_trip(x: torch.Tensor, role: str, keep: int | None, device) -> ck.SparseKV:
    expected = oracle.prune(x, keep)
    kv = ck.compress(x.to(device), role=role, keep=keep)
    assert (
        kv.shape == x.shape and kv.dtype == x.dtype and kv.role == role and kv.device.type == torch.device(device).type
    )
    assert oracle.same_bits(ck.decompress(kv), expected)
    assert oracle.same_bits(decompress_reference(storage_of(kv, "kv")), expected)
    assert kv.nnz == oracle.nonzeros(expected)
    kv.validate()
    return kv


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("role", ROLES)
def test_round_trip(role, head_dim, dtype, device, rng):
    for tokens in (1, 63, 64, 65, rng.randrange(66, 300)):
        x = oracle.gaussian(2, 2, tokens, head_dim, dtype=dtype)
        check_round_trip(x, role, rng.randrange(1, head_dim + 1), device)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("role", ROLES)
def test_random_bits(role, dtype, device, rng):
    x = oracle.random_bits(1, 2, 150, 128, dtype=dtype)
    check_round_trip(x, role, None, device)
    check_round_trip(x, role, 38, device)


def test_special_values(device):
    special = torch.tensor([0x7C00, -0x400, 0x7E00, 0x7C01, -1, 0x0001, -0x7FFF, -0x8000, 0, 0x7BFF], dtype=torch.int16)
    x = special.repeat(1 + 100 * 64 // 10)[: 100 * 64].view(torch.float16).view(1, 1, 100, 64)
    for role in ROLES:
        check_round_trip(x, role, None, device)


def patterns(head_dim: int) -> dict[str, torch.Tensor]:
    ones = torch.ones(1, 2, 130, head_dim, dtype=torch.float16)
    token, channel = torch.arange(130)[:, None], torch.arange(head_dim)[None]

    def where(mask):
        return ones * mask

    return {
        "empty": ones * 0,
        "negative zeros": ones * -0.0,
        "full": oracle.gaussian(1, 2, 130, head_dim).abs() + 1,
        "one element": where((token == 129) & (channel == head_dim - 1)),
        "one token": where((token == 70) & (channel >= 0)),
        "one channel": where((channel == 3) & (token >= 0)),
        "one lane": where((token % 8 == 5) & (channel % 8 // 2 == 1)),
        "one stream": where((token % 8 == 2) & (channel % 8 == 7)),
        "one head": torch.cat([ones[:, :1], 0 * ones[:, :1]], dim=1),
        "one tile": where((token // 64 == 1) & (channel >= 0)),
        "triangle": where(channel <= token),
    }


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("role", ROLES)
def test_patterns(role, head_dim, device, rng):
    for name, x in patterns(head_dim).items():
        kv = check_round_trip(x, role, None, device)
        if "zeros" in name or name == "empty":
            assert kv.nnz == 0


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 0, 5, 64), (2, 2, 0, 80), (0, 0, 0, 8)])
@pytest.mark.parametrize("role", ROLES)
def test_empty(role, shape, device):
    kv = ck.compress(torch.empty(shape, dtype=torch.bfloat16, device=device), role=role, keep=3)
    assert ck.decompress(kv).shape == shape and kv.shape == shape and kv.nnz == 0
    kv.validate()
    assert kv.bits_per_element == 0


@given(
    tokens=st.integers(1, 140),
    head_dim=st.sampled_from([8, 24, 64, 72, 136]),
    keep=st.none() | st.integers(1, 8),
    density=st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]),
    role=st.sampled_from(ROLES),
    dtype=st.sampled_from(oracle.DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_of_any_shape(tokens, head_dim, keep, density, role, dtype, seed):
    torch.manual_seed(seed)
    shape = (1, 2, tokens, head_dim)
    check_round_trip(oracle.random_bits(*shape, dtype=dtype) * (torch.rand(shape) < density), role, keep, "cpu")


def test_views(device, rng):
    x = oracle.random_bits(2, 3, 100, 128)
    batch_last = x.to(device).permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    odd = torch.zeros(2, 3, 100, 131, dtype=x.dtype, device=device)
    odd[..., 3:] = x.to(device)
    tokens = x.to(device).repeat_interleave(2, dim=2)[:, :, 1::2]
    for view in (batch_last, odd[..., 3:], tokens):
        for role in ROLES:
            assert oracle.same_bits(ck.decompress(ck.compress(view, role=role, keep=50)), oracle.prune(x, 50))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("head_dim, tokens", [(40, 70), (128, 65), (256, 64)])
def test_storage_is_as_documented(role, head_dim, tokens, device, rng):
    """An independent reader of docs/format.md sees the same cache."""
    x = oracle.random_bits(1, 2, tokens, head_dim)
    state = ck.compress(x.to(device), role=role, keep=head_dim // 3).state_dict()
    assert oracle.same_bits(oracle.decode(state), oracle.prune(x, head_dim // 3))


def test_compressing_again_changes_nothing(device, rng):
    x = oracle.gaussian(2, 2, 200, 128).to(device)
    for role in ROLES:
        first = ck.compress(x, role=role, keep=38)
        again = ck.compress(ck.decompress(first), role=role)
        for name, tensor in first.state_dict().items():
            if name != "metadata":
                assert torch.equal(tensor, again.state_dict()[name]), name


def test_prune_and_compress_agree(device, rng):
    x = oracle.gaussian(1, 2, 100, 128, dtype=torch.bfloat16).to(device)
    for argument in ({"sparsity": 0.7}, {"keep": 64}, {}):
        kv = ck.compress(x, role="key", **argument)
        assert oracle.same_bits(ck.decompress(kv), ck.prune(x, **argument))


def test_input_is_left_alone(device, rng):
    x = oracle.gaussian(1, 2, 100, 64).to(device).requires_grad_()
    before = x.detach().clone()
    kv = ck.compress(x, role="key")
    ck.decompress(kv).zero_()
    assert torch.equal(x.detach(), before) and torch.equal(ck.decompress(kv), before)
    with torch.no_grad():
        x.zero_()
    assert torch.equal(ck.decompress(kv), before)


# ---- compress_kv -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, keep_k, keep_v",
    [
        ({}, None, None),
        ({"keep": 38}, 38, 38),
        ({"sparsity": 0.5}, 64, 64),
        ({"key_keep": 20}, 20, None),
        ({"value_keep": 20}, None, 20),
        ({"key_keep": 64, "value_keep": 30}, 64, 30),
        ({"sparsity": 0.5, "value_keep": 30}, 64, 30),
        ({"keep": 50, "key_keep": 128}, 128, 50),
    ],
)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_compress_kv(arguments, keep_k, keep_v, dtype, device, rng):
    k, v = oracle.gaussian(2, 2, 150, 128, dtype=dtype), oracle.random_bits(2, 2, 150, 128, dtype=dtype)
    keys, values = ck.compress_kv(k.to(device), v.to(device), **arguments)
    assert (keys.role, values.role) == ("key", "value")
    assert oracle.same_bits(ck.decompress(keys), oracle.prune(k, keep_k))
    assert oracle.same_bits(ck.decompress(values), oracle.prune(v, keep_v))
    assert torch.equal(keys.state_dict()["token_order"], values.state_dict()["token_order"])
    for kv in (keys, values):
        kv.validate()
        assert oracle.same_bits(decompress_reference(storage_of(kv, "kv")), ck.decompress(kv))
    assert keys.nnz == oracle.nonzeros(oracle.prune(k, keep_k))


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (1, 2, 0, 64)])
def test_compress_kv_empty(shape, device):
    x = torch.empty(shape, dtype=torch.float16, device=device)
    for kv in ck.compress_kv(x, x, sparsity=0.5):
        kv.validate()
        assert kv.shape == shape


# ---- Size ------------------------------------------------------------------------------------------------------------

BITS = {38: 6.3, 64: 9.6}
PAIR_BITS = {38: 6.45, 64: 9.75}  # one order of tokens for both


@pytest.mark.parametrize("keep", BITS)
@pytest.mark.parametrize("distribution", ["gaussian", "lognormal channels"])
def test_bits_per_element(distribution, keep, device, rng):
    make = oracle.gaussian if distribution == "gaussian" else oracle.lognormal_channels
    k, v = make(1, 2, 4096, 128).to(device), make(1, 2, 4096, 128).to(device)
    for role, x in (("key", k), ("value", v)):
        assert ck.compress(x, role=role, keep=keep).bits_per_element <= BITS[keep], role
    for kv in ck.compress_kv(k, v, keep=keep):
        assert kv.bits_per_element <= PAIR_BITS[keep], kv.role


def test_size_is_what_is_stored(device, rng):
    kv = ck.compress(oracle.gaussian(2, 3, 500, 128).to(device), role="key", keep=38)
    tensors = [t for t in kv.state_dict().values() if isinstance(t, torch.Tensor)]
    assert kv.nbytes == sum(t.numel() * t.element_size() for t in tensors)
    assert kv.bits_per_element == pytest.approx(8 * kv.nbytes / (2 * 3 * 500 * 128))
    assert kv.nnz == 2 * 3 * 500 * 38
