"""What is done with a pool of pages: sequences' compressed tiles, and the dense windows of their newest tokens.

A page holds `tiles_per_page` tiles of 64 consecutive tokens of one sequence, for all KV heads, keys and values. A tile
lies in a slot: slot = (page * Hkv + head) * tiles_per_page + tile in page, its keys' block first and its values' right
behind. `SlotRows` limits the rows of each and of both. A tile that exceeds them is trimmed: every stream that is too
long loses its values of least magnitude, of equal ones the later; `Pool.dropped` counts them. CPU and GPU write the
same bits.

Channel orders stay, so that tiles can be packed one by one, and so do the scales of channels that narrow codecs have. A
sequence has its own, chosen when its first tile is stored, scales by that tile alone; or all sequences share them, so
that a page serves any of them, and `choose_orders` chooses them once.

S sequences, Hkv KV heads, D head dim, Dp that of tiles (64, 128 or 256). Nothing here waits for a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels._cache import pair_pool, slot_pool
from cute_kernels._cache.page_config import MAX_APPEND
from cute_kernels._cache.pool import Pool, Share, Windows
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C, TILE_TOKENS
from cute_kernels._runtime.launching import address, compression_kernels, launch
from cute_kernels._storage import steps
from cute_kernels._storage.storage import BITMAP, TWO_OF_FOUR, TWO_OF_FOUR_BITMAP

_OF_FORMAT = {TWO_OF_FOUR: pair_pool, TWO_OF_FOUR_BITMAP: slot_pool}  # that are stored and loaded elsewhere
_NEW_ORDER = {False: 0, True: 1, None: 2}
_SCRATCH_FRACTION = 0.05  # scratch of `store`, of the bytes of k, v and their tiles; at least one tile's


def store(
    pool: Pool,
    k: Tensor,
    v: Tensor,
    sequences: Tensor,
    first_tiles: Tensor,
    new_order: bool | None = None,
    *,
    constrained: Tensor | None = None,
) -> None:
    """Prunes, compresses and stores whole tiles of k and v: row i becomes the tiles of sequence sequences[i] from
    first_tiles[i] on.

    k, v: (n, Hkv, 64 c, D) in the pool's dtype, stride 1 in the last dimension.
    sequences, first_tiles: int32 (n,), no sequence twice; a row of a negative sequence is left out.
    new_order: whether the sequences' channel orders are chosen anew from these tokens, and scales of channels from the
        first 64; None: of those rows whose first tile is 0. Shared ones stay.

    constrained: int64 (2,), of keys and values, to which a pool of two of four adds what the pattern loses.

    Tiles without a page are left out, and `pool.error` is set; in a pool of two of four all tiles must have one.
    Callers set the sequences' lengths.

    Raises TypeError or ValueError for a wrong class, dtype, shape, stride or device.
    """
    rows = _check_rows(pool, k, v, sequences)
    if pool.shares_orders:
        if new_order:
            raise ValueError("new_order must be None or False where sequences share their channel orders")
        new_order = False
    check_index(first_tiles, "first_tiles", rows, pool.device)
    tokens = k.shape[2]
    if tokens % TILE_TOKENS:
        raise ValueError(f"k and v must have whole tiles of {TILE_TOKENS} tokens, got shape {tuple(k.shape)}")
    if not k.numel():
        return
    if pool.tile_format != BITMAP:
        if new_order is None:
            raise ValueError("new_order must be True or False for a pool of two of four")
        _OF_FORMAT[pool.tile_format].store(pool, k, v, sequences, first_tiles, new_order, constrained)
        return
    kernels = compression_kernels(pool.device)
    k, v = checks.plain(k), checks.plain(v)
    arguments = (
        *(pool.kernel_pool, address(k), k.stride()[:3], address(v), v.stride()[:3], rows, tokens),
        *(address(sequences), address(first_tiles), _NEW_ORDER[new_order]),
    )
    with kernels.launch() as stream:
        if pool.device.type == "cpu":
            kernels.module.store(*arguments, stream)
            return
        part = _tiles_at_a_time(pool, k)
        size = kernels.module.store_scratch_bytes(pool.kernel_pool, rows, part)
        scratch = torch.empty(size, dtype=torch.uint8, device=pool.device)
        kernels.module.store(*arguments, part, address(scratch), stream)


def choose_orders(pool: Pool, k: Tensor, v: Tensor) -> None:
    """Chooses the shared channel orders by these tokens' nonzeros, so that tiles of tokens like them are short, and the
    shared scales of channels by the first 512 of them.

    k, v: (n, Hkv, tokens, D) in the pool's dtype, stride 1 in the last dimension: the first prompts, or tokens
        for calibration. Tiles that are stored already cannot be read any more.

    Raises TypeError or ValueError for a wrong class, dtype, shape, stride or device, ValueError for a pool whose
    sequences have orders of their own.
    """
    _check_rows(pool, k, v, None, any_rows=True)
    if not pool.shares_orders:
        raise ValueError("pool must have channel orders that all sequences share")
    if not k.numel():
        return
    kernels = compression_kernels(pool.device)
    with kernels.launch() as stream:
        for x, keep, order, scales in (
            (checks.plain(k), pool.key_keep, pool.key_channels, pool.key_scales),
            (checks.plain(v), pool.value_keep, pool.value_channels, pool.value_scales),
        ):
            _, counts, _ = steps.select(kernels, x, keep, stream)
            counts = counts.view(x.shape[0], *order.shape).sum(0, dtype=torch.int32)
            steps.deal(kernels, counts, pool.head_dim, order, stream)
            if scales is not None:
                tokens = x.transpose(0, 1).flatten(1, 2)[None]
                by_channel = steps.channel_scales(kernels, tokens, stream)
                scales.copy_(by_channel.gather(1, order.long()))


def append(
    pool: Pool, windows: Windows, lengths: Tensor, k: Tensor, v: Tensor, sequences: Tensor | None = None
) -> None:
    """Puts m <= 64 new tokens of each row into its sequence's window.

    Where the window then holds `recent` + 64 tokens or more, its oldest 64 leave it, which are tile lengths[s] / 64:
    the rest moves down. The tile is pruned, compressed and stored then or, where `stores_full`, when its 64th token
    arrives.

    lengths: int32 (S,), tokens before the window of every sequence, multiples of 64; grows with every tile that leaves
        the window.
    k, v: (n, Hkv, m, D) in the pool's dtype, stride 1 in the last dimension.
    sequences: int32 (n,), row i belongs to sequence sequences[i], none twice; a row of a negative one is left out.
        None: row i belongs to sequence i.

    Where the window is full, the tile has no page or a length is negative, nothing of that sequence changes and
    `pool.error` is set; the same for a sequence that the pool does not have. One kernel on a GPU, which a CUDA graph
    can capture.

    Raises TypeError or ValueError for a wrong class, dtype, shape, stride or device.
    """
    _check_rows(pool, k, v, sequences)
    if k.shape[2] > MAX_APPEND:
        raise ValueError(f"k and v must have at most {MAX_APPEND} tokens a call, got shape {tuple(k.shape)}")
    check_index(lengths, "lengths", pool.sequences, pool.device)
    append_unchecked(pool, windows, lengths, checks.plain(k), checks.plain(v), sequences)


def append_unchecked(
    pool: Pool,
    windows: Windows,
    lengths: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Tensor | None = None,
    share: Share | None = None,
) -> None:
    """`append` without its checks, for k and v without pending negations. share: whose lengths grow, too."""
    rows, _, tokens, _ = k.shape
    if not rows or not tokens:
        return
    if pool.device.type == "cpu":
        append_on_cpu(pool, windows, lengths, k, v, sequences)
        if share is not None:
            share.count(lengths)
        return
    launch(
        compression_kernels(pool.device).module.append,
        pool.device,
        pool.kernel_pool,
        windows.kernel_windows,
        lengths.data_ptr(),
        k.data_ptr(),
        k.stride()[:3],
        v.data_ptr(),
        v.stride()[:3],
        rows,
        tokens,
        0 if sequences is None else sequences.data_ptr(),
        *((0, 0, 1) if share is None else (share.lengths.data_ptr(), share.rank, share.ranks)),
    )


def load(pool: Pool, sequence: int, first_tile: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Tiles of one sequence, decompressed: (k, v), each (Hkv, 64 * tiles, D).

    Zeros for tiles without a page, and `pool.error` is set. Raises ValueError outside of the page table.
    """
    last = pool.tokens_per_sequence // TILE_TOKENS
    if not 0 <= sequence < pool.sequences:
        raise ValueError(f"sequence must be from 0 to {pool.sequences - 1}, got {sequence}")
    if first_tile < 0 or tiles < 0 or first_tile + tiles > last:
        raise ValueError(f"tiles must be within the {last} of a sequence, got {tiles} from {first_tile} on")
    if pool.tile_format != BITMAP and tiles:
        return _OF_FORMAT[pool.tile_format].load(pool, sequence, first_tile, tiles)
    shape = (pool.kv_heads, tiles * TILE_TOKENS, pool.head_dim)
    k, v = (torch.empty(shape, dtype=pool.dtype, device=pool.device) for _ in range(2))
    if k.numel():
        kernels = compression_kernels(pool.device)
        with kernels.launch() as stream:
            kernels.module.load(pool.kernel_pool, sequence, first_tile, tiles, address(k), address(v), stream)
    return k, v


