"""ShardedKVCache: ranks in processes of their own, beside float64 over all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import oracle, ranks

if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from cute_kernels.distributed import ShardedKVCache
from cute_kernels.rules import ChannelMagnitude

B, HQ, HKV, D, KEEP = 2, 4, 2, 64, 20
PROMPTS = (1, 63, 200, 500)
STEPS = 70  # tiles get full in between
PLACES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(device: str, **changes: Any) -> ShardedKVCache:
    sizes = {"max_batch": 3, "kv_heads": HKV, "head_dim": D, "capacity": 700, "keep": KEEP, "device": device}
    return ShardedKVCache(**(sizes | changes))


def tokens(generator: torch.Generator, heads: int, count: int, device: str) -> Tensor:
    return torch.randn(B, heads, count, D, generator=generator).half().to(device)


def exact(q: Tensor, k: Tensor, v: Tensor, compressed: int) -> tuple[Tensor, Tensor]:
    """In float64: the first `compressed` tokens pruned, the rest as they are; causal among the newest."""
    q, k, v = (x.cpu() for x in (q, k, v))
    k, v = (torch.cat([oracle.prune(x[:, :, :compressed], KEEP), x[:, :, compressed:]], 2).double() for x in (k, v))
    k, v = (x.repeat_interleave(HQ // HKV, dim=1) for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2) * D**-0.5
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(logits.shape[-1] - logits.shape[-2] + 1)
    logits = logits.masked_fill(hidden, float("-inf"))
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def assert_exact(cache: ShardedKVCache, q: Tensor, k: Tensor, v: Tensor) -> None:
    out, lse = cache.attend(q, return_lse=True)
    held = k.shape[2]
    assert cache.length == held
    compressed = max(0, held - cache.window) // 64 * 64
    expected, expected_lse = exact(q, k, v, compressed)
    assert (out.cpu().double() - expected).norm() <= 2e-3 * expected.norm()
    torch.testing.assert_close(lse.cpu().double(), expected_lse, atol=2e-3, rtol=1e-3)
    said: list[Any] = [None] * cache.world_size
    dist.all_gather_object(said, (out.cpu(), lse.cpu()))
    assert all(oracle.same_bits(x, y) for other in said for x, y in zip(other, said[0]))


def drive(rank: int, given: tuple[str, int]) -> list[int]:
    """Prompts, steps and chunks; returns what this rank holds of the last."""
    device, seed = given
    generator = torch.Generator().manual_seed(seed)
    held: list[int] = []
    for window in (0, 32, 100):
        cache = make(device, window=window)
        for prompt in PROMPTS:
            cache.reset()
            k, v = (tokens(generator, HKV, prompt, device) for _ in range(2))
            cache.append(k, v)
            assert_exact(cache, tokens(generator, HQ, 1, device), k, v)
            for count in [*[1] * STEPS, 7, 64, 20]:
                new = [tokens(generator, HKV, count, device) for _ in range(2)]
                k, v = (torch.cat(pair, dim=2) for pair in zip((k, v), new))
                cache.append(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in new))
                queries = tokens(generator, HQ, 1 if count == 1 else min(count, max(window, 1)), device)
                if count > 1 or k.shape[2] % 16 == 0:
                    assert_exact(cache, queries, k, v)
        held.append(int(cache._tiles.lengths[0]))
        assert cache._tiles.statistics()["key_tiles_trimmed"] < 5
    return held


@PLACES
@pytest.mark.parametrize("world_size", [2, 4])
def test_as_one_cache(world_size, device, rng, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < world_size:
        pytest.skip(f"fewer than {world_size} GPUs")
    held = ranks.run(world_size, drive, (device, rng.randrange(2**31)), tmp_path, device)
    total = PROMPTS[-1] + STEPS + 91
    for of_ranks, window in zip(zip(*held), (0, 32, 100)):
        assert sum(of_ranks) == max(0, total - window) // 64 * 64  # every tile lies on one rank
        assert max(of_ranks) - min(of_ranks) <= 64


def misuse(rank: int, device: str) -> dict[str, str]:
    """What every rank is told."""
    told: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            told[name] = "nothing"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    mesh = dist.device_mesh.init_device_mesh(device, (1, 2), mesh_dim_names=("tp", "cp"))
    attempt("mesh", lambda: make(device, group=mesh))
    attempt("part of a mesh", lambda: make(device, group=mesh["cp"], value_rule=ChannelMagnitude(16)))
    attempt("group", lambda: make(device, group=2))
    attempt("arguments", lambda: make(device, keep=KEEP + rank))
    attempt("window", lambda: make(device, window=32 - rank))
    attempt("bad", lambda: make(device, keep=D + 1))
    x = torch.ones(B, HKV, 100, D, dtype=torch.float16, device=device)
    q = torch.ones(B, HQ, 1, D, dtype=torch.float16, device=device)

    cache = make(device)
    cache.append(x, x)
    attempt("shape", lambda: cache.attend(q if rank else q[:1]))
    cache = make(device)
    cache.append(x, x)
    attempt("scale", lambda: cache.attend(q, scale=0.1 + rank))
    cache = make(device)
    cache.append(x, x)
    attempt("queries", lambda: cache.attend(q.expand(-1, -1, 33, -1).contiguous()))
    cache.attend(q)
    if rank == 1:
        cache.append(x[:, :, :1], x[:, :, :1])
    attempt("tokens", lambda: cache.attend(q))

    cache = make(device)
    cache.append(x, x)
    cache.attend(q)
    if rank == 1:
        cache._attend_here = fails
    attempt("failure", lambda: cache.attend(q))

    attempt("batch", lambda: cache.append(x[:1], x[:1]))
    attempt("capacity", lambda: cache.append(*[x.repeat(1, 1, 7, 1)] * 2))
    attempt("dtype", lambda: cache.append(x.float(), x.float()))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    cache = make(device)
    cache._leaving = interrupt
    try:
        cache.append(*[x.repeat(1, 1, 2, 1)] * 2)  # a tile for each rank
    except KeyboardInterrupt:
        attempt("interrupted append", lambda: cache.append(x, x))
        attempt("interrupted", lambda: cache.attend(q))
    cache.reset()
    del cache._leaving
    cache.append(x, x)
    attempt("reset", lambda: cache.attend(q))
    return told


def fails(*_: Any) -> None:
    raise MemoryError("no memory is left")


@PLACES
def test_misuse(device, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than 2 GPUs")
    first, second = ranks.run(2, misuse, device, tmp_path, device)
    both = {
        "mesh": "ValueError: group must be a DeviceMesh of one dimension, got 2",
        "part of a mesh": "nothing",
        "group": "TypeError: group must be a process group, a DeviceMesh or None, got int",
        "arguments": "ValueError: ShardedKVCache: keep must be the same on all ranks, got rank 0: 20, rank 1: 21",
        "window": "ValueError: ShardedKVCache: window must be the same on all ranks, got rank 0: 32, rank 1: 31",
        "bad": "ValueError: keep must be from 1 to D = 64, got 65",
        "scale": "ValueError: attend: scale must be the same on all ranks, got rank 0: 0.1, rank 1: 1.1",
        "queries": "ValueError: q must have at most the 32 newest tokens",
        "tokens": "RuntimeError: ranks must hold the same tokens: rank 0: 100, rank 1: 101 tokens a sequence",
        "batch": "ValueError: k must have the B = 2 sequences of the cache, got 1",
        "capacity": "RuntimeError: 100 tokens and 700 new ones exceed the capacity of 700",
        "dtype": "TypeError: k must be float16",
        "reset": "nothing",
    }
    for name, message in both.items():
        assert first[name].startswith(message) and second[name].startswith(message), (name, first[name], second[name])
    for told in (first, second):
        assert all(
            "append to this cache was interrupted" in told[name] for name in ("interrupted append", "interrupted")
        )
    assert first["shape"].startswith("ValueError: q must have the B = 2 sequences of the cache, got 1")
    assert "attend failed on rank 0 of the group: ValueError: q must have the B = 2" in second["shape"]
    assert first["failure"] == "RuntimeError: attend failed on rank 1 of the group, which say why"
    assert second["failure"] == "MemoryError: no memory is left"


def test_without_a_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        make("cpu")
