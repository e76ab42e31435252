"""The pool of pages on one GPU: how often tiles are trimmed, and what store and append take.

python -m profiling.pages trim [--tiles N]   # share of tiles that slots of the default size and nearby trim
python -m profiling.pages time               # B 8, Hkv 8, D 128, 38 kept
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from cute_kernels._cache import page_pool
from cute_kernels._cache.slot_rows import SlotRows
from cute_kernels._runtime.extension import _C
from profiling.command_line import positive_integer
from profiling.progress import Progress

DEVICE = torch.device("cuda")
KINDS = ("gaussian", "lognormal", "lognormal 1.5", "outliers", "outliers in both", "tokens")
HEADS, TILES = 8, 2048  # of one call


def caches(kind: str, head_dim: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """k, v (1, HEADS, 64 TILES, D). Outliers: channels that are always kept, one to eight of a head, of keys unless of
    both."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=rng)

    k, v = (normal(1, HEADS, TILES * page_pool.TILE_TOKENS, head_dim) for _ in range(2))
    if kind.startswith("outliers"):
        for x in (k,) if kind == "outliers" else (k, v):
            for head in range(HEADS):
                x[0, head, :, torch.randperm(head_dim, device=DEVICE, generator=rng)[: head + 1]] *= 35
    elif kind != "gaussian":
        sigma = 1.5 if kind == "lognormal 1.5" else 1.0
        for x in (k, v):
            x *= (sigma * normal(1, HEADS, 1, head_dim)).exp()
            if kind == "tokens":
                x *= normal(1, HEADS, x.shape[2], 1).exp()
    return k.half().clamp(-6e4, 6e4), v.half().clamp(-6e4, 6e4)


def make_pool(
    sequences: int, pages: int, kv_heads: int, head_dim: int, keep: int, slot_rows: SlotRows | None = None
) -> page_pool.Pool:
    """A pool of so many pages a sequence, a tile each; its page table is to be filled."""
    return page_pool.Pool.allocate(
        pages=sequences * pages,
        sequences=sequences,
        pages_per_sequence=pages,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=torch.float16,
        device=DEVICE,
        key_keep=keep,
        value_keep=keep,
        slot_rows=slot_rows,
    )


