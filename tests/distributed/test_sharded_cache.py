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

from cute_kernels.distributed import PendingAttention, ShardedKVCache
from cute_kernels.distributed.attention import _CHECKED_EVERY
from cute_kernels.distributed.ranks import Ranks
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
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2) * D**-0.5
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(logits.shape[-1] - logits.shape[-2] + 1)
    logits = logits.masked_fill(hidden, float("-inf"))
    return logits.softmax(-1).nan_to_num() @ v, logits.logsumexp(-1)  # without a token: zeros and -inf


def assert_close(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert_near(found[0], expected[0])
    torch.testing.assert_close(found[1].cpu().double(), expected[1], atol=2e-3, rtol=1e-3)


def assert_near(out: Tensor, expected: Tensor) -> None:
    assert (out.cpu().double() - expected).norm() <= 2e-3 * expected.norm()


def compressed_of(cache: ShardedKVCache, tokens: int) -> int:
    return max(0, tokens - cache.window) // 64 * 64


def assert_exact(cache: ShardedKVCache, q: Tensor, k: Tensor, v: Tensor) -> None:
    out, lse = cache.attend(q, return_lse=True)
    held = k.shape[2]
    assert cache.lengths.tolist() == [held] * B
    assert_close((out, lse), exact(q, k, v, compressed_of(cache, held)))
    said: list[Any] = [None] * cache.world_size
    dist.all_gather_object(said, (out.cpu(), lse.cpu()))
    assert all(oracle.same_bits(x, y) for other in said for x, y in zip(other, said[0]))


def assert_held(found: Tensor, tokens: Tensor, compressed: int) -> None:
    """Some nonzeros may be missing, of tiles that exceeded their slots."""
    found, tokens = found.cpu(), tokens.cpu()
    assert oracle.same_bits(found[:, compressed:], tokens[:, compressed:])
    pruned = oracle.prune(tokens[:, :compressed], KEEP)
    missing = found[:, :compressed] != pruned
    assert missing.sum() <= 1e-3 * missing.numel() and (found[:, :compressed][missing] == 0).all()


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
        held.append(int(cache._shard.share.lengths[0]))
        for whole, row in ((k, 0), (v, 1)):
            assert_held(cache.dense(1)[row], whole[1], compressed_of(cache, whole.shape[2]))
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


def ragged(rank: int, given: tuple[str, int]) -> None:
    """Sequences of different lengths, left-padded, that go on together and one by one."""
    device, seed = given
    generator = torch.Generator().manual_seed(seed)
    cache = make(device, value_rule=ChannelMagnitude(16) if seed % 2 else "magnitude")
    plain = cache._config.prunes_in_kernels
    for lengths in ([300, 171], [64, 0], [31, 500]):
        cache.reset()
        k, v = (tokens(generator, HKV, max(lengths), device) for _ in range(2))
        cache.prefill(k, v, lengths=lengths)
        rows = [[x[b, :, x.shape[2] - lengths[b] :] for x in (k, v)] for b in range(B)]
        for count in (1, 40, 100):
            new = [tokens(generator, HKV, count, device) for _ in range(2)]
            if count == 40:
                for b in reversed(range(B)):
                    cache.append(*(x[b : b + 1] for x in new), sequences=[b])
            else:
                cache.append(*new)
            rows = [[torch.cat(pair, 1) for pair in zip(row, (x[b] for x in new))] for b, row in enumerate(rows)]
            q = tokens(generator, HQ, 2, device)
            found = cache.attend(q, return_lse=True)
            assert cache.lengths.tolist() == [row[0].shape[1] for row in rows]
            for b, row in enumerate(rows):
                one = [x[None] for x in (q[b], *row)]
                if plain:
                    expected = exact(*one, compressed_of(cache, row[0].shape[1]))
                    assert_close(tuple(x[b : b + 1] for x in found), expected)
                reference = cache.attend(q, return_lse=True, backend="reference")
                assert_close(found, tuple(x.cpu().double() for x in reference))


@PLACES
def test_ragged(device, rng, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than 2 GPUs")
    seed = rng.randrange(2**30) * 2
    ranks.run(2, ragged, (device, seed), tmp_path / "kernels", device)
    ranks.run(2, ragged, (device, seed + 1), tmp_path / "rule", device)


def mesh_of_two(rank: int, given: tuple[str, int]) -> tuple[int, int]:
    """Heads over one dimension, tokens over the other."""
    device, seed = given
    generator = torch.Generator().manual_seed(seed)
    mesh = dist.device_mesh.init_device_mesh(device, (2, 2), mesh_dim_names=("tp", "cp"))
    cache = make(device, group=mesh)
    tp = mesh.get_local_rank("tp")
    assert cache.rank == mesh.get_local_rank("cp") and cache.kv_heads == HKV // 2
    k, v = (tokens(generator, HKV, 400, device) for _ in range(2))
    q = tokens(generator, HQ, 1, device)
    mine, queries = slice(tp, tp + 1), slice(2 * tp, 2 * tp + 2)
    cache.prefill(*(x[:, mine, :399] for x in (k, v)))
    out = cache.step(q[:, queries], *(x[:, mine, 399:] for x in (k, v)))
    assert_near(out, exact(q[:, queries], k[:, mine], v[:, mine], compressed_of(cache, 400))[0])
    with pytest.raises(
        ValueError, match=r"^kv_heads must be a multiple of the 2 ranks of the mesh's dimension 'tp', got 3$"
    ):
        make(device, group=mesh, kv_heads=3)
    with pytest.raises(
        ValueError, match=r"keep must be the same on all ranks, got tp 0, cp 0: 20, .*, tp 1, cp 0: 21, "
    ):
        make(device, group=mesh, keep=KEEP + (rank == 2))
    return tp, cache.rank


@PLACES
def test_heads_and_tokens(device, rng, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("fewer than 4 GPUs")
    places = ranks.run(4, mesh_of_two, (device, rng.randrange(2**31)), tmp_path, device)
    assert sorted(places) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def overlapped(rank: int, given: tuple[str, int]) -> None:
    """Two calls on their way at once, as of a layer and the next."""
    device, seed = given
    generator = torch.Generator().manual_seed(seed)
    caches = [make(device) for _ in range(2)]
    inputs = [
        [tokens(generator, heads, count, device) for heads, count in ((HQ, 1), (HKV, 300), (HKV, 300))] for _ in caches
    ]
    for cache, (_, k, v) in zip(caches, inputs):
        cache.append(k, v)
    pending = [cache.attend(q, return_lse=True, async_op=True) for cache, (q, _, _) in zip(caches, inputs)]
    for cache, each, (q, k, v) in zip(caches, pending, inputs):
        assert isinstance(each, PendingAttention)
        found = each.wait()
        assert_close(found, exact(q, k, v, compressed_of(cache, 300)))
        assert each.wait() is found
        assert all(oracle.same_bits(x, y) for x, y in zip(found, cache.attend(q, return_lse=True)))


@PLACES
def test_overlap(device, rng, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than 2 GPUs")
    ranks.run(2, overlapped, (device, rng.randrange(2**31)), tmp_path, device)


def replayed(rank: int, seed: int) -> None:
    """A captured step goes on, token by token, over the ends of tiles."""
    generator = torch.Generator().manual_seed(seed)
    cache = make("cuda")
    k, v = (tokens(generator, HKV, 700, "cuda") for _ in range(2))
    q = tokens(generator, HQ, 1, "cuda")
    cache.prefill(*(x[:, :, :200].contiguous() for x in (k, v)))
    place = [x[:, :, 200:201].clone() for x in (k, v)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cache.step(q, *place)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = cache.step(q, *place)
        for token in range(201, 500):
            for static, x in zip(place, (k, v)):
                static.copy_(x[:, :, token : token + 1])
            graph.replay()
        stream.synchronize()
    assert_near(out, exact(q, k[:, :, :500], v[:, :, :500], compressed_of(cache, 500))[0])
    cache.append(k[:, :, 500:600], v[:, :, 500:600])
    assert_exact(cache, q, k[:, :, :600], v[:, :, :600])


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_captured_step(world_size, rng, tmp_path, monkeypatch):
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"fewer than {world_size} GPUs")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    ranks.run(world_size, replayed, rng.randrange(2**31), tmp_path, "cuda")


def misuse(rank: int, device: str) -> dict[str, str]:
    """What every rank is told."""
    told: dict[str, str] = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
            told[name] = "nothing"
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    def until_seen(call: Any) -> None:
        """On GPUs the host looks at what other ranks say at every 64th call."""
        error: Exception | None = None
        for _ in range(1 if device == "cpu" else _CHECKED_EVERY):
            try:
                call()
            except Exception as caught:
                error = caught
        if error is not None:
            raise error

    mesh = dist.device_mesh.init_device_mesh(device, (1, 2), mesh_dim_names=("tp", "cp"))
    attempt("mesh", lambda: make(device, group=dist.device_mesh.init_device_mesh(device, (1, 2))))
    attempt("heads alone", lambda: make(device, group=mesh["tp"]))
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
    attempt("tokens", lambda: until_seen(lambda: cache.attend(q)))

    cache = make(device)
    cache.append(x, x)
    cache.attend(q)
    if rank == 1:
        cache._attend_here = fails
    attempt("failure", lambda: until_seen(lambda: cache.attend(q)))

    cache = make(device)
    cache.append(x, x)
    cache.attend(q)
    attempt("one rank's argument", lambda: until_seen(lambda: cache.attend(q if rank else q[:1])))
    attempt("after it", lambda: cache.attend(q))
    pending = cache.attend(q, async_op=True)
    attempt("gradient", lambda: cache.attend(q.clone().requires_grad_(), async_op=True))
    pending.wait()
    attempt("filled", lambda: cache.prefill(x, x))
    attempt("sequences", lambda: cache.append(x, x, sequences=[0, 0]))
    attempt("another device", lambda: Ranks(None).check_device(torch.device("meta")))
    attempt("batch", lambda: cache.append(x[:1], x[:1]))
    attempt("capacity", lambda: cache.append(*[x.repeat(1, 1, 7, 1)] * 2))
    attempt("dtype", lambda: cache.append(x.float(), x.float()))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    cache = make(device)
    cache._shard.settle = interrupt
    try:
        cache.append(*[x.repeat(1, 1, 2, 1)] * 2)  # a tile for each rank
    except KeyboardInterrupt:
        attempt("interrupted append", lambda: cache.append(x, x))
        attempt("interrupted", lambda: cache.attend(q))
    cache.reset()
    del cache._shard.settle
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
        "mesh": "ValueError: group must be a DeviceMesh of one dimension, or of the dimensions 'tp' (heads) and 'cp' "
        "(tokens), got 2 with names None: take a part of it, as mesh['cp']",
        "heads alone": "ValueError: group must be a DeviceMesh of one dimension, or of the dimensions 'tp' (heads)",
        "part of a mesh": "nothing",
        "group": "TypeError: group must be a process group, a DeviceMesh or None, got int",
        "arguments": "ValueError: ShardedKVCache: keep must be the same on all ranks, got rank 0: 20, rank 1: 21",
        "window": "ValueError: ShardedKVCache: window must be the same on all ranks, got rank 0: 32, rank 1: 31",
        "bad": "ValueError: keep must be from 1 to D = 64, got 65",
        "scale": "ValueError: attend: scale must be the same on all ranks, got rank 0: 0.1, rank 1: 1.1",
        "queries": "ValueError: q must have at most the 32 newest tokens",
        "tokens": "RuntimeError: ranks must hold the same tokens: rank 0: 100, rank 1: 101 tokens in sequence 0",
        "after it": "nothing",
        "gradient": "RuntimeError: attend with async_op=True takes no part in autograd",
        "filled": "ValueError: prefill takes empty sequences, sequence 0 holds 100 tokens: use append",
        "sequences": "ValueError: sequences must name one row for each of k's 2, none twice, got [0, 0]",
        "another device": "ValueError: the group's backend does not serve the cache's device meta: it is ",
        "batch": "ValueError: k must have the B = 2 sequences of the cache, got 1",
        "capacity": "RuntimeError: sequence 0 holds 100 tokens, 700 more exceed capacity = 700",
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
    assert first["one rank's argument"].startswith("ValueError: q must have the B = 2 sequences of the cache, got 1")
    assert second["one rank's argument"] == "RuntimeError: attend failed on rank 0 of the group, which say why"
    assert first["failure"] == "RuntimeError: attend failed on rank 1 of the group, which say why"
    assert second["failure"] == "MemoryError: no memory is left"


def test_without_a_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        make("cpu")


@pytest.mark.parametrize("backend", ["nccl", "cuda:nccl"])
def test_a_cpu_cache_in_an_nccl_group(backend, tmp_path, monkeypatch):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        config = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend) if backend == "nccl" else backend))
        monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
        with pytest.raises(ValueError, match=r"backend does not serve the cache's device cpu: it is cuda:nccl"):
            make("cpu")
    finally:
        dist.destroy_process_group()
