"""A pool of pages whose keys and values are in the tile format of at most two of four.

Channel orders and scales of channels are chosen with a sequence's first tiles and stay, so that which channels are
neighbours does not change. Tiles are written to their slots, keys and right behind them values, and trimmed to these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._cache.pool import Pool
from cute_kernels._cache.pool_parts import Part, decompressed, lost_by, parts_of, slots_of
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C, CODEC_IDS, TILE_TOKENS
from cute_kernels._runtime.launching import compression_kernels
from cute_kernels._storage import two_of_four_bitmap
from cute_kernels._storage.compressor import Cache
from cute_kernels._storage.steps import rows_before_values
from cute_kernels._storage.storage import TWO_OF_FOUR_BITMAP, Storage
from cute_kernels._storage.two_of_four import Channels
from cute_kernels.rules.two_of_four import MagnitudeTwoOfFour


def store(
    pool: Pool,
    k: Tensor,
    v: Tensor,
    sequences: Tensor,
    first_tiles: Tensor,
    new_order: bool,
    constrained: Tensor | None,
) -> None:
    """As `page_pool.store`, of sequences that all have pages for their tiles.

    constrained: int64 (2,), of keys and values: what `Rule.constrained` says is added.
    """
    kernels = compression_kernels(pool.device)
    tiles = k.shape[2] // TILE_TOKENS
    index, slots = sequences.long(), slots_of(pool, sequences, first_tiles, tiles).flatten()
    parts = list(parts_of(pool))
    caches = [
        Cache(checks.plain(x), part.role, keep, part.codec, None, TWO_OF_FOUR_BITMAP)
        for x, part, keep in zip((k, v), parts, (pool.key_keep, pool.value_keep))
    ]
    token_order = torch.empty(k.shape[0], pool.kv_heads, tiles, TILE_TOKENS, dtype=torch.uint8, device=pool.device)
    totals = torch.zeros(2, two_of_four_bitmap.TOTALS, dtype=torch.int64, device=pool.device)
    with kernels.launch() as stream:
        if new_order:
            for part, cache in zip(parts, caches):
                part.choose(kernels, cache, index, stream)
        on_gpu = constrained if kernels.device.type == "cuda" else None
        selections = [
            two_of_four_bitmap.select(
                kernels, cache, part.of(index), totals[i], stream, None if on_gpu is None else on_gpu[i]
            )
            for i, (part, cache) in enumerate(zip(parts, caches))
        ]
        two_of_four_bitmap.choose_orders(kernels, caches, selections, token_order, totals, stream)
        first, left = slots * pool.slot_rows.both, torch.full_like(slots, pool.slot_rows.both)
        for i, (part, cache, selection) in enumerate(zip(parts, caches, selections)):
            rows = torch.minimum(_rows(selection.longest, part.codec, cache.padded), left.clamp(max=part.rows))
            storage = _view_of(pool, part, selection.channels, first, token_order, cache.x.shape)
            of_tiles = rows.to(torch.int32)
            two_of_four_bitmap.pack_anywhere(kernels, cache, selection, storage, of_tiles, pool.dropped[i], stream)
            (pool.key_rows if i == 0 else pool.value_rows)[slots] = of_tiles
            first, left = first + rows, left - rows
    pool.token_order[slots] = token_order.view(-1, TILE_TOKENS)
    pool.refused.add_(totals[:, -2])
    if constrained is not None and on_gpu is None:
        for i, (cache, selection) in enumerate(zip(caches, selections)):
            constrained[i] += lost_by(MagnitudeTwoOfFour(), cache, selection.channels)


def _rows(longest: Tensor, codec: str, padded: int) -> Tensor:
    """Rows that tiles take whose longest streams have so many values, int64."""
    word_values = 32 // _C.format.value_bits(CODEC_IDS[codec])  # of one stream a lane
    values = -(-longest.long() // word_values)
    return values + rows_before_values(padded, codec, TWO_OF_FOUR_BITMAP)


def _view_of(
    pool: Pool, part: Part, channels: Channels, first_rows: Tensor, token_order: Tensor, shape: torch.Size
) -> Storage:
    """Tiles that begin in these rows of the pool, as one cache."""
    return Storage(
        blocks=pool.blocks.view(-1, _C.format.LANES),
        row_offsets=torch.cat([first_rows, first_rows[-1:]]).to(torch.int32),
        token_order=token_order,
        channel_order=channels.order,
        channel_scale=channels.scale,
        role=part.role,
        dtype=pool.dtype,
        codec=part.codec,
        tile_format=TWO_OF_FOUR_BITMAP,
        shape=shape,
        max_tile_rows=part.rows,
    )


def load(pool: Pool, sequence: int, first_tile: int, tiles: int) -> tuple[Tensor, Tensor]:
    """As `page_pool.load`, of tiles that have pages."""
    of_sequence = torch.tensor([sequence], dtype=torch.int32, device=pool.device)
    slots = slots_of(pool, of_sequence, torch.full_like(of_sequence, first_tile), tiles).flatten()
    token_order = pool.token_order[slots].view(1, pool.kv_heads, tiles, TILE_TOKENS)
    shape = torch.Size((1, pool.kv_heads, tiles * TILE_TOKENS, pool.head_dim))
    first = slots * pool.slot_rows.both
    results = []
    for part in parts_of(pool):
        storage = _view_of(pool, part, part.of(of_sequence.long()), first, token_order, shape)
        results.append(decompressed(pool, storage))
        first = first + pool.key_rows[slots]
    keys, values = results
    return keys, values
