"""KVCache: one attention layer's growing cache, compressed tiles in pages and a dense window of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._attention import packed as packed_queries
from cute_kernels._cache import checks as cache_checks
from cute_kernels._cache import ops as cache_ops
from cute_kernels._cache.config import config
from cute_kernels._cache.rows import CacheRows, exclusive
from cute_kernels._runtime import checks, gradients, ops
from cute_kernels._runtime.backends import check_name
from cute_kernels.rules import Rule


class KVCache(CacheRows):
    """The K and V cache of one layer for up to `max_batch` sequences; memory is taken here, and by `grow`.

        cache = ck.KVCache(max_batch=8, kv_heads=8, head_dim=128, capacity=16384, sparsity=0.7)
        cache.prefill(k, v)                  # (B, Hkv, T, D)
        out = cache.step(q, k_new, v_new)    # per step: (B, Hq, 1, D), (B, Hkv, 1, D) twice
        cache.append(k_new, v_new)           # the same in two calls, for any number of tokens:
        out = cache.attend(q)                # (B, Hkv, n, D) twice, then (B, Hq, Sq, D)

    New tokens enter a dense window. Where it holds `window` + 64 of them, the oldest 64 are pruned, packed and stored
    as a tile, so that between `window` and `window` + 63 stay dense. What a rule keeps of a sequence does not depend on
    the chunks in which its tokens came, but in the tile formats of two of four: there the tiles that are stored first,
    together, decide which channels of keys are neighbours. Per-token magnitude pruning with a bitmap and packed
    nonzeros and a local dense window is the method of Mustafar (arXiv 2505.22913).

    Tiles lie in pages of `page_tokens` tokens of one sequence, for all KV heads, keys and values. Copies of a sequence
    share pages by reference count; a page that is filled in part is copied before one of them writes to it.
    A tile has a slot of fixed size in its page. Where its nonzeros exceed that, which is rare, values of least
    magnitude are dropped and counted in `statistics`.

    Sequences are rows, numbered from 0. For a batch, `prefill` and `append` take the rows 0..B-1 of their tensors into
    use, and `reorder`, `repeat_interleave` and `select` move them; a server takes rows by `add` and `fork`, gives them
    back by `free`, and names them in `sequences`. Argument `sequences` everywhere: distinct row numbers, one for each
    row of the other arguments, as ints or as a 1-D tensor of integers (on a GPU: one synchronisation); None: 0, 1, ...

    append, attend and step do not wait for the device. After `reserve` they can be captured in a CUDA graph, whose
    replays append further tokens. The host cannot know how many, so from the first capture on, operations that depend
    on lengths (eager append among them) read these from the device. A replay for which no pages are reserved leaves the
    tokens of that sequence out, and the next such operation raises RuntimeError for it.

    torch.compile takes append, attend and step whole (fullgraph=True): as operations, one graph for all layers and
    steps. They check their arguments when they run; the compiled function raises their errors.

    A cache belongs to one stream at a time: pages and windows are reused in the order of the calls, which only work
    that is queued on one stream follows. To change streams, make the new one wait for the old.

    It is for one thread at a time: a method raises RuntimeError while a call from another thread, or the call that runs
    a pruning rule, is under way. Threads that take turns hold a lock of their own around their calls.

    A call that an exception ends, a rule's own, one of torch's or Ctrl-C at any point, has changed nothing, or has
    emptied the sequences whose tokens it was moving at that moment: a RuntimeWarning names them. An interrupt may also
    come when all is done: `lengths` tells.

    max_batch: sequences that it can hold at once.
    kv_heads, head_dim: Hkv, and D, a multiple of 8 up to 256. dtype: float16 or bfloat16.
    capacity: tokens that one sequence can have, at most 2^31 - 129.
    pool_tokens: tokens that all sequences together have pages for; pool_bytes: the same in bytes. Default: enough for
        max_batch sequences of `capacity` tokens.
    sparsity, keep, key_keep, value_keep: what is kept of every token, as for `compress_kv`; with none of them every
        nonzero is; by "2of4" and "magnitude-2of4" at most two of every four.
    key_rule, value_rule: of `cute_kernels.rules`, by name or itself. Each tile is pruned for itself, as `prune` prunes
        its 64 tokens: "magnitude", "channel-magnitude" with a group that divides 64, "random", "2of4",
        "magnitude-2of4", and your own rules. Rules that need queries or choose channels for all tokens are refused.
        Slots hold as much of a tile as the rule keeps on average (`Rule.mean_kept`).
        Where both are "2of4", or both "magnitude-2of4" with narrow codecs and at most 35 % kept, tiles are stored in
        the rule's tile format: kernels prune them, and channels of keys have the order of the sequence's first tiles.
        All other rules but "magnitude" prune in torch operations, unless every nonzero is kept: they may wait for the
        device. Only a cache with "magnitude", or with every nonzero kept, for both can be captured in a CUDA graph.
    codec, key_codec, value_codec: how nonzeros are stored, as for `compress_kv`; on a GPU keys and values alike. The
        first tile of a sequence decides its scales of channels. What a narrow codec cannot store is replaced and
        counted in `statistics`: infinity by the largest number of its sign, NaN, but for "fp8", by the least number.
    window: newest tokens of a sequence that are always dense; memory is taken for `capacity` of them at most.
    page_tokens: a multiple of 64.
    max_append: from 1 to 64, new tokens a sequence that `append` takes in one kernel; windows are made for them. More
        take several kernels. 1, enough for decoding, saves 63 dense tokens a sequence.
    device: a cpu or cuda device.

    Attributes, besides methods: the arguments max_batch, kv_heads, head_dim, dtype, capacity, window, page_tokens and
    device, and key_codec, value_codec, key_keep, value_keep (0: every nonzero), key_rule, value_rule (`rules.Rule`).

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
        codec: str | None = None,
        key_codec: str | None = None,
        value_codec: str | None = None,
        window: int = 32,
        page_tokens: int = 64,
        max_append: int = 64,
        device: torch.device | str | int = "cuda",
    ) -> None:
        made_for = config(
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
            codec=codec,
            key_codec=key_codec,
            value_codec=value_codec,
            window=window,
            page_tokens=page_tokens,
            max_append=max_append,
            device=device,
        )
        super().__init__(made_for)
        self.kv_heads, self.head_dim = made_for.kv_heads, made_for.head_dim
        self.dtype, self.device = made_for.dtype, made_for.device
        self.window, self.page_tokens = made_for.window, made_for.page_tokens
        self.key_codec, self.value_codec = made_for.key_codec, made_for.value_codec
        self.key_keep, self.value_keep = made_for.keys.kept, made_for.values.kept
        self.key_rule, self.value_rule = made_for.keys.rule, made_for.values.rule

    # ---- What it holds -----------------------------------------------------------------------------------------------

    @property
    @exclusive
    def lengths(self) -> Tensor:
        """Tokens of every row, window included: (batch,) int32 on the device, a new tensor. 0 for rows not in use."""
        storage = self._core.storage
        return (storage.lengths + storage.windows.lengths)[: self.batch]

    @property
    def max_length(self) -> int:
        """Tokens that one sequence can have: `capacity`."""
        return self.capacity

    def nbytes(self) -> int:
        """Bytes of all memory that the cache holds: pages, used or not, windows, page table, lengths, orders, scales of
        channels."""
        return self._core.storage.nbytes

    @exclusive
    def statistics(self) -> dict[str, int]:
        """What is used, and what slots of fixed size dropped. Waits for the device.

        sequences: rows in use. tokens: of all of them; shared ones count for each.
        pages, pages_free, pages_shared: of the pool; reserved ones are not free. page_bytes: size of one.
        key_tiles_trimmed, key_values_dropped, value_tiles_trimmed, value_values_dropped: since the cache was made,
            tiles that exceeded their slots, and nonzeros that they lost.
        key_values_refused, value_values_refused: since then, infinities and NaN that a narrow codec replaced.
        key_values_constrained, value_values_constrained: nonzeros that rule "magnitude" would have kept, as many a
            token, and that "2of4" or "magnitude-2of4" could not.
        """
        core = self._core
        core.refresh("statistics")
        rows, allocator = core.table.rows, core.table.allocator
        return {
            "sequences": sum(row.used for row in rows),
            "tokens": sum(row.tokens for row in rows),
            "pages": allocator.pages,
            "pages_free": allocator.free,
            "pages_shared": allocator.shared,
            "page_bytes": core.config.page_bytes,
            **core.storage.dropped(),
        }

    @exclusive
    @torch.no_grad()
    def dense(self, sequence: int) -> tuple[Tensor, Tensor]:
        """K and V of one sequence, (Hkv, length, D) each: unchanged in the window, elsewhere pruned and, by a narrow
        codec, rounded."""
        core = self._core
        row = core.row(sequence)
        core.refresh("dense")
        return core.dense(row)

    # ---- Tokens ------------------------------------------------------------------------------------------------------

    @exclusive
    @torch.no_grad()
    def prefill(
        self,
        k: Tensor,
        v: Tensor,
        *,
        lengths: Sequence[int] | Tensor | None = None,
        sequences: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Fills empty sequences. Tiles are compressed straight from k and v, which are not copied.

        k, v: (B, Hkv, T, D) of the cache's dtype, on its device, stride 1 in the last dimension.
        lengths: (B,) integers from 0 to T: of row b the last lengths[b] tokens count, those before are left padding.
            A tensor on a GPU takes a synchronisation.

        Raises TypeError or ValueError for arguments that do not fit, and for sequences that hold tokens; RuntimeError,
        before anything changes, where a sequence would exceed the capacity or all together the pages.
        """
        core = self._core
        cache_checks.new_tokens(core.config, k, v)
        k, v = checks.plain(k), checks.plain(v)
        rows = core.rows(sequences, k.shape[0], "k", take=True)
        tokens = cache_checks.counts(lengths, "lengths", k.shape[0], k.shape[2])
        core.refresh("prefill")
        for row in rows:
            held = core.table.rows[row].tokens
            if held:
                raise ValueError(f"prefill takes empty sequences, sequence {row} holds {held} tokens: use append")
        core.extend("prefill", k, v, rows, tokens)

    def append(self, k: Tensor, v: Tensor, *, sequences: Sequence[int] | Tensor | None = None) -> None:
        """Adds n >= 1 tokens to every sequence, empty or not: a decoding step, a user's next turn, a chunk of a prompt.

        k, v: (B, Hkv, n, D) of the cache's dtype, on its device, stride 1 in the last dimension.

        Does not wait for the device (once captured: reads lengths; other rules than "magnitude" may wait). In a
        capture, every sequence needs pages for what is appended and written by replays: `reserve` them before.

        Raises what `prefill` raises, and RuntimeError in a capture without pages or with a rule but "magnitude".
        """
        core = self._core
        cache_checks.appended_tokens(core.config, k, v)
        if ops.eager(k, v):
            core.append(k, v, sequences)
        else:
            cache_ops.append(core, k, v, sequences)

    def attend(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        return_lse: bool = False,
        out: Tensor | None = None,
        sequences: Sequence[int] | Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        backend: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """softmax(scale * q K^T) V over everything that a sequence holds, query head h meeting KV head h // (Hq / Hkv).

        q: (B, Hq, Sq, D) of the cache's dtype, on its device, stride 1 in the last dimension. The Sq queries
            are those of the Sq newest tokens, which have been appended before.
        cu_seqlens_q: int32 (B + 1), contiguous: sequences differ in how many queries they have. q is then
            (1, Hq, total, D), out like it, and those of the i-th sequence are q[0, :, cu_seqlens_q[i] :
            cu_seqlens_q[i + 1]]; q of FlashAttention's layout (total, Hq, D) is q.transpose(0, 1)[None]. On the cpu the
            numbers are checked: they rise from 0 to total, and no sequence has more queries than tokens. On the
            cache's device they are not read on the host; whatever they are, nothing is read or written out of bounds,
            and what no sequence has is undefined in out and lse.
        max_seqlen_q: the most queries of one sequence; needed with cu_seqlens_q on a GPU, where none has more.
        scale: finite; None: 1 / sqrt(D).
        causal: query i sees all tokens but the Sq - 1 - i newest. False: every query sees every token.
        return_lse: return (out, lse) with lse (B, Hq, Sq) float32, the natural logarithm of the sum of exponentials.
        out: where to put the result, contiguous and apart from q; default: a new tensor.
        backend: as for `sparse_attention`; "reference" reads lengths on the host.

        Returns (B, Hq, Sq, D) of q's dtype. A query that sees no token gives zeros and an lse of -inf. Results have no
        gradient: a backward pass through them raises RuntimeError.

        Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError
        if the backend cannot serve the call; all before anything is launched.
        """
        if gradients.wanted(q):
            keywords: dict[str, Any] = {
                "scale": scale,
                "causal": causal,
                "return_lse": return_lse,
                "sequences": sequences,
                "cu_seqlens_q": cu_seqlens_q,
                "max_seqlen_q": max_seqlen_q,
                "backend": backend,
            }
            return gradients.without_gradient("KVCache.attend", lambda q: self.attend(q, **keywords), q, out=out)
        core = self._core
        cache_checks.queries(core.config, q)
        scale = core.scale(scale)
        checks.flag(causal, "causal")
        checks.flag(return_lse, "return_lse")
        if out is not None:
            checks.output(out, q.shape, q.dtype, self.device)
        check_name(backend)
        packed = packed_queries.check(cu_seqlens_q, max_seqlen_q, q)
        options = scale, causal, return_lse, out, sequences, backend
        if ops.eager(q, out, cu_seqlens_q):
            result, lse = core.attend(q, *options, packed=packed)
        else:
            result, lse = cache_ops.attend(core, q, *options, packed)
        return result if lse is None else (result, lse)

    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, backend: str = "auto") -> Tensor:
        """`append` of k and v, then causal `attend` of q, in one call: a layer's part of a decoding step. The same bits
        as the two calls, for less of the host's time where a step is like the one before.

        q: (B, Hq, n, D); k, v: (B, Hkv, n, D), of sequences 0 .. B-1; n is 1 in decoding. Dtype, device and strides as
            for `append` and `attend`.
        scale, backend: as for `attend`.

        Returns (B, Hq, n, D) of q's dtype, which has no gradient, as for `attend`.

        Raises what `append` and `attend` raise, before anything changes; where memory runs out or an interrupt comes
        after the append, the tokens stay.
        """
        return self._core.step(q, k, v, scale, backend)

    def __repr__(self) -> str:
        dtype = checks.dtype_name(self.dtype)
        return (
            f"KVCache(max_batch={self.max_batch}, kv_heads={self.kv_heads}, head_dim={self.head_dim}, {dtype}, "
            f"capacity={self.capacity}, keep=({self.key_keep or 'all'}, {self.value_keep or 'all'}), "
            f"window={self.window}, {self.device}, {self.nbytes()} bytes)"
        )
