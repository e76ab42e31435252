"""Attention over compressed pages in memory that the caller owns: what serving engines call, and `KVCache` inside.

    from cute_kernels import paged

    config = paged.configure(kv_heads=8, head_dim=128, dtype=torch.float16, sparsity=0.7, window=32)
    sizes = config.pool_tensors(pages, sequences, pages_per_sequence)
    pool = paged.make_pool(config, {name: size.empty("cuda") for name, size in sizes.items()})
    sizes = config.window_tensors(sequences)
    windows = paged.make_windows(config, {name: size.empty("cuda") for name, size in sizes.items()})
    lengths = torch.zeros(sequences, dtype=torch.int32, device="cuda")
    pool.initialize()
    windows.initialize()

    paged.choose_orders(pool, k, v)  # once, from the first prompt
    paged.extend(pool, windows, lengths, k, v, sequence=s, compressed=0, window=0)  # a prompt
    paged.append(pool, windows, lengths, k_new, v_new, sequences)  # a step of many sequences
    out = paged.attend(q, pool, windows, lengths, sequences)

A page is `page_tokens` consecutive tokens of one sequence, for all KV heads, keys and values; `page_table[s, i]` is the
page of tokens i * page_tokens and on of sequence s. A full page holds all its tiles, whichever sequence stored them, so
pages of equal tokens behind equal tokens can be shared: who hashes, counts references and evicts is the caller.

The newest tokens of a sequence are dense, in its window. `lengths[s]` tokens, a multiple of 64, are read from pages,
the `windows.lengths[s]` tokens behind them from the window. A sequence that begins with n tokens of shared pages, n a
multiple of 64, starts with lengths[s] = n and windows.lengths[s] = 0, both set by the caller.

S sequences, Hkv KV heads, D head dim. Argument `sequences` everywhere: int32 (n,) on the pool's device, row i of the
other arguments belongs to sequence sequences[i], none twice where something is written; None: row i belongs to sequence
i. Numbers on the device are not checked on the host: out of range, writes are left out and `pool.error` is set; what
`attend` is given must be in range. Nothing waits for the device but backend "reference"; `append` and `attend` can be
captured in CUDA graphs and, as `store` and `export`, compiled whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cute_kernels._attention import packed as packed_queries
from cute_kernels._cache import checks as cache_checks
from cute_kernels._cache import extend as _extend
from cute_kernels._cache import page_checks, page_pool, paged_ops
from cute_kernels._cache.checks import at_least, layer_sizes
from cute_kernels._cache.exclusive import not_recorded
from cute_kernels._cache.extend import Run, Tiles
from cute_kernels._cache.page_config import PageConfig, TensorSize
from cute_kernels._cache.pool import Pool, Windows
from cute_kernels._cache.slot_rows import SlotRows
from cute_kernels._runtime import checks, gradients, ops
from cute_kernels._runtime.backends import check_name
from cute_kernels._runtime.extension import TILE_TOKENS
from cute_kernels._storage.checks import chosen_codec

__all__ = [
    "PageConfig",
    "Pool",
    "TensorSize",
    "Windows",
    "append",
    "attend",
    "choose_orders",
    "configure",
    "export",
    "extend",
    "make_pool",
    "make_windows",
    "store",
]

_ALIGNMENT = 16  # bytes, of what kernels copy in vectors
_MOST_TOKENS = 2**31 - 1  # of a sequence


def configure(
    *,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    sparsity: float | None = None,
    keep: int | None = None,
    key_keep: int | None = None,
    value_keep: int | None = None,
    codec: str | None = None,
    window: int = 32,
    page_tokens: int = 64,
    max_append: int = 64,
) -> PageConfig:
    """The sizes of a layer's pages and windows.

    kv_heads, head_dim: Hkv, and D, a multiple of 8 up to 256. dtype: float16 or bfloat16, of k and v.
    sparsity, keep, key_keep, value_keep: what is kept of every token, as for `compress_kv`; with none of them every
        nonzero is.
    codec: how nonzeros of keys and of values are stored, as for `compress`. What a narrow one cannot store is replaced
        as in `KVCache`.
    window: newest tokens of a sequence that are dense at least. page_tokens: a multiple of 64.
    max_append: from 1 to 64, new tokens a sequence that `append` takes.

    `pool_tensors`, `page_tensors` and `window_tensors` of the result say what to allocate, `page_bytes` and
    `window_bytes` how much that is.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong range.
    """
    sizes = layer_sizes(kv_heads, head_dim, dtype, sparsity, keep, key_keep, value_keep, page_tokens, max_append)
    chosen = chosen_codec(codec, "codec", dtype)
    return PageConfig(
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        dtype=dtype,
        key_keep=sizes.key_keep,
        value_keep=sizes.value_keep,
        tiles_per_page=sizes.page_tokens // TILE_TOKENS,
        slot_rows=SlotRows.holding(sizes.padded_head_dim, sizes.key_keep, sizes.value_keep, chosen, chosen),
        shares_orders=True,
        recent=at_least(window, "window", 0),
        max_append=sizes.max_append,
        stores_full=True,
        key_codec=chosen,
        value_codec=chosen,
    )


def make_pool(config: PageConfig, tensors: Mapping[str, Tensor]) -> Pool:
    """The pool that these tensors are; nothing is copied. `pool.initialize()` makes its slots empty.

    tensors: those that config.pool_tensors(pages, sequences, pages_per_sequence) names, contiguous, on one cpu or cuda
        device, `blocks` and `token_order` aligned to 16 bytes. Sizes are read from `blocks` and `page_table`.

    Raises TypeError for a wrong class or dtype, ValueError for a missing tensor, a wrong shape, device or alignment.
    """
    page_checks.names(tensors, config.pool_tensors(0, 0, 0), "tensors")
    slots, table = tensors["blocks"].shape[0], tensors["page_table"]
    if table.dim() != 2:
        raise ValueError(f"page_table must have shape (sequences, pages of each), got {tuple(table.shape)}")
    in_page = config.kv_heads * config.tiles_per_page
    if slots % in_page:
        raise ValueError(f"blocks must have {in_page} slots for each page, got {slots}")
    page_checks.sizes(tensors, config.pool_tensors(slots // in_page, *table.shape))
    for name in ("blocks", "token_order"):
        if not torch.compiler.is_compiling() and tensors[name].data_ptr() % _ALIGNMENT:
            raise ValueError(f"{name} must be aligned to {_ALIGNMENT} bytes")
    return Pool.of(config, **tensors)


def make_windows(config: PageConfig, tensors: Mapping[str, Tensor]) -> Windows:
    """The windows that these tensors are; nothing is copied. `windows.initialize()` empties them.

    tensors: those that config.window_tensors(sequences) names, contiguous, on one device, keys and values aligned to 16
        bytes. `arrivals` is scratch and must be zero.

    Raises TypeError for a wrong class or dtype, ValueError for a missing tensor, a wrong shape, device or alignment.
    """
    page_checks.names(tensors, config.window_tensors(0), "tensors")
    page_checks.sizes(tensors, config.window_tensors(tensors["lengths"].numel()))
    for name in ("keys", "values"):
        if not torch.compiler.is_compiling() and tensors[name].data_ptr() % _ALIGNMENT:
            raise ValueError(f"{name} must be aligned to {_ALIGNMENT} bytes")
    return Windows.of(config, **tensors)


def choose_orders(pool: Pool, k: Tensor, v: Tensor) -> None:
    """Chooses the layer's channel orders by these tokens' nonzeros, so that tiles of tokens like them are short. Also
    the scales of channels that narrow codecs have, by the first 512 tokens. Until then channels are in the order of
    memory, and their scales are 1: tiles are longer, so that more of them have to be trimmed, and narrow codecs err
    more where channels differ in size.

    k, v: (n, Hkv, T, D) in the pool's dtype, stride 1 in the last dimension: the first prompts, or tokens for
        calibration. Tiles that are stored already cannot be read any more: call it before the first.

    Raises TypeError or ValueError for a wrong class, dtype, shape, stride or device.
    """
    page_checks.pool(pool)
    page_checks.tensors(k=k, v=v)
    if ops.eager(k, v, pool.blocks):
        page_pool.choose_orders(pool, k, v)
    else:
        paged_ops.CHOOSE_ORDERS(paged_ops.pool_tensors(pool), paged_ops.pool_sizes(pool), k, v)


def store(pool: Pool, k: Tensor, v: Tensor, sequences: Tensor, first_tiles: Tensor) -> None:
    """Prunes, compresses and stores whole tiles: row i of k and v becomes the tiles of sequence sequences[i] from
    first_tiles[i] on.

    k, v: (n, Hkv, 64 c, D) in the pool's dtype, stride 1 in the last dimension. first_tiles: int32 (n,).

    Rows of a negative sequence and tiles without a page are left out; for the latter `pool.error` is set. Lengths are
    the caller's to set.

    Raises TypeError or ValueError for a wrong class, dtype, shape, stride or device.
    """
    page_checks.pool(pool)
    page_checks.tensors(k=k, v=v, sequences=sequences, first_tiles=first_tiles)
    if ops.eager(k, v, sequences, first_tiles, pool.blocks):
        page_pool.store(pool, k, v, sequences, first_tiles, False)
    else:
        tensors, sizes = paged_ops.pool_tensors(pool), paged_ops.pool_sizes(pool)
        paged_ops.STORE(tensors, sizes, k, v, sequences, first_tiles)


def append(
    pool: Pool, windows: Windows, lengths: Tensor, k: Tensor, v: Tensor, sequences: Tensor | None = None
) -> None:
    """Puts m new tokens of each row into its sequence's window: max_append of them always fit, up to 64 where there is
    room.

    A tile is stored, pruned and compressed, when its 64th token arrives. Where a window then holds `window` + 64 tokens
    or more, its oldest 64 leave it and `lengths` grows by 64: they are read from their page from then on.

    lengths: int32 (S,), contiguous. k, v: (n, Hkv, m, D) in the pool's dtype, stride 1 in the last dimension.

    Rows of a negative sequence are left out. Where the tile that gets full has no page, or the window no room, nothing
    of that sequence changes and `pool.error` is set. One kernel on a GPU.

    Raises TypeError or ValueError for a wrong class, dtype, shape, stride or device.
    """
    page_checks.pool(pool)
    page_checks.windows(windows, pool)
    page_checks.tensors(k=k, v=v, lengths=lengths)
    if sequences is not None:
        page_checks.tensors(sequences=sequences)
    if ops.eager(k, v, sequences, lengths, pool.blocks):
        page_pool.append(pool, windows, lengths, k, v, sequences)
        return
    paged_ops.APPEND(
        paged_ops.pool_tensors(pool),
        paged_ops.window_tensors(windows),
        lengths,
        paged_ops.pool_sizes(pool),
        paged_ops.window_sizes(windows),
        k,
        v,
        sequences,
    )


def extend(
    pool: Pool,
    windows: Windows,
    lengths: Tensor | None,
    k: Tensor,
    v: Tensor,
    *,
    sequence: int,
    compressed: int,
    window: int,
) -> None:
    """Any number of new tokens of one sequence whose lengths the host knows: a prompt, or a chunk of one. The same
    tiles and lengths as `append`; whole tiles are compressed straight from k and v.

    k, v: (1, Hkv, T, D) in the pool's dtype, stride 1 in the last dimension.
    sequence: its number. compressed, window: what lengths[sequence] and windows.lengths[sequence] are; both are set to
        what they become, unless lengths is None: then the caller sets them.

    Tiles without a page are left out, and `pool.error` is set.

    Raises TypeError or ValueError for a wrong class, dtype, shape, stride, device or range; RuntimeError where calls
    are recorded to run again, as numbers of the host would stay as they are.
    """
    page_checks.pool(pool)
    page_checks.windows(windows, pool)
    if ops.recorded():
        raise not_recorded("extend")
    cache_checks.new_tokens(pool, k, v)
    if k.shape[0] != 1:
        raise ValueError(f"k must have one row, got shape {tuple(k.shape)}")
    if lengths is not None:
        page_checks.lengths(lengths, pool)
    number = checks.integer(sequence, "sequence")
    if not 0 <= number < pool.sequences:
        raise ValueError(f"sequence must be from 0 to {pool.sequences - 1}, got {number}")
    tiled, held = at_least(compressed, "compressed", 0), at_least(window, "window", 0)
    if tiled % TILE_TOKENS:
        raise ValueError(f"compressed must be a multiple of {TILE_TOKENS}, got {tiled}")
    if tiled > pool.tokens_per_sequence:
        raise ValueError(f"compressed must be at most the {pool.tokens_per_sequence} of the page table, got {tiled}")
    if held >= windows.recent + TILE_TOKENS:
        raise ValueError(f"window must be below {windows.recent + TILE_TOKENS}, got {held}")
    if not k.shape[2]:
        return
    k, v = checks.plain(k), checks.plain(v)
    run = Run(0, 1, number, tiled, held, k.shape[2])
    tiles = Tiles.of(run, windows)
    with torch.no_grad():
        numbers = torch.full((1,), number, dtype=torch.int32, device=pool.device)
        _extend.store_run(pool, windows, k, v, run, tiles, numbers)
        _extend.settle_run(windows, lengths, k, v, run, tiles)


def attend(
    q: Tensor,
    pool: Pool,
    windows: Windows | None,
    lengths: Tensor,
    sequences: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    return_lse: bool = False,
    expected: tuple[int, int] | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q K^T) V over tiles and windows of sequences, query head h meeting KV head h // (Hq / Hkv).

    q: (n, Hq, Sq, D) of the pool's dtype, stride 1 in the last dimension. windows: None: tiles alone.
    lengths: int32 (S,), contiguous. sequences: may name one twice.
    scale: finite; None: 1 / sqrt(D).
    causal: the Sq queries are those of the newest tokens, in order; False: every query sees every token.
    return_lse: return (out, lse) with lse (n, Hq, Sq) float32, natural logarithm; see `merge_states`.
    expected: tokens in tiles of the longest of the sequences, and of all of them together, where the host knows them:
        it decides how work is divided, so no more than the last bits of results.
    cu_seqlens_q, max_seqlen_q: as for `KVCache.attend`: q is (1, Hq, total, D), and row i of the batch, which belongs
        to sequences[i], has its queries from cu_seqlens_q[i] to cu_seqlens_q[i + 1].
    out: where to put the result, contiguous and apart from q and the pool; default: a new tensor.
    backend: as for `sparse_attention`; "reference" reads lengths on the host.

    Returns (n, Hq, Sq, D) of q's dtype. A query that sees no token gives zeros and an lse of -inf. Results have no
    gradient: a backward pass through them raises RuntimeError.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError if
    the backend cannot serve the call; all before anything is launched.
    """
    if gradients.wanted(q):
        keywords: dict[str, Any] = {
            "scale": scale,
            "causal": causal,
            "return_lse": return_lse,
            "expected": expected,
            "cu_seqlens_q": cu_seqlens_q,
            "max_seqlen_q": max_seqlen_q,
            "backend": backend,
        }

        def call(q: Tensor) -> Any:
            return attend(q, pool, windows, lengths, sequences, **keywords)

        return gradients.without_gradient("attend", call, q, out=out)
    page_checks.pool(pool)
    if windows is not None:
        page_checks.windows(windows, pool)
    cache_checks.queries(pool, q)
    page_checks.lengths(lengths, pool)
    packed = packed_queries.check(cu_seqlens_q, max_seqlen_q, q)
    rows, of_rows = (q.shape[0], "q") if packed is None else (packed.rows, "cu_seqlens_q")
    if sequences is not None:
        page_pool.check_index(sequences, "sequences", rows, pool.device)
    elif rows > pool.sequences:
        raise ValueError(f"{of_rows} must have at most a row for each of {pool.sequences} sequences, got {rows}")
    factor = 1 / math.sqrt(pool.head_dim) if scale is None else checks.scale(scale)
    checks.flag(causal, "causal")
    checks.flag(return_lse, "return_lse")
    hint = (0, 0) if expected is None else checks.pair(expected, "expected")
    longest, total = (at_least(number, "every number of expected", 0) for number in hint)
    if longest > _MOST_TOKENS:
        raise ValueError(f"expected[0] must be at most {_MOST_TOKENS}, got {longest}")
    check_name(backend)
    if out is None:
        out = q.new_empty(q.shape)
    else:
        checks.output(out, q.shape, q.dtype, pool.device)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    if ops.eager(q, lengths, sequences, cu_seqlens_q, out, pool.blocks):
        options = factor, causal, (longest, total), backend
        paged_ops.attend(q, pool, windows, lengths, sequences, packed, *options, out, lse)
    else:
        starts, most = (None, None) if packed is None else (packed.starts, packed.most)
        tensors = paged_ops.pool_tensors(pool), paged_ops.window_tensors(windows), lengths, sequences, starts, most
        sizes = paged_ops.pool_sizes(pool), paged_ops.window_sizes(windows)
        paged_ops.ATTEND(q, *tensors, *sizes, factor, causal, [longest, total], backend, out, lse)
    return out if lse is None else (out, lse)


def export(pool: Pool, sequence: int, first_tile: int, tiles: int) -> tuple[Tensor, Tensor]:
    """Tiles of one sequence, decompressed: (k, v), each (Hkv, 64 * tiles, D): what was kept, bit for bit
    with a 16-bit codec, rounded with a narrow one.

    Zeros for tiles without a page, and `pool.error` is set. Raises TypeError for a wrong class, ValueError for tiles
    that the page table does not have.
    """
    page_checks.pool(pool)
    if ops.eager(pool.blocks):
        named = {"sequence": sequence, "first_tile": first_tile, "tiles": tiles}
        return page_pool.load(pool, *(checks.integer(number, name) for name, number in named.items()))
    numbers = pool.dtype, sequence, first_tile, tiles
    k, v = paged_ops.EXPORT(paged_ops.pool_tensors(pool), paged_ops.pool_sizes(pool), *numbers)
    return k, v
