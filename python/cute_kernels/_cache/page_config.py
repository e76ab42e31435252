"""What a pool of pages and its windows consist of: every tensor's shape and dtype, from a few sizes.

Whoever owns the memory makes these tensors, a KVCache or a serving engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels._cache.slot_rows import SlotRows
from cute_kernels._runtime.extension import _C, SCALED_CODECS, TILE_TOKENS
from cute_kernels._storage.storage import BITMAP

MAX_APPEND = TILE_TOKENS  # tokens that one call of `append` takes


def scale_names(key_codec: str, value_codec: str) -> list[str]:
    """The tensors of a `Pool` that hold scales of channels: those of codecs with scales."""
    named = ("key_scales", key_codec), ("value_scales", value_codec)
    return [name for name, codec in named if codec in SCALED_CODECS]


class TensorSize(NamedTuple):
    """Shape and dtype of a contiguous tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self, device: torch.device | str) -> Tensor:
        """Memory for it, not initialised."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class PageConfig:
    """Sizes that the pages of one layer have in common.

    kv_heads, head_dim, dtype: of k and v. key_keep, value_keep: elements that a token keeps, 0: every nonzero.
    key_codec, value_codec: how they are stored. tile_format: of both.
    tiles_per_page: tiles of 64 tokens in a page. slot_rows: rows of the slot of a tile.
    shares_orders: whether all sequences have the same channel orders, so that a page serves any of them.
    recent: tokens of a sequence that stay dense at least. max_append: new tokens that one call of `append` takes.
    stores_full: whether `append` and `extend` store a tile when its 64th token arrives, so that a full page holds all
        its tiles, or when its tokens leave the window.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    key_keep: int
    value_keep: int
    tiles_per_page: int
    slot_rows: SlotRows
    shares_orders: bool
    recent: int
    max_append: int
    stores_full: bool
    key_codec: str
    value_codec: str
    tile_format: str = BITMAP

    @cached_property
    def padded_head_dim(self) -> int:
        return _C.format.padded_head_dim(self.head_dim)

    @property
    def page_tokens(self) -> int:
        return self.tiles_per_page * TILE_TOKENS

    @property
    def window_capacity(self) -> int:
        """Tokens that a window holds: `recent`, all but one of a tile, and the new ones of one call."""
        return self.recent + TILE_TOKENS - 1 + self.max_append

    @property
    def slot_bytes(self) -> int:
        """Of `blocks`: a tile of one KV head, keys and values."""
        return self.slot_rows.both * int(_C.format.ROW_BYTES)

    @property
    def page_bytes(self) -> int:
        """Of a page in all tensors."""
        beside = sum(size.nbytes for name, size in self.page_tensors(1).items() if name != "blocks")
        return self.kv_heads * self.tiles_per_page * self.slot_bytes + beside

    @property
    def window_bytes(self) -> int:
        """Of one sequence's window."""
        return sum(size.nbytes for size in self.window_tensors(1).values())

    def page_tensors(self, pages: int) -> dict[str, TensorSize]:
        """What a page consists of: slots, slot = (page * Hkv + head) * tiles_per_page + tile in page."""
        slots = pages * self.kv_heads * self.tiles_per_page
        return {
            "blocks": TensorSize((slots, self.slot_rows.both, _C.format.LANES), torch.int32),
            "key_rows": TensorSize((slots,), torch.int32),
            "value_rows": TensorSize((slots,), torch.int32),
            "token_order": TensorSize((slots, TILE_TOKENS), torch.uint8),
        }

    def pool_tensors(self, pages: int, sequences: int, pages_per_sequence: int) -> dict[str, TensorSize]:
        """All tensors of a `Pool`."""
        orders = (self.kv_heads,) if self.shares_orders else (sequences, self.kv_heads)
        channels = TensorSize((*orders, self.padded_head_dim), torch.uint8)
        scales = TensorSize(channels.shape, torch.bfloat16)
        scaled = scale_names(self.key_codec, self.value_codec)
        return self.page_tensors(pages) | {
            "key_channels": channels,
            "value_channels": channels,
            "page_table": TensorSize((sequences, pages_per_sequence), torch.int32),
            "dropped": TensorSize((2, 2), torch.int64),
            "refused": TensorSize((2,), torch.int64),
            "error": TensorSize((1,), torch.int32),
            **dict.fromkeys(scaled, scales),
        }

    def window_tensors(self, sequences: int) -> dict[str, TensorSize]:
        """All tensors of `Windows`."""
        return window_tensors(sequences, self.kv_heads, self.window_capacity, self.head_dim, self.dtype)


def window_tensors(
    sequences: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype
) -> dict[str, TensorSize]:
    """All tensors of `Windows` that hold `capacity` tokens of each sequence."""
    tokens = TensorSize((sequences, kv_heads, capacity, head_dim), dtype)
    number = TensorSize((sequences,), torch.int32)
    return {"keys": tokens, "values": tokens, "lengths": number, "arrivals": number}
