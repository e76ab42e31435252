"""A KV cache whose tokens are spread over several devices: context parallel decoding.

    from cute_kernels.distributed import ShardedKVCache

    cache = ShardedKVCache(max_batch=1, kv_heads=8, head_dim=128, capacity=1 << 20, sparsity=0.7)   # on every rank
    cache.append(k, v)     # a prompt or new tokens, the same on every rank
    out = cache.attend(q)  # the same result on every rank

Tiles of 64 tokens go round to the ranks of a `torch.distributed` group, one each; the dense window of the newest tokens
is attended to by the first rank. Every rank attends to its own tokens, and outputs are merged by their log-sum-exps
(`merge_states`), so that a step moves the outputs between ranks and no keys or values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels._cache import checks as cache_checks
from cute_kernels._cache.config import config
from cute_kernels._cache.tile_rules import TILE
from cute_kernels._runtime import checks, gradients
from cute_kernels.attention import sparse_attention
from cute_kernels.compression import compress_kv
from cute_kernels.kv_cache import KVCache
from cute_kernels.merging import merge_states
from cute_kernels.rules import Rule
from cute_kernels.sparse_kv import SparseKV

# What torch 2.13 calls all_gather_single; builds without torch.distributed have neither.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_HEADER = 16  # bytes that go before the outputs of a rank: its tokens, and whether it failed


class ShardedKVCache:
    """The K and V cache of one layer, with the tokens of each sequence spread over the ranks of a group.

    Every rank makes one with the same arguments, and calls the same methods with the same tensors in the same order.
    All sequences of a batch have the same length. `append` needs no communication; `attend` gathers outputs.

    group: a process group, or a DeviceMesh of one dimension; None: the default group. Its backend has to serve
        `device`: gloo for the CPU, NCCL for GPUs.
    capacity: tokens that a sequence can have, on all ranks together; a rank has memory for its share.
    window: newest tokens that are always dense, up to 63 more are; every rank holds them.
    The other arguments are those of `KVCache`.

    A rank whose arguments differ, whose call raises, or that holds another number of tokens makes `attend` raise on
    every rank; the message names it. A rank that does not call at all makes it raise where the group's timeout ends.
    On GPUs numbers of tokens and failures are looked at where shapes are new or a tile was stored since; until then the
    result of a step in which a rank failed is NaN.

    Raises what `KVCache` raises; TypeError or ValueError for a wrong group, and where ranks differ in an argument.
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
        window: int = 32,
        page_tokens: int = 64,
        device: torch.device | str | int = "cuda",
    ) -> None:
        self._group = _process_group(group)
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        if self.rank < 0:
            raise ValueError("group must have this process as a rank")
        options: dict[str, Any] = {
            "max_batch": max_batch,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": dtype,
            "sparsity": sparsity,
            "keep": keep,
            "key_keep": key_keep,
            "value_keep": value_keep,
            "key_rule": key_rule,
            "value_rule": value_rule,
            "page_tokens": page_tokens,
            "device": device,
        }
        kind = torch.device(device).type if isinstance(device, (str, torch.device)) else "cuda"
        described = {name: _described(value) for name, value in (options | {"device": kind}).items()}
        self._agree("ShardedKVCache", described | {"capacity": repr(capacity), "window": repr(window)})
        # Of the whole cache: checks the arguments.
        whole = config(
            **options, capacity=capacity, window=window, max_append=1, codec=None, key_codec=None, value_codec=None,
            pool_tokens=None, pool_bytes=None
        )  # fmt: skip
        tiles = -(-whole.capacity // TILE)
        # Tiles come whole, and leave the window of no tokens at once.
        share = TILE * max(1, -(-tiles // self.world_size))
        self._tiles = KVCache(**options, capacity=share, window=0, max_append=1)
        self.capacity, self.window = whole.capacity, whole.window
        shape = (whole.max_batch, whole.kv_heads, min(whole.window, whole.capacity) + TILE - 1, whole.head_dim)
        self._window = [torch.zeros(shape, dtype=dtype, device=whole.device) for _ in range(2)]
        self._no_tiles: tuple[SparseKV, SparseKV] | None = None  # beside the window
        self._config = whole
        self._batch = 0
        self._stored = 0  # tiles, of all ranks
        self._recent = 0  # tokens of the window
        self._known: set[tuple[Any, ...]] = set()  # calls in which all ranks have agreed
        self._checked = -1  # _stored when numbers of tokens were compared last
        self._whole = True  # no append was interrupted

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first tokens."""
        return self._batch

    @property
    def length(self) -> int:
        """Tokens of every sequence, on all ranks together."""
        return TILE * self._stored + self._recent

    def nbytes(self) -> int:
        """Bytes that this rank holds."""
        return self._tiles.nbytes() + sum(x.nbytes for x in self._window)

    @torch.no_grad()
    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds n >= 1 tokens to every sequence: a prompt, a chunk of one, or a decoding step.

        k, v: (B, Hkv, n, D) of the cache's dtype, on its device, any strides but 1 in the last dimension; the same on
            every rank. The first call says how many sequences there are, until `reset`.

        Where the window then holds `window` + 64 tokens or more, its oldest go to the ranks in tiles of 64. Does not
        communicate, and does not wait for a GPU (other rules than "magnitude" may).

        Raises TypeError or ValueError for arguments that do not fit, RuntimeError where sequences would exceed the
        capacity; nothing has changed then.
        """
        cache_checks.appended_tokens(self._config, k, v)
        batch, _, new, _ = k.shape
        if self._batch and batch != self._batch:
            raise ValueError(f"k must have the B = {self._batch} sequences of the cache, got {batch}")
        if batch > self._config.max_batch:
            raise ValueError(f"k must have at most max_batch = {self._config.max_batch} sequences, got {batch}")
        if self.length + new > self.capacity:
            raise RuntimeError(f"{self.length} tokens and {new} new ones exceed the capacity of {self.capacity}")
        self._check_whole()
        self._whole = False
        held, total = self._recent, self._recent + new
        leaving = max(0, total - self.window) // TILE  # tiles
        mine = range((self.rank - self._stored) % self.world_size, leaving, self.world_size)
        if mine:
            self._tiles.append(*(self._leaving(i, x, mine) for i, x in enumerate((k, v))))
        left, kept = total - leaving * TILE, max(0, held - leaving * TILE)  # tokens of the window, and old ones of them
        for window, x in zip(self._window, (k, v)):
            if leaving and kept:
                window[:batch, :, :kept].copy_(window[:batch, :, held - kept : held].clone())
            window[:batch, :, kept:left].copy_(x[:, :, new - (left - kept) :])
        if self._no_tiles is None or self._batch != batch:
            self._no_tiles = compress_kv(*(window[:batch, :, :0] for window in self._window))
        self._batch, self._recent, self._stored, self._whole = batch, left, self._stored + leaving, True

    def _leaving(self, i: int, x: Tensor, mine: range) -> Tensor:
        """Of the tiles that leave the window, those of this rank, (B, Hkv, 64 n, D)."""
        parts = [self._tokens(i, x, TILE * tile, TILE * (tile + 1)) for tile in mine]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def _tokens(self, i: int, x: Tensor, begin: int, end: int) -> Tensor:
        """Of the window's tokens and the new ones x behind them."""
        held = self._recent
        old = self._window[i][: x.shape[0], :, begin : min(end, held)]
        if end <= held:
            return old
        new = x[:, :, max(0, begin - held) : end - held]
        return new if begin >= held else torch.cat([old, new], dim=2)

    def attend(
        self, q: Tensor, *, scale: float | None = None, return_lse: bool = False, backend: str = "auto"
    ) -> Tensor | tuple[Tensor, Tensor]:
        """softmax(scale * q K^T) V over all tokens of all ranks, causal among the newest.

        q: (B, Hq, Sq, D) of the cache's dtype, on its device, any strides but 1 in the last dimension; the same on
            every rank. The Sq queries are those of the Sq newest tokens, which are in the window: Sq is at most
            `window`, or the tokens that there are.
        scale, return_lse, backend: as for `KVCache.attend`.

        Returns (B, Hq, Sq, D) of q's dtype, or (out, lse), the same bits on every rank. Outputs of ranks are rounded to
        q's dtype before they are merged in float32.

        Raises TypeError or ValueError for arguments that do not fit; RuntimeError if the backend cannot serve the call,
        and as the class says.
        """
        if gradients.wanted(q):
            keywords: dict[str, Any] = {"scale": scale, "return_lse": return_lse, "backend": backend}
            return gradients.without_gradient("ShardedKVCache.attend", lambda q: self.attend(q, **keywords), q)
        error: Exception | None = None
        key: tuple[Any, ...] = ()
        try:
            self._check_whole()
            self._check_queries(q)
            key = (tuple(q.shape), str(q.dtype), scale, return_lse, backend)
        except (TypeError, ValueError, RuntimeError) as caught:
            error = caught
        if error is not None or key not in self._known:
            names = ("q's shape", "q's dtype", "scale", "return_lse", "backend")
            self._agree("attend", {name: repr(value) for name, value in zip(names, key)}, error)
        out = lse = None
        try:
            out, lse = self._attend_here(q, scale, backend)
        except Exception as caught:
            error = caught
        outs, lses = self._gathered(q, out, lse, error, new=key not in self._known)
        self._known.add(key)
        merged, merged_lse = merge_states(outs, lses)
        return (merged, merged_lse) if return_lse else merged

    def _check_whole(self) -> None:
        if not self._whole:
            raise RuntimeError("an append to this cache was interrupted, and it may lack tokens: call reset")

    def _check_queries(self, q: Tensor) -> None:
        cache_checks.queries(self._config, q)
        if q.shape[0] != self._batch:
            raise ValueError(f"q must have the B = {self._batch} sequences of the cache, got {q.shape[0]}")
        most = max(min(self.length, 1), self.window if self._stored else self._recent)
        if q.shape[2] > most:
            raise ValueError(
                f"q must have at most the {most} newest tokens, which the window has, got Sq = {q.shape[2]}"
            )

    def _attend_here(self, q: Tensor, scale: float | None, backend: str) -> tuple[Tensor, Tensor]:
        """Over this rank's tokens."""
        states = []
        if self._tiles.batch:  # every tile is older than every query
            states.append(self._tiles.attend(q, scale=scale, causal=False, return_lse=True, backend=backend))
        if self.rank == 0 and self._recent and self._no_tiles is not None:
            k, v = (x[: self._batch, :, : self._recent] for x in self._window)
            options: dict[str, Any] = {"window": (k, v), "scale": scale, "return_lse": True, "backend": backend}
            states.append(sparse_attention(q, *self._no_tiles, **options))
        if not states:
            return torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), device=q.device)
        outs, lses = zip(*states)
        return (outs[0], lses[0]) if len(states) == 1 else merge_states(outs, lses)

    def _gathered(
        self, q: Tensor, out: Tensor | None, lse: Tensor | None, error: Exception | None, new: bool
    ) -> tuple[Tensor, Tensor]:
        """All ranks' (outs, lses), behind one collective. Raises `error`, or what another rank's header says."""
        if out is None or lse is None:
            out, lse = torch.zeros_like(q), torch.full(q.shape[:3], float("nan"), device=q.device)
        header = torch.tensor([self.length, error is not None], dtype=torch.int64, device="cpu").to(q.device)
        parts = [x.contiguous().view(-1).view(torch.uint8) for x in (header, lse, out)]
        sent = torch.cat(parts)
        received = sent.new_empty(self.world_size * sent.numel())
        _all_gather(received, sent, group=self._group)
        received = received.view(self.world_size, sent.numel())
        if q.device.type == "cpu" or new or error is not None or self._checked != self._stored:
            self._compare(received[:, :_HEADER].contiguous().view(torch.int64).tolist(), error)
            self._checked = self._stored
        end = _HEADER + lse.nbytes
        lses = received[:, _HEADER:end].contiguous().view(torch.float32).view(self.world_size, *lse.shape)
        outs = received[:, end:].contiguous().view(q.dtype).view(self.world_size, *out.shape)
        return outs, lses

    def _compare(self, headers: list[list[int]], error: Exception | None) -> None:
        if error is not None:
            raise error
        failed = [rank for rank, (_, flag) in enumerate(headers) if flag]
        if failed:
            raise RuntimeError(f"attend failed on {_ranks(failed)} of the group, which say why")
        lengths = [length for length, _ in headers]
        if len(set(lengths)) > 1:
            raise RuntimeError(f"ranks must hold the same tokens: {_by_rank(lengths)} tokens a sequence")

    def _agree(self, what: str, described: dict[str, str], error: Exception | None = None) -> None:
        """Raises on all ranks where one of them has an error, or describes the call differently."""
        said: list[Any] = [None] * self.world_size
        mine = (described, None if error is None else f"{type(error).__name__}: {error}")
        dist.all_gather_object(said, mine, group=self._group)
        if error is not None:
            raise error
        failed = [(rank, text) for rank, (_, text) in enumerate(said) if text]
        if failed:
            rank, text = failed[0]
            raise RuntimeError(f"{what} failed on rank {rank} of the group: {text}")
        for name in described:
            values = [texts.get(name) for texts, _ in said]
            if len(set(values)) > 1:
                raise ValueError(f"{what}: {name} must be the same on all ranks, got {_by_rank(values)}")

    def reset(self) -> None:
        """No tokens any more."""
        self._tiles.reset()
        self._whole = True
        self._batch = self._stored = self._recent = 0
        self._checked = -1

    def __repr__(self) -> str:
        config = self._config
        return (
            f"ShardedKVCache(rank {self.rank} of {self.world_size}, max_batch={config.max_batch}, "
            f"kv_heads={config.kv_heads}, head_dim={config.head_dim}, {checks.dtype_name(config.dtype)}, "
            f"capacity={self.capacity}, window={self.window}, {config.device}, {self.nbytes()} bytes here)"
        )


def _process_group(group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed has no group: call torch.distributed.init_process_group first")
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of one dimension, got {group.ndim}: take mesh['name']")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a process group, a DeviceMesh or None, got {type(group).__name__}")
    return group


def _described(value: Any) -> str:
    return f"{type(value).__name__} with group {value.group}" if isinstance(value, Rule) else repr(value)


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
