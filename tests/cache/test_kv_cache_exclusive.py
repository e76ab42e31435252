"""KVCache beside other threads, and after exceptions at any point of a call: one at a time, and nothing half done."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch

import cute_kernels as ck
from cute_kernels._cache.core import CacheCore
from cute_kernels._cache.rows import core_of
from cute_kernels._cache.storage import CacheStorage
from tests.support.backends import skip_unless_ok
from tests.support.exact_kv_cache import make, pair
from tests.support.oracle import bits

IN_USE = "another call of this KVCache is under way: a cache is for one thread at a time"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def place(request) -> str:
    if request.param == "cuda":
        skip_unless_ok("sm80")
    return request.param


def tokens(cache: ck.KVCache, count: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return pair(batch, 2, count, 16, device=cache.device)


def content(cache: ck.KVCache) -> tuple:
    """What it holds, once host and device were found to agree."""
    core = core_of(cache)
    table, storage = core.table, core.storage
    table.check()
    assert storage.lengths.tolist() == [row.compressed for row in table.rows]
    assert storage.windows.lengths.tolist() == [row.window for row in table.rows]
    for entries, row in zip(storage.pool.page_table.tolist(), table.rows, strict=True):
        assert entries == row.pages + [-1] * (len(entries) - len(row.pages))
    dense = [tuple(bits(x).tolist() for x in core.dense(row)) for row in range(cache.batch)]
    return cache.lengths.tolist(), dense, cache.statistics()["pages_free"], cache.capacity, cache.max_batch


# ---- Threads ---------------------------------------------------------------------------------------------------------


@contextmanager
def in_use(cache: ck.KVCache, monkeypatch) -> Iterator[None]:
    """Another thread is in the midst of `attend`."""
    inside, leave, plain = threading.Event(), threading.Event(), CacheCore._attend

    def waiting(*arguments):
        inside.set()
        assert leave.wait(60)
        return plain(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(CacheCore, "_attend", waiting)
        q, out = tokens(cache, 1)[0], []
        thread = threading.Thread(target=lambda: out.append(cache.attend(q)))
        thread.start()
        assert inside.wait(60)
        try:
            yield
        finally:
            leave.set()
            thread.join()
        assert out


CALLS: dict[str, Callable[[ck.KVCache], object]] = {
    "prefill": lambda c: c.prefill(*tokens(c, 70, batch=1), sequences=[2]),
    "append": lambda c: c.append(*tokens(c, 1)),
    "attend": lambda c: c.attend(tokens(c, 1)[0]),
    "step": lambda c: c.step(tokens(c, 1)[0], *tokens(c, 1)),
    "reserve": lambda c: c.reserve(100),
    "grow": lambda c: c.grow(capacity=2000, max_batch=7),
    "crop": lambda c: c.crop(20),
    "reorder": lambda c: c.reorder([1, 0, 2]),
    "repeat_interleave": lambda c: c.repeat_interleave(1),
    "select": lambda c: c.select([1, 1]),
    "reset": lambda c: c.reset(),
    "add": lambda c: c.add(),
    "free": lambda c: c.free(1),
    "fork": lambda c: c.fork(1),
    "dense": lambda c: c.dense(0),
    "lengths": lambda c: c.lengths,
    "statistics": lambda c: c.statistics(),
    "deepcopy": lambda c: copy.deepcopy(c),
    "pickle": lambda c: pickle.dumps(c),
}


def filled(device="cpu", **arguments) -> ck.KVCache:
    """Rows of 150 and 101 tokens, and an empty one in use."""
    cache = make(device, **arguments)
    cache.prefill(*tokens(cache, 150), lengths=[150, 101])
    cache.add()
    return cache


def test_another_thread_is_refused(rng, monkeypatch):
    cache = filled()
    before = content(cache)
    with in_use(cache, monkeypatch):
        for call in CALLS.values():
            with pytest.raises(RuntimeError, match=IN_USE):
                call(cache)
        assert "KVCache(" in repr(cache)
    assert content(cache) == before
    for call in CALLS.values():  # and every one of them is there again
        call(copy.deepcopy(cache))


def test_many_threads_at_once(rng):
    """What is refused changes nothing, what is not is done whole; nothing crashes."""
    cache, refused, others = make(capacity=400), [], []
    interval = sys.getswitchinterval()
    k, v = tokens(cache, 64)
    calls = [
        lambda: cache.append(k[:, :, :1], v[:, :, :1]),
        lambda: cache.append(k, v),
        lambda: cache.attend(k[:, :, :1]),
        lambda: cache.step(k[:, :, :1], k[:, :, :1], v[:, :, :1]),
        lambda: cache.crop(-1),
        lambda: cache.grow(capacity=cache.capacity + 1),
        lambda: cache.dense(0),
        lambda: cache.reset(),
    ]

    def run(seed: int) -> None:
        for i in range(40):
            try:
                calls[(seed * 5 + i * 3) % len(calls)]()
            except RuntimeError as error:
                refused.append(IN_USE in str(error) or "exceed capacity" in str(error))
            except ValueError as error:  # of rows that a reset gave back
                refused.append("rows, got" in str(error) or "in use" in str(error) or "drops more" in str(error))
            except BaseException as error:
                others.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert all(refused) and not others
    content(cache)


def test_a_thread_after_the_other(rng):
    cache = make()
    for _ in range(3):
        thread = threading.Thread(target=lambda: cache.append(*tokens(cache, 5)))
        thread.start()
        thread.join()
    assert cache.lengths.tolist() == [15, 15]


# ---- Exceptions ------------------------------------------------------------------------------------------------------


class Fails(ck.rules.Rule):
    """Keeps everything; calls what it is told to, raises when it is told to."""

    name = "fails"
    left = 10**9  # tiles and roles that it prunes before it raises
    call: Callable[[], object] | None = None

    def mask(self, x, kept, role):
        self.left -= 1
        if self.call is not None:
            self.call()
        if self.left < 0:
            raise ArithmeticError("the rule's own")
        return torch.ones_like(x, dtype=torch.bool)


@pytest.mark.parametrize("left", [0, 1, 2, 5])
def test_a_rule_that_raises_changes_nothing(left, place, rng):
    rule = Fails()
    cache = make(place, max_batch=3, capacity=500, key_rule=rule, value_rule=rule)
    k, v = tokens(cache, 300, batch=3)
    empty = content(cache)
    rule.left = left
    with pytest.raises(ArithmeticError):
        cache.prefill(k, v, lengths=[300, 200, 250])
    assert content(cache) == empty
    rule.left = 10**9
    cache.prefill(k, v, lengths=[300, 200, 250])
    assert cache.lengths.tolist() == [300, 200, 250]
    before = content(cache)
    rule.left = left
    with pytest.raises(ArithmeticError):
        cache.append(*tokens(cache, 150, batch=3))
    assert content(cache) == before


def test_attention_that_fails_leaves_the_tokens_of_its_step(place, rng, monkeypatch):
    cache = filled(place)
    q, k, v = tokens(cache, 50)[0], *tokens(cache, 50)
    twin = copy.deepcopy(cache)
    twin.append(k, v)

    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(CacheCore, "_attend", fails)
    with pytest.raises(MemoryError):
        cache.step(q, k, v)
    assert content(cache) == content(twin)


def test_a_rule_that_calls_its_cache_is_refused(rng):
    rule = Fails()
    cache = make(key_rule=rule)
    rule.call = lambda: cache.lengths
    with pytest.raises(RuntimeError, match=IN_USE):
        cache.prefill(*tokens(cache, 300))
    rule.call = None
    cache.prefill(*tokens(cache, 300))
    assert cache.lengths.tolist() == [300, 300]


class Interrupts:
    """KeyboardInterrupt as Ctrl-C brings it: where Python looks for signals, at the start of a function and behind the
    call of a builtin. At the place number `at` of those in the cache's own code; places: how many there were."""

    def __init__(self, at: int = 10**9) -> None:
        self.at, self.places = at, 0

    def __call__(self, frame, event, _) -> None:
        file = frame.f_code.co_filename
        if event in ("call", "c_return") and ("/cute_kernels/_cache/" in file or file.endswith("kv_cache.py")):
            self.places += 1
            if self.places > self.at:
                raise KeyboardInterrupt  # which ends the profiling, too

    def __enter__(self) -> Interrupts:
        sys.setprofile(self)
        return self

    def __exit__(self, *_) -> None:
        sys.setprofile(None)


