"""What context parallel decoding would do on G GPUs: python -m profiling.scaling [--help].

A model, not a measurement: attention on one GPU is fitted to committed rows of an H200, links and collectives are
assumed (SOURCES), and nothing of it was checked on several GPUs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiling import command_line
from profiling.command_line import positive_integer
from profiling.tables import aligned

HEAD_DIM, TILE = 128, 64
TOKENS, GPUS = (1 << 20, 10 << 20), (1, 2, 8, 64)
MEMORY_GB = 141.0  # of an H200

SOURCES = {
    "tile pair, rest of a call": "0.42 us an SM and 12 us: profiling/NOTES.md, D 128, 38 of 128 kept, one H200",
    "bytes": "slots of KVCache for 38 of 128 kept, D 128: 14024 bytes a tile of keys and values",
    "small kernels": "9 a step of ShardedKVCache.attend (lengths, packing, unpacking, merge), 1.5 us each: assumed",
    "gather": "launch 6 us, 0.7 us a GPU of the host, 5 us for each doubling of hosts: assumed",
    "links": "450 GB/s NVLink within a host of 8, 50 GB/s a GPU between hosts, one direction: datasheets",
    "copies": "4.28 TB/s, a copy on an H200: profiling/NOTES.md",
}
SM_COUNT = 132
PAIR_US, CALL_US = 0.42, 12.0
PAIR_BYTES = 14024
SMALL_KERNELS, SMALL_KERNEL_US = 9, 1.5
GATHER_US, NEIGHBOUR_US, HOST_US = 6.0, 0.7, 5.0
GPUS_A_HOST = 8
LINK_GB_PER_S, NETWORK_GB_PER_S, COPY_GB_PER_S = 450.0, 50.0, 4280.0


@dataclass(frozen=True)
class Step:
    """A layer's part of a decoding step of one token a sequence, on one of `gpus` GPUs. Microseconds."""

    tokens: int  # a sequence
    gpus: int
    attention_us: float
    gather_us: float
    merge_us: float  # packing and unpacking too
    sent_bytes: int  # by a GPU, to each of the others
    cache_gb: float  # of a GPU, all layers

    @property
    def total_us(self) -> float:
        return self.attention_us + self.gather_us + self.merge_us


def attention_us(tile_pairs: int) -> float:
    """One call over so many tiles of keys and as many of values, of all sequences and KV heads."""
    return CALL_US + PAIR_US * tile_pairs / SM_COUNT


