"""A pool of pages whose keys and values are in the tile format of exactly two of four.

Tiles are written as for a contiguous storage, then copied to their slots. Channel orders and scales of channels are
chosen with a sequence's first tiles and stay. Slots have one size, so nothing is trimmed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._cache.pool import Pool
from cute_kernels._cache.pool_parts import decompressed, lost_by, parts_of, slots_of
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C, TILE_TOKENS
from cute_kernels._runtime.launching import compression_kernels
from cute_kernels._storage import two_of_four
from cute_kernels._storage.compressor import Cache
from cute_kernels._storage.storage import TWO_OF_FOUR, Storage
from cute_kernels.rules.two_of_four import TwoOfFour


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
    index, slots = sequences.long(), slots_of(pool, sequences, first_tiles, k.shape[2] // TILE_TOKENS).flatten()
    for i, (part, x) in enumerate(zip(parts_of(pool), (k, v))):
        cache = Cache(checks.plain(x), part.role, 0, part.codec, None, TWO_OF_FOUR)
        totals = torch.zeros(2, dtype=torch.int64, device=pool.device)
        with kernels.launch() as stream:
            if new_order:
                part.choose(kernels, cache, index, stream)
            channels = part.of(index)
            storage = two_of_four.write(kernels, cache, channels, False, totals, stream)
        blocks = pool.blocks[:, part.first_row : part.first_row + part.rows]
        blocks.index_copy_(0, slots, storage.blocks.view(-1, part.rows, _C.format.LANES))
        pool.refused[i] += totals[0]
        if constrained is not None:
            constrained[i] += lost_by(TwoOfFour(), cache, channels)


def load(pool: Pool, sequence: int, first_tile: int, tiles: int) -> tuple[Tensor, Tensor]:
    """As `page_pool.load`, of tiles that have pages."""
    of_sequence = torch.tensor([sequence], dtype=torch.int32, device=pool.device)
    slots = slots_of(pool, of_sequence, torch.full_like(of_sequence, first_tile), tiles).flatten()
    results = []
    for part in parts_of(pool):
        channels = part.of(of_sequence.long())
        storage = Storage(
            blocks=pool.blocks[slots, part.first_row : part.first_row + part.rows].flatten(0, 1),
            row_offsets=torch.arange(len(slots) + 1, device=pool.device).mul_(part.rows).to(torch.int32),
            token_order=pool.token_order[slots].view(1, pool.kv_heads, tiles, TILE_TOKENS),
            channel_order=channels.order,
            channel_scale=channels.scale,
            role=part.role,
            dtype=pool.dtype,
            codec=part.codec,
            tile_format=TWO_OF_FOUR,
            shape=torch.Size((1, pool.kv_heads, tiles * TILE_TOKENS, pool.head_dim)),
            max_tile_rows=part.rows,
        )
        results.append(decompressed(pool, storage))
    keys, values = results
    return keys, values
