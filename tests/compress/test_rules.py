"""Pruning rules against their definitions, element by element in Python and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels import rules
from tests.support import oracle
from tests.support.rule_definitions import expected

B, HKV, G = 2, 2, 3


def summed_by_kv_head(value: torch.Tensor) -> np.ndarray:
    """(B, Hq, Sq, N) -> (B, Hkv, N) float64: absolute values, summed."""
    grouped = value.cpu().double().abs().view(value.shape[0], HKV, -1, *value.shape[2:])
    return grouped.sum(dim=(2, 3)).numpy()


def exact(*shape) -> torch.Tensor:
    """Small integers: sums and products are exact in float32, and ties are frequent."""
    return torch.randint(-6, 7, shape).float()


SHAPES = [(1, 8), (31, 64), (32, 80), (65, 128), (100, 72)]


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("tokens, head_dim", SHAPES)
def test_channel_magnitude(tokens, head_dim, dtype, device, rng):
    kept, group = rng.randint(1, head_dim), rng.choice([1, 5, 32, 200])
    for x in (exact(B, HKV, tokens, head_dim).to(dtype), oracle.random_bits(B, HKV, tokens, head_dim, dtype=dtype)):
        pruned = ck.prune(x.to(device), keep=kept, method=rules.ChannelMagnitude(group))
        assert oracle.same_bits(pruned, expected(x, kept, group, lambda b, h, m: m, "group"))
    by_name = ck.prune(x.to(device), keep=kept, method="channel-magnitude")
    assert oracle.same_bits(by_name, expected(x, kept, 32, lambda b, h, m: m, "group"))


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("tokens, head_dim", SHAPES)
def test_output_aware_keys(tokens, head_dim, dtype, device, rng):
    kept, q = rng.randint(1, head_dim), exact(B, HKV * G, 7, head_dim).to(dtype)
    weight = summed_by_kv_head(q)
    x = exact(B, HKV, tokens, head_dim).to(dtype)
    for method, role in ((rules.OutputAware(q=q.to(device)), None), (rules.OutputAware(q.to(device), q), "key")):
        pruned = ck.prune(x.to(device), keep=kept, method=method, role=role)
        assert oracle.same_bits(pruned, expected(x, kept, 0, lambda b, h, m: m * weight[b, h], "token"))


@pytest.mark.parametrize("tokens, head_dim", SHAPES)
def test_output_aware_values(tokens, head_dim, device, rng):
    kept, attention = rng.randint(1, head_dim), exact(B, HKV * G, 5, tokens).abs()
    mass = torch.from_numpy(summed_by_kv_head(attention))
    x = exact(B, HKV, tokens, head_dim).half()
    right = expected(x, kept, 32, lambda b, h, m: m * mass[b, h, :, None].numpy(), "group")
    for given_mass in (attention, mass.float()):
        method = rules.OutputAware(attention=given_mass.to(device))
        assert oracle.same_bits(ck.prune(x.to(device), keep=kept, method=method), right)


@pytest.mark.parametrize("tokens, head_dim", SHAPES)
def test_structured_channels(tokens, head_dim, device, rng):
    kept, q = rng.randint(1, head_dim), exact(B, HKV * G, 7, head_dim).half()
    q[..., 3] = 0
    energy = summed_by_kv_head(q.double().square())
    x = exact(B, HKV, tokens, head_dim).half()
    x[:, :, :, 1] *= 100
    think = ck.prune(x.to(device), keep=kept, method=rules.ThinK(q.to(device)))
    assert oracle.same_bits(think, expected(x, kept, 0, lambda b, h, m: (m**2).sum(0) * energy[b, h], "channel"))
    thinv = ck.prune(x.to(device), keep=kept, method="thinv")
    assert oracle.same_bits(thinv, expected(x, kept, 0, lambda b, h, m: (m**2).sum(0), "channel"))


def test_magnitude_in_torch_is_the_kernels_rule(device, rng):
    x = oracle.random_bits(B, HKV, 50, 80)
    assert oracle.same_bits(rules.Magnitude().prune(x.to(device), 17), oracle.prune(x, 17))
    assert oracle.same_bits(rules.Magnitude().prune(x.to(device), 0), oracle.prune(x, None))
    single = oracle.gaussian(B, HKV, 50, 80)
    assert torch.equal(rules.Magnitude().prune(single.float(), 17), oracle.prune(single, 17).float())


def test_random(device, rng):
    x = torch.rand(B, HKV, 200, 64).add(0.5).half().to(device)
    pruned = ck.prune(x, keep=13, method="random")
    assert ((pruned != 0).sum(-1) == 13).all()
    assert torch.equal(pruned[pruned != 0], x[pruned != 0])
    assert torch.equal(pruned, ck.prune(x, keep=13, method=rules.Random(0)))
    assert torch.equal(pruned.cpu(), ck.prune(x.cpu(), keep=13, method="random"))
    rule = rules.Random(1)
    first, second = (ck.prune(x, keep=13, method=rule) for _ in range(2))
    assert not torch.equal(first, second) and not torch.equal(first, pruned)
    share = (pruned != 0).float().mean(dim=(0, 1, 2))  # of 800 tokens, per channel: 0.2 +- 0.014
    assert share.min() > 0.1 and share.max() < 0.32


# ---- Special values --------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(["keys", "values", "think", "thinv"]))
def test_special_values(seed, name):
    """NaN, infinities, zeros of both signs, in the cache and in the rule's inputs."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.0, -0.0, 1.0, -2.0, 3.0, float("inf"), float("-inf"), float("nan")])

    def draw(*shape):
        return special[torch.randint(0, 8, shape, generator=generator)].half()

    x, q, mass = draw(1, 1, 9, 16), draw(1, 1, 1, 16), draw(1, 1, 9).abs()
    kept = int(torch.randint(1, 17, (), generator=generator))
    weight, tokens = q.double().abs()[0, 0, 0].numpy(), mass.double()[0, 0].numpy()
    with np.errstate(invalid="ignore"):
        method, right = {
            "keys": (rules.OutputAware(q=q), lambda: expected(x, kept, 0, lambda b, h, m: m * weight, "token")),
            "values": (
                rules.OutputAware(attention=mass, group=4),
                lambda: expected(x, kept, 4, lambda b, h, m: m * tokens[:, None], "group"),
            ),
            "think": (
                rules.ThinK(q),
                lambda: expected(x, kept, 0, lambda b, h, m: (m**2).sum(0) * weight**2, "channel"),
            ),
            "thinv": (rules.ThinV(), lambda: expected(x, kept, 0, lambda b, h, m: (m**2).sum(0), "channel")),
        }[name]
        right = right()
    assert oracle.same_bits(ck.prune(x, keep=kept, method=method), right)


