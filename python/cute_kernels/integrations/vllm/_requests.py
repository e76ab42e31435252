"""Which request a row of a step is of, where vLLM's runner does not say: the first one, which runs on CPUs."""

from __future__ import annotations

import numpy as np

from cute_kernels.integrations._serving.step import BLOCK_TOKENS


class RequestsByBlock:
    """Rows of a request table for a runner that does not say which request a row is of, but has its blocks on the host:
    a request is known by the block of its last token, which it wrote itself."""

    def __init__(self, most: int) -> None:
        self._of_block: dict[int, int] = {}
        self._block = [-1] * most
        self._used = [0] * most  # the last step
        self._steps = 0

    def rows(self, blocks: np.ndarray, before: np.ndarray, ends: np.ndarray, begins: np.ndarray) -> np.ndarray:
        """The requests' rows, (n,); begins is set for those that are not known. The rows of requests that are gone are
        given away, the longest unused first."""
        self._steps += 1
        request = np.full(len(before), -1, dtype=np.int64)
        for i in np.flatnonzero(~begins):
            row = self._of_block.get(int(blocks[i, (before[i] - 1) // BLOCK_TOKENS]), -1)
            if row >= 0 and self._used[row] < self._steps:
                request[i], self._used[row] = row, self._steps
        begins |= request < 0
        free = sorted((row for row, used in enumerate(self._used) if used < self._steps), key=self._used.__getitem__)
        for i, row in zip(np.flatnonzero(request < 0), free):
            request[i], self._used[row] = row, self._steps
        for row in request:
            if self._of_block.get(self._block[row]) == row:
                del self._of_block[self._block[row]]
        for i, row in enumerate(request):
            self._block[row] = int(blocks[i, (ends[i] - 1) // BLOCK_TOKENS])
            self._of_block[self._block[row]] = int(row)
        return request
