"""Pruning and compression: dense K and V to SparseKV, and back.

Method: per-token magnitude pruning with a bitmap and packed nonzeros, after Mustafar (arXiv 2505.22913). The steps run
as kernels, the same on CPU and GPU and bit for bit with the same result: select what is kept, balance the tiles, pack
them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cute_kernels import _checks, _tiles
from cute_kernels._extension import _C, DTYPE_CODES
from cute_kernels._validation import MAX_ROWS
from cute_kernels._backends import Kernels, compression_kernels
from cute_kernels.sparse_kv import SparseKV


def prune(x: Tensor, *, sparsity: float | None = None, keep: int | None = None, method: str = "magnitude") -> Tensor:
    """Zeroes all but the largest elements of every token and head.

    x: (B, Hkv, T, D) float16 or bfloat16, D a multiple of 8 up to 256, any strides but 1 in the last dimension.
    sparsity: share of every token's D elements to drop, 0 to 1: keeps floor(D * (1 - sparsity) + 1e-6), at least 1.
    keep: how many elements of every token to keep, 1 to D. With neither, every nonzero is kept.
    method: "magnitude", per token: the `keep` largest |x|, ties to the lower channel. NaN is larger than everything.

    Returns a contiguous tensor like x, with +0 for what is dropped and for -0.0.

    Raises TypeError for a wrong class or dtype; ValueError for a wrong shape, stride or range, or both sparsity and
    keep; RuntimeError if the extension has no kernels for x's device.
    """
    _checks.method(method)
    x = _checks.dense_cache(x, "x")
    kept = _checks.kept_elements(x.shape[3], sparsity, keep)
    kernels = compression_kernels(x.device)
    pruned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with kernels.launch() as stream:
            kernels.module.select(
                x.data_ptr(), x.stride()[:3], *x.shape, DTYPE_CODES[x.dtype], kept, 0, 0, pruned.data_ptr(), stream
            )
    return pruned


def compress(
    x: Tensor, *, role: str, sparsity: float | None = None, keep: int | None = None, method: str = "magnitude"
) -> SparseKV:
    """Prunes and compresses a K or V cache.

    x, sparsity, keep, method: as for `prune`. With neither sparsity nor keep, every nonzero of x is stored exactly.
    role: "key" or "value".

    Any T >= 0; the last tile may be partial. One device synchronisation, for the size of the storage.

    Raises what `prune` raises, and ValueError if the storage would exceed 2^31 rows of 128 bytes.
    """
    _checks.role(role)
    _checks.method(method)
    x = _checks.dense_cache(x, "x")
    kept = _checks.kept_elements(x.shape[3], sparsity, keep)
    return _compress([(x, role, kept)])[0]


def compress_kv(
    k: Tensor,
    v: Tensor,
    *,
    sparsity: float | None = None,
    keep: int | None = None,
    key_keep: int | None = None,
    value_keep: int | None = None,
    method: str = "magnitude",
) -> tuple[SparseKV, SparseKV]:
    """Prunes and compresses both caches of a layer, which then share one order of tokens per tile.

    k, v: as x of `compress`, alike in shape, dtype and device.
    sparsity or keep: for both caches. key_keep, value_keep: for one of them, in place of what is said for both.

    Returns (keys, values). Raises what `compress` raises; the message says which cache is meant.
    """
    _checks.method(method)
    k, v = _checks.dense_cache(k, "k"), _checks.dense_cache(v, "v")
    _checks.dtype(v, "v", (k.dtype,), " like k")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    _checks.device(v, "v", k.device, "k")
    head_dim = k.shape[3]
    both = _checks.kept_elements(head_dim, sparsity, keep)
    kept_k = both if key_keep is None else _checks.kept_elements(head_dim, None, key_keep, "key_keep")
    kept_v = both if value_keep is None else _checks.kept_elements(head_dim, None, value_keep, "value_keep")
    keys, values = _compress([(k, "key", kept_k), (v, "value", kept_v)])
    return keys, values


def decompress(kv: SparseKV) -> Tensor:
    """The dense cache (B, Hkv, T, D) that `kv` holds: bit for bit what `prune` gives.

    Raises TypeError if kv is no SparseKV; RuntimeError if the extension has no kernels for its device.
    """
    _checks.sparse(kv, "kv")
    kernels = compression_kernels(kv.device)
    out = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    if out.numel():
        with kernels.launch() as stream:
            kernels.module.decompress(kv._kernel_view(), out.data_ptr(), stream)
    return out


@dataclass
class _Selection:
    """One cache on its way through compression; Dp is the padded head dim."""

    x: Tensor
    role: str
    masks: Tensor  # (B * Hkv * T, Dp / 32) int32: what is kept and nonzero
    channel_order: Tensor  # (B, Hkv, Dp) uint8
    longest: Tensor  # (B * Hkv * tiles) int32: longest value stream of each tile
    nnz: Tensor  # () int64


def _compress(caches: list[tuple[Tensor, str, int]]) -> list[SparseKV]:
    """One cache, or a K/V pair that shares its token order, alike in shape, dtype and device."""
    kernels = compression_kernels(caches[0][0].device)
    with kernels.launch() as stream:
        selections = [_select(kernels, x, role, kept, stream) for x, role, kept in caches]
        token_order = _balance(kernels, selections, stream)
        sizes = [_block_sizes(selection) for selection in selections]
        # The only synchronisation: rows in all, rows of the longest tile, nonzeros.
        totals = torch.stack([total for _, total in sizes]).tolist()
        return [
            _pack(kernels, selection, token_order, offsets, total, stream)
            for selection, (offsets, _), total in zip(selections, sizes, totals)
        ]


def _select(kernels: Kernels, x: Tensor, role: str, kept: int, stream: int) -> _Selection:
    batch, kv_heads, tokens, head_dim = x.shape
    padded = _C.format.padded_head_dim(head_dim)
    tiles = batch * kv_heads * _tiles.tiles_per_head(tokens)
    masks = torch.empty(batch * kv_heads * tokens, padded // 32, dtype=torch.int32, device=x.device)
    counts = torch.zeros(batch * kv_heads, padded, dtype=torch.int32, device=x.device)
    if x.numel():
        kernels.module.select(
            x.data_ptr(),
            x.stride()[:3],
            *x.shape,
            DTYPE_CODES[x.dtype],
            kept,
            masks.data_ptr(),
            counts.data_ptr(),
            0,
            stream,
        )
    channel_order = _deal_channels(counts).view(batch, kv_heads, padded)
    longest = torch.empty(tiles, dtype=torch.int32, device=x.device)
    return _Selection(x, role, masks, channel_order, longest, counts.sum())


def _deal_channels(counts: Tensor) -> Tensor:
    """Channel order (heads, Dp) uint8: channels, densest first, dealt to the classes (position mod 8), back and forth.

    Position mod 8 decides which value streams a channel adds to: dealt by density, the streams come out equally long.
    """
    heads, channels = counts.shape
    classes = _C.format.CLASSES
    densest_first = counts.argsort(dim=1, descending=True, stable=True).to(torch.uint8)
    rounds = densest_first.view(heads, channels // (2 * classes), 2, classes)
    return torch.stack([rounds[:, :, 0], rounds[:, :, 1].flip(-1)], dim=2).view(heads, channels)


def _balance(kernels: Kernels, selections: list[_Selection], stream: int) -> Tensor:
    """Fills in the selections' longest streams; returns the token order they share, (B, Hkv, tiles, 64) uint8."""
    batch, kv_heads, tokens, head_dim = selections[0].x.shape
    order = torch.empty(
        batch,
        kv_heads,
        _tiles.tiles_per_head(tokens),
        _C.format.TILE_TOKENS,
        dtype=torch.uint8,
        device=selections[0].x.device,
    )
    if order.numel():
        first = selections[0]
        second = selections[1] if len(selections) > 1 else None
        kernels.module.balance(
            first.masks.data_ptr(),
            first.channel_order.data_ptr(),
            second.masks.data_ptr() if second else 0,
            second.channel_order.data_ptr() if second else 0,
            batch,
            kv_heads,
            tokens,
            head_dim,
            order.data_ptr(),
            first.longest.data_ptr(),
            second.longest.data_ptr() if second else 0,
            stream,
        )
    return order