def test_no_amount_keeps_every_nonzero(rng):
    x = oracle.random_bits(1, 2, 40, 64)
    for method in ("channel-magnitude", "thinv", "random"):
        assert oracle.same_bits(ck.prune(x, method=method), oracle.prune(x, None))


@pytest.mark.parametrize("shape", [(0, 2, 5, 64), (2, 0, 5, 64), (2, 2, 0, 64)])
def test_empty(shape, device):
    x = torch.empty(shape, dtype=torch.float16, device=device)
    for method in ("channel-magnitude", "thinv", "random", rules.ThinK(torch.ones(2, 2, 1, 64, device=device))):
        assert ck.prune(x, keep=3, method=method).shape == shape
        assert ck.compress(x, role="value" if method == "thinv" else "key", keep=3, method=method).nnz == 0


# ---- Through compression ---------------------------------------------------------------------------------------------


def each_rule(x, q):
    mass = rules.attention_mass(q, x)
    return {
        "key": ["channel-magnitude", "random", rules.OutputAware(q=q), rules.ThinK(q)],
        "value": ["channel-magnitude", "random", "thinv", rules.OutputAware(attention=mass)],
    }


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("tokens, head_dim", [(70, 64), (130, 80), (64, 128)])
def test_compress_stores_what_prune_gives(tokens, head_dim, dtype, device, rng):
    x = oracle.lognormal_channels(B, HKV, tokens, head_dim, dtype).to(device)
    q = oracle.gaussian(B, HKV * G, 8, head_dim, dtype=dtype).to(device)
    for role, methods in each_rule(x, q).items():
        for method in methods:
            kv = ck.compress(x, role=role, sparsity=0.7, method=method)
            kv.validate()
            assert oracle.same_bits(ck.decompress(kv), ck.prune(x, sparsity=0.7, method=method, role=role)), method


def test_compress_pair_with_a_rule_each(device, rng):
    k, v = (oracle.random_bits(B, HKV, 100, 64).to(device) for _ in range(2))
    q = exact(B, HKV * G, 4, 64).half().to(device)
    keys, values = ck.compress_kv(k, v, key_keep=20, value_keep=30, method=(rules.ThinK(q), "channel-magnitude"))
    assert oracle.same_bits(ck.decompress(keys), ck.prune(k, keep=20, method=rules.ThinK(q)))
    assert oracle.same_bits(ck.decompress(values), ck.prune(v, keep=30, method="channel-magnitude"))
    mass = rules.attention_mass(q, k)
    keys, values = ck.compress_kv(k, v, keep=20, method=rules.OutputAware(q=q, attention=mass))
    assert oracle.same_bits(ck.decompress(keys), ck.prune(k, keep=20, method=rules.OutputAware(q=q)))
    assert oracle.same_bits(ck.decompress(values), ck.prune(v, keep=20, method=rules.OutputAware(attention=mass)))


