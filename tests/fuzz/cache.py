"""Random operations on a KVCache of random sizes beside its dense model: what `profiling.soak` drives, and more."""

from __future__ import annotations

import copy
import pickle

import torch

from profiling.soak_driver import Shape, Soak
from tests.fuzz import inputs
from tests.fuzz.case import Case

_OPERATIONS = 25


def run(case: Case) -> None:
    driver = Driver(case, case.note("cache", cache_shape(case)))
    with case.backend() as driver.backend:
        for i in range(_OPERATIONS):
            case.note("operation", i)
            driver.step()
            case.note("last operation", driver.last)
        driver.check_everything()
        driver.cache.reset()
        driver.model.rows = [None] * driver.cache.max_batch
        driver.check_everything()


def cache_shape(case: Case) -> Shape:
    rng = case.rng
    head_dim = rng.choice([8, 16, 40, 64, 64, 72, 128, 136, 256])
    page_tokens = 64 * rng.choice([1, 1, 2, 3, 5])
    capacity = rng.randint(1, 700)
    max_batch = rng.randint(1, 6)
    return Shape(
        max_batch=max_batch,
        kv_heads=rng.choice([1, 1, 2, 3]),
        group=rng.choice([1, 2, 4, 5, 8]),
        head_dim=head_dim,
        dtype=rng.choice(inputs.DTYPES),
        key_keep=rng.choice([None, 1, head_dim // 2, head_dim, rng.randint(1, head_dim)]),
        value_keep=rng.choice([None, 1, head_dim // 2, head_dim, rng.randint(1, head_dim)]),
        window=rng.choice([0, 1, 16, 32, 63, 64, 100, rng.randint(0, 200)]),
        page_tokens=page_tokens,
        capacity=capacity,
        pool_tokens=rng.randint(page_tokens, max(page_tokens, capacity * max_batch)),
    )


class Driver(Soak):
    """A Soak that also takes steps and goes on with copies."""

    def __init__(self, case: Case, shape: Shape) -> None:
        super().__init__(shape, case.rng, case.device)
        self._ops |= {"step": (15, self._step), "copy": (2, self._copy)}

    def _step(self) -> None:
        """append and attend in one call, of the first rows: the same bits as the two calls on a copy."""
        rows = self.rng.randint(1, self.cache.max_batch)
        n = self.rng.choice([1, 1, 1, 1, 3, 70])
        k, v = self._tokens(rows, n)
        q = torch.randn(rows, self.shape.kv_heads * self.shape.group, n, self.shape.head_dim).to(self.shape.dtype)
        k, v, q = (self._to_device(x) for x in (k, v, q))
        before, twin = self.cache.statistics(), copy.deepcopy(self.cache)
        results: list[torch.Tensor] = []

        def change() -> None:
            for row in range(rows):
                self.model.append(row, k[row].cpu(), v[row].cpu())
            self._accept_dropped(list(range(rows)), before)
            twin.append(k, v)
            want = twin.attend(q, backend=self.backend)
            same = torch.equal(results[0].view(torch.int16), want.contiguous().view(torch.int16))
            self._require(same or bool(want.isnan().any()), "step differs from append and attend")

        self._change(
            f"step of {n} tokens for {rows} rows",
            lambda: results.append(self.cache.step(q, k, v, backend=self.backend).contiguous()),
            change,
        )

    def _copy(self) -> None:
        """The copy goes on, and what happens to the original then does not reach it."""
        if self.rng.random() < 0.5:
            self.last, twin = "pickle", pickle.loads(pickle.dumps(self.cache))
        else:
            self.last, twin = "deepcopy", copy.deepcopy(self.cache)
        self.cache.reset()
        self.cache = twin
