"""Attention over caller-owned pages, against float64 on what must be stored."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels import paged
from tests.support import oracle
from tests.support.paged_engine import TILE, Engine

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def make_engine(device, *, engine=None, **options) -> Engine:
    options = {"kv_heads": 2, "head_dim": 64, "sparsity": 0.6, **options}
    return Engine(paged.configure(**options), torch.device(device), **(engine or {}))


def tokens_of(engine: Engine, tokens: int, *rows: int) -> torch.Tensor:
    config = engine.config
    return oracle.gaussian(2, *rows, config.kv_heads, tokens, config.head_dim, dtype=config.dtype)


def check_attention(engine: Engine, sequences: list[int], backend: str, queries: int = 1, **options) -> None:
    config = engine.config
    q = oracle.gaussian(len(sequences), 6, queries, config.head_dim, dtype=config.dtype)
    arguments = q.to(engine.device), engine.pool, engine.windows, engine.lengths, engine.index(sequences)
    out, lse = paged.attend(*arguments, scale=0.2, return_lse=True, backend=backend, **options)
    for row, sequence in enumerate(sequences):
        expected, sums = engine.expected(sequence, q[row : row + 1], 0.2, options.get("causal", True))
        assert oracle.relative_error(out[row : row + 1], expected) <= TOLERANCE[config.dtype]
        torch.testing.assert_close(lse[row : row + 1].cpu().double(), sums, atol=3e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("head_dim, window, page_tokens", [(64, 0, 64), (128, 32, 128), (256, 70, 64), (40, 5, 192)])
def test_engine(backend, head_dim, window, page_tokens, dtype, rng):
    """Prompts of many lengths in chunks, steps of some sequences, a prefix of another's pages."""
    options = {"head_dim": head_dim, "window": window, "page_tokens": page_tokens, "dtype": dtype}
    engine = make_engine(backend.device, **options, engine={"pages": 15, "pages_per_sequence": 5})
    prompts = [rng.randrange(1, 150), 2 * page_tokens]
    paged.choose_orders(engine.pool, *tokens_of(engine, 100, 2).to(backend.device))
    for sequence, prompt in enumerate(prompts):
        while prompt:
            chunk = rng.randint(1, prompt)
            engine.extend(sequence, tokens_of(engine, chunk))
            engine.check()
            prompt -= chunk
    engine.share(2, 1, page_tokens)
    engine.extend(2, tokens_of(engine, rng.randrange(1, 70)))
    engine.check()
    check_attention(engine, [2, 0, 1, 2], backend.name, queries=3)
    check_attention(engine, [1, 0], backend.name, causal=False, expected=(2 * page_tokens, 4 * page_tokens))
    for _ in range(3):
        engine.append(rng.sample(range(3), k=2), tokens_of(engine, rng.randint(1, 32), 2))
        engine.check()
        check_attention(engine, [0, 1, 2], backend.name)


def test_prompts_as_steps(device, rng):
    """`extend` stores the same bits as `append`."""
    engines = [make_engine(device, window=20, head_dim=128) for _ in range(2)]
    k, v = oracle.lognormal_channels(2, 2, 200, 128).to(device)[:, None]
    new = tokens_of(engines[0], 300)
    for engine in engines:
        engine.free.sort()
        paged.choose_orders(engine.pool, k, v)
    engines[0].extend(1, new)
    for i in range(0, 300, 50):
        engines[1].append([1], new[:, None, :, i : i + 50])
    for engine in engines:
        engine.check()
    for name in ("blocks", "key_rows", "value_rows", "token_order", "page_table"):
        one, other = (getattr(engine.pool, name) for engine in engines)
        assert torch.equal(one, other), name


def test_a_shared_prefix_gives_the_same_bits(backend, rng):
    """Two sequences over the same pages attend alike: nothing of a page belongs to the sequence that stored it."""
    engine = make_engine(backend.device, window=0)
    paged.choose_orders(engine.pool, *oracle.lognormal_channels(2, 2, 100, 64).to(backend.device)[:, None])
    engine.extend(0, tokens_of(engine, 3 * TILE))
    engine.share(2, 0, 3 * TILE)
    q = oracle.gaussian(1, 4, 1, 64).repeat(2, 1, 1, 1).to(backend.device)
    out = paged.attend(q, engine.pool, None, engine.lengths, engine.index([0, 2]), backend=backend.name)
    assert torch.equal(out[0], out[1])


def test_sizes(rng):
    config = paged.configure(kv_heads=8, head_dim=128, keep=38, window=32, page_tokens=128, max_append=1)
    tensors = config.page_tensors(10)
    assert sum(size.nbytes for size in tensors.values()) == 10 * config.page_bytes
    assert sum(size.nbytes for size in config.window_tensors(7).values()) == 7 * config.window_bytes
    assert config.window_capacity == 32 + 63 + 1
    dense = 2 * 128 * 8 * 128 * 2
    assert config.page_bytes <= 0.44 * dense
    assert config.slot_bytes * 16 == tensors["blocks"].nbytes // 10