@torch.no_grad()
def append_on_cpu(
    pool: Pool, windows: Windows, lengths: Tensor, k: Tensor, v: Tensor, sequences: Tensor | None
) -> None:
    indices = range(k.shape[0]) if sequences is None else sequences.tolist()
    for row, sequence in enumerate(indices):
        if sequence >= pool.sequences:
            pool.error.fill_(1)
        elif sequence >= 0:
            _append_to_one(pool, windows, lengths, k[row], v[row], sequence)


def _append_to_one(pool: Pool, windows: Windows, lengths: Tensor, k: Tensor, v: Tensor, sequence: int) -> None:
    """One sequence on the CPU; k, v (Hkv, m, D)."""
    held, compressed = int(windows.lengths[sequence]), int(lengths[sequence])
    total = held + k.shape[1]
    moves = total >= windows.recent + TILE_TOKENS
    begin = (total // TILE_TOKENS - 1) * TILE_TOKENS if windows.stores_full else 0  # of the tile in the window
    stores = total // TILE_TOKENS > held // TILE_TOKENS if windows.stores_full else moves
    tile = (compressed + begin) // TILE_TOKENS
    if held < 0 or compressed < 0 or total > windows.capacity or (stores and not _has_page(pool, sequence, tile)):
        pool.error.fill_(1)
        return
    for window, new in ((windows.keys[sequence], k), (windows.values[sequence], v)):
        window[:, held:total] = new
    windows.lengths[sequence] = total
    if stores:
        due = slice(sequence, sequence + 1), slice(None), slice(begin, begin + TILE_TOKENS)
        indices = torch.tensor([[sequence], [tile]], dtype=torch.int32, device="cpu")
        store(pool, windows.keys[due], windows.values[due], indices[0], indices[1])
    if not moves:
        return
    for window in (windows.keys[sequence], windows.values[sequence]):
        window[:, : total - TILE_TOKENS] = window[:, TILE_TOKENS:total].clone()
    windows.lengths[sequence] = total - TILE_TOKENS
    lengths[sequence] += TILE_TOKENS


def _has_page(pool: Pool, sequence: int, tile: int) -> bool:
    page = tile // pool.tiles_per_page
    return page < pool.page_table.shape[1] and 0 <= int(pool.page_table[sequence, page]) < pool.pages


def _tiles_at_a_time(pool: Pool, k: Tensor) -> int:
    """Tiles of every head that `store` works on together: as many as its scratch holds."""
    tiles = k.shape[2] // TILE_TOKENS
    dense = 2 * TILE_TOKENS * pool.head_dim * k.element_size()  # bytes of a head's tile of k and v
    stored = pool.slot_rows.both * _C.format.ROW_BYTES
    padded = pool.key_channels.shape[-1]
    counts, masks = 2 * padded * 4, 2 * TILE_TOKENS * padded // 8 + 2 * 4  # of a head; of its tile
    if pool.key_scales is not None or pool.value_scales is not None:
        counts, masks = counts + 2 * padded * 2, masks + 2 * TILE_TOKENS * 2
    most = int((_SCRATCH_FRACTION * tiles * (dense + stored) - counts) / masks)
    return min(tiles, max(1, most))


def _check_rows(pool: Pool, k: Any, v: Any, sequences: Any, any_rows: bool = False) -> int:
    """The number of rows of k and v."""
    for x, name in ((k, "k"), (v, "v")):
        checks.tensor(x, name)
        checks.dtype(x, name, (pool.dtype,), " like the pool")
        checks.device(x.device, name, pool.device, "the pool")
        checks.unit_stride(x, name)
    shape = k.shape
    if len(shape) != 4 or shape[1] != pool.kv_heads or shape[3] != pool.head_dim:
        raise ValueError(f"k must have shape (n, {pool.kv_heads}, tokens, {pool.head_dim}), got {tuple(shape)}")
    if v.shape != shape:
        raise ValueError(f"v must have the shape of k, {tuple(shape)}, got {tuple(v.shape)}")
    rows: int = k.shape[0]
    if sequences is not None:
        check_index(sequences, "sequences", rows, pool.device)
    elif rows > pool.sequences and not any_rows:
        raise ValueError(f"k must have at most a row for each of {pool.sequences} sequences, got {rows}")
    return rows


def check_index(value: Any, name: str, size: int, device: torch.device) -> None:
    checks.tensor(value, name)
    checks.dtype(value, name, (torch.int32,))
    checks.device(value.device, name, device, "the pool")
    if value.shape != (size,) or not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, of shape ({size},), got {tuple(value.shape)}")
