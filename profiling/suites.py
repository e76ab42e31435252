"""Suites: the named lists of cases. Without a name a sweep measures all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from profiling.cases import (
    CACHES,
    CODECS,
    DECODE_OPS,
    DENSE_OPS,
    EQUAL_BLOCK,
    PRODUCTS,
    Block,
    Load,
    Shape,
    usual_keeps,
)


@dataclass(frozen=True)
class Suite:
    """`lists` takes the kind of device, "cuda" or "cpu": a CPU's lists are scaled down."""

    about: str
    lists: Callable[[str], list[Block]]
    by_default: bool = True  # measured where no suite is named
    has_file: bool = False  # of its own, also among the committed results

    def blocks(self, device: str) -> list[Block]:
        return _in_caches(self.lists(device), device)


def _in_caches(blocks: Iterable[Block], device: str) -> list[Block]:
    """On a CPU with a cold and with a warm cache: callers find either, and which it is changes who is faster."""
    return [replace(block, caches=CACHES) if device == "cpu" else block for block in blocks]


def default_loads(device: str) -> list[Load]:
    """The project's figures with both distributions; bf16 and equal streams on the first, then its variants."""
    headline, variants = figures(device)[0], _variants(device)
    loads = [
        Load(s, k, data=d) for s in figures(device) for k in usual_keeps(s.head_dim) for d in ("gaussian", "outlier")
    ]
    loads += [Load(headline, k, dtype="bfloat16") for k in usual_keeps(headline.head_dim)]
    loads += [Load(headline, _multiple(k), data="equal") for k in usual_keeps(headline.head_dim)]
    return loads + [Load(s, k) for s in variants for k in usual_keeps(s.head_dim)]


def figures(device: str) -> list[Shape]:
    """The shapes that the README quotes; the first is the headline."""
    if device == "cpu":
        return [Shape(1, 32, 8, 1, 8192, 128), Shape(1, 8, 8, 1, 4096, 128)]
    return [
        Shape(8, 32, 8, 1, 16384, 128),
        Shape(8, 64, 8, 1, 16384, 128),
        Shape(8, 32, 32, 1, 4096, 128),
        Shape(1, 32, 8, 1, 32768, 128),
        Shape(8, 32, 8, 1, 4096, 128),
    ]


def _variants(device: str) -> list[Shape]:
    if device == "cpu":
        return [Shape(1, 32, 8, 1, 8192, 64), Shape(1, 32, 8, 1, 4096, 256), Shape(1, 32, 8, 16, 4096, 128)]
    return [Shape(8, 32, 8, 1, 16384, 64), Shape(8, 32, 8, 1, 16384, 256), Shape(8, 32, 8, 16, 16384, 128)]