def test_kv_cache_holds_the_same(device, rng):
    """The same tokens in a KVCache and in pages of the caller: attention differs by rounding alone."""
    engine = make_engine(device, window=32)
    cache = ck.KVCache(max_batch=1, kv_heads=2, head_dim=64, capacity=384, sparsity=0.6, device=device)
    new = tokens_of(engine, 290)
    engine.extend(1, new)
    cache.append(*new[:, None].to(device))
    q = oracle.gaussian(1, 4, 1, 64).to(device)
    out = paged.attend(q, engine.pool, engine.windows, engine.lengths, engine.index([1]))
    assert oracle.relative_error(out, cache.attend(q).double().cpu()) <= 2e-3


# ---- Compilers and graphs --------------------------------------------------------------------------------------------


def step(pool, windows, lengths, q, k, v, sequences):
    paged.append(pool, windows, lengths, k, v, sequences)
    return paged.attend(q, pool, windows, lengths, sequences)


def test_compiled(device, rng):
    engine = make_engine(device, window=3)
    for sequence in range(3):
        engine.extend(sequence, tokens_of(engine, 60 + sequence))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(6):  # tiles are stored, and leave
        outs = []

        def call(pool, windows, lengths, k, v, sequences):
            q = oracle.gaussian(2, 4, 1, 64).to(k.device)
            outs.append((q, compiled(pool, windows, lengths, q, k, v, sequences)))  # noqa: B023

        engine.append([2, 0], tokens_of(engine, 1, 2), call)
        engine.check()
        ((q, out),) = outs
        for row, sequence in enumerate([2, 0]):
            expected, _ = engine.expected(sequence, q[row : row + 1], 0.125)
            assert oracle.relative_error(out[row : row + 1], expected) <= 2e-3


def test_recorded(device, rng):
    """What needs numbers of the host is refused where calls are recorded; the others have fakes."""
    engine = make_engine(device)
    k, v = tokens_of(engine, TILE, 1).to(device)
    state = {"sequence": 0, "compressed": 0, "window": 0}
    with pytest.raises(RuntimeError, match="extend"):
        torch.compile(
            lambda: paged.extend(engine.pool, engine.windows, engine.lengths, k, v, **state),
            backend="eager",
            fullgraph=True,
        )()
    engine.give_pages(0, TILE)
    store = torch.compile(
        lambda: paged.store(engine.pool, k, v, engine.index([0]), engine.index([0])), backend="aot_eager"
    )
    store()
    exported = torch.compile(lambda: paged.export(engine.pool, 0, 0, 1), backend="aot_eager", fullgraph=True)()
    for x, tile in zip((k, v), exported):
        assert oracle.same_bits(tile.cpu(), oracle.prune(x[0].cpu(), engine.config.key_keep))


@pytest.mark.gpu
def test_graph(rng):
    """Replays append and attend; nothing waits for the device."""
    engine = make_engine("cuda", window=8)
    for sequence in range(3):
        engine.extend(sequence, tokens_of(engine, 60 + sequence))
    for sequence in range(3):
        engine.give_pages(sequence, 100)
    q, k, v = (oracle.gaussian(3, heads, 1, 64, device="cuda") for heads in (4, 2, 2))
    sequences, graph, side = engine.index([0, 1, 2]), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    saved = [x.clone() for x in (engine.windows.lengths, engine.lengths)]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(engine.pool, engine.windows, engine.lengths, q, k, v, sequences)
    torch.cuda.synchronize()
    engine.windows.lengths.copy_(saved[0])
    engine.lengths.copy_(saved[1])
    with torch.cuda.graph(graph):
        out = step(engine.pool, engine.windows, engine.lengths, q, k, v, sequences)
    for _ in range(70):
        new = tokens_of(engine, 1, 3)

        def replay(pool, windows, lengths, new_k, new_v, _):
            k.copy_(new_k)
            v.copy_(new_v)
            graph.replay()

        engine.append([0, 1, 2], new, replay)
    engine.check()
    for sequence in range(3):
        expected, _ = engine.expected(sequence, q[sequence : sequence + 1], 0.125)
        assert oracle.relative_error(out[sequence : sequence + 1], expected) <= 2e-3


