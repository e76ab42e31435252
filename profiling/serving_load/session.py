"""A manager that serves users: each sends its next request when it has the answer to the last one."""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers.generation.continuous_batching.requests import RequestState

from profiling.serving_load.requests import Request, Requests
from profiling.serving_load.sides import Made

_POLL = 0.02  # seconds between looks at the memory in use


@dataclass(frozen=True)
class Load:
    """What one number of users got, in a window of time. Times in seconds.

    first_token: from sending a request to its first token; those that still wait count with their time so far. waiting:
    requests without a token at the end. under_way: requests between their first and last token, on average. used: bytes
    of cache, on average. steps: passes of the model.
    """

    seconds: float
    tokens: int
    first_token_p50: float | None
    first_token_p99: float | None
    first_tokens: int
    waiting: int
    under_way: float
    used: int
    steps: int


class Session:
    """Of one manager, from its start to its end. A request that the engine starts again keeps its times."""

    def __init__(self, made: Made, requests: Requests) -> None:
        self._made, self._requests = made, requests
        self._sent: dict[str, float] = {}
        self._times: dict[str, list[float]] = {}  # of tokens, of requests that ended
        self._users = 0
        self._replaces = True  # whether users go on

    def __enter__(self) -> Session:
        self._kept = _kept_times()
        self._kept.__enter__()
        self._made.manager.warmup()
        self._made.manager.start()
        self._complete(self._requests.next(0.1))  # what is slow only once
        return self

    def __exit__(self, *_: object) -> None:
        manager = self._made.manager
        manager.stop(block=True, hard_stop=True)
        manager.destroy()
        self._kept.__exit__(None, None, None)

    def prefix_hits(self, tokens: int, tail: int, repeats: int) -> tuple[float, float]:
        """Seconds to the first token, medians: of prompts that are new, and of ones whose first `tokens` are known."""
        misses, hits = [], []
        for _ in range(repeats):
            common = self._requests.tokens(tokens)
            for found in (misses, hits):
                request = Request(common + self._requests.tokens(tail), 2)
                found.append(self._first_token(self._complete(request)))
        return statistics.median(misses), statistics.median(hits)

    def load(self, users: int, seconds: float, settle: float) -> Load:
        """Measures for `seconds`, once all of so many users have a token, at the latest after `settle` seconds."""
        for _ in range(self._users, users):
            self._send(self._requests.first())
        self._users = users
        begun = time.perf_counter()
        while time.perf_counter() - begun < settle and any(not times for times in self._under_way().values()):
            self._wait(_POLL)
        used, manager = [], self._made.manager
        first, steps = time.perf_counter(), manager.current_batch
        while time.perf_counter() - first < seconds:
            self._wait(_POLL)
            used.append(self._made.used())
        last = time.perf_counter()
        return self._described(first, last, round(statistics.fmean(used)), manager.current_batch - steps)

    def _described(self, first: float, last: float, used: int, steps: int) -> Load:
        times = self._times | self._under_way()
        tokens = sum(bisect.bisect(each, last) - bisect.bisect(each, first) for each in times.values())
        spans = [(each[0], min(last, each[-1])) for each in times.values() if each]
        overlap = sum(max(0.0, end - max(first, begin)) for begin, end in spans)
        waits = [self._first_token(name) for name, each in times.items() if each and first < each[0] <= last]
        waiting = [last - self._sent[name] for name, each in times.items() if not each]
        ordered: list[Any] = sorted(waits + waiting) or [None]
        return Load(
            seconds=last - first,
            tokens=tokens,
            first_token_p50=ordered[len(ordered) // 2],
            first_token_p99=ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
            first_tokens=len(waits),
            waiting=len(waiting),
            under_way=overlap / (last - first),
            used=used,
            steps=steps,
        )

    def _send(self, request: Request) -> str:
        name = str(len(self._sent))
        self._sent[name] = time.perf_counter()
        self._made.manager.add_request(
            request.prompt, request_id=name, max_new_tokens=request.answer, record_timestamps=True
        )
        return name

    def _complete(self, request: Request) -> str:
        """Without another one after it."""
        self._replaces, name = False, self._send(request)
        while name not in self._times:
            self._wait(0.1)
        self._replaces = True
        return name

    def _first_token(self, name: str) -> float:
        return (self._times | self._under_way())[name][0] - self._sent[name]

    def _wait(self, seconds: float) -> None:
        """For results, which it answers with new requests."""
        manager, end = self._made.manager, time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            result = manager.get_result(timeout=left)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                self._times[result.request_id] = result.timestamps
                if self._replaces:
                    self._send(self._requests.next())
            elif not manager.is_running():
                raise RuntimeError(f"the manager stopped: {manager.background_thread_status.fatal_error}")

    def _under_way(self) -> dict[str, list[float]]:
        """Times of the tokens of requests that did not end, waiting ones among them."""
        scheduler: Any = self._made.manager.batch_processor.scheduler
        states = [*scheduler.waiting_requests.values(), *scheduler.active_requests.values()]
        known = {state.request_id: list(state.timestamps or []) for state in states}
        return {name: known.get(name, []) for name in self._sent if name not in self._times}


@contextmanager
def _kept_times() -> Iterator[None]:
    """A request whose blocks the engine took starts again without the times of its tokens."""
    original = RequestState.create_equivalent_initial_request

    def again(self: RequestState) -> RequestState:
        new = original(self)
        new._timestamps = self._timestamps
        return new

    RequestState.create_equivalent_initial_request = again
    try:
        yield
    finally:
        RequestState.create_equivalent_initial_request = original