def _multiple(keep: int) -> int:
    return -(-keep // EQUAL_BLOCK) * EQUAL_BLOCK


def _usual(shapes: Iterable[Shape]) -> tuple[Load, ...]:
    return tuple(Load(s, k) for s in shapes for k in usual_keeps(s.head_dim))


def _product(op: str) -> Callable[[str], list[Block]]:
    def blocks(device: str) -> list[Block]:
        return [
            Block((op,), tuple(default_loads(device))),
            Block((op,), _usual(figures(device)[:1]), scores=("float32",)),
        ]

    return blocks


def _attention(device: str) -> list[Block]:
    return [Block(("sparse_attention", "dense_attention"), _usual(figures(device)))]


def _sparsity(device: str) -> list[Block]:
    """The usual keeps, and every eighth of the channels."""
    headline = figures(device)[0]
    keeps = sorted({*range(16, headline.head_dim, 16), *usual_keeps(headline.head_dim)}, reverse=True)
    loads = tuple(Load(headline, keep) for keep in keeps)
    return [
        Block(DECODE_OPS, loads),
        Block(PRODUCTS[:1], tuple(Load(headline, keep, data="outlier") for keep in keeps)),
    ]


def _tokens(device: str) -> list[Block]:
    """One batch row of 32 query heads on 8 KV heads, 1 K to 1 M tokens (a CPU: to 64 K)."""
    last = 16 if device == "cpu" else 20
    shapes = [Shape(1, 32, 8, 1, 1 << bits, 128) for bits in range(10, last + 1)]
    return [Block(DECODE_OPS, tuple(Load(s, usual_keeps(128)[0]) for s in shapes))]


def _short(device: str) -> list[Block]:
    """Kernels of some microseconds, where a launch counts: warm and cold, alone and one after the other in a graph."""
    shapes = [Shape(1, 32, 8, 1, tokens, 128) for tokens in (1024, 4096, 8192)]
    timings = ("events", "graph") if device == "cuda" else ("events",)
    return [Block(PRODUCTS, _usual(shapes), caches=("cold", "warm"), timings=timings)]


def _readme(device: str) -> list[Block]:
    return [Block(DECODE_OPS, _usual(figures(device)))]


def _queries(device: str) -> list[Block]:
    """Query tokens over a compressed prefix: speculation, several turns, chunks of a prompt."""
    tokens, most = (8192, 2048) if device == "cuda" else (1024, 64)
    counts = [1 << bits for bits in range(12) if 1 << bits <= most]
    shapes = [Shape(b, 32, 8, s, tokens, 128) for b in ((1, 8) if device == "cuda" else (1,)) for s in counts]
    loads = tuple(Load(s, usual_keeps(128)[0], dtype="bfloat16") for s in shapes)
    if device == "cuda":
        loads += (Load(Shape(1, 32, 8, 512, 65536, 128), usual_keeps(128)[0], dtype="bfloat16"),)
    return [Block(("sparse_attention",), loads, best_backend=True)]


def _codecs(device: str) -> list[Block]:
    """Caches of 16-bit values and in every narrow codec, of the headline's shape."""
    headline = figures(device)[0]
    loads = tuple(Load(headline, keep, codec=c) for keep in usual_keeps(headline.head_dim) for c in ("", *CODECS))
    return [Block(("sparse_attention", "compress"), loads, best_backend=True)]


def _two_of_four(device: str) -> list[Block]:
    """Two of four neighbours, exactly and at most: the headline's shape, shorter and longer caches, many queries."""
    headline = figures(device)[0]
    half, keeps = headline.head_dim // 2, [round(share * headline.head_dim) for share in (0.3, 0.2, 0.1)]
    exact = [Load(headline, half, codec=codec, method="2of4") for codec in ("", *CODECS)]
    loads = exact + [Load(headline, keep, codec=c, method="magnitude-2of4") for keep in keeps for c in ("fp8", "int4")]
    blocks = [Block(("sparse_attention", "attend", "compress"), tuple(loads), best_backend=True)]
    free = tuple(replace(load, method="") for load in loads)  # as many kept without the constraint
    blocks.append(Block(("compress",), free, best_backend=True))
    if device == "cuda":
        shapes = [Shape(8, 32, 8, 1, 4096, 128), *(Shape(1, 32, 8, 1, tokens, 128) for tokens in (32768, 1 << 20))]
        queries = [Shape(8, 32, 8, count, 8192, 128) for count in (512, 2048)]
        others = [Load(shape, half, codec=c, method="2of4") for shape in shapes for c in ("fp8", "int4")]
        others += [Load(shape, half, "bfloat16", codec=c, method="2of4") for shape in queries for c in ("", "int4")]
        blocks.append(Block(("sparse_attention",), tuple(others), best_backend=True))
    return blocks


SERVING_OPS = ("sparse_attention", "attend")
_MOST_ELEMENTS = 2**31  # of a dense cache: 4 GiB each of keys and values


def _serving(device: str) -> list[Block]:
    """What servers run: batches, tokens by powers of two and some between, heads and head dims of common models."""
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    tokens = sorted({*(1 << bits for bits in range(8, 18)), 720, 3008, 11008})
    heads = [(32, 8, 128), (64, 8, 128), (28, 4, 128), (16, 16, 128), (8, 1, 128), (32, 8, 64), (32, 8, 256)]
    if device == "cpu":
        batches, tokens, heads = (1, 2, 4), [256, 720, 1024, 4096], heads[:1]
    shapes = [Shape(b, q, kv, 1, t, d) for q, kv, d in heads for b in batches for t in tokens]
    loads = (Load(s, usual_keeps(s.head_dim)[0]) for s in shapes if s.elements <= _MOST_ELEMENTS)
    return [Block(SERVING_OPS, tuple(loads), best_backend=True)]


def _paged(device: str) -> list[Block]:
    """KVCache.attend and the plain call where a step's start and end count most, and at the README's figures."""
    shapes = figures(device)
    if device == "cuda":
        shapes += [Shape(1, 32, 8, 1, 1024, 128), Shape(64, 32, 8, 1, 1024, 128), Shape(1, 32, 8, 1, 8192, 128)]
    return [Block(SERVING_OPS, tuple(Load(s, usual_keeps(s.head_dim)[0]) for s in shapes), best_backend=True)]


def _named(about: str, lists: Callable[[str], list[Block]]) -> Suite:
    return Suite(f"{about}; only if named", lists, by_default=False, has_file=True)


SUITES = {
    "qk": Suite("sparse_qk beside the dense product, and with float32 logits", _product("sparse_qk")),
    "av": Suite("sparse_av beside the dense product, and with float32 p, as the README uses it", _product("sparse_av")),
    "attention": Suite("sparse_attention beside dense attention, and dense attention for itself", _attention),
    "compress": Suite("compress beside a copy", lambda device: [Block(("compress",), tuple(default_loads(device)))]),
    "peers": Suite(
        "the peers for themselves, and a copy: the bandwidth there is",
        lambda device: [Block(DENSE_OPS, _usual(figures(device)))],
    ),
    "sparsity": Suite("every operation against the share of elements pruned", _sparsity),
    "tokens": Suite("every operation against the number of tokens", _tokens),
    "short": Suite("small caches: cold and warm, single calls and CUDA graphs", _short),
    "readme": Suite("the figures that the README quotes", _readme, has_file=True),
    "codecs": _named("attention and compress in narrow codecs", _codecs),
    "two-of-four": _named("attention and compress of two of four neighbours", _two_of_four),
    "queries": _named("attention of 1 to 2048 query tokens, best backend", _queries),
    "paged": _named("KVCache.attend beside the plain call at the README's shapes", _paged),
    "serving": _named(
        "attention on a grid of batches, tokens and heads, plain and KVCache.attend, best backend", _serving
    ),
}

HAVE_FILES = [name for name, suite in SUITES.items() if suite.has_file]


def quick(device: str) -> list[Block]:
    """A smoke test of small shapes."""
    if device == "cpu":
        shape, odd = Shape(1, 32, 8, 1, 4096, 128), Shape(1, 8, 2, 4, 4000, 64)
    else:
        shape, odd = Shape(8, 32, 8, 1, 4096, 128), Shape(8, 32, 8, 4, 4000, 64)
    loads = (
        Load(shape, 38),
        Load(shape, 64),
        Load(shape, 38, data="outlier"),
        Load(shape, 64, data="equal"),
        Load(shape, 38, dtype="bfloat16"),
        Load(odd, 19),
    )
    blocks = [
        Block((*PRODUCTS, "compress"), loads),
        Block(("sparse_av",), loads[:1], scores=("float32",)),
        Block(("sparse_attention", "dense_attention"), loads[:1]),
    ]
    return _in_caches(blocks, device)