def trimmed(kind: str, head_dim: int, keep: int, more_rows: int, tiles: int) -> dict[str, object]:
    padded = _C.format.padded_head_dim(head_dim)
    rows = SlotRows.holding(padded, keep, keep)
    rows = dataclasses.replace(rows, both=min(rows.both + more_rows, rows.keys + rows.values))
    pool = make_pool(1, TILES, HEADS, head_dim, keep, rows)
    pool.page_table.copy_(torch.arange(TILES)[None])
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    rng = torch.Generator(DEVICE).manual_seed(1)
    calls = -(-tiles // (HEADS * TILES))
    longest = [0, 0]
    for _ in range(calls):
        page_pool.store(pool, *caches(kind, head_dim, rng), zero, zero, True)
        longest = [max(a, int(b.max())) for a, b in zip(longest, (pool.key_rows, pool.value_rows))]
    shares = (pool.dropped[:, 0] / (calls * HEADS * TILES)).tolist()
    return {
        "D": head_dim,
        "keep": keep,
        "rows": dataclasses.astuple(rows),
        "kind": kind,
        "tiles": calls * HEADS * TILES,
        "trimmed": [f"{share:.1e}" for share in shares],
        "nonzeros": pool.dropped[:, 1].tolist(),
        "longest": longest,
    }


def microseconds(call: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / repeats


def time_append(batch: int, kv_heads: int, head_dim: int, keep: int, spread_phases: bool) -> dict[str, object]:
    """In a graph of 64 calls, one of which compresses if all sequences are at the same phase."""
    tile, pages = page_pool.TILE_TOKENS, 128
    pool = make_pool(batch, pages, kv_heads, head_dim, keep)
    pool.page_table.copy_(torch.arange(batch * pages).view(batch, pages))
    windows = page_pool.Windows.allocate(pool, 32)
    lengths = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
    k, v = (torch.randn(batch, kv_heads, tile, head_dim, dtype=torch.float16, device=DEVICE) for _ in range(2))
    windows.keys.normal_(), windows.values.normal_()

    def phase(first: int) -> None:
        offsets = torch.arange(batch, device=DEVICE) * (tile // batch) if spread_phases else 0
        windows.lengths.copy_((first + offsets) % tile + 32)
        lengths.fill_(tile)  # channel orders are there

    def graph(calls: int) -> torch.cuda.CUDAGraph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for i in range(calls):
                page_pool.append(pool, windows, lengths, k[:, :, i : i + 1], v[:, :, i : i + 1])
        return captured

    phase(0)
    page_pool.append(pool, windows, lengths, k, v)  # its first tile: channel orders
    torch.cuda.synchronize()
    result: dict[str, object] = {"B": batch, "Hkv": kv_heads, "D": head_dim, "keep": keep, "spread": spread_phases}
    tile_of_calls, plain, one = graph(tile), graph(tile - 1), graph(1)
    if not spread_phases:
        times = []
        for _ in range(20):
            phase(0)
            times.append(microseconds(plain.replay, 1) / (tile - 1))
        result["plain"] = round(sorted(times)[10], 2)
        times = []
        for _ in range(20):
            phase(tile - 1)
            times.append(microseconds(one.replay, 1))
        result["compressing, launched alone"] = round(sorted(times)[10], 2)
        assert not pool.dropped.any(), "trimmed tiles take longer"
    times = []
    for _ in range(10):
        phase(0)
        times.append(microseconds(tile_of_calls.replay, 20) / tile)
    result["amortised"] = round(sorted(times)[5], 2)
    assert int(pool.error) == 0
    return result


def time_store(batch: int, kv_heads: int, tokens: int, head_dim: int, keep: int, new_order: bool) -> dict[str, object]:
    pages = tokens // page_pool.TILE_TOKENS
    pool = make_pool(batch, pages, kv_heads, head_dim, keep)
    pool.page_table.copy_(torch.randperm(batch * pages).view(batch, pages))
    k, v = (torch.randn(batch, kv_heads, tokens, head_dim, device=DEVICE).half() for _ in range(2))
    sequences, zeros = (f(batch, dtype=torch.int32, device=DEVICE) for f in (torch.arange, torch.zeros))
    for _ in range(3):
        page_pool.store(pool, k, v, sequences, zeros, new_order)
    times = [microseconds(lambda: page_pool.store(pool, k, v, sequences, zeros, new_order), 1) for _ in range(20)]
    us = round(sorted(times)[10], 1)
    return {"store": [batch, kv_heads, tokens, head_dim], "keep": keep, "new_order": new_order, "us": us}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("trim", "time"), help="what to measure")
    parser.add_argument(
        "--tiles", type=positive_integer, default=1 << 20, metavar="N", help="of a line of trim (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: page pools are measured on a GPU")
    measured = _trims(options.tiles) if options.what == "trim" else _times()
    with Progress(len(measured)) as progress:
        for call in measured:
            row = call()
            print(json.dumps(row), flush=True)
            progress.finish(", ".join(f"{name} {value}" for name, value in list(row.items())[:4]))
    return 0


def _trims(tiles: int) -> list[Callable[[], dict[str, object]]]:
    return [
        partial(trimmed, kind, head_dim, keep, more_rows, tiles)
        for head_dim in (64, 128, 256)
        for keep in (16, 32, 38, 64, 96, 128)
        for kind in (KINDS if keep < head_dim else ())
        for more_rows in (-1, 0, 1)
    ]


def _times() -> list[Callable[[], dict[str, object]]]:
    shapes = ((8, 8, 128, 38), (8, 8, 128, 64), (1, 8, 128, 38), (64, 8, 128, 38), (8, 8, 64, 19), (8, 8, 256, 76))
    return [
        *(partial(time_append, *shape, False) for shape in shapes),
        partial(time_append, 8, 8, 128, 38, True),
        *(partial(time_store, 8, 8, 16384, 128, 38, new_order) for new_order in (True, False)),
    ]


if __name__ == "__main__":
    sys.exit(main())