# ---- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"kv_heads": 0}, ValueError, "kv_heads must be at least 1"),
        ({"head_dim": 60}, ValueError, "head_dim must be a multiple of 8"),
        ({"dtype": torch.float32}, TypeError, "dtype must be"),
        ({"window": -1}, ValueError, "window must be at least 0"),
        ({"page_tokens": 96}, ValueError, "page_tokens must be a multiple of 64"),
        ({"max_append": 65}, ValueError, "max_append must be at most 64"),
        ({"keep": 3, "sparsity": 0.5}, ValueError, "sparsity and keep say the same thing"),
        ({"key_keep": 65}, ValueError, "key_keep must be from 1 to D = 64"),
    ],
)
def test_bad_sizes(options, error, message):
    with pytest.raises(error, match=message):
        paged.configure(**{"kv_heads": 2, "head_dim": 64, **options})


@pytest.mark.parametrize("page", [12, 13, 2**31 - 1, -2, -(2**31)])
def test_pages_that_the_pool_does_not_have(page, device, rng):
    """Nothing is written or read there, and the error is set; a CPU refuses to attend to them."""
    engine = make_engine(device, window=0)
    pool, windows, lengths = engine.pool, engine.windows, engine.lengths
    k, v = tokens_of(engine, TILE, 1).to(device)
    pool.page_table[0] = page
    content = pool.blocks.clone(), pool.key_rows.clone(), pool.token_order.clone()

    def store():
        paged.store(pool, k, v, engine.index([0]), engine.index([0]))

    def append():
        paged.append(pool, windows, lengths, k[:, :, :1], v[:, :, :1], engine.index([0]))

    def export():
        assert not any(x.any() for x in paged.export(pool, 0, 0, 2))

    for call in (store, append, export):
        windows.lengths[0] = TILE - 1
        pool.error.zero_()
        call()
        assert int(pool.error) == 1, call
        now = pool.blocks, pool.key_rows, pool.token_order
        assert all(map(torch.equal, content, now)) and int(windows.lengths[0]) == TILE - 1 and not lengths.any()
    engine.check_memory()
    if engine.device.type == "cpu":
        lengths[0] = TILE
        with pytest.raises(ValueError, match="the page table has no page 0 for sequence 0"):
            paged.attend(oracle.gaussian(1, 4, 1, 64), pool, windows, lengths)


@pytest.mark.parametrize("stores", [False, True])
@pytest.mark.parametrize(
    "length, held", [(-64, 0), (-640, 0), (0, -1), (0, -3), (0, -(2**31)), (0, 1000), (0, 2**31 - 1)]
)
def test_lengths_that_no_sequence_has(length, held, stores, device, rng):
    engine = make_engine(device)
    pool, windows, lengths = engine.pool, engine.windows, engine.lengths
    engine.give_pages(1, 5 * TILE)
    k, v = tokens_of(engine, TILE if stores else 1, 1).to(device)
    lengths[1], windows.lengths[1] = length, held
    content = pool.blocks.clone(), windows.keys.clone(), windows.values.clone()
    paged.append(pool, windows, lengths, k, v, engine.index([1]))
    assert int(pool.error) == 1 and (int(lengths[1]), int(windows.lengths[1])) == (length, held)
    assert all(map(torch.equal, content, (pool.blocks, windows.keys, windows.values)))
    engine.check_memory()