def step(tokens: int, gpus: int, *, batch: int, query_heads: int, kv_heads: int, layers: int) -> Step:
    """The slowest GPU's, which has the most tiles; the dense window is left out."""
    tiles = -(-tokens // TILE)
    pairs = -(-tiles // gpus) * batch * kv_heads
    sent = batch * query_heads * (2 * HEAD_DIM + 4) if gpus > 1 else 0  # outputs in 16 bits, and the LSE
    merge = SMALL_KERNELS * SMALL_KERNEL_US + 4 * sent * gpus / COPY_GB_PER_S / 1e3 if gpus > 1 else 0.0
    return Step(
        tokens=tokens,
        gpus=gpus,
        attention_us=attention_us(pairs),
        gather_us=_gather_us(sent, gpus),
        merge_us=merge,
        sent_bytes=sent,
        cache_gb=pairs * PAIR_BYTES * layers / 1e9,
    )


def _gather_us(sent: int, gpus: int) -> float:
    """Every GPU receives what all others send, over links that differ within and between hosts."""
    if gpus == 1:
        return 0.0
    near = min(gpus, GPUS_A_HOST) - 1
    hosts = -(-gpus // GPUS_A_HOST)
    latency = GATHER_US + NEIGHBOUR_US * near + HOST_US * math.log2(hosts)
    far = gpus - 1 - near
    return latency + sent * (near / LINK_GB_PER_S + far / NETWORK_GB_PER_S) / 1e3


def table(steps: Sequence[Step], weights_gb: float) -> list[tuple[str, ...]]:
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
                "yes" if each.cache_gb + weights_gb <= MEMORY_GB else "no",
                f"{each.sent_bytes / 1e3:.1f}",
                f"{each.attention_us:.1f}",
                f"{each.gather_us:.1f}",
                f"{each.merge_us:.1f}",
                f"{each.total_us:.1f}",
                f"{base / each.total_us:.2f}" if base else "",
            )
        )
    return lines


def draw(steps: Sequence[Step], path: Path) -> Path:
    """Microseconds a layer against the number of GPUs; a panel for each number of tokens."""
    from profiling.plots import style

    counts = list(dict.fromkeys(each.tokens for each in steps))
    with style.settings():
        figure, axes = style.panels(len(counts))
        for tokens, axis in zip(counts, axes, strict=True):
            mine = [each for each in steps if each.tokens == tokens]
            gpus = [each.gpus for each in mine]
            first = mine[0].total_us * mine[0].gpus
            series = (
                ("a layer", style.BLUE, [each.total_us for each in mine]),
                ("attention", style.GREEN, [each.attention_us for each in mine]),
                ("gather and merge", style.ORANGE, [each.gather_us + each.merge_us or None for each in mine]),
            )
            for label, color, values in series:
                axis.plot(gpus, [math.nan if v is None else v for v in values], "o-", color=color, label=label)
            axis.plot(gpus, [first / count for count in gpus], "--", color=style.GREY, label="evenly divided")
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xticks(gpus, [str(count) for count in gpus])
            axis.set_title(f"{tokens / (1 << 20):g} M tokens, a model")
            axis.set_xlabel("GPUs along cp")
        axes[0].set_ylabel("us a layer and step")
        style.shared_legend(figure, axes)
        return style.save(figure, path.parent, path.stem)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    sources = "\n".join(f"  {name}: {source}" for name, source in SOURCES.items())
    parser = argparse.ArgumentParser(
        prog="python -m profiling.scaling",
        description="A model of context parallel decoding: bytes, gather, merge and latency a layer on G H200s, with "
        "38 of 128 channels kept. It was not checked on several GPUs.",
        epilog=f"where its figures come from:\n{sources}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=_integers, default=list(TOKENS), metavar="LIST", help="a sequence (default: 1 M and 10 M)")
    add("--gpus", type=_integers, default=list(GPUS), metavar="LIST", help="along cp (default: 1,2,8,64)")
    add("--batch", type=positive_integer, default=1, metavar="N", help="sequences (default: %(default)s)")
    add("--query-heads", type=positive_integer, default=32, metavar="N", help="of a GPU (default: %(default)s)")
    add("--kv-heads", type=positive_integer, default=8, metavar="N", help="of a GPU (default: %(default)s)")
    add("--layers", type=positive_integer, default=32, metavar="N", help="of the model (default: %(default)s)")
    add(
        "--weights-gb",
        type=command_line.count,
        default=16,
        metavar="GB",
        help="of a GPU, to tell what fits (default: %(default)s)",
    )
    add("--plot", type=Path, metavar="FILE", help="also draw a plot, as PNG")
    args = parser.parse_args(arguments)
    if args.query_heads % args.kv_heads:
        parser.error(f"--query-heads: must be a multiple of --kv-heads {args.kv_heads}, got {args.query_heads}")
    if args.plot is not None and args.plot.suffix != ".png":
        parser.error(f"--plot: must end in .png, got {args.plot}")
    return args


def _integers(text: str) -> list[int]:
    return sorted({positive_integer(word) for word in text.split(",")})


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    shape = {name: getattr(args, name) for name in ("batch", "query_heads", "kv_heads", "layers")}
    steps = [step(tokens, gpus, **shape) for tokens in args.tokens for gpus in args.gpus]
    print(aligned(table(steps, args.weights_gb)))
    print("A model, not a measurement: --help says where its figures come from.")
    if args.plot is not None:
        try:
            print(f"wrote {draw(steps, args.plot)}")
        except (ImportError, OSError) as error:
            print(f"python -m profiling.scaling: error: {error}", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
