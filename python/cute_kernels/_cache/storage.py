"""The tensors of a KVCache, all on one device, and what moves between them.

Everything is queued on the current stream in the order of the calls; only `read` waits for the device. Numbers from the
host go through pinned memory of torch's allocator, which does not reuse it before the copy is done.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from cute_kernels._attention.packed import PackedQueries
from cute_kernels._attention.problem import pack_problem
from cute_kernels._cache import extend, page_pool
from cute_kernels._cache.config import CacheConfig
from cute_kernels._cache.extend import Run, Tiles
from cute_kernels._cache.pool import Pool, Share, Windows, writable
from cute_kernels._cache.sequences import Changes, Row
from cute_kernels._runtime.extension import _C, TILE_TOKENS
from cute_kernels._storage.storage import BITMAP

_REMEMBERED = 64  # groups of sequences whose numbers stay on the device


def _copy_into(larger: Tensor, smaller: Tensor) -> None:
    larger[tuple(slice(size) for size in smaller.shape)].copy_(smaller)


class CacheStorage:
    """pool, windows: see page_pool. lengths: (sequences,) int32, compressed tokens of every sequence."""

    def __init__(self, made_for: CacheConfig) -> None:
        sequences, device = made_for.max_batch, made_for.device
        self.device = device
        self.pool = Pool.allocate(
            pages=made_for.pages,
            tiles_per_page=made_for.page_tokens // TILE_TOKENS,
            sequences=sequences,
            pages_per_sequence=made_for.pages_per_sequence,
            kv_heads=made_for.kv_heads,
            head_dim=made_for.head_dim,
            dtype=made_for.dtype,
            key_keep=made_for.pool_keep(made_for.keys),
            value_keep=made_for.pool_keep(made_for.values),
            slot_rows=made_for.slot_rows,
            key_codec=made_for.key_codec,
            value_codec=made_for.value_codec,
            tile_format=made_for.tile_format,
            device=device,
        )
        self._rules = made_for.keys, made_for.values
        self.constrained = torch.zeros(2, dtype=torch.int64, device=device)  # of keys and values: Rule.constrained
        self.windows = Windows.allocate(
            self.pool, made_for.recent, made_for.max_append, prepares=made_for.prunes_in_kernels
        )
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._numbers = torch.arange(sequences, dtype=torch.int32, device=device)
        self.content = torch.zeros(1, dtype=torch.int32, device=device)  # see ops
        self._remembered: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._kept: list[Tensor] = []  # tensors that captured graphs point to
        self._share: Share | None = None  # whose lengths `append` counts, too
        self._problem: tuple[object, _C.AttentionProblem | None] = None, None  # arguments of the last one, and it

    def grown(self, made_for: CacheConfig) -> CacheStorage:
        """A copy with more rows, more pages after the present ones and longer rows of the page table."""
        new = CacheStorage(made_for)
        for name in ("pool", "windows"):
            for field in fields(getattr(new, name)):
                to, of = (getattr(getattr(storage, name), field.name) for storage in (new, self))
                if isinstance(to, Tensor):
                    _copy_into(to, of)
        _copy_into(new.lengths, self.lengths)
        new.content, new._remembered, new.constrained = self.content, self._remembered, self.constrained
        return new

    @property
    def nbytes(self) -> int:
        others = self.lengths, self._numbers, self.content, self.constrained
        return self.pool.nbytes + self.windows.nbytes + sum(tensor.nbytes for tensor in others)

    def problem(
        self,
        q: Tensor,
        scale: float,
        causal: bool = True,
        *,
        expected: tuple[int, int],
        packed: PackedQueries | None = None,
    ) -> _C.AttentionProblem:
        """Attention of queries like q over all that sequences hold; expected, packed: see pack_problem. Valid as long
        as this object; the last one is kept."""
        rows = None if packed is None else (packed.rows, packed.most)
        wanted = q.shape, q.stride(), scale, causal, expected, rows
        known, problem = self._problem
        if problem is None or known != wanted:
            views = self.pool.key_view, self.pool.value_view
            window = self.windows.attention_window
            problem = pack_problem(*views, window, q, scale=scale, causal=causal, expected=expected, packed=packed)
            self._problem = wanted, problem
        return problem

    def __getstate__(self) -> dict[str, object]:
        """Without the problem, which points to this object's tensors: a copy packs its own."""
        return self.__dict__ | {"_problem": (None, None)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update({name: writable(value) for name, value in state.items()})

    def numbers(self, rows: Sequence[int], *, capturing: bool = False) -> Tensor:
        """The rows' numbers, (n,) int32 on the device."""
        first = rows[0] if rows else 0
        if all(row == first + i for i, row in enumerate(rows)):
            return self._numbers[first : first + len(rows)]
        key = tuple(rows)
        if key in self._remembered:
            self._remembered.move_to_end(key)
        elif capturing:
            raise RuntimeError(f"sequences {list(rows)} are new here: call once with them before the capture")
        else:
            self._remembered[key] = self._send(rows, torch.int32)
            if len(self._remembered) > _REMEMBERED:
                self._remembered.popitem(last=False)
        if capturing:
            self._kept.append(self._remembered[key])
        return self._remembered[key]

    def apply(self, changes: Changes) -> None:
        """Brings the page table up to date and copies pages."""
        if changes.entries:
            table = self.pool.page_table
            entries = [row * table.shape[1] + index for row, index in changes.entries]
            sent = self._send([entries, list(changes.entries.values())], torch.int64)
            table.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))
        for tensor in self._pages_content() if changes.copies else ():
            pages = tensor.view(self.pool.pages, -1)
            for source, target in changes.copies:
                pages[target].copy_(pages[source])

    def append(self, k: Tensor, v: Tensor, rows: Sequence[int] | None, *, capturing: bool = False) -> None:
        """One to max_append new tokens a row; rows None: 0, 1, ... Callers have checked k and v, which have no pending
        negation, and have entered the pages that the tokens need into the table."""
        numbers = None if rows is None else self.numbers(rows, capturing=capturing)
        page_pool.append_unchecked(self.pool, self.windows, self.lengths, k, v, numbers, self._share)

    def store(self, k: Tensor, v: Tensor, run: Run, tiles: int) -> None:
        """The tiles that get full with the last run.tokens of k and v (B, Hkv, T, D). Writes over nothing that the
        sequences hold: `settle` makes the tiles theirs."""
        numbers = self._numbers[run.row : run.row + run.count]
        extend.store_run(
            self.pool, self.windows, k, v, run, self._tiles(run, tiles), numbers, self._prune, self.constrained
        )

    def settle(self, k: Tensor, v: Tensor, run: Run, tiles: int) -> None:
        """Windows and lengths after `store` of the same."""
        extend.settle_run(self.windows, self.lengths, k, v, run, self._tiles(run, tiles))

    def _tiles(self, run: Run, tiles: int) -> Tiles:
        """A cache stores tiles when they leave the window."""
        return Tiles(run.compressed // TILE_TOKENS, tiles, tiles)

    def _prune(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.pool.tile_format != BITMAP:  # chosen as tiles are stored, in the order of the sequence's channels
            return k, v
        keys, values = self._rules
        return keys.prune(k, self.constrained[0]), values.prune(v, self.constrained[1])

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Row targets[i] becomes a copy of row sources[i], except for its pages."""
        if not targets:
            return
        to, of = self._send([list(targets), list(sources)], torch.int64)
        pool, windows = self.pool, self.windows
        rows = windows.keys, windows.values, windows.lengths, self.lengths
        for tensor in (*rows, pool.key_channels, pool.value_channels, pool.key_scales, pool.value_scales):
            if tensor is not None:
                tensor.index_copy_(0, to, tensor.index_select(0, of))
        windows.prepare_anew(to)

    def cut(self, row: int, tile: int, tokens: int) -> None:
        """The first tokens of a tile go to the row's window, as they were stored. Lengths stay as they are."""
        if tokens:
            k, v = page_pool.load(self.pool, row, tile, 1)
            self.windows.keys[row, :, :tokens].copy_(k[:, :tokens])
            self.windows.values[row, :, :tokens].copy_(v[:, :tokens])

    def set_lengths(self, rows: Sequence[int], compressed: Sequence[int], window: Sequence[int]) -> None:
        if rows:
            sent = self._send([list(rows), list(compressed), list(window)], torch.int64)
            lengths = sent[1:].to(torch.int32)
            self.lengths.index_copy_(0, sent[0], lengths[0])
            self.windows.lengths.index_copy_(0, sent[0], lengths[1])

    def follow(self, rows: Sequence[Row]) -> None:
        """The page table and all lengths become what the host's table says."""
        table = self.pool.page_table
        table.copy_(self._send([row.pages + [-1] * (table.shape[1] - len(row.pages)) for row in rows], torch.int32))
        sent = self._send([[row.compressed for row in rows], [row.window for row in rows]], torch.int32)
        self.lengths.copy_(sent[0])
        self.windows.lengths.copy_(sent[1])
        self.windows.prepare_anew()

    def clear(self) -> None:
        """No row has tokens or pages any more."""
        self.pool.page_table.fill_(-1)
        self.pool.error.zero_()
        self.lengths.zero_()
        self.windows.lengths.zero_()

    def dense(self, row: int, compressed: int, window: int) -> tuple[Tensor, Tensor]:
        """What a row holds, two tensors (Hkv, tokens, D)."""
        k, v = page_pool.load(self.pool, row, 0, compressed // TILE_TOKENS)
        windows = (self.windows.keys, self.windows.values)
        k, v = (torch.cat([x, dense[row, :, :window]], dim=1) for x, dense in zip((k, v), windows))
        return k, v

    def read(self) -> tuple[list[int], list[int], bool]:
        """Compressed tokens and tokens of the window, of all rows, and whether an append had to leave tokens out.

        Waits for the device. The mark of what was left out is taken back.
        """
        error = self.pool.error
        *lengths, failed = torch.cat([self.lengths, self.windows.lengths, error]).tolist()
        if failed:
            error.zero_()
        sequences = self.lengths.shape[0]
        return lengths[:sequences], lengths[sequences:], bool(failed)

    def dropped(self) -> dict[str, int]:
        """Tiles that exceeded their slots, and the nonzeros that they lost; nonzeros that the codec cannot store, and
        those that a rule's constraint lost. Waits for the device."""
        names = ("key_tiles_trimmed", "key_values_dropped", "value_tiles_trimmed", "value_values_dropped")
        refused = "key_values_refused", "value_values_refused"
        constrained = "key_values_constrained", "value_values_constrained"
        counts = torch.cat([self.pool.dropped.flatten(), self.pool.refused, self.constrained]).tolist()
        return dict(zip((*names, *refused, *constrained), counts, strict=True))

    def _pages_content(self) -> tuple[Tensor, ...]:
        """What a page consists of: tensors of slots."""
        pool = self.pool
        return pool.blocks, pool.key_rows, pool.value_rows, pool.token_order

    def _send(self, values: Sequence[int] | list[list[int]], dtype: torch.dtype) -> Tensor:
        if self.device.type == "cpu":
            return torch.tensor(values, dtype=dtype, device="cpu")
        return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(self.device, non_blocking=True)