CHANGES: dict[str, Callable[[ck.KVCache], object]] = {
    name: call for name, call in CALLS.items() if name not in ("deepcopy", "pickle")
} | {
    "append of several tiles": lambda c: c.append(*tokens(c, 150)),
    "append that fills a tile": lambda c: c.append(*tokens(c, 50)),
    "crop of a tile": lambda c: c.crop(-140, sequences=[0]),
    "crop of the window": lambda c: c.crop(-20, sequences=[0, 1]),
    "reorder of all": lambda c: c.reorder([2, 0, 1]),
    "select more": lambda c: c.select([1, 0, 1, 0]),
}


def interrupted(cache: ck.KVCache, call: Callable[[ck.KVCache], object], at: int) -> list[str]:
    """What was said besides KeyboardInterrupt."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(KeyboardInterrupt), Interrupts(at):  # Python itself drops one at the end of a generator
            call(cache)
    return [str(warning.message) for warning in caught]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("again", [False, True], ids=["", "and again"])
@pytest.mark.parametrize("name", CHANGES)
def test_interrupts_anywhere(name, again, place, rng, monkeypatch):
    """A call that was interrupted has not happened, or has, or emptied sequences and says which."""
    original, call, seed = filled(place), CHANGES[name], rng.randrange(2**31)
    done = copy.deepcopy(original)
    torch.manual_seed(seed)
    with Interrupts() as counted:
        call(done)
    before, after, follow = content(original), content(done), CacheStorage.follow

    def interrupted_follow(self, rows):
        monkeypatch.setattr(CacheStorage, "follow", follow)
        raise KeyboardInterrupt

    for at in sorted(rng.sample(range(counted.places), min(15, counted.places))):
        cache = copy.deepcopy(original)
        torch.manual_seed(seed)
        if again:
            monkeypatch.setattr(CacheStorage, "follow", interrupted_follow)
        said = interrupted(cache, call, at)
        monkeypatch.setattr(CacheStorage, "follow", follow)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            lengths = cache.lengths.tolist()  # recovers where the recovery was interrupted
        said += [str(warning.message) for warning in caught]
        found = content(cache)
        assert found[3:] in (before[3:], after[3:])
        if found[:3] != before[:3] and found[:3] != after[:3]:
            assert len(said) == 1 and "are empty now, and what they held is lost" in said[0]
            for row in range(len(lengths)):
                assert lengths[row] == 0 or found[1][row] == before[1][row]
        cache.append(*tokens(cache, 70, batch=1))
        content(cache)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_steps(place, rng):
    """Of steps that are alike, which are launched whole."""
    cache = make(place, window=64)
    k, v = tokens(cache, 1)
    for at in range(40):
        cache.crop(0)
        for _ in range(3):
            cache.step(k, k, v)
        said = interrupted(cache, lambda c: c.step(k, k, v), at)
        lengths = content(cache)[0]
        assert lengths in ([3, 3], [4, 4]) and not said
        assert torch.equal(cache.dense(1)[0], k[1].expand(2, lengths[1], 16))