def test_into_preallocated_memory(device, rng):
    x = oracle.gaussian(B, HKV, 100, 64).to(device)
    out = ck.SparseKV.preallocate(x.shape, x.dtype, role="key", keep=20, device=device)
    for method in ("random", rules.ThinK(oracle.gaussian(B, HKV, 3, 64).to(device))):
        generator_again = rules.Random(0) if method == "random" else method
        assert ck.compress(x, role="key", keep=20, method=method, out=out) is out
        assert oracle.same_bits(ck.decompress(out), ck.prune(x, keep=20, method=generator_again))
    with pytest.raises(ValueError, match="preallocated for 20"):
        ck.compress(x, role="key", keep=20, method="channel-magnitude", out=out)
    anything = ck.SparseKV.preallocate(x.shape, x.dtype, role="key", device=device)
    ck.compress(x, role="key", keep=20, method="channel-magnitude", out=anything)
    assert oracle.same_bits(ck.decompress(anything), ck.prune(x, keep=20, method="channel-magnitude"))


def test_views(device, rng):
    x = oracle.random_bits(1, 2, 150, 64)
    view = x.to(device).transpose(1, 2).contiguous().transpose(1, 2)[:, :, ::3]
    for method in ("channel-magnitude", "random"):
        assert oracle.same_bits(ck.prune(view, keep=9, method=method), ck.prune(x[:, :, ::3], keep=9, method=method))


def test_a_rule_of_ones_own(rng):
    class FirstChannels(rules.Rule):
        name = "first"

        def mask(self, x, kept, role):
            return (torch.arange(x.shape[3]) < kept).expand(x.shape)

    x = oracle.gaussian(1, 2, 30, 64)
    first = ck.decompress(ck.compress(x, role="key", keep=10, method=FirstChannels()))
    assert oracle.same_bits(first[..., :10], oracle.prune(x[..., :10], None)) and not first[..., 10:].any()


