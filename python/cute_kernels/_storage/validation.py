"""The checks behind `SparseKV.validate`: storage that passes is what `compress` could have written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels._runtime.extension import _C, CODEC_IDS, HEAD_DIMS, LARGEST_HEAD_DIM, TILE_FORMATS, TILE_TOKENS
from cute_kernels._storage import tile_reader
from cute_kernels._storage.storage import BITMAP, TWO_OF_FOUR, TWO_OF_FOUR_BITMAP, Storage

MAX_ROWS = 2**31 - 1  # row_offsets are int32
ALIGNMENT = 64  # bytes: of every tensor's first element; kernels copy 16 bytes at a time
TENSOR_DTYPES = {
    "blocks": torch.int32,
    "row_offsets": torch.int32,
    "token_order": torch.uint8,
    "channel_order": torch.uint8,
    "channel_scale": torch.bfloat16,
}


def check_storage(storage: Storage) -> int:
    """Raises ValueError, naming the field, or returns the number of nonzeros."""
    check_tensors(storage)
    for name, tensor in storage.tensors().items():
        if tensor.data_ptr() % ALIGNMENT:
            raise ValueError(f"{name}: must start at a multiple of {ALIGNMENT} bytes")
    _check_row_offsets(storage)
    _check_permutation(storage.token_order, "token_order")
    _check_permutation(storage.channel_order, "channel_order")
    _check_channel_scale(storage)
    check = {BITMAP: _check_chunk, TWO_OF_FOUR: _check_pairs, TWO_OF_FOUR_BITMAP: _check_slots}[storage.tile_format]
    return sum(check(storage, first, last) for first, last in tile_reader.chunks(storage))


def check_size(shape: Sequence[int]) -> None:
    """ValueError for the shape (B, Hkv, T, D) of a cache that no storage can hold, be it one without elements.

    D has been checked.
    """
    batch, kv_heads, tokens, head_dim = shape
    padded, tiles = _C.format.padded_head_dim(head_dim), tile_reader.tiles_per_head(tokens)
    if batch * kv_heads * tiles * _C.format.bitmap_rows(padded) > MAX_ROWS or max(batch, kv_heads) > MAX_ROWS:
        raise ValueError(f"shape: {tuple(shape)} has more tiles than row_offsets can count")
    if math.prod(max(1, size) for size in (batch, kv_heads, tiles * TILE_TOKENS, padded)) >= 2**63:
        raise ValueError(f"shape: {tuple(shape)} has more elements than a tensor can address")


def check_tensors(storage: Storage) -> None:
    """Raises ValueError unless every tensor is dense memory of the size that the cache's shape asks for. Reads none of
    their elements and takes no memory."""
    for name, tensor in storage.tensors().items():
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type not in ("cpu", "cuda"):
            kind = "a nested one" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name}: must be a dense tensor on a cpu or cuda device, got {kind} on {tensor.device}")
        if not torch.compiler.is_compiling() and tensor.is_neg():  # a compiler cannot trace is_neg
            raise ValueError(f"{name}: must not have a pending negation, got a tensor with is_neg()")
    batch, kv_heads, tokens, head_dim = storage.shape
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"shape: D must be a multiple of 8, from 8 to {LARGEST_HEAD_DIM}, got {head_dim}")
    padded = _C.format.padded_head_dim(head_dim)
    check_size(storage.shape)
    tiles = tile_reader.tiles_per_head(tokens)
    shapes = {
        "blocks": (storage.blocks.shape[0] if storage.blocks.dim() else 0, _C.format.LANES),
        "row_offsets": (batch * kv_heads * tiles + 1,),
        "token_order": (batch, kv_heads, tiles, TILE_TOKENS),
        "channel_order": (batch, kv_heads, padded),
        "channel_scale": (batch, kv_heads, padded),
    }
    for name, tensor in storage.tensors().items():
        if tensor.dtype != TENSOR_DTYPES[name]:
            raise ValueError(f"{name}: must be {TENSOR_DTYPES[name]}, got {tensor.dtype}")
        if tuple(tensor.shape) != shapes[name]:
            raise ValueError(
                f"{name}: must have shape {shapes[name]} for a cache of shape {tuple(storage.shape)}, got "
                f"{tuple(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {tuple(tensor.stride())}")
        if tensor.device != storage.blocks.device:
            raise ValueError(f"{name}: must be on the device of blocks, {storage.blocks.device}, got {tensor.device}")


def _check_row_offsets(storage: Storage) -> None:
    padded = storage.padded_head_dim
    codec_id = CODEC_IDS[storage.codec]
    shortest = tile_reader.scale_row(storage) + _C.format.scale_rows(codec_id)
    longest = _C.format.max_tile_rows(padded, codec_id, TILE_FORMATS[storage.tile_format])
    if storage.tile_format == TWO_OF_FOUR:
        shortest = longest
    offsets = storage.row_offsets.long()
    rows = offsets.diff()
    if int(offsets[0]) != 0:
        raise ValueError(f"row_offsets: must start at 0, got {int(offsets[0])}")
    actual = 0
    if rows.numel():
        least, actual = (int(value) for value in torch.stack(rows.aminmax()))
        if least < shortest or actual > longest:
            raise ValueError(
                f"row_offsets: a tile of head dim {storage.shape[3]} takes from {shortest} to {longest} rows, got from "
                f"{least} to {actual}"
            )
    if int(offsets[-1]) != storage.blocks.shape[0]:
        raise ValueError(
            f"row_offsets: must end at the number of rows of blocks, {storage.blocks.shape[0]}, got {int(offsets[-1])}"
        )
    if actual != storage.max_tile_rows:
        raise ValueError(f"max_tile_rows: must be {actual}, as row_offsets say, got {storage.max_tile_rows}")


def _check_permutation(order: Tensor, name: str) -> None:
    expected = torch.arange(order.shape[-1], device=order.device)
    if not bool((order.sort(dim=-1).values == expected).all()):
        raise ValueError(f"{name}: every row must be a permutation of 0..{order.shape[-1] - 1}")


def _check_channel_scale(storage: Storage) -> None:
    if storage.channel_scale is None:
        return
    scales, most = storage.channel_scale.float(), 2.0**_C.format.MAX_CHANNEL_SCALE_LOG2
    if not bool(((scales >= 1 / most) & (scales <= most)).all()):
        raise ValueError(f"channel_scale: every scale must be from {1 / most} to {most}")


def _outside(storage: Storage, first: int, last: int) -> tuple[Tensor, Tensor]:
    """(tiles, token positions) and (tiles, channel positions): which of them hold no token or channel of the cache."""
    token_order, channel_order = tile_reader.orders(storage, first, last)
    tile = torch.arange(first, last, device=storage.device) % storage.token_order.shape[2]
    return token_order + TILE_TOKENS * tile[:, None] >= storage.shape[2], channel_order >= storage.shape[3]


def _check_token_scales(storage: Storage, first: int, last: int) -> None:
    scales, most = tile_reader.token_scales(storage, first, last), 2.0**_C.format.MAX_SCALE_LOG2
    if not bool(((scales >= 1 / most) & (scales <= most)).all()):
        raise ValueError(f"blocks: the scale of a token must be from {1 / most} to {most}")


def _check_metadata(metadata: Tensor) -> None:
    if bool((metadata & 3 >= metadata >> 2).any()):
        raise ValueError("blocks: metadata must name two of four in order")


def _check_pairs(storage: Storage, first: int, last: int) -> int:
    """Checks metadata and values of tiles in the format of two of four; returns their number of nonzeros."""
    _check_metadata(tile_reader.pair_metadata(storage, first, last))
    codes, position = tile_reader.stored_pairs(storage, first, last)
    values, nonzero = tile_reader.values_of(storage), tile_reader.is_nonzero(storage, codes)
    if values.codes is None:
        if bool((~nonzero & (codes != 0)).any()):
            raise ValueError("blocks: a zero must be stored without a sign")
    else:
        if bool((~values.codes[codes]).any()):
            raise ValueError(f"blocks: a value is no code of codec '{storage.codec}'")
        _check_token_scales(storage, first, last)
    no_token, no_channel = _outside(storage, first, last)
    padded = storage.padded_head_dim
    outside = no_token.gather(1, position // padded) | no_channel.gather(1, position % padded)
    if bool((outside & nonzero).any()):
        raise ValueError("blocks: a value that is not zero is of a token or channel that the cache does not have")
    return int(nonzero.sum())


def _check_chunk(storage: Storage, first: int, last: int) -> int:
    """Checks bitmaps and values of the tiles [first, last); returns their number of nonzeros."""
    layout = tile_reader.layout_of(storage)
    bits = tile_reader.element_bits(storage, first, last)  # (tiles, E, L)
    no_token, no_channel = _outside(storage, first, last)
    outside = no_token[:, layout.token] | no_channel[:, layout.channel]
    counts = tile_reader.by_stream(bits).sum(dim=1)  # (tiles, streams, L)
    return _check_streams(storage, first, last, counts, bool((bits & outside).any()))


def _check_slots(storage: Storage, first: int, last: int) -> int:
    """Checks metadata, bitmaps and values of tiles in the format of at most two of four; returns their number of
    nonzeros."""
    _check_metadata(tile_reader.slot_metadata(storage, first, last))
    bits, streams = tile_reader.slot_bits(storage, first, last), tile_reader.slots_of(storage).stream  # (tiles, L, S)
    position, padded = tile_reader.slot_positions(storage, first, last).flatten(1), storage.padded_head_dim
    no_token, no_channel = _outside(storage, first, last)
    outside = no_token.gather(1, position // padded) | no_channel.gather(1, position % padded)
    counts = [bits[:, :, streams == stream].sum(dim=2) for stream in range(tile_reader.values_of(storage).streams)]
    return _check_streams(storage, first, last, torch.stack(counts, dim=1), bool((bits.flatten(1) & outside).any()))


def _check_streams(storage: Storage, first: int, last: int, counts: Tensor, has_bit_outside: bool) -> int:
    """Checks the values of tiles whose streams have `counts` of them, (tiles, streams, L); returns their number."""
    codec = tile_reader.values_of(storage)
    begin = storage.row_offsets[first:last].long()
    end = storage.row_offsets[first + 1 : last + 1].long()
    first_value_row = tile_reader.scale_row(storage) + _C.format.scale_rows(CODEC_IDS[storage.codec])
    value_rows = end - begin - first_value_row
    if bool((counts > codec.capacity(value_rows)[:, None, None]).any()):
        raise ValueError("blocks: a bitmap has more bits than its tile holds values")
    if has_bit_outside:
        raise ValueError("blocks: a bitmap has a bit for a token or channel that the cache does not have")

    row = torch.arange(int(begin[0]), int(end[-1]), device=storage.device)
    tile_of_row = torch.repeat_interleave(torch.arange(last - first, device=storage.device), end - begin)
    value_row = row - begin[tile_of_row] - first_value_row  # counted in its tile; negative: none
    is_value = value_row >= 0
    values, stream, rank = tile_reader.row_values(storage, row[is_value], value_row[is_value])
    used = rank[..., None] < counts[tile_of_row[is_value][:, None], stream]
    if codec.codes is None:
        if bool((used & ((values & codec.mask >> 1) == 0)).any()):
            raise ValueError("blocks: a bitmap has a bit for a value that is zero")
    else:
        if bool((used & ~codec.codes[values]).any()):
            raise ValueError(f"blocks: a value is no code of codec '{storage.codec}'")
        _check_token_scales(storage, first, last)
    if bool((~used & (values != 0)).any()):
        raise ValueError("blocks: values must be followed by zeros up to the tile's last row")
    return int(counts.sum())
