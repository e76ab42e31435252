"""KVCache: one attention layer's growing cache, compressed tiles in pages and a dense window of the newest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels import _cache_checks, _checks, attention
from cute_kernels._backends import resolve
from cute_kernels._cache_attention import attend_reference
from cute_kernels._cache_storage import CacheStorage, runs
from cute_kernels._sequences import TILE, Target


class KVCache:
    """The K and V cache of one layer for up to `max_batch` sequences; memory is taken once, here.

        cache = ck.KVCache(max_batch=8, kv_heads=8, head_dim=128, capacity=16384, sparsity=0.7)
        cache.prefill(k, v)                  # (B, Hkv, T, D)
        cache.append(k_new, v_new)           # (B, Hkv, n, D), per step
        out = cache.attend(q)                # (B, Hq, Sq, D)

    New tokens enter a dense window. Where it holds `window` + 64 of them, the oldest 64 are pruned, packed and stored
    as a tile, so that between `window` and `window` + 63 stay dense, and what a sequence holds does not depend on the
    portions that it came in. Per-token magnitude pruning with a bitmap and packed nonzeros and a local dense window is
    the method of Mustafar (arXiv 2505.22913).

    Tiles lie in pages of `page_tokens` tokens of one sequence, for all KV heads, keys and values. Copies of a sequence
    share pages by reference count; a page that is filled in part is copied before one of them writes to it.
    A tile has a slot of fixed size in its page. Where its nonzeros exceed that, which is rarer than one tile in 10^4,
    values of least magnitude are dropped and counted in `statistics`.

    Sequences are rows, numbered from 0. For a batch, `prefill` and `append` take the rows 0..B-1 of their tensors into
    use, and `reorder`, `repeat_interleave` and `select` move them; a server takes rows by `add` and `fork`, gives them
    back by `free`, and names them in `sequences`. Argument `sequences` everywhere: distinct row numbers, one for each
    row of the other arguments, as ints or as a 1-D tensor of integers (on a GPU: one synchronisation); None: 0, 1, ...

    append and attend do not wait for the device. After `reserve` they can be captured in a CUDA graph, whose replays
    append further tokens. The host cannot know how many, so from the first capture on, operations that depend on
    lengths (eager append among them) read these from the device. A replay for which no pages are reserved leaves the
    tokens of that sequence out, and the next such operation raises RuntimeError for it.

    A cache belongs to one stream at a time: pages and windows are reused in the order of the calls, which only
    work that is queued on one stream follows. Who changes streams has to make the new one wait for the old.

    max_batch: sequences that it can hold at once.
    kv_heads, head_dim: Hkv, and D, a multiple of 8 up to 256. dtype: float16 or bfloat16.
    capacity: tokens that one sequence can have.
    pool_tokens: tokens that all sequences together have pages for; pool_bytes: the same in bytes. Default: enough for
        max_batch sequences of `capacity` tokens.
    sparsity, keep, key_keep, value_keep: what is kept of every token, as for `compress_kv`; with none of them every
        nonzero is.
    window: newest tokens of a sequence that are always dense.
    page_tokens: a multiple of 64.
    device: a cpu or cuda device.

    Attributes, besides methods: the arguments max_batch, kv_heads, head_dim, dtype, capacity, window, page_tokens and
    device, and key_keep, value_keep (0: every nonzero).

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, range or device, RuntimeError where no
    kernels run on the device.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        capacity: int,
        pool_tokens: int | None = None,
        pool_bytes: int | None = None,
        sparsity: float | None = None,
        keep: int | None = None,
        key_keep: int | None = None,
        value_keep: int | None = None,
        window: int = 32,
        page_tokens: int = 64,
        device: torch.device | str | int = "cuda",
    ) -> None:
        config = _cache_checks.config(
            max_batch=max_batch,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            capacity=capacity,
            pool_tokens=pool_tokens,
            pool_bytes=pool_bytes,
            sparsity=sparsity,
            keep=keep,
            key_keep=key_keep,
            value_keep=value_keep,
            window=window,
            page_tokens=page_tokens,
            device=device,
        )
        self._config = config
        self.max_batch, self.kv_heads, self.head_dim = config.max_batch, config.kv_heads, config.head_dim
        self.dtype, self.device = config.dtype, config.device
        self.capacity, self.window, self.page_tokens = config.capacity, config.window, config.page_tokens
        self.key_keep, self.value_keep = config.key_keep, config.value_keep
        self._table = config.table()
        self._storage = CacheStorage(config)
        self._captured = False  # an append is in a graph: lengths here may be behind those on the device

    # ---- What it holds -----------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Rows up to the last one in use."""
        return self._table.batch

    @property
    def lengths(self) -> Tensor:
        """Tokens of every row, window included: (batch,) int32 on the device, a new tensor. 0 for rows not in use."""
        return (self._storage.lengths + self._storage.windows.lengths)[: self.batch]

    @property
    def max_length(self) -> int:
        """Tokens that one sequence can have: `capacity`."""
        return self.capacity

    def nbytes(self) -> int:
        """Bytes of all memory that the cache holds: pages, used or not, windows, page table, lengths and orders."""
        return self._storage.nbytes

    def statistics(self) -> dict[str, int]:
        """What is used, and what was lost to slots of fixed size. Waits for the device.

        sequences: rows in use. tokens: of all of them; shared ones count for each.
        pages, pages_free, pages_shared: of the pool; reserved ones are not free. page_bytes: size of one.
        key_tiles_trimmed, key_values_dropped, value_tiles_trimmed, value_values_dropped: since the cache was made,
            tiles that exceeded their slots, and nonzeros that they lost.
        """
        self._refresh("statistics")
        rows, allocator = self._table.rows, self._table.allocator
        return {
            "sequences": sum(row.used for row in rows),
            "tokens": sum(row.tokens for row in rows),
            "pages": allocator.pages,
            "pages_free": allocator.free,
            "pages_shared": allocator.shared,
            "page_bytes": self._config.page_bytes,
            **self._storage.dropped(),
        }

    @torch.no_grad()
    def dense(self, sequence: int) -> tuple[Tensor, Tensor]:
        """K and V of one sequence, (Hkv, length, D) each: pruned where compressed, as they came in the window."""
        row = self._row(sequence)
        self._refresh("dense")
        return self._dense(row)

    # ---- Tokens ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        sequences: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Fills empty sequences. What becomes tiles is compressed from where it lies; k and v are not copied.

        k, v: (B, Hkv, T, D) of the cache's dtype, on its device, any strides but 1 in the last dimension.
        lengths: (B,) integers from 0 to T: of row b the last lengths[b] tokens count, those before are left padding.
            A tensor on a GPU takes a synchronisation.

        Raises TypeError or ValueError for arguments that do not fit, and for sequences that hold tokens; RuntimeError,
        before anything changes, where a sequence would exceed the capacity or all together the pages.
        """
        k, v = _cache_checks.new_tokens(self._config, k, v)
        rows = self._rows(sequences, k.shape[0], "k", take=True)
        tokens = _cache_checks.counts(lengths, "lengths", k.shape[0], k.shape[2])
        self._refresh("prefill")
        for row in rows:
            held = self._table.rows[row].tokens
            if held:
                raise ValueError(f"prefill takes empty sequences, sequence {row} holds {held} tokens: use append")
        self._extend(k, v, rows, tokens)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, *, sequences: Sequence[int] | Tensor | None = None) -> None:
        """Adds n >= 1 tokens to every sequence, empty or not: a decoding step, a further turn, a chunk of a prompt.

        k, v: (B, Hkv, n, D) of the cache's dtype, on its device, any strides but 1 in the last dimension.

        Does not wait for the device (once captured: reads lengths). In a capture, every sequence needs pages for what
        is appended and written by replays: `reserve` them before.

        Raises what `prefill` raises, and RuntimeError in a capture without pages.
        """
        k, v = _cache_checks.new_tokens(self._config, k, v)
        if k.shape[2] < 1:
            raise ValueError(f"k must have at least 1 token to append, got shape {tuple(k.shape)}")
        rows = self._rows(sequences, k.shape[0], "k", take=True)
        if self._capturing():
            self._append_captured(k, v, rows)
            return
        self._refresh("append")
        tokens = [k.shape[2]] * len(rows)
        if k.shape[2] > TILE:
            self._extend(k, v, rows, tokens)
            return
        changes = self._table.provide(rows, tokens)
        if rows:
            self._storage.apply(changes)
            self._storage.append(k, v, rows)
            self._table.advance(rows, tokens)

    @torch.no_grad()
    def attend(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        return_lse: bool = False,
        out: Tensor | None = None,
        sequences: Sequence[int] | Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """softmax(scale * q K^T) V over everything that a sequence holds, query head h meeting KV head h // (Hq / Hkv).

        q: (B, Hq, Sq, D) of the cache's dtype, on its device, any strides but 1 in the last dimension. The Sq queries
            are those of the Sq newest tokens, which have been appended before.
        scale: finite; None: 1 / sqrt(D).
        causal: query i sees all tokens but the Sq - 1 - i newest. False: every query sees every token.
        return_lse: return (out, lse) with lse (B, Hq, Sq) float32, the natural logarithm of the sum of exponentials.
        out: where to put the result, contiguous and apart from q; default: a new tensor.
        backend: as for `sparse_attention`; "reference" reads lengths on the host.

        Returns (B, Hq, Sq, D) of q's dtype. A query that sees no token gives zeros and an lse of -inf.

        Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError
        if the backend cannot serve the call; all before anything is launched.
        """
        q = _cache_checks.queries(self._config, q)
        rows = self._rows(sequences, q.shape[0], "q")
        scale = 1 / math.sqrt(self.head_dim) if scale is None else _checks.scale(scale)
        _checks.flag(causal, "causal")
        _checks.flag(return_lse, "return_lse")
        if out is not None:
            _checks.output(out, q.shape, q.dtype, self.device, (("q", q),))
        name = resolve(backend, self.device)
        if name == "reference":
            self._refresh("attend with backend 'reference'")
            result, lse = attend_reference(q, [self._dense(row) for row in rows], scale, causal, out)
            return (result, lse) if return_lse else result
        storage = self._storage
        result, sums = attention._attend(
            storage.pool.key_view(),
            storage.pool.value_view(),
            q,
            window=(storage.windows.keys, storage.windows.values),
            window_lengths=storage.windows.lengths,
            lengths=storage.lengths,
            sequences=None if sequences is None else storage.numbers(rows, capturing=self._capturing()),
            scale=scale,
            causal=causal,
            return_lse=return_lse,
            out=out,
            backend=name,
        )
        return result if sums is None else (result, sums)

    @torch.no_grad()
    def reserve(self, tokens: int) -> None:
        """Takes pages for so many more tokens of every sequence in use, and copies what they share and would write to.

        After this, graphs captured from append and attend can be replayed for that many tokens. What was reserved is
        used by eager appends too; it is given up where a sequence is freed, cut back to fewer tiles or replaced.

        Raises TypeError or ValueError for a wrong number, RuntimeError, before anything changes, where a sequence would
        exceed the capacity or all together the pages.
        """
        more = _checks.integer(tokens, "tokens")
        if more < 0:
            raise ValueError(f"tokens must be at least 0, got {more}")
        self._refresh("reserve")
        rows = [i for i, row in enumerate(self._table.rows) if row.used]
        self._storage.apply(self._table.provide(rows, [more] * len(rows), private=True))

    @torch.no_grad()
    def crop(self, length: int | Sequence[int] | Tensor, *, sequences: Sequence[int] | Tensor | None = None) -> None:
        """Drops the newest tokens.

        length: how many tokens to keep, from the first, for every sequence or as one integer for each; more than there
            are: all. Negative: how many to drop, at most all.
        sequences: None: all rows of the batch.

        Tokens of a tile that is cut return to the window, pruned as they are.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError, before anything changes, if a cut
        page is shared, a graph was captured, and no page is free for a copy.
        """
        rows = list(range(self.batch)) if sequences is None else self._rows(sequences, None, "length")
        keeps = _cache_checks.integers(length, "length", len(rows))
        self._refresh("crop")
        targets: list[Target] = []
        for row, keep in zip(rows, keeps):
            held = self._table.rows[row].tokens
            if -keep > held:
                raise ValueError(f"length {keep} drops more tokens than sequence {row} holds, {held}")
            if (keep if keep >= 0 else held + keep) < held:
                targets.append(self._table.cropped(row, keep if keep >= 0 else held + keep))
        before = {target.row: self._table.rows[target.row].compressed for target in targets}
        changes = self._table.assign(targets, private=self._captured)
        for target in targets:
            if target.compressed < before[target.row]:
                self._storage.cut(target.row, target.compressed // TILE, target.window)
        self._storage.apply(changes)
        self._storage.set_lengths(
            [target.row for target in targets],
            [target.compressed for target in targets],
            [target.window for target in targets],
        )

    # ---- Rows --------------------------------------------------------------------------------------------------------

    def reorder(self, beam_idx: Sequence[int] | Tensor) -> None:
        """Row i of the batch becomes a copy of what row beam_idx[i] is; beam_idx: one row number for each of the batch.

        Copies share pages; windows are copied. A tensor on a GPU takes a synchronisation. Raises TypeError or
        ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        indices = _cache_checks.rows(beam_idx, "beam_idx", self.batch, "batch")
        if len(indices) != self.batch:
            raise ValueError(f"beam_idx must name one row for each of batch = {self.batch}, got {len(indices)}")
        self._gather(indices)

    def repeat_interleave(self, repeats: int) -> None:
        """Every row of the batch becomes `repeats` neighbouring ones, as torch.repeat_interleave does it.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        count = _checks.integer(repeats, "repeats")
        if count < 1 or count * self.batch > self.max_batch:
            raise ValueError(
                f"repeats must be from 1 to max_batch / batch = {self.max_batch} / {self.batch}, got {count}"
            )
        self._gather([row for row in range(self.batch) for _ in range(count)])

    def select(self, indices: Sequence[int] | Tensor) -> None:
        """The batch becomes its rows `indices`, in that order, each as often as it is named.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError as `crop` does.
        """
        chosen = _cache_checks.rows(indices, "indices", self.batch, "batch")
        if len(chosen) > self.max_batch:
            raise ValueError(f"indices must name at most max_batch = {self.max_batch} rows, got {len(chosen)}")
        self._gather(chosen)

    def reset(self) -> None:
        """No row is in use any more, all pages are free. Statistics of what was dropped stay."""
        self._outside_capture("reset")
        self._table = self._config.table()
        self._storage.clear()

    def add(self) -> int:
        """Takes a row into use and returns its number; it holds no tokens yet. RuntimeError if all rows are in use."""
        row = self._table.unused()
        self._table.rows[row].used = True
        return row

    @torch.no_grad()
    def free(self, sequence: int) -> None:
        """Gives a row and its pages back. Raises TypeError or ValueError if it is not in use."""
        row = self._row(sequence)
        self._outside_capture("free")
        self._storage.apply(self._table.assign([Target(row, [], 0, 0, used=False)], private=False))
        self._storage.set_lengths([row], [0], [0])

    @torch.no_grad()
    def fork(self, sequence: int) -> int:
        """Takes a row into use as a copy of `sequence`, sharing its pages, and returns its number.

        Raises TypeError or ValueError if `sequence` is not in use; RuntimeError if all rows are in use, and as `crop`
        does.
        """
        source = self._row(sequence)
        self._refresh("fork")
        row = self._table.unused()
        self._storage.apply(self._table.assign([self._table.copied(row, source)], private=self._captured))
        self._storage.move([row], [source])
        return row

    # ---- Inside ------------------------------------------------------------------------------------------------------

    def _dense(self, row: int) -> tuple[Tensor, Tensor]:
        state = self._table.rows[row]
        return self._storage.dense(row, state.compressed, state.window)

    def _extend(self, k: Tensor, v: Tensor, rows: list[int], tokens: list[int]) -> None:
        changes = self._table.provide(rows, tokens)
        self._storage.apply(changes)
        for run in list(runs(rows, self._table.rows, tokens)):
            compressed, _ = self._table.after(run.row, run.tokens)
            self._storage.extend(k, v, run, (compressed - run.compressed) // TILE)
        self._table.advance(rows, tokens)

    def _append_captured(self, k: Tensor, v: Tensor, rows: list[int]) -> None:
        for row in rows:
            if not self._table.has_pages(row, k.shape[2]) or not self._table.is_private(row):
                raise RuntimeError(
                    f"sequence {row} has no pages for appends in a graph: call reserve before the capture"
                )
        self._captured = True
        for first in range(0, k.shape[2], TILE):
            chunk = slice(first, first + TILE)
            self._storage.append(k[:, :, chunk], v[:, :, chunk], rows, capturing=True)

    @torch.no_grad()
    def _gather(self, sources: list[int]) -> None:
        """The batch becomes these of its rows."""
        self._refresh("moving sequences")
        moved = [(row, source) for row, source in enumerate(sources) if row != source]
        targets = [self._table.copied(row, source) for row, source in moved]
        left = range(len(sources), self.batch)
        targets += [Target(row, [], 0, 0, used=False) for row in left]
        self._storage.apply(self._table.assign(targets, private=self._captured))
        self._storage.move([row for row, _ in moved], [source for _, source in moved])
        self._storage.set_lengths(left, [0] * len(left), [0] * len(left))
        for row in range(len(sources)):
            self._table.rows[row].used = True

    def _rows(
        self, sequences: Sequence[int] | Tensor | None, count: int | None, of: str, take: bool = False
    ) -> list[int]:
        """Row numbers that a call means; take: those of None need not be in use yet."""
        if sequences is None:
            assert count is not None
            most, name = (self.max_batch, "max_batch") if take else (self.batch, "batch")
            if count > most:
                raise ValueError(f"{of} must have at most {name} = {most} rows, got {count}")
            return list(range(count))
        rows = _cache_checks.rows(sequences, "sequences", self.max_batch, "max_batch")
        if count is not None and len(rows) != count:
            raise ValueError(f"sequences must name one row for each of {of}'s {count}, got {len(rows)}")
        if len(set(rows)) != len(rows):
            raise ValueError(f"sequences must be distinct, got {rows}")
        self._require_use(rows, "sequences")
        return rows

    def _row(self, sequence: int) -> int:
        """The number of one row in use."""
        row = _checks.integer(sequence, "sequence")
        _cache_checks.rows([row], "sequence", self.max_batch, "max_batch")
        self._require_use([row], "sequence")
        return row

    def _require_use(self, rows: list[int], name: str) -> None:
        for row in rows:
            if not self._table.rows[row].used:
                raise ValueError(f"{name} must be in use, {row} is not: take it by add or fork")

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _outside_capture(self, what: str) -> None:
        if self._capturing():
            raise RuntimeError(f"{what} cannot be captured in a CUDA graph")

    def _refresh(self, what: str) -> None:
        """Lengths as they are on the device, where graphs may have changed them."""
        self._outside_capture(what)
        if not self._captured:
            return
        compressed, window, failed = self._storage.read()
        self._table.set_lengths(compressed, window)
        if failed:
            raise RuntimeError(
                "replays of a captured append left tokens out, as no pages were reserved for them: call "
                "reserve(tokens) before replaying; `lengths` says what the sequences hold"
            )

    def __repr__(self) -> str:
        dtype = _checks.dtype_name(self.dtype)
        return (
            f"KVCache(max_batch={self.max_batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, {dtype}, "
            f"capacity={self.capacity}, keep=({self.key_keep or 'all'}, {self.value_keep or 'all'}), "
            f"window={self.window}, {self.device}, {self.nbytes()} bytes)"
        )
