"""KVCache: one attention layer's growing cache, compressed tiles in pages and a dense window of the newest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import _cache_checks, _cache_ops, _checks, _ops, attention
from cute_kernels._backends import check_name, resolve
from cute_kernels._cache_attention import attend_reference
from cute_kernels._cache_rows import CacheRows
from cute_kernels._cache_storage import runs
from cute_kernels._decoding_step import DecodingStep
from cute_kernels._sequences import TILE
from cute_kernels.rules import Rule


class KVCache(CacheRows):
    """The K and V cache of one layer for up to `max_batch` sequences; memory is taken here, and by `grow`.

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

    torch.compile takes append and attend whole (fullgraph=True): as operations, one graph for all layers and steps.
    They check and count when they run: what they refuse, the compiled function raises.

    A cache belongs to one stream at a time: pages and windows are reused in the order of the calls, which only
    work that is queued on one stream follows. Who changes streams has to make the new one wait for the old.

    max_batch: sequences that it can hold at once.
    kv_heads, head_dim: Hkv, and D, a multiple of 8 up to 256. dtype: float16 or bfloat16.
    capacity: tokens that one sequence can have.
    pool_tokens: tokens that all sequences together have pages for; pool_bytes: the same in bytes. Default: enough for
        max_batch sequences of `capacity` tokens.
    sparsity, keep, key_keep, value_keep: what is kept of every token, as for `compress_kv`; with none of them every
        nonzero is.
    key_rule, value_rule: of `cute_kernels.rules`, by name or itself. Each tile is pruned for itself, as `prune` prunes
        its 64 tokens: "magnitude", "channel-magnitude" with a group that divides 64, "random", and your own rules.
        Rules that want queries or choose channels for all tokens are refused. Slots have room for as much of a tile as
        the rule keeps on average (`Rule.mean_kept`). Rules other than "magnitude" prune in torch operations: they may
        wait for the device, and such a cache cannot be captured in a CUDA graph.
    window: newest tokens of a sequence that are always dense.
    page_tokens: a multiple of 64.
    max_append: from 1 to 64, new tokens a sequence that `append` takes in one kernel, and a window has room for. More
        take several kernels. 1, enough for decoding, saves 63 dense tokens a sequence.
    device: a cpu or cuda device.

    Attributes, besides methods: the arguments max_batch, kv_heads, head_dim, dtype, capacity, window, page_tokens and
    device, and key_keep, value_keep (0: every nonzero), key_rule, value_rule (`rules.Rule`).

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
        key_rule: str | Rule = "magnitude",
        value_rule: str | Rule = "magnitude",
        window: int = 32,
        page_tokens: int = 64,
        max_append: int = 64,
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
            key_rule=key_rule,
            value_rule=value_rule,
            window=window,
            page_tokens=page_tokens,
            max_append=max_append,
            device=device,
        )
        super().__init__(config)
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        self.dtype, self.device = config.dtype, config.device
        self.window, self.page_tokens = config.window, config.page_tokens
        self.key_keep, self.value_keep = config.keys.kept, config.values.kept
        self.key_rule, self.value_rule = config.keys.rule, config.values.rule
        self._prunes_in_kernels = config.keys.in_kernels and config.values.in_kernels
        self._number = _cache_ops.register(self)

    def __getstate__(self) -> dict[str, Any]:  # for copies, which have memory of their own
        return self.__dict__ | {"_known_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._number = _cache_ops.register(self)

    # ---- What it holds -----------------------------------------------------------------------------------------------

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
        _cache_checks.new_tokens(self._config, k, v)
        k, v = _checks.plain(k), _checks.plain(v)
        rows = self._rows(sequences, k.shape[0], "k", take=True)
        tokens = _cache_checks.counts(lengths, "lengths", k.shape[0], k.shape[2])
        self._refresh("prefill")
        for row in rows:
            held = self._table.rows[row].tokens
            if held:
                raise ValueError(f"prefill takes empty sequences, sequence {row} holds {held} tokens: use append")
        self._extend(k, v, rows, tokens)

    def append(self, k: Tensor, v: Tensor, *, sequences: Sequence[int] | Tensor | None = None) -> None:
        """Adds n >= 1 tokens to every sequence, empty or not: a decoding step, a further turn, a chunk of a prompt.

        k, v: (B, Hkv, n, D) of the cache's dtype, on its device, any strides but 1 in the last dimension.

        Does not wait for the device (once captured: reads lengths; other rules than "magnitude" may wait). In a
        capture, every sequence needs pages for what is appended and written by replays: `reserve` them before.

        Raises what `prefill` raises, and RuntimeError in a capture without pages or with a rule but "magnitude".
        """
        _cache_checks.appended_tokens(self._config, k, v)
        if _ops.eager(k, v):
            self._append(k, v, sequences)
        else:
            _cache_ops.append(self, k, v, sequences)

    def _append(self, k: Tensor, v: Tensor, sequences: Sequence[int] | Tensor | None) -> None:
        k, v = _checks.plain(k), _checks.plain(v)
        rows = self._rows(sequences, k.shape[0], "k", take=True)
        if self._capturing():
            self._append_captured(k, v, rows)
            return
        if self._captured:
            self._refresh("append")
        new, named = k.shape[2], None if sequences is None else rows
        if new > self._config.max_append:
            self._extend(k, v, rows, [new] * len(rows))
        elif self._table.stays_dense(rows, new):
            self._storage.append(k, v, named)
            self._table.advance_dense(new)
        elif not self._prunes_in_kernels:
            self._extend(k, v, rows, [new] * len(rows))
        else:
            self._storage.apply(self._table.provide(rows, [new] * len(rows)))
            self._storage.append(k, v, named)
            self._table.advance(rows, [new] * len(rows))

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
        _cache_checks.queries(self._config, q)
        scale = self._scale(scale)
        _checks.flag(causal, "causal")
        _checks.flag(return_lse, "return_lse")
        if out is not None:
            _checks.output(out, q.shape, q.dtype, self.device)
        check_name(backend)
        options = scale, causal, return_lse, out, sequences, backend
        result, lse = self._attend(q, *options) if _ops.eager(q, out) else _cache_ops.attend(self, q, *options)
        return result if lse is None else (result, lse)

    def _attend(
        self,
        q: Tensor,
        scale: float,
        causal: bool,
        return_lse: bool,
        out: Tensor | None,
        sequences: Sequence[int] | Tensor | None,
        backend: str,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        rows = self._rows(sequences, q.shape[0], "q")
        if out is not None:
            _checks.apart(out, q=q)
        name = resolve(backend, self.device)
        if name == "reference":
            self._refresh("attend with backend 'reference'")
            out, lse = attend_reference(q, [self._dense(row) for row in rows], scale, causal, out, lse)
            return out, lse if return_lse else None
        storage = self._storage
        return attention._attend(
            storage.pool.key_view(),
            storage.pool.value_view(),
            q,
            window=storage.windows._attention_window,
            lengths=storage.lengths,
            sequences=None if sequences is None else storage.numbers(rows, capturing=self._capturing()),
            scale=scale,
            causal=causal,
            return_lse=return_lse,
            out=out,
            lse=lse,
            backend=name,
        )

    def _step(self, k: Tensor, v: Tensor, q: Tensor, *, scale: float | None, backend: str) -> Tensor:
        """`append` of k and v, then `attend` of q: a layer's part of a model's step, for less of the host's time.

        k, v, q and scale are checked before anything changes. backend: a name that `check_name` passed. Returns
        (B, Sq, Hq, D), as models go on with it.
        """
        known = self._known_step if _ops.unobserved() else None
        if known is not None and known.fits(k, v, q, scale, backend):
            if not self._captured and not self._capturing() and self._table.stays_dense(known.rows, known.tokens):
                out = known.run(self._storage, k, v, q)
                self._table.advance_dense(known.tokens)
                return out
        elif _ops.eager(k, v, q):
            _cache_checks.appended_tokens(self._config, k, v)
            _cache_checks.queries(self._config, q)
            known = None
        else:
            self.append(k, v)
            result = self.attend(q, scale=scale, backend=backend)
            assert isinstance(result, Tensor)
            return result.transpose(1, 2)
        factor = self._scale(scale)
        self._append(k, v, None)
        out, _ = self._attend(q, factor, True, False, None, None, backend)
        if known is None:
            self._known_step = self._know(k, v, q, scale, factor, backend)
        return out.transpose(1, 2)

    def _know(
        self, k: Tensor, v: Tensor, q: Tensor, scale: float | None, factor: float, backend: str
    ) -> DecodingStep | None:
        """What a step just took and did, if those like it can be launched whole."""
        name = resolve(backend, self.device)
        if k.shape[0] != q.shape[0] or k.shape[2] > self._config.max_append or not q.numel() or name == "reference":
            return None
        return DecodingStep(self._storage, k, v, q, scale=scale, factor=factor, backend=backend, name=name)

    def _scale(self, scale: float | None) -> float:
        return 1 / math.sqrt(self.head_dim) if scale is None else _checks.scale(scale)

    def _dense(self, row: int) -> tuple[Tensor, Tensor]:
        state = self._table.rows[row]
        return self._storage.dense(row, state.compressed, state.window)

    @torch.no_grad()
    def _extend(self, k: Tensor, v: Tensor, rows: Sequence[int], tokens: list[int]) -> None:
        changes = self._table.provide(rows, tokens)
        self._storage.apply(changes)
        for run in list(runs(rows, self._table.rows, tokens)):
            compressed, _ = self._table.after(run.row, run.tokens)
            self._storage.extend(k, v, run, (compressed - run.compressed) // TILE)
        self._table.advance(rows, tokens)

    def _append_captured(self, k: Tensor, v: Tensor, rows: Sequence[int]) -> None:
        if not self._prunes_in_kernels:
            raise RuntimeError(
                f"only rule 'magnitude' prunes in a CUDA graph, this cache has {self.key_rule.name!r} for keys and "
                f"{self.value_rule.name!r} for values"
            )
        for row in rows:
            if not self._table.has_pages(row, k.shape[2]) or not self._table.is_private(row):
                raise RuntimeError(
                    f"sequence {row} has no pages for appends in a graph: call reserve before the capture"
                )
            self._table.rows[row].used = True
        self._captured = True
        for first in range(0, k.shape[2], self._config.max_append):
            chunk = slice(first, first + self._config.max_append)
            self._storage.append(k[:, :, chunk], v[:, :, chunk], rows, capturing=True)

    def __repr__(self) -> str:
        dtype = _checks.dtype_name(self.dtype)
        return (
            f"KVCache(max_batch={self.max_batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, {dtype}, "
            f"capacity={self.capacity}, keep=({self.key_keep or 'all'}, {self.value_keep or 'all'}), "
            f"window={self.window}, {self.device}, {self.nbytes()} bytes)"
        )
