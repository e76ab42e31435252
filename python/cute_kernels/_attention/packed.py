"""Queries of sequences that differ in how many they have, packed one sequence after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime import checks


@dataclass(frozen=True)
class PackedQueries:
    """q is (1, Hq, total, D), and row i of the batch has its tokens from starts[i] to starts[i + 1].

    starts: int32 (B + 1), contiguous. most: tokens of one row at most. host: the numbers in starts, where the host has
        them; only those were checked.
    """

    starts: Tensor
    most: int
    host: tuple[int, ...] | None

    @property
    def rows(self) -> int:
        return self.starts.shape[0] - 1

    def on_device(self, device: torch.device) -> Tensor:
        """starts where kernels read them, without waiting."""
        if self.starts.device == device:
            return self.starts
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("cu_seqlens_q must be on the device of q in the capture of a CUDA graph")
        return self.starts.pin_memory().to(device, non_blocking=True)

    def ranges(self, total: int) -> list[tuple[int, int]]:
        """Where the tokens of every row begin and end, as kernels take any numbers; total: tokens of q. Waits for the
        device where the host does not have them."""
        numbers = self.starts.tolist() if self.host is None else self.host
        begins = [min(max(number, 0), total) for number in numbers[:-1]]
        ends = [min(max(number, begin), total) for begin, number in zip(begins, numbers[1:], strict=True)]
        return [(begin, min(end, begin + self.most)) for begin, end in zip(begins, ends, strict=True)]

    def check_held(self, held: Sequence[int]) -> None:
        """ValueError for more queries than a row's sequence holds tokens; held: of every row."""
        if self.host is None:
            return
        for row, ((begin, end), tokens) in enumerate(zip(pairwise(self.host), held, strict=True)):
            if end - begin > tokens:
                raise ValueError(
                    f"cu_seqlens_q must give a row no more queries than its sequence holds tokens, got {end - begin} "
                    f"for row {row}, which holds {tokens}"
                )


def check(cu_seqlens_q: Any, max_seqlen_q: Any, q: Tensor) -> PackedQueries | None:
    """The arguments of that name; q (B, Hq, Sq, D) has been checked. None where both are None.

    Raises TypeError or ValueError as the functions that take them say; numbers on a GPU are not read.
    """
    if cu_seqlens_q is None:
        if max_seqlen_q is not None:
            raise ValueError("max_seqlen_q goes with cu_seqlens_q, which is None")
        return None
    checks.tensor(cu_seqlens_q, "cu_seqlens_q")
    checks.dtype(cu_seqlens_q, "cu_seqlens_q", (torch.int32,))
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1 or not cu_seqlens_q.is_contiguous():
        raise ValueError(
            f"cu_seqlens_q must be contiguous, of shape (B + 1,), got {tuple(cu_seqlens_q.shape)} with strides "
            f"{tuple(cu_seqlens_q.stride())}"
        )
    cu_seqlens_q = checks.plain(cu_seqlens_q)
    if cu_seqlens_q.device != q.device and cu_seqlens_q.device.type != "cpu":
        raise ValueError(f"cu_seqlens_q must be on the device of q, {q.device}, or the cpu, got {cu_seqlens_q.device}")
    if q.shape[0] != 1:
        raise ValueError(f"q must have shape (1, Hq, total, D) with cu_seqlens_q, got {tuple(q.shape)}")
    most = None if max_seqlen_q is None else checks.integer(max_seqlen_q, "max_seqlen_q")
    if most is not None and not 0 <= most < 2**31:
        raise ValueError(f"max_seqlen_q must be from 0 to 2^31 - 1, got {most}")
    if cu_seqlens_q.device.type != "cpu" or not _readable(cu_seqlens_q):
        if most is None:
            raise ValueError("max_seqlen_q must be given where cu_seqlens_q is on a GPU or its numbers are not known")
        return PackedQueries(cu_seqlens_q, min(most, q.shape[2]), None)
    numbers = tuple(cu_seqlens_q.tolist())
    counts = [end - begin for begin, end in pairwise(numbers)]
    if numbers[0] != 0 or numbers[-1] != q.shape[2] or min(counts, default=0) < 0:
        raise ValueError(f"cu_seqlens_q must rise from 0 to q's {q.shape[2]} tokens, got {checks.shown(list(numbers))}")
    longest = max(counts, default=0)
    if most is not None and most < longest:
        raise ValueError(f"max_seqlen_q must be at least the {longest} tokens of the longest row, got {most}")
    return PackedQueries(cu_seqlens_q, longest, numbers)


def _readable(tensor: Tensor) -> bool:
    """Whether it has data that the host may look at: not under a compiler, nor in FakeTensorMode."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor
