"""Pools of pages for tests, what must be stored in them by the rule of the slots, and the history of their windows."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import torch

from cute_kernels._cache import page_pool
from cute_kernels._runtime.extension import _C
from tests.support import oracle

TILE = page_pool.TILE_TOKENS
CPU = torch.device("cpu")


def make_pool(device=CPU, *, sequences=3, pages_per_sequence=4, spare=3, seed=0, **options) -> page_pool.Pool:
    """Every sequence has all its pages, scattered over the pool."""
    options = {"kv_heads": 2, "head_dim": 128, "dtype": torch.float16, "tiles_per_page": 1, **options}
    pages = sequences * pages_per_sequence
    pool = page_pool.Pool.allocate(
        pages=pages + spare, sequences=sequences, pages_per_sequence=pages_per_sequence, device=device, **options
    )
    order = torch.randperm(pages + spare, generator=torch.Generator().manual_seed(seed))[:pages]
    pool.page_table.copy_(order.view(sequences, pages_per_sequence))
    return pool


def index(*values: int, device=CPU) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@cache
def stream_positions(role: str, padded: int) -> np.ndarray:
    """(32 lanes, 2 streams, elements of a stream): token position * padded + channel position, in stream order."""
    positions = np.array(
        [[oracle.element_position(role, padded, lane, e) for e in range(TILE * padded // 32)] for lane in range(32)]
    )
    flat = positions[..., 0] * padded + positions[..., 1]
    return flat.reshape(32, -1, 2).transpose(0, 2, 1)


def trimmed(tile: torch.Tensor, role: str, token_order, channel_order, most: int) -> tuple[torch.Tensor, int]:
    """A pruned tile (64, D) after the rule of the slots, and how many nonzeros that dropped."""
    padded = len(channel_order)
    dense = np.zeros((TILE, padded), dtype=np.int16)
    dense[:, : tile.shape[1]] = oracle.bits(tile).numpy()
    positions = stream_positions(role, padded)
    tokens, channels = token_order[positions // padded], channel_order[positions % padded]
    streams = dense[tokens, channels]
    dropped = 0
    keys = np.minimum(streams.astype(np.int32) & 0x7FFF, oracle.INFINITY_BITS[tile.dtype] + 1)
    for lane, stream in zip(*np.nonzero((streams != 0).sum(-1) > most)):
        values = keys[lane, stream]
        present = [e for e in range(len(values)) if streams[lane, stream, e]]
        present.sort(key=lambda e: (values[e], -e))  # least magnitude first, of equal ones the later
        for e in present[: len(present) - most]:
            dense[tokens[lane, stream, e], channels[lane, stream, e]] = 0
            dropped += 1
    return torch.from_numpy(dense[:, : tile.shape[1]].copy()).view(tile.dtype), dropped


def check_tiles(
    pool: page_pool.Pool, sequence: int, first_tile: int, k: torch.Tensor, v: torch.Tensor
) -> list[list[int]]:
    """Holds stored tiles against k, v (Hkv, 64 c, D) before pruning; the expected growth of `pool.dropped`."""
    tiles = k.shape[1] // TILE
    counts = [[0, 0], [0, 0]]
    loaded = page_pool.load(pool, sequence, first_tile, tiles)
    slots = pool.page_table.cpu().long()
    for i, (x, role, keep, actual) in enumerate(
        ((k, "key", pool.key_keep, loaded[0]), (v, "value", pool.value_keep, loaded[1]))
    ):
        channels = pool.key_channels if i == 0 else pool.value_channels
        bitmap_rows = _C.format.bitmap_rows(channels.shape[-1])
        pruned = oracle.prune(x.cpu(), keep or None)
        for head in range(pool.kv_heads):
            channel_order = channels.expand(pool.sequences, -1, -1)[sequence, head].cpu().numpy()
            assert sorted(channel_order) == list(range(len(channel_order)))
            for tile in range(tiles):
                page, in_page = divmod(first_tile + tile, pool.tiles_per_page)
                slot = (int(slots[sequence, page]) * pool.kv_heads + head) * pool.tiles_per_page + in_page
                token_order = pool.token_order[slot].cpu().numpy()
                assert sorted(token_order) == list(range(TILE))
                part = slice(tile * TILE, (tile + 1) * TILE)
                first = 0 if i == 0 else int(pool.key_rows[slot])  # values follow the keys
                most = pool.slot_rows.keys if i == 0 else min(pool.slot_rows.values, pool.slot_rows.both - first)
                expected, lost = trimmed(pruned[head, part], role, token_order, channel_order, most - bitmap_rows)
                assert oracle.same_bits(actual[head, part].contiguous(), expected), (role, head, tile)
                rows = int((pool.key_rows if i == 0 else pool.value_rows)[slot])
                assert bitmap_rows <= rows <= most and (not lost or rows == most)
                bitmap = pool.blocks[slot, first : first + bitmap_rows].cpu().numpy().view(np.uint8)
                assert np.unpackbits(bitmap).sum() == int((expected != 0).sum())
                counts[i][0] += lost > 0
                counts[i][1] += lost
    return counts


def state(pool: page_pool.Pool, windows: page_pool.Windows | None = None) -> dict[str, torch.Tensor]:
    return {
        field.name + type(part).__name__: getattr(part, field.name).cpu().clone()
        for part in (pool, windows)
        if part is not None
        for field in dataclasses.fields(part)
        if isinstance(getattr(part, field.name), torch.Tensor)
    }


def same_state(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name, tensor in a.items():
        view = tensor.view(torch.int16) if tensor.is_floating_point() else tensor
        other = b[name].view(torch.int16) if tensor.is_floating_point() else b[name]
        assert torch.equal(view, other), name


@dataclasses.dataclass
class History:
    """What has been appended to the sequences of a pool."""

    pool: page_pool.Pool
    windows: page_pool.Windows
    lengths: torch.Tensor
    tokens: list[torch.Tensor]  # of each sequence (2, Hkv, tokens, D): keys and values

    @classmethod
    def start(cls, pool: page_pool.Pool, recent: int, **options) -> History:
        nothing = torch.zeros(2, pool.kv_heads, 0, pool.head_dim, dtype=pool.dtype)
        lengths = torch.zeros(pool.sequences, dtype=torch.int32, device=pool.device)
        return cls(pool, page_pool.Windows.allocate(pool, recent, **options), lengths, [nothing] * pool.sequences)

    def append(self, new: torch.Tensor, sequences: list[int] | None) -> None:
        """new: (2, n, Hkv, m, D), on the CPU."""
        k, v = new.to(self.pool.device)
        where = None if sequences is None else index(*sequences, device=self.pool.device)
        page_pool.append(self.pool, self.windows, self.lengths, k, v, where)
        for row, sequence in enumerate(range(new.shape[1]) if sequences is None else sequences):
            if sequence >= 0:
                self.tokens[sequence] = torch.cat([self.tokens[sequence], new[:, row]], dim=2)

    def check(self) -> None:
        assert int(self.pool.error) == 0 and not self.windows.arrivals.any()
        counts = np.zeros((2, 2), dtype=int)
        for sequence, (k, v) in enumerate(self.tokens):
            held, compressed = int(self.windows.lengths[sequence]), int(self.lengths[sequence])
            assert held + compressed == k.shape[1] and compressed % TILE == 0
            assert held < self.windows.recent + TILE and (not compressed or held >= self.windows.recent)
            for window, x in ((self.windows.keys, k), (self.windows.values, v)):
                assert oracle.same_bits(window[sequence, :, :held].contiguous(), x[:, compressed:].contiguous())
            stored = k.shape[1] // TILE * TILE if self.windows.stores_full else compressed
            if stored:
                counts += check_tiles(self.pool, sequence, 0, k[:, :stored], v[:, :stored])
        assert self.pool.dropped.tolist() == counts.tolist()


def tokens_of(pool: page_pool.Pool, rows: int, tokens: int) -> torch.Tensor:
    return oracle.gaussian(2, rows, pool.kv_heads, tokens, pool.head_dim, dtype=pool.dtype)
