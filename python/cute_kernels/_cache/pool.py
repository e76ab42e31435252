"""The tensors of a pool of pages and of its windows, whoever owns their memory, and what kernels take of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cute_kernels._attention.problem import pack_window
from cute_kernels._cache.page_config import MAX_APPEND, PageConfig, window_tensors
from cute_kernels._cache.slot_rows import SlotRows
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C, CODEC_IDS, DTYPE_IDS, ROLE_IDS, TILE_FORMATS, TILE_TOKENS, own_codec
from cute_kernels._runtime.launching import address
from cute_kernels._storage.steps import NO_NONZEROS, rows_before_values
from cute_kernels._storage.storage import BITMAP, TWO_OF_FOUR


class _Tensors:
    """A dataclass with tensors among its fields."""

    def __getstate__(self) -> dict[str, Any]:
        """The fields alone: a copy makes views of its own tensors."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({name: writable(value) for name, value in state.items()})

    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.__getstate__().items() if isinstance(value, Tensor)}

    @cached_property
    def memory(self) -> list[checks.Extent]:
        """Where the tensors are, for `checks.apart_from`."""
        of = type(self).__name__.lower()
        return checks.extents(**{f"{of}.{name}": value for name, value in self.tensors().items()})

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(value.nbytes for value in self.tensors().values())


def writable(value: Any) -> Any:
    """A copy of a tensor that was made in inference mode, which nothing outside may write to; else the value itself."""
    if not isinstance(value, Tensor) or not value.is_inference():
        return value
    with torch.inference_mode(False):
        return value.clone()