def test_attention_mass(device, rng):
    k, q = oracle.gaussian(B, HKV, 20, 16), oracle.gaussian(B, HKV * G, 6, 16)
    for causal in (True, False):
        mass = np.zeros((B, HKV, 20))
        for b in range(B):
            for h in range(HKV * G):
                for i in range(6):
                    seen = 20 - 5 + i if causal else 20
                    logits = 0.25 * (k[b, h // G, :seen].double() @ q[b, h, i].double())
                    mass[b, h // G, :seen] += logits.softmax(0).numpy()
        for autocast in (False, True):
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                got = rules.attention_mass(q.to(device), k.to(device), causal=causal)
            assert got.dtype == torch.float32 and torch.allclose(got.cpu().double(), torch.from_numpy(mass), atol=1e-5)


def test_attention_mass_without_queries():
    """Also where there are more tokens than a mask could have."""
    for batch, heads, queries, tokens in ((0, 2, 1, 2**40), (2, 0, 1, 30), (2, 2, 0, 30)):
        q, k = torch.zeros(batch, heads, queries, 16), torch.zeros(batch, 2, tokens, 16)
        mass = rules.attention_mass(q, k)
        assert mass.shape == (batch, 2, tokens) and mass.dtype == torch.float32 and not mass.any()


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1, np.int64(5)])
def test_seeds(seed):
    x = oracle.gaussian(1, 1, 9, 64)
    assert torch.equal(ck.prune(x, keep=5, method=rules.Random(seed)), ck.prune(x, keep=5, method=rules.Random(seed)))


# ---- Errors ----------------------------------------------------------------------------------------------------------

X = torch.zeros(B, HKV, 40, 64, dtype=torch.float16)
Q = torch.zeros(B, HKV * G, 4, 64, dtype=torch.float16)
BAD = [
    (ValueError, "OutputAware(q=...", lambda: ck.prune(X, keep=3, method="output-aware")),
    (ValueError, "ThinK(q=...)", lambda: ck.prune(X, keep=3, method="think")),
    (ValueError, "prunes keys", lambda: ck.compress(X, role="value", keep=3, method=rules.ThinK(Q))),
    (ValueError, "prunes values", lambda: ck.compress(X, role="key", keep=3, method="thinv")),
    (ValueError, "needs attention", lambda: ck.compress(X, role="value", keep=3, method=rules.OutputAware(q=Q))),
    (ValueError, "needs q", lambda: ck.compress(X, role="key", keep=3, method=rules.OutputAware(attention=X[..., 0]))),
    (ValueError, "role must", lambda: ck.prune(X, keep=3, method=rules.OutputAware(q=Q, attention=X[..., 0]))),
    (ValueError, "role must", lambda: ck.prune(X, keep=3, role="keys")),
    (ValueError, "needs q", lambda: rules.OutputAware()),
    (TypeError, "q must", lambda: rules.ThinK([1.0])),
    (TypeError, "q must", lambda: rules.ThinK(Q.int())),
    (ValueError, "q must", lambda: rules.ThinK(Q[0])),
    (ValueError, "Hq a multiple of 2", lambda: ck.prune(X, keep=3, method=rules.ThinK(Q[:, :3]))),
    (ValueError, "D = 64", lambda: ck.prune(X, keep=3, method=rules.ThinK(Q[..., :8]))),
    (ValueError, "B = 2", lambda: ck.prune(X, keep=3, method=rules.ThinK(Q[:1]))),
    (ValueError, "on the device", lambda: ck.prune(X, keep=3, method=rules.ThinK(Q.to("meta")))),
    (ValueError, "T = 40", lambda: ck.prune(X, keep=3, method=rules.OutputAware(attention=Q))),
    (ValueError, "attention must", lambda: ck.prune(X, keep=3, method=rules.OutputAware(attention=X[:, :, :7, 0]))),
    (ValueError, "newest", lambda: rules.attention_mass(X, X[:, :, :7])),
    (ValueError, "group", lambda: rules.ChannelMagnitude(0)),
    (TypeError, "group", lambda: rules.ChannelMagnitude(2.5)),
    (TypeError, "seed", lambda: rules.Random("1")),
    (ValueError, "seed", lambda: rules.Random(2**64)),
    (ValueError, "seed", lambda: rules.Random(10**400)),
    (ValueError, "group", lambda: rules.ChannelMagnitude(10**400)),
    (TypeError, "q must", lambda: rules.ThinK(Q.to_sparse())),
    (TypeError, "q must", lambda: rules.ThinK(Q.to(torch.float8_e4m3fn))),
    (TypeError, "scale must", lambda: rules.attention_mass(Q, X, scale="1")),
    (TypeError, "scale must", lambda: rules.attention_mass(Q, X, scale=np.array([1.0, 2.0]))),
    (ValueError, "scale must", lambda: rules.attention_mass(Q, X, scale=float("nan"))),
    (ValueError, "scale must", lambda: rules.attention_mass(Q, X, scale=10**400)),
    (TypeError, "causal must", lambda: rules.attention_mass(Q, X, causal=None)),
    (TypeError, "causal must", lambda: rules.attention_mass(Q, X, causal=np.array([True, False]))),
    (TypeError, "x must", lambda: rules.Magnitude().prune([1.0], 3)),
    (ValueError, "x must", lambda: rules.Magnitude().prune(X[0], 3)),
    (TypeError, "kept must", lambda: rules.Magnitude().prune(X, 3.5)),
    (ValueError, "kept must", lambda: rules.Magnitude().prune(X, 65)),
    (ValueError, "role must", lambda: rules.Magnitude().prune(X, 3, "keys")),
    (ValueError, "got 3", lambda: ck.compress_kv(X, X, keep=3, method=("magnitude",) * 3)),
    (ValueError, "method must", lambda: ck.compress_kv(X, X, keep=3, method=("magnitude", "largest"))),
    (ValueError, "method must", lambda: ck.prune(X, keep=3, method=("magnitude", "magnitude"))),
]


@pytest.mark.parametrize("error, message, call", BAD, ids=range(len(BAD)))
def test_errors(error, message, call):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


def test_a_wrong_mask_is_refused():
    class Wrong(rules.Rule):
        name = "wrong"

        def mask(self, x, kept, role):
            return x.abs()

    with pytest.raises(ValueError, match="'wrong' must return a bool mask"):
        ck.prune(X, keep=3, method=Wrong())
    Wrong.mask = lambda self, x, kept, role: torch.nested.nested_tensor([torch.ones(2, dtype=torch.bool)])
    with pytest.raises(ValueError, match=r"'wrong' must return a bool mask .* got a nested tensor of bool"):
        ck.prune(X, keep=3, method=Wrong())