def _block_sizes(selection: _Selection) -> tuple[Tensor, Tensor]:
    """Row offsets (tiles + 1), and (rows in all, rows of the longest tile, nonzeros): int64, still on the device."""
    rows = selection.longest.long() + _C.format.bitmap_rows(selection.channel_order.shape[-1])
    offsets = torch.zeros(rows.numel() + 1, dtype=torch.int64, device=rows.device)
    torch.cumsum(rows, dim=0, out=offsets[1:])
    most = rows.max() if rows.numel() else offsets[0]
    return offsets, torch.stack([offsets[-1], most, selection.nnz])


def _pack(
    kernels: Kernels, selection: _Selection, token_order: Tensor, offsets: Tensor, totals: list[int], stream: int
) -> SparseKV:
    x, role = selection.x, selection.role
    rows, max_tile_rows, nnz = totals
    if rows > MAX_ROWS:
        raise ValueError(
            f"{'k' if role == 'key' else 'v'} of shape {tuple(x.shape)} would take {rows} rows of 128 bytes, at "
            f"most {MAX_ROWS} can be addressed: compress it in parts"
        )
    kv = SparseKV._from_parts(
        blocks=torch.empty(rows, _C.format.LANES, dtype=torch.int32, device=x.device),
        row_offsets=offsets.to(torch.int32),
        token_order=token_order,
        channel_order=selection.channel_order,
        role=role,
        dtype=x.dtype,
        shape=x.shape,
        max_tile_rows=max_tile_rows,
        nnz=nnz,
    )
    if rows:
        kernels.module.pack(x.data_ptr(), x.stride()[:3], selection.masks.data_ptr(), kv._kernel_view(), stream)
    return kv