@dataclass(frozen=True, eq=False)
class Pool(_Tensors):
    """Compressed tiles of up to S sequences; all tensors contiguous, on one device."""

    blocks: Tensor  # int32 (slots, slot_rows.both, 32): key_rows of a slot's keys, then value_rows of its values
    key_rows: Tensor  # int32 (slots,): rows of each slot's blocks
    value_rows: Tensor
    token_order: Tensor  # uint8 (slots, 64): token position -> token of the tile, for keys and values
    key_channels: Tensor  # uint8 (S, Hkv, Dp), shared (Hkv, Dp): channel position -> channel
    value_channels: Tensor
    page_table: Tensor  # int32 (S, pages of a sequence): page, -1 where there is none
    dropped: Tensor  # int64 (2, 2): of keys and values, tiles that were trimmed and nonzeros that they lost
    refused: Tensor  # int64 (2,): nonzeros that the codec cannot store: infinity becomes its largest, NaN its least
    error: Tensor  # int32 (1,): 1 once a tile had no page or a window was full
    dtype: torch.dtype
    head_dim: int
    tiles_per_page: int
    key_keep: int  # elements that a token keeps, 0: every nonzero
    value_keep: int
    slot_rows: SlotRows
    key_codec: str
    value_codec: str
    key_scales: Tensor | None = None  # bf16, like key_channels: channel position -> scale; of a codec with scales
    value_scales: Tensor | None = None
    tile_format: str = BITMAP

    @classmethod
    def allocate(
        cls,
        *,
        pages: int,
        sequences: int,
        pages_per_sequence: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        tiles_per_page: int = 1,
        key_keep: int = 0,
        value_keep: int = 0,
        slot_rows: SlotRows | None = None,
        shares_orders: bool = False,
        key_codec: str | None = None,
        value_codec: str | None = None,
        tile_format: str = BITMAP,
    ) -> Pool:
        """A pool in memory of its own, `initialize`d.

        slot_rows: default: those that hold tiles of key_keep and value_keep. key_codec, value_codec: default: the
        dtype's own.
        """
        codecs = key_codec or own_codec(dtype), value_codec or own_codec(dtype)
        padded = _C.format.padded_head_dim(head_dim)
        sizes = PageConfig(
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            key_keep=key_keep,
            value_keep=value_keep,
            tiles_per_page=tiles_per_page,
            slot_rows=SlotRows.holding(padded, key_keep, value_keep, *codecs) if slot_rows is None else slot_rows,
            shares_orders=shares_orders,
            recent=0,
            max_append=MAX_APPEND,
            stores_full=False,
            key_codec=codecs[0],
            value_codec=codecs[1],
            tile_format=tile_format,
        )
        tensors = sizes.pool_tensors(pages, sequences, pages_per_sequence)
        pool = cls.of(sizes, **{name: size.empty(device) for name, size in tensors.items()})
        pool.initialize()
        return pool

    @classmethod
    def of(cls, sizes: PageConfig, **tensors: Tensor) -> Pool:
        """The pool that these tensors are, as `sizes.pool_tensors` says; unchecked."""
        sizes.slot_rows.check(sizes.padded_head_dim, sizes.key_codec, sizes.value_codec, sizes.tile_format)
        return cls(
            **tensors,
            dtype=sizes.dtype,
            head_dim=sizes.head_dim,
            tiles_per_page=sizes.tiles_per_page,
            key_keep=sizes.key_keep,
            value_keep=sizes.value_keep,
            slot_rows=sizes.slot_rows,
            key_codec=sizes.key_codec,
            value_codec=sizes.value_codec,
            tile_format=sizes.tile_format,
        )

    def initialize(self) -> None:
        """Makes all slots empty tiles, channel orders those of memory, their scales 1, and the page table one without
        pages."""
        self.blocks.zero_()
        padded, first = self.key_channels.shape[-1], 0
        for rows, codec, scales in (
            (self.key_rows, self.key_codec, self.key_scales),
            (self.value_rows, self.value_codec, self.value_scales),
        ):
            before = empty = rows_before_values(padded, codec, self.tile_format)
            if self.tile_format == TWO_OF_FOUR:  # whose tiles have one size
                empty = _C.format.two_of_four_rows(padded, CODEC_IDS[codec])
            rows.fill_(empty)
            if scales is not None:
                scale_row = _C.format.scale_row(padded, TILE_FORMATS[self.tile_format])
                self.blocks[:, first + scale_row : first + before].fill_(NO_NONZEROS)
                scales.fill_(1)
            first += empty
        for order in (self.token_order, self.key_channels, self.value_channels):
            order.copy_(torch.arange(order.shape[-1], device=self.device))
        self.page_table.fill_(-1)
        self.dropped.zero_()
        self.refused.zero_()
        self.error.zero_()

    @cached_property
    def device(self) -> torch.device:
        return self.page_table.device

    @cached_property
    def sequences(self) -> int:
        return self.page_table.shape[0]

    @cached_property
    def kv_heads(self) -> int:
        return self.key_channels.shape[-2]

    @property
    def shares_orders(self) -> bool:
        """Whether all sequences have the same channel orders."""
        return self.key_channels.ndim == 2

    @property
    def pages(self) -> int:
        return self.key_rows.shape[0] // (self.kv_heads * self.tiles_per_page)

    @property
    def tokens_per_sequence(self) -> int:
        """Compressed tokens that a row of the page table reaches."""
        return self.page_table.shape[1] * self.tiles_per_page * TILE_TOKENS

    @cached_property
    def key_view(self) -> _C.SparseView:
        """The keys as kernels take them. Valid as long as this object lives."""
        tensors = self.key_rows, self.key_channels, self.key_scales
        return self._view("key", self.key_codec, *tensors, self.slot_rows.keys, rows_before=0)

    @cached_property
    def value_view(self) -> _C.SparseView:
        tensors, before = (self.value_rows, self.value_channels, self.value_scales), address(self.key_rows)
        return self._view("value", self.value_codec, *tensors, self.slot_rows.values, rows_before=before)

    @cached_property
    def kernel_pool(self) -> _C.Pool:
        return _C.Pool(
            self.key_view,
            self.value_view,
            self.key_keep,
            self.value_keep,
            address(self.dropped),
            address(self.refused),
            address(self.error),
        )

    def _view(
        self,
        role: str,
        codec: str,
        rows: Tensor,
        channels: Tensor,
        scales: Tensor | None,
        most_rows: int,
        rows_before: int,
    ) -> _C.SparseView:
        return _C.SparseView.paged(
            address(self.blocks),
            address(rows),
            address(self.token_order),
            address(channels),
            0 if scales is None else address(scales),
            ROLE_IDS[role],
            DTYPE_IDS[self.dtype],
            CODEC_IDS[codec],
            self.sequences,
            self.kv_heads,
            self.head_dim,
            most_rows,
            address(self.page_table),
            self.page_table.shape[1],
            self.tiles_per_page,
            self.slot_rows.both,
            self.pages,
            rows_before,
            self.shares_orders,
            TILE_FORMATS[self.tile_format],
        )


