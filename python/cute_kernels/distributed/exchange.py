"""What ranks send one another in a call of attend: outputs, their log-sum-exps, and what they say of themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes: kernels store and load outputs in vectors


class Parts:
    """Room for what all ranks send, in one tensor that a single all-gather fills; kernels write this rank's part and
    read all of them where they lie.

    `bytes`: uint8 (ranks, n). `out` (B, Hq, Sq, D), `lse` (B, Hq, Sq) float32 and `header` (headers,) int32: this
    rank's part, not initialized.
    """

    def __init__(
        self, ranks: int, rank: int, shape: Sequence[int], dtype: torch.dtype, headers: int, device: torch.device
    ) -> None:
        rows = math.prod(shape[:3])
        self._shape, self._dtype = tuple(shape), dtype
        self._lse = rows * shape[3] * dtype.itemsize
        self._header = self._lse + rows * torch.float32.itemsize
        self._end = self._header + headers * torch.int32.itemsize
        size = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        self.bytes = torch.empty(ranks, size, dtype=torch.uint8, device=device)
        mine = self.bytes[rank : rank + 1]
        self.out, self.lse = (x[0] for x in self._states(mine))
        self.header = self._headers(mine)[0]

    def states(self) -> tuple[Tensor, Tensor]:
        """(outs, lses) of all ranks, (ranks, B, Hq, Sq, D) and (ranks, B, Hq, Sq)."""
        return self._states(self.bytes)

    def headers(self) -> Tensor:
        """Of all ranks, (ranks, headers)."""
        return self._headers(self.bytes)

    def _states(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        outs = parts[:, : self._lse].view(self._dtype).unflatten(1, self._shape)
        return outs, parts[:, self._lse : self._header].view(torch.float32).unflatten(1, self._shape[:3])

    def _headers(self, parts: Tensor) -> Tensor:
        return parts[:, self._header : self._end].view(torch.int32)
