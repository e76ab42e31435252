"""The checks behind `SparseKV.validate`: storage that passes is what `compress` could have written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cute_kernels import _tiles
from cute_kernels._extension import _C

if TYPE_CHECKING:
    from cute_kernels.sparse_kv import SparseKV

MAX_ROWS = 2**31 - 1  # row_offsets are int32
ALIGNMENT = 64  # bytes: of every tensor's first element; kernels copy in pieces of 16
TENSOR_DTYPES = {
    "blocks": torch.int32,
    "row_offsets": torch.int32,
    "token_order": torch.uint8,
    "channel_order": torch.uint8,
}


def check_storage(kv: SparseKV) -> int:
    """Raises ValueError, naming the field, or returns the number of nonzeros."""
    _check_tensors(kv)
    _check_row_offsets(kv)
    _check_permutation(kv.token_order, "token_order")
    _check_permutation(kv.channel_order, "channel_order")
    return sum(_check_chunk(kv, first, last) for first, last in _tiles.chunks(kv))


def _check_tensors(kv: SparseKV) -> None:
    batch, kv_heads, tokens, head_dim = kv.shape
    padded = _C.format.padded_head_dim(head_dim) if head_dim < 2**31 else 0
    if padded == 0:
        raise ValueError(f"shape: D must be a multiple of 8, from 8 to {max(_C.format.HEAD_DIMS)}, got {head_dim}")
    tiles = _tiles.tiles_per_head(tokens)
    if batch * kv_heads * tiles * _C.format.bitmap_rows(padded) > MAX_ROWS or max(batch, kv_heads) > MAX_ROWS:
        raise ValueError(f"shape: {tuple(kv.shape)} has more tiles than row_offsets can count")
    tile_tokens = _C.format.TILE_TOKENS
    shapes = {
        "blocks": (kv.blocks.shape[0] if kv.blocks.dim() else 0, _C.format.LANES),
        "row_offsets": (batch * kv_heads * tiles + 1,),
        "token_order": (batch, kv_heads, tiles, tile_tokens),
        "channel_order": (batch, kv_heads, padded),
    }
    for name, tensor in kv._tensors().items():
        if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{name}: must be a dense tensor on a cpu or cuda device, got {tensor.layout} on {tensor.device}"
            )
        if tensor.dtype != TENSOR_DTYPES[name]:
            raise ValueError(f"{name}: must be {TENSOR_DTYPES[name]}, got {tensor.dtype}")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{name}: must have shape {shapes[name]} for a cache of shape {tuple(kv.shape)}, got "
                f"{tuple(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {tuple(tensor.stride())}")
        if tensor.device != kv.blocks.device:
            raise ValueError(f"{name}: must be on the device of blocks, {kv.blocks.device}, got {tensor.device}")
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name}: must start at a multiple of {ALIGNMENT} bytes")


def _check_row_offsets(kv: SparseKV) -> None:
    padded = kv.channel_order.shape[-1]
    shortest, longest = _C.format.bitmap_rows(padded), _C.format.max_tile_rows(padded)
    offsets = kv.row_offsets.long()
    rows = offsets.diff()
    if int(offsets[0]) != 0:
        raise ValueError(f"row_offsets: must start at 0, got {int(offsets[0])}")
    actual = 0
    if rows.numel():
        least, actual = (int(value) for value in torch.stack(rows.aminmax()))
        if least < shortest or actual > longest:
            raise ValueError(
                f"row_offsets: a tile of head dim {kv.shape[3]} takes from {shortest} to {longest} rows, got from "
                f"{least} to {actual}"
            )
    if int(offsets[-1]) != kv.blocks.shape[0]:
        raise ValueError(
            f"row_offsets: must end at the number of rows of blocks, {kv.blocks.shape[0]}, got {int(offsets[-1])}"
        )
    if actual != kv.max_tile_rows:
        raise ValueError(f"max_tile_rows: must be {actual}, as row_offsets say, got {kv.max_tile_rows}")


def _check_permutation(order: Tensor, name: str) -> None:
    expected = torch.arange(order.shape[-1], device=order.device)
    if not bool((order.sort(dim=-1).values == expected).all()):
        raise ValueError(f"{name}: every row must be a permutation of 0..{order.shape[-1] - 1}")


def _check_chunk(kv: SparseKV, first: int, last: int) -> int:
    """Checks bitmaps and values of the tiles [first, last); returns their number of nonzeros."""
    layout = _tiles.layout_of(kv)
    begin = kv.row_offsets[first:last].long()
    end = kv.row_offsets[first + 1 : last + 1].long()
    bits = _tiles.element_bits(kv, first, last)  # (tiles, E, L)
    counts = _tiles.by_stream(bits).sum(dim=1)  # (tiles, streams, L)
    value_rows = end - begin - layout.bitmap_rows
    if bool((counts > value_rows[:, None, None]).any()):
        raise ValueError("blocks: a bitmap has more bits than its tile has value rows")

    token_order, channel_order = _tiles.orders(kv, first, last)
    tile = torch.arange(first, last, device=kv.device) % kv.token_order.shape[2]
    no_token = token_order + _C.format.TILE_TOKENS * tile[:, None] >= kv.shape[2]  # (tiles, token positions)
    no_channel = channel_order >= kv.shape[3]  # (tiles, channel positions)
    if bool((bits & (no_token[:, layout.token] | no_channel[:, layout.channel])).any()):
        raise ValueError("blocks: a bitmap has a bit for a token or channel that the cache does not have")

    row = torch.arange(int(begin[0]), int(end[-1]), device=kv.device)
    tile_of_row = torch.repeat_interleave(torch.arange(last - first, device=kv.device), end - begin)
    rank = row - begin[tile_of_row] - layout.bitmap_rows  # of a row among its tile's value rows; negative: a bitmap row
    is_value = rank >= 0
    values = _tiles.halves(kv)[row[is_value]]  # (value rows, L, streams)
    used = rank[is_value][:, None, None] < counts[tile_of_row[is_value]].transpose(1, 2)
    if bool((used & ((values & _tiles.MAGNITUDE_BITS) == 0)).any()):
        raise ValueError("blocks: a bitmap has a bit for a value that is zero")
    if bool((~used & (values != 0)).any()):
        raise ValueError("blocks: values must be followed by zeros up to the tile's last row")
    return int(counts.sum())