@dataclass(frozen=True, eq=False)
class Windows(_Tensors):
    """The newest tokens of every sequence of a pool, dense. At least `recent` of them stay dense."""

    keys: Tensor  # (S, Hkv, capacity, D), contiguous, in the pool's dtype
    values: Tensor
    lengths: Tensor  # int32 (S,): tokens of each window
    arrivals: Tensor  # int32 (S,): zeros; scratch of `append`
    recent: int
    stores_full: bool = False  # tiles are stored when their 64th token arrives, not when they leave the window
    # Where `append` on a GPU prepares the tile that a window begins with, a portion a call, before it is stored:
    prepared: Tensor | None = None  # int32 (S,): portions that are done
    preparation: Tensor | None = None  # uint8 (S, Hkv, bytes): what they have found

    @classmethod
    def allocate(
        cls,
        pool: Pool,
        recent: int,
        max_append: int = MAX_APPEND,
        *,
        stores_full: bool = False,
        prepares: bool = True,
    ) -> Windows:
        """Empty windows, in memory of their own, that hold `recent` tokens, all but one of a tile, and the `max_append`
        new ones of one call of `append`. prepares: where that can be, a tile is prepared before it is stored."""
        if recent < 0:
            raise ValueError(f"recent must be at least 0, got {recent}")
        capacity = recent + TILE_TOKENS - 1 + max_append
        sizes = window_tensors(pool.sequences, pool.kv_heads, capacity, pool.head_dim, pool.dtype)
        tensors = {name: size.empty(pool.device) for name, size in sizes.items()}
        if prepares and recent and not stores_full and pool.device.type == "cuda":
            size = _C.cuda.preparation_bytes(pool.key_channels.shape[-1])
            tensors["prepared"] = torch.empty(pool.sequences, dtype=torch.int32, device=pool.device)
            shape = pool.sequences, pool.kv_heads, size
            tensors["preparation"] = torch.empty(shape, dtype=torch.uint8, device=pool.device)
        windows = cls(**tensors, recent=recent, stores_full=stores_full)
        windows.initialize()
        return windows

    @classmethod
    def of(cls, sizes: PageConfig, **tensors: Tensor) -> Windows:
        """The windows that these tensors are, as `sizes.window_tensors` says; unchecked."""
        return cls(**tensors, recent=sizes.recent, stores_full=sizes.stores_full)

    def initialize(self) -> None:
        """Empties all windows."""
        for tensor in (self.keys, self.values, self.lengths, self.arrivals, self.prepared, self.preparation):
            if tensor is not None:
                tensor.zero_()

    def prepare_anew(self, rows: Tensor | slice = slice(None)) -> None:
        """For whoever changes the first 64 tokens of these windows (int64, or a slice) other than by `append`."""
        if self.prepared is None:
            return
        if isinstance(rows, slice):
            self.prepared[rows].zero_()
        else:
            self.prepared.index_fill_(0, rows, 0)

    @property
    def capacity(self) -> int:
        """Tokens that a window can hold."""
        return self.keys.shape[2]

    @cached_property
    def kernel_windows(self) -> _C.cuda.Windows:
        return _C.cuda.Windows(
            address(self.keys),
            address(self.values),
            address(self.lengths),
            address(self.arrivals),
            self.capacity,
            self.recent,
            self.stores_full,
            0 if self.prepared is None else address(self.prepared),
            0 if self.preparation is None else address(self.preparation),
        )

    @cached_property
    def attention_window(self) -> _C.Window:
        return pack_window(self.keys, self.values, self.lengths)


@dataclass(frozen=True, eq=False)
class Share:
    """One rank's part of all tiles, which are dealt out: tile i of a sequence belongs to rank i % ranks."""

    lengths: Tensor  # int32 (S,): tokens in this rank's tiles
    rank: int
    ranks: int

    def tiles(self, tiles: int) -> int:
        """How many of the first `tiles` tiles are this rank's."""
        return (tiles + self.ranks - 1 - self.rank) // self.ranks

    def count(self, lengths: Tensor) -> None:
        """Sets the rank's lengths from those of all ranks together, int32 (S,), multiples of 64."""
        tiles = (lengths // TILE_TOKENS + (self.ranks - 1 - self.rank)) // self.ranks
        self.lengths.copy_(tiles * TILE_TOKENS)
