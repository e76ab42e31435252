"""A step of an engine: which requests it has, what of their tokens is read from pages, and the tensors that say so.

A request under way has a row of a table, and its dense window has that number. A request that begins, is resumed after
pre-emption or hits the prefix cache starts at a multiple of 64 tokens, all of which are in full pages: its window
starts empty there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cute_kernels._runtime.extension import TILE_TOKENS as BLOCK_TOKENS

if TYPE_CHECKING:
    from cute_kernels.integrations._serving.layer import SparseKVLayer

UNKNOWN_LENGTHS = (0, 0)  # for `Step.expected`


@dataclass(frozen=True)
class Rows:
    """The requests of a step, in its order; all arrays (n,)."""

    request: np.ndarray  # its row of the request table
    first: np.ndarray  # of its new tokens, in the step's tokens
    new: np.ndarray  # tokens
    start: np.ndarray  # tokens before them that are read from pages
    held: np.ndarray  # tokens of the window behind those

    @property
    def is_decode(self) -> np.ndarray:
        return self.new == 1


class Requests:
    """recent: tokens that stay dense at least. most: requests that the table has rows for."""

    def __init__(self, recent: int, most: int) -> None:
        self._recent = recent
        self._start = np.zeros(most, dtype=np.int64)
        self._end = np.zeros(most, dtype=np.int64)  # tokens after the last step
        self.stored = False  # whether any tile was

    def step(self, request: np.ndarray, query_starts: np.ndarray, ends: np.ndarray, begins: np.ndarray) -> Rows:
        """What a step finds; afterwards requests are as after it.

        query_starts: (n + 1,), of new tokens. ends: (n,), tokens with the new ones. begins: (n,) bool, whose window
        starts empty.

        Raises RuntimeError for a request in the middle of a page to which it did not come.
        """
        first, new = query_starts[:-1], np.diff(query_starts)
        before = ends - new
        lost = np.where(begins, before % BLOCK_TOKENS != 0, self._end[request] != before)
        if lost.any():
            row = int(np.flatnonzero(lost)[0])
            raise RuntimeError(
                f"a request goes on after {before[row]} tokens, but its dense window is not known any more: the runner "
                "must schedule a request until it ends, is pre-empted or has filled a block"
            )
        start = np.where(begins, before, self._start[request])
        left = (ends - self._recent) // BLOCK_TOKENS * BLOCK_TOKENS
        self._start[request] = np.maximum(start, left)
        self._end[request] = ends
        self.stored |= bool((ends // BLOCK_TOKENS > before // BLOCK_TOKENS).any())
        return Rows(request, first, new, start, before - start)


@dataclass(frozen=True)
class Prompt:
    """Several new tokens of one request."""

    request: int  # its row of the request table
    row: Tensor  # the same, int32 (1,) on the device
    first: int  # of its tokens in the step
    last: int
    compressed: int  # tokens before them, in pages
    window: int  # and in the window


@dataclass(frozen=True)
class Step:
    """What all layers do in a step. Decoding requests have one new token each.

    decode_tokens: where these are in the step's tokens; None: the first ones, as many as there are rows.
    """

    decodes: int  # rows of the following, padding included
    append_rows: Tensor  # int32 (decodes,): rows of the request table; -1: padding
    attend_rows: Tensor  # the same, padding as an empty row
    decode_tokens: Tensor | None
    expected: tuple[int, int]  # see paged.attend
    prompts: tuple[Prompt, ...]
    chooses_orders: bool  # no tile is stored yet


class Steps:
    """Makes them, with tensors of all rows of the request table, one more for padding, where graphs find them again."""

    def __init__(self, layers: Sequence[SparseKVLayer], most: int, max_tokens: int, device: torch.device) -> None:
        """most: rows of the request table. max_tokens: of a request."""
        self._most, rows, self._device = most, most + 1, device
        pages = -(-max_tokens // BLOCK_TOKENS)
        self._requests = Requests(layers[0].config.recent, most)
        self._page_table = torch.full((rows, pages), -1, dtype=torch.int32, device=device)
        self._lengths = torch.zeros(2, len(layers), rows, dtype=torch.int32, device=device)  # in pages, in windows
        self._rows = torch.empty(2, most, dtype=torch.int32, device=device)  # as append and attend take them
        for layer, lengths, window_lengths in zip(layers, *self._lengths):
            layer.attach(self._page_table, lengths, window_lengths)

    @property
    def nbytes(self) -> int:
        return self._page_table.nbytes + self._lengths.nbytes + self._rows.nbytes

    def step(
        self,
        request: np.ndarray,
        query_starts: np.ndarray,
        ends: np.ndarray,
        begins: np.ndarray,
        block_table: Tensor,
        padding: int = 0,
    ) -> Step:
        """The next step of n requests; arguments as for `Requests.step`.

        request: (n,), rows of the request table. block_table: (n or more, blocks). padding: rows behind those, where
            all of these decode.
        """
        chooses = not self._requests.stored
        rows = self._requests.step(request, query_starts, ends, begins)
        return self._described(rows, self._send(rows, block_table[: len(request)]), padding, chooses)

    def padding(self, count: int) -> Step:
        """A step of padding alone, which changes nothing: to capture a graph."""
        self._rows[0].fill_(-1)
        self._rows[1].fill_(self._most)
        return self._described(Rows(*[np.zeros(0, dtype=np.int64)] * 5), self._rows[0, :0], count, chooses=False)

    def _send(self, rows: Rows, block_table: Tensor) -> Tensor:
        """The step's rows, their pages and lengths, to the device; nothing waits for it. Returns rows.request there."""
        count, decodes = len(rows.request), rows.request[rows.is_decode]
        numbers = np.empty((5, max(self._most, count)), dtype=np.int32)
        numbers[0], numbers[1] = -1, self._most
        numbers[:2, : len(decodes)] = decodes
        numbers[2:, :count] = rows.request, rows.start, rows.held
        sent = torch.from_numpy(numbers)
        if self._device.type != "cpu":
            sent = sent.pin_memory().to(self._device, non_blocking=True)
        self._rows.copy_(sent[:2, : self._most])
        index = sent[2, :count].long()
        pages = min(block_table.shape[1], self._page_table.shape[1])
        self._page_table[:, :pages].index_copy_(0, index, block_table[:, :pages].to(torch.int32))
        values = sent[3:, None, :count].expand(2, self._lengths.shape[1], count)
        self._lengths.index_copy_(2, index, values)
        return sent[2, :count]

    def _described(self, rows: Rows, numbers: Tensor, padding: int, chooses: bool) -> Step:
        """numbers: rows.request on the device."""
        is_decode = rows.is_decode
        decodes = int(is_decode.sum())
        if decodes < len(rows.request):
            padding = 0  # padded batches are of decoding requests alone
        where = rows.first[is_decode]
        tokens = None
        if not np.array_equal(where, np.arange(decodes)):
            tokens = torch.from_numpy(where).to(self._device, non_blocking=True)
        start = rows.start[is_decode]
        prompts = tuple(
            Prompt(int(request), numbers[i : i + 1], int(first), int(first + new), int(start), int(held))
            for i, (request, first, new, start, held) in enumerate(
                zip(rows.request, rows.first, rows.new, rows.start, rows.held)
            )
            if new > 1
        )
        count = decodes + padding
        return Step(
            decodes=count,
            append_rows=self._rows[0, :count],
            attend_rows=self._rows[1, :count],
            decode_tokens=tokens,
            expected=(int(start.max(initial=0)), int(start.sum())),
            prompts=prompts,
            chooses_orders=chooses,
        )
