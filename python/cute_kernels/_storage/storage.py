"""The tensors and numbers of one compressed cache, as everything inside the package takes them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_IDS, DTYPE_IDS, ROLE_IDS, TILE_FORMATS
from cute_kernels._runtime.launching import address

TENSORS = ("blocks", "row_offsets", "token_order", "channel_order", "channel_scale")  # the last: codecs with scales
BITMAP, TWO_OF_FOUR, TWO_OF_FOUR_BITMAP = "bitmap", "two_of_four", "two_of_four_bitmap"  # tile formats


def refusal(name: str, values: int, codec: str) -> str:
    """The message for values that `codec` cannot store."""
    what = "infinite" if _C.format.has_nan(CODEC_IDS[codec]) else "infinite or NaN"
    return f"{name} holds {values} values that are {what}, which codec '{codec}' cannot store"


@dataclass(eq=False, slots=True)
class Storage:
    """What a `SparseKV` holds; see docs/format.md for the tensors. `validation` checks it.

    blocks, row_offsets, token_order, channel_order: contiguous, on one device. channel_scale: likewise; None for a
        codec without scales.
    dtype: of the dense cache, and of what multiplies. codec: how nonzeros are stored. tile_format: where they are.
    max_tile_rows: rows of the longest tile. nnz: nonzeros; None: not counted yet.
    totals: of a preallocated cache, `steps.TOTALS` numbers of its content, on the device. `blocks` and `max_tile_rows`
        are upper bounds then. keep: it takes caches of so many elements a token; 0: of any number.
    last_call: what `sparse_attention` keeps of its last call with these keys, an `_attention.memo.AttentionCall`.
    """

    blocks: Tensor
    row_offsets: Tensor
    token_order: Tensor
    channel_order: Tensor
    role: str
    dtype: torch.dtype
    codec: str
    shape: torch.Size  # (B, Hkv, T, D)
    max_tile_rows: int
    tile_format: str = BITMAP
    channel_scale: Tensor | None = None
    nnz: int | None = None
    keep: int = 0
    totals: Tensor | None = None
    last_call: Any = field(default=None, init=False)
    _view: _C.SparseView | None = field(default=None, init=False)
    _addresses: tuple[int, ...] = field(default=(), init=False)  # that _view was made of
    _stays: bool = field(default=False, init=False)  # torch moves only CPU storage: to memory that processes share

    def __post_init__(self) -> None:
        self.shape = torch.Size(self.shape)
        self._stays = self.blocks.device.type != "cpu"

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def padded_head_dim(self) -> int:
        return self.channel_order.shape[-1]

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for name in TENSORS if (tensor := getattr(self, name)) is not None}

    def with_tensors(self, tensors: dict[str, Any]) -> Storage:
        """The same content in other tensors."""
        return replace(self, **tensors)

    def exact(self) -> Storage:
        """The content without the memory beyond it that was preallocated; shares the tensors. Itself if there is none.

        Waits for the device. ValueError if it was filled with values that its codec cannot store.
        """
        if self.totals is None:
            return self
        rows, max_tile_rows, nnz, refused = self.totals.tolist()
        if refused:
            raise ValueError(refusal("the cache", refused, self.codec))
        blocks = self.blocks[:rows]
        return replace(self, blocks=blocks, max_tile_rows=max_tile_rows, nnz=nnz, keep=0, totals=None)

    def has_view(self, view: _C.SparseView) -> bool:
        """Whether `view()` returns this one; False also where `view` was never called."""
        return self._view is view and self.view() is view

    def view(self) -> _C.SparseView:
        """The storage as kernels take it: pointers and sizes. Valid as long as this object lives and its tensors stay
        where they are."""
        if self._stays and self._view is not None:
            return self._view
        addresses = (
            address(self.blocks),
            address(self.row_offsets),
            address(self.token_order),
            address(self.channel_order),
            0 if self.channel_scale is None else address(self.channel_scale),
        )
        if self._view is None or addresses != self._addresses:
            batch, kv_heads, tokens, head_dim = self.shape
            self._addresses = addresses
            self._view = _C.SparseView(
                *addresses,
                ROLE_IDS[self.role],
                DTYPE_IDS[self.dtype],
                CODEC_IDS[self.codec],
                batch,
                kv_heads,
                tokens,
                head_dim,
                self.max_tile_rows,
                TILE_FORMATS[self.tile_format],
            )
        return self._view
