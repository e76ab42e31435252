"""ShardedKVCache: one layer's cache, its tokens spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels._attention.problem import launch_problem
from cute_kernels._cache import checks as cache_checks
from cute_kernels._cache.config import config
from cute_kernels._cache.extend import runs
from cute_kernels._cache.reference import attend_reference
from cute_kernels._runtime import checks, gradients, ops
from cute_kernels._runtime.backends import resolve
from cute_kernels._runtime.extension import TILE_TOKENS
from cute_kernels.distributed.attention import PendingAttention, ShardedAttention
from cute_kernels.distributed.exchange import Parts
from cute_kernels.distributed.ranks import Ranks
from cute_kernels.distributed.shard import Shard
from cute_kernels.rules import Rule


class ShardedKVCache:
    """The K and V cache of one layer, with the tokens of each sequence spread over the ranks of a group.

    Every rank makes one with the same arguments, and calls the same methods with the same tensors in the same order.
    `append`, `prefill` and `reset` need no communication; `attend` gathers outputs.

    group: a process group, or a DeviceMesh of one dimension; None: the default group. Or a DeviceMesh of the dimensions
        "tp" and "cp": heads are divided among the ranks along "tp", tokens among those along "cp". Tensors then have
        the heads of their rank alone, as in a tensor parallel model, and only ranks along "cp" have to be given the
        same ones. The backend has to serve `device`: gloo for the CPU, NCCL for GPUs.
    kv_heads: of the model, a multiple of the ranks along "tp"; below, Hkv is the rank's share.
    capacity: tokens that a sequence can have, on all ranks together; a rank has memory for its share of the tiles.
    window: newest tokens that are always dense, up to 63 more are; every rank holds them.
    The other arguments are those of `KVCache`.

    Steps of up to 64 tokens, `append` and `attend`, do not wait for a GPU and can be captured in a CUDA graph, with the
    group's collectives, whose replays append further tokens; run a step like it before. Where replays went beyond the
    capacity, the tokens are left out and a later eager call raises. NVLink multicast has to be off in captures
    (NCCL_NVLS_ENABLE=0).

    A rank whose arguments differ, whose call raises, or that holds another number of tokens makes `attend` raise on
    every rank of its "cp" group; the message names it. A rank that does not call at all makes it raise where the
    group's timeout ends. On GPUs numbers of tokens and failures are looked at where shapes are new and at every 64th
    call; until then the result of a step in which a rank failed is NaN.

    Attributes, besides methods: rank, world_size (of the ranks with other tokens), kv_heads (of this rank), head_dim,
    dtype, device, capacity, window, max_batch.

    Raises what `KVCache` raises; TypeError or ValueError for a wrong group, a group whose backend does not serve the
    device, heads that the mesh does not divide, and where ranks differ in an argument.
    """

    def __init__(
        self,
        *,
        group: Any = None,
        max_batch: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float16,
        capacity: int,
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
        device: torch.device | str | int = "cuda",
    ) -> None:
        if ops.recorded():
            raise RuntimeError("a ShardedKVCache holds memory: make it outside of compiled and traced functions")
        self._ranks = Ranks(group)
        self.rank, self.world_size = self._ranks.rank, self._ranks.world_size
        options: dict[str, Any] = {
            "max_batch": max_batch,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": dtype,
            "capacity": capacity,
            "sparsity": sparsity,
            "keep": keep,
            "key_keep": key_keep,
            "value_keep": value_keep,
            "key_rule": key_rule,
            "value_rule": value_rule,
            "codec": codec,
            "key_codec": key_codec,
            "value_codec": value_codec,
            "window": window,
            "device": device,
        }
        kind = torch.device(device).type if isinstance(device, (str, torch.device)) else "cuda"
        described = {name: _described(value) for name, value in (options | {"device": kind}).items()}
        self._ranks.agree("ShardedKVCache", described, heads=True)
        # Pages of one tile, as tiles go round.
        fixed: dict[str, Any] = {
            "page_tokens": TILE_TOKENS,
            "max_append": TILE_TOKENS,
            "pool_tokens": None,
            "pool_bytes": None,
        }
        whole = config(**options, **fixed)
        self._ranks.check_device(whole.device)
        self._config = made_for = replace(whole, kv_heads=self._ranks.local_heads(whole.kv_heads))
        with torch.inference_mode(False):  # tensors made in it could not be written to outside of it
            self._shard = Shard(made_for, self.rank, self.world_size)
        self._attention = ShardedAttention(self._ranks, self._shard, made_for)
        self._table = made_for.table()
        self.max_batch, self.kv_heads, self.head_dim = made_for.max_batch, made_for.kv_heads, made_for.head_dim
        self.dtype, self.device = made_for.dtype, made_for.device
        self.capacity, self.window = made_for.capacity, made_for.window
        self._captured = False  # an append is in a graph: the host's lengths may be behind those of the device
        self._whole = True  # no append was interrupted

    # ---- What it holds -----------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first tokens."""
        return self._table.batch

    @property
    def lengths(self) -> Tensor:
        """Tokens of every sequence, on all ranks together: (batch,) int32 on the device, a new tensor."""
        return (self._shard.lengths + self._shard.windows.lengths)[: self.batch]

    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return self._shard.nbytes

    @torch.no_grad()
    def dense(self, sequence: int) -> tuple[Tensor, Tensor]:
        """K and V of one sequence, (Hkv, length, D) each, gathered from all ranks, which call it together: pruned where
        compressed, unchanged in the window."""
        self._check_whole()
        (row,) = cache_checks.rows([checks.integer(sequence, "sequence")], "sequence", self.batch, "batch", 1)
        self._refresh("dense")
        state, ranks = self._table.rows[row], self.world_size
        tiles = state.compressed // TILE_TOKENS
        share = -(-tiles // ranks)
        own = torch.stack(self._shard.load_own(row, tiles))  # (2, Hkv, tokens, D)
        parts = own.new_zeros(ranks, 2, self.kv_heads, share * TILE_TOKENS, self.head_dim)
        parts[self.rank, :, :, : own.shape[2]] = own
        self._ranks.gather(parts.view(ranks, -1))
        tiled = parts.view(ranks, 2, self.kv_heads, share, TILE_TOKENS, self.head_dim)
        k, v = tiled.permute(1, 2, 3, 0, 4, 5).flatten(2, 4)[:, :, : state.compressed]
        k, v = (torch.cat(pair, dim=1) for pair in zip((k, v), self._shard.window(row, state.window)))
        return k, v

    # ---- Tokens ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(self, k: Tensor, v: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> None:
        """Fills empty sequences 0 .. B-1. Each rank compresses its own tiles.

        k, v: (B, Hkv, T, D) of the cache's dtype, on its device, stride 1 in the last dimension; the same on
            every rank along "cp". B says how many sequences there are, until `reset`.
        lengths: (B,) integers from 0 to T: of row b the last lengths[b] tokens count, those before are left padding.
            A tensor on a GPU takes a synchronisation.

        Raises TypeError or ValueError for arguments that do not fit, and for sequences that hold tokens; RuntimeError
        where a sequence would exceed the capacity; nothing has changed then.
        """
        cache_checks.new_tokens(self._config, k, v)
        rows = self._rows(k, None)
        tokens = cache_checks.counts(lengths, "lengths", k.shape[0], k.shape[2])
        self._check_whole()
        self._refresh("prefill")
        for row in rows:
            if held := self._table.rows[row].tokens:
                raise ValueError(f"prefill takes empty sequences, sequence {row} holds {held} tokens: use append")
        self._extend(k, v, rows, tokens)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor, *, sequences: Sequence[int] | Tensor | None = None) -> None:
        """Adds n >= 1 tokens to every sequence: a prompt, a chunk of one, or a decoding step.

        k, v: (B, Hkv, n, D) of the cache's dtype, on its device, stride 1 in the last dimension; the same on
            every rank along "cp".
        sequences: distinct numbers of sequences, one for each row of k; None: 0, 1, ... to the last. The first call
            says how many there are, until `reset`.

        Where a window then holds `window` + 64 tokens or more, its oldest go to the ranks in tiles of 64. Does not
        communicate, and does not wait for a GPU (once captured: reads lengths; rules other than "magnitude" may wait).

        Raises TypeError or ValueError for arguments that do not fit, RuntimeError where sequences would exceed the
        capacity, and in a capture with another rule than "magnitude"; nothing has changed then.
        """
        cache_checks.appended_tokens(self._config, k, v)
        rows = self._rows(k, sequences)
        self._check_whole()
        k, v = checks.plain(k), checks.plain(v)
        named = None if sequences is None else rows
        if self._capturing():
            self._append_captured(k, v, rows, named)
            return
        self._refresh("append")
        new = k.shape[2]
        if new > self._config.max_append or not self._config.prunes_in_kernels:
            self._extend(k, v, rows, [new] * len(rows))
            return
        dense = self._table.stays_dense(rows, new)
        if not dense:
            self._table.provide(rows, [new] * len(rows))  # raises
        self._whole = False
        self._shard.append(k, v, named)
        if dense:
            self._table.advance_dense(new)
        else:
            self._table.advance(rows, [new] * len(rows))
        self._whole = True

    def _append_captured(self, k: Tensor, v: Tensor, rows: Sequence[int], named: Sequence[int] | None) -> None:
        if not self._config.prunes_in_kernels:
            raise RuntimeError("only rule 'magnitude' prunes in a CUDA graph")
        if not self.batch:
            raise RuntimeError("the sequences are empty: prefill or append before the capture")
        self._captured = True
        for first in range(0, k.shape[2], self._config.max_append):
            chunk = slice(first, first + self._config.max_append)
            self._shard.append(k[:, :, chunk], v[:, :, chunk], named, capturing=True)

    def _extend(self, k: Tensor, v: Tensor, rows: Sequence[int], tokens: list[int]) -> None:
        """The last tokens[i] of row i of k and v follow those of sequence rows[i]."""
        k, v = checks.plain(k), checks.plain(v)
        self._table.provide(rows, tokens)  # raises
        parts = []
        for run in runs(rows, self._table.rows, tokens):
            compressed, _ = self._table.after(run.row, run.tokens)
            parts.append((run, (compressed - run.compressed) // TILE_TOKENS))
        for run, tiles in parts:  # rules of the user's own may raise here; what is stored does not count yet
            self._shard.store(k, v, run, tiles)
        self._whole = False
        for run, tiles in parts:
            self._shard.settle(k, v, run, tiles)
        self._table.advance(rows, tokens)
        self._whole = True

    def _rows(self, k: Tensor, sequences: Sequence[int] | Tensor | None) -> Sequence[int]:
        """Which sequences the rows of k belong to."""
        batch = k.shape[0]
        if sequences is not None:
            rows = cache_checks.rows(sequences, "sequences", self.batch, "batch", self.batch)
            if len(rows) != batch or len(set(rows)) != batch:
                raise ValueError(f"sequences must name one row for each of k's {batch}, none twice, got {rows}")
            return rows
        if self.batch and batch != self.batch:
            raise ValueError(f"k must have the B = {self.batch} sequences of the cache, got {batch}")
        if not 1 <= batch <= self.max_batch:
            raise ValueError(f"k must have from 1 to max_batch = {self.max_batch} sequences, got {batch}")
        return range(batch)

    # ---- Attention ---------------------------------------------------------------------------------------------------

    def attend(
        self,
        q: Tensor,
        *,
        scale: float | None = None,
        return_lse: bool = False,
        backend: str = "auto",
        async_op: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor] | PendingAttention:
        """softmax(scale * q K^T) V over all tokens of all ranks, causal among the newest.

        q: (B, Hq, Sq, D) of the cache's dtype, on its device, stride 1 in the last dimension; the same on
            every rank along "cp". The Sq queries are those of the Sq newest tokens: at most `window` of them, or one.
        scale, return_lse, backend: as for `KVCache.attend`.
        async_op: return a `PendingAttention` once this rank's part is queued; its wait() gives the result, so that
            outputs travel while the caller works on something else.

        Returns (B, Hq, Sq, D) of q's dtype, or (out, lse), the same bits on every rank. Outputs of ranks are rounded to
        q's dtype before they are merged in float32.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError if the backend cannot serve the call,
        in a capture without a call like it before, and as the class says.
        """
        if gradients.wanted(q):
            if async_op:
                raise RuntimeError("attend with async_op=True takes no part in autograd: call it under torch.no_grad()")
            keywords: dict[str, Any] = {"scale": scale, "return_lse": return_lse, "backend": backend}
            return gradients.without_gradient("ShardedKVCache.attend", lambda q: self.attend(q, **keywords), q)
        return self._attention.attend(
            q,
            scale=scale,
            return_lse=return_lse,
            backend=backend,
            async_op=async_op,
            capturing=self._capturing(),
            check=lambda: self._check_attend(q),
            part=self._attend_here,
        )

    @torch.no_grad()
    def step(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, backend: str = "auto") -> Tensor:
        """`append` of k and v, then `attend` of q: a layer's part of a decoding step.

        q: (B, Hq, n, D); k, v: (B, Hkv, n, D). Returns (B, Hq, n, D) of q's dtype. Raises what both raise, before
        anything changes where the arguments do not fit.
        """
        cache_checks.step(self._config, k, v, q)
        self._check_count(q)
        self.append(k, v)
        out = self.attend(q, scale=scale, backend=backend)
        assert isinstance(out, Tensor)
        return out

    def _check_whole(self) -> None:
        if not self._whole:
            raise RuntimeError("an append to this cache was interrupted, and it may lack tokens: call reset")

    def _check_attend(self, q: Tensor) -> None:
        self._check_whole()
        cache_checks.queries(self._config, q)
        if q.shape[0] != self.batch:
            raise ValueError(f"q must have the B = {self.batch} sequences of the cache, got {q.shape[0]}")
        self._check_count(q)

    def _check_count(self, q: Tensor) -> None:
        most = max(1, self.window)
        if q.shape[2] > most:
            raise ValueError(
                f"q must have at most the {most} newest tokens, which the window has, got Sq = {q.shape[2]}"
            )

    def _attend_here(self, q: Tensor, scale: float, backend: str, parts: Parts) -> None:
        """Over this rank's tokens, into its part. Only the window has tokens that are hidden from some queries."""
        shard, causal = self._shard, self._shard.has_window
        name = resolve(backend, self.device)
        if name == "reference":
            self._refresh("attend with backend 'reference'")
            attend_reference(q, [self._own(row) for row in range(q.shape[0])], scale, causal, parts.out, parts.lse)
        elif parts.out.numel():
            q = checks.plain(q)
            tiles = [shard.share.tiles(state.compressed // TILE_TOKENS) for state in self._table.rows[: q.shape[0]]]
            expected = max(tiles) * TILE_TOKENS, sum(tiles) * TILE_TOKENS
            problem = shard.own_problem(q, scale, causal, expected=expected)
            launch_problem(problem, q, parts.out, parts.lse, name, lengths=shard.share.lengths)

    def _own(self, row: int) -> tuple[Tensor, Tensor]:
        """K and V of a sequence, those of this rank alone."""
        state = self._table.rows[row]
        k, v = self._shard.load_own(row, state.compressed // TILE_TOKENS)
        if self._shard.has_window:
            k, v = (torch.cat(pair, dim=1) for pair in zip((k, v), self._shard.window(row, state.window)))
        return k, v

    # ---- Everything --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """No tokens any more; memory stays."""
        self._whole = False
        self._shard.clear()
        self._table = self._config.table()
        self._whole = True

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _refresh(self, what: str) -> None:
        """Reads the lengths from the device, where graphs may have changed them."""
        if self._capturing():
            raise RuntimeError(f"{what} cannot be captured in a CUDA graph")
        if not self._captured:
            return
        compressed, window, failed = self._shard.read()
        self._table.set_lengths(compressed, window)
        if failed:
            raise RuntimeError(
                f"replays of a captured append exceeded the capacity of {self.capacity} and left tokens out: `lengths` "
                "says what the sequences hold"
            )

    def __repr__(self) -> str:
        return (
            f"ShardedKVCache(rank {self.rank} of {self.world_size}, max_batch={self.max_batch}, "
            f"kv_heads={self.kv_heads}, head_dim={self.head_dim}, {checks.dtype_name(self.dtype)}, "
            f"capacity={self.capacity}, window={self.window}, {self.device}, {self.nbytes()} bytes here)"
        )


def _described(value: Any) -> str:
    return f"{type(value).__name__} with group {value.group}" if isinstance(value, Rule) else repr(value)
