"""What context parallel decoding takes on G GPUs, and generation with the Llama-3-8B shape over a mesh: a model.

One GPU is fitted to committed rows, and so is what two GPUs exchange; more of them are assumed (SOURCES).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HEAD_DIM, KEEP, TILE = 128, 38, 64
TOKENS, GPUS = (1 << 20, 10 << 20), (1, 2, 8, 64)


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str  # as torch has it
    pair_us: float  # of a tile of keys and one of values, on an SM
    call_us: float  # the rest of a call of attention
    copy_gb_per_s: float  # bytes read and written
    memory_gb: float
    sm_count: int = 132


H200 = Gpu("NVIDIA H200", pair_us=0.42, call_us=12.0, copy_gb_per_s=4280.0, memory_gb=141.0)
H100 = Gpu("NVIDIA H100 80GB HBM3", pair_us=0.573, call_us=11.1, copy_gb_per_s=3000.0, memory_gb=80.0)
KINDS = {gpu.name: gpu for gpu in (H200, H100)}

SOURCES = {
    "tile pair, rest of a call": "D 128, 38 of 128 kept: H200 profiling/NOTES.md, H100 the rows of one GPU in "
    "profiling/results/nvidia-h100-80gb-hbm3/scaling.json",
    "bytes": "slots of KVCache for 38 of 128 kept, D 128: 14024 bytes a tile of keys and values",
    "gather, merge": "6.6 and 2.6 us on two H100: the same file; 0.7 us a further GPU of the host and 5 us for each "
    "doubling of hosts: assumed",
    "links": "450 GB/s NVLink within a host of 8, 50 GB/s a GPU between hosts, one direction: datasheets",
    "copies": "4.28 TB/s on an H200: profiling/NOTES.md; 3.0 TB/s on an H100",
    "generation": "16 GB of weights, 3.5 ms a step besides them and attention: generate-graphs.json and "
    "scaling-generate*.json in profiling/results; two sums over tp a layer, 7 us on two GPUs: assumed",
}
PAIR_BYTES = 14024
GATHER_US, NEIGHBOUR_US, HOST_US, MERGE_US, SUM_US = 5.9, 0.7, 5.0, 2.6, 6.3
GPUS_A_HOST = 8
LINK_GB_PER_S, NETWORK_GB_PER_S = 450.0, 50.0
# The Llama-3-8B shape: 16-bit weights, a step's time besides reading them and attention.
CONFIG, LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS = "llama3-8b", 32, 4096, 32, 8
WEIGHTS_GB, OTHER_MS = 16.0, 3.5


@dataclass(frozen=True)
class Step:
    """A layer's part of a decoding step of one token a sequence, on one of `gpus` GPUs. Microseconds."""

    tokens: int  # a sequence
    gpus: int
    attention_us: float
    gather_us: float
    merge_us: float
    sent_bytes: int  # by a GPU, to each of the others
    cache_gb: float  # of a GPU, all layers

    @property
    def total_us(self) -> float:
        return self.attention_us + self.gather_us + self.merge_us


def attention_us(tile_pairs: int, gpu: Gpu = H200) -> float:
    """One call over so many tiles of keys and as many of values, of all sequences and KV heads."""
    return gpu.call_us + gpu.pair_us * tile_pairs / gpu.sm_count


def step(
    tokens: int, gpus: int, *, batch: int, query_heads: int, kv_heads: int, layers: int = 1, gpu: Gpu = H200
) -> Step:
    """The slowest GPU's, which has the most tiles; the dense window is left out."""
    tiles = -(-tokens // TILE)
    pairs = -(-tiles // gpus) * batch * kv_heads
    sent = batch * query_heads * (2 * HEAD_DIM + 4) if gpus > 1 else 0  # outputs in 16 bits, and the LSE
    merge = MERGE_US + sent * gpus / gpu.copy_gb_per_s / 1e3 if gpus > 1 else 0.0
    return Step(
        tokens=tokens,
        gpus=gpus,
        attention_us=attention_us(pairs, gpu),
        gather_us=_exchange_us(GATHER_US, sent, gpus),
        merge_us=merge,
        sent_bytes=sent,
        cache_gb=pairs * PAIR_BYTES * layers / 1e9,
    )


def generation_ms(tokens: int, batch: int, *, tp: int = 1, cp: int = 1, gpu: Gpu = H200) -> float:
    """A decoding step of the Llama-3-8B shape: weights and heads divided by tp, each sequence's tokens by cp."""
    heads = {"query_heads": QUERY_HEADS // tp, "kv_heads": KV_HEADS // tp}
    layer = step(tokens, cp, batch=batch, gpu=gpu, **heads)
    sums = 2 * _exchange_us(SUM_US, 2 * batch * HIDDEN, tp)
    weights_ms = WEIGHTS_GB / tp / gpu.copy_gb_per_s * 1e3
    return OTHER_MS + weights_ms + LAYERS * (layer.total_us + sums) / 1e3


def _exchange_us(latency: float, sent: int, gpus: int) -> float:
    """Every GPU receives what all others send, over links that differ within and between hosts."""
    if gpus == 1:
        return 0.0
    near = min(gpus, GPUS_A_HOST) - 1
    hosts = -(-gpus // GPUS_A_HOST)
    far = gpus - 1 - near
    latency += NEIGHBOUR_US * near + HOST_US * math.log2(hosts)
    return latency + sent * (near / LINK_GB_PER_S + far / NETWORK_GB_PER_S) / 1e3


def table(steps: Sequence[Step], weights_gb: float, gpu: Gpu = H200) -> list[tuple[str, ...]]:
    """The header and a line for each step; times relative to as many tokens on one GPU."""
    alone = {each.tokens: each.total_us for each in steps if each.gpus == 1}
    header = ("tokens", "GPUs", "cache a GPU, GB", "fits", "sent, KB", "attention, us", "gather, us", "merge, us")
    lines = [(*header, "layer, us", "speed-up")]
    for each in steps:
        base = alone.get(each.tokens)
        lines.append(
            (
                str(each.tokens),
                str(each.gpus),
                f"{each.cache_gb:.1f}",
                "yes" if each.cache_gb + weights_gb <= gpu.memory_gb else "no",
                f"{each.sent_bytes / 1e3:.1f}",
                f"{each.attention_us:.1f}",
                f"{each.gather_us:.1f}",
                f"{each.merge_us:.1f}",
                f"{each.total_us:.1f}",
                f"{base / each.total_us:.2f}" if base else "",
            )
        )
    return lines