def test_results_apart_from_what_is_read(rng):
    """Whatever tensor of the pool, the windows or the call lies in the memory of the result."""
    engine = make_engine("cpu", codec="int8")
    engine.extend(0, tokens_of(engine, 200))
    q, sequences = oracle.gaussian(1, 4, 1, 64), engine.index([0])
    tensors = engine.pool.tensors() | engine.windows.tensors() | {"lengths": engine.lengths, "sequences": sequences}
    for name, tensor in tensors.items():
        if name in ("dropped", "refused", "error", "arrivals"):
            continue
        memory = torch.zeros(max(tensor.nbytes, q.nbytes) + 64, dtype=torch.uint8)
        moved = memory[64 : 64 + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        named = {field: engine.pool.tensors()[field] for field in engine.config.pool_tensors(12, 3, 6)}
        held = {field: engine.windows.tensors()[field] for field in engine.config.window_tensors(3)}
        pool = paged.make_pool(engine.config, {field: moved if field == name else x for field, x in named.items()})
        windows = paged.make_windows(engine.config, {field: moved if field == name else x for field, x in held.items()})
        lengths = moved if name == "lengths" and tensor is engine.lengths else engine.lengths
        out = memory[: q.nbytes].view(q.dtype).view(q.shape)
        with pytest.raises(ValueError, match=f"out must not share memory with .*{name}"):
            paged.attend(q, pool, windows, lengths, moved if name == "sequences" else sequences, out=out)


def test_bad_tensors():
    config = paged.configure(kv_heads=2, head_dim=64, keep=20)
    tensors = {name: size.empty("cpu") for name, size in config.pool_tensors(3, 2, 2).items()}
    for name, tensor, error, message in (
        ("blocks", tensors["blocks"][:5], ValueError, "blocks must have 2 slots for each page, got 5"),
        ("blocks", tensors["blocks"][:4], ValueError, r"key_rows must be contiguous, of shape \(4,\)"),
        ("blocks", tensors["blocks"].float(), TypeError, "blocks must be int32"),
        ("key_channels", tensors["key_channels"][:1], ValueError, "key_channels must be contiguous, of shape"),
        ("page_table", tensors["page_table"].T, ValueError, "page_table must be contiguous"),
        ("page_table", tensors["page_table"][0], ValueError, "page_table must have shape"),
        ("error", None, TypeError, "error must be a"),
    ):
        with pytest.raises(error, match=message):
            paged.make_pool(config, {**tensors, name: tensor})
    with pytest.raises(ValueError, match=r"missing .*error"):
        paged.make_pool(config, {name: x for name, x in tensors.items() if name != "error"})
    with pytest.raises(TypeError, match="tensors must map names to tensors"):
        paged.make_pool(config, list(tensors.values()))
    shifted = torch.empty(tensors["token_order"].numel() + 1, dtype=torch.uint8)[1:].view(-1, 64)
    with pytest.raises(ValueError, match="token_order must be aligned"):
        paged.make_pool(config, {**tensors, "token_order": shifted})
    windows = {name: size.empty("cpu") for name, size in config.window_tensors(2).items()}
    with pytest.raises(ValueError, match="keys must be contiguous"):
        paged.make_windows(config, {**windows, "keys": windows["keys"][:, :, 1:]})


def test_bad_calls(rng):
    engine = make_engine("cpu")
    pool, windows, lengths = engine.pool, engine.windows, engine.lengths
    k, q = oracle.gaussian(1, 2, TILE, 64), oracle.gaussian(1, 4, 1, 64)
    state = {"sequence": 0, "compressed": 0, "window": 0}
    other = paged.make_windows(
        engine.config, {name: size.empty("cpu") for name, size in engine.config.window_tensors(2).items()}
    )
    for call, error, message in (
        (lambda: paged.append(None, windows, lengths, k, k), TypeError, "pool must be what make_pool makes"),
        (lambda: paged.append(pool, None, lengths, k, k), TypeError, "windows must be what make_windows makes"),
        (lambda: paged.append(pool, other, lengths, k, k), ValueError, "windows must be those of the pool's 3"),
        (lambda: paged.append(pool, windows, lengths.long(), k, k), TypeError, "lengths must be int32"),
        (lambda: paged.append(pool, windows, lengths, k, k.bfloat16()), TypeError, "v must be float16"),
        (
            lambda: paged.extend(pool, windows, lengths, k, k, **{**state, "sequence": 3}),
            ValueError,
            "sequence must be",
        ),
        (
            lambda: paged.extend(pool, windows, lengths, k, k, **{**state, "compressed": 9}),
            ValueError,
            "compressed must",
        ),
        (
            lambda: paged.extend(pool, windows, lengths, k, k, **{**state, "window": 96}),
            ValueError,
            "window must be below",
        ),
        (lambda: paged.attend(q[:, :3], pool, windows, lengths), ValueError, "multiple of kv_heads = 2"),
        (lambda: paged.attend(q, pool, windows, lengths[:2]), ValueError, "lengths must be contiguous"),
        (lambda: paged.attend(q, pool, windows, lengths, engine.index([0, 1])), ValueError, "sequences must be"),
        (lambda: paged.attend(q, pool, windows, lengths, scale=float("nan")), ValueError, "scale"),
        (lambda: paged.attend(q, pool, windows, lengths, backend="sm99"), ValueError, "backend"),
        (lambda: paged.attend(q, pool, windows, lengths, expected=3), TypeError, "expected"),
        (lambda: paged.attend(q, pool, windows, lengths, expected=(2**31, 0)), ValueError, r"expected\[0\] must be"),
        (lambda: paged.attend(q, pool, windows, lengths, expected=(0, 2**63)), ValueError, "expected must be"),
        (lambda: paged.attend(q, pool, windows, lengths, out=q), ValueError, "out must not share memory"),
        (lambda: paged.export(pool, 0, 5, 2), ValueError, "tiles must be within the 6"),
        (lambda: paged.store(pool, k, k, engine.index([0]), engine.index([0, 1])), ValueError, "first_tiles must be"),
    ):
        with pytest.raises(error, match=message):
            call()
    assert not pool.error and not pool.blocks.any() and not windows.lengths.any()
    with pytest.raises(RuntimeError, match="attend"):
        paged.attend(q.requires_grad_(), pool, windows, lengths).sum().backward()
