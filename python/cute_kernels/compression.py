"""Pruning and compression: dense K and V to SparseKV, and back.

Method: per-token magnitude pruning with a bitmap and packed nonzeros, after Mustafar (arXiv 2505.22913). The steps run
as kernels, the same on CPU and GPU and bit for bit with the same result: select what is kept, balance the tiles, pack
them. Other pruning rules (`cute_kernels.rules`) choose in torch operations what the kernels then compress.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels import rules
from cute_kernels._runtime import checks, gradients, ops
from cute_kernels._runtime.extension import TILE_FORMATS
from cute_kernels._runtime.launching import address, compression_kernels
from cute_kernels._storage import arguments, steps, two_of_four, two_of_four_bitmap
from cute_kernels._storage.checks import check_preallocated, chosen_codec
from cute_kernels._storage.compressor import Cache, compress_caches
from cute_kernels._storage.storage import BITMAP, TWO_OF_FOUR, TWO_OF_FOUR_BITMAP, Storage
from cute_kernels.rules import Magnitude, MagnitudeTwoOfFour, Rule, TwoOfFour
from cute_kernels.rules.two_of_four import is_stored_as_slots
from cute_kernels.sparse_kv import SparseKV, from_storage, storage_of


def prune(
    x: Tensor,
    *,
    sparsity: float | None = None,
    keep: int | None = None,
    method: str | Rule = "magnitude",
    role: str | None = None,
) -> Tensor:
    """Zeroes all but the largest elements of every token and head, or what another rule says.

    x: (B, Hkv, T, D) float16 or bfloat16, D a multiple of 8 up to 256, stride 1 in the last dimension.
    sparsity: share of every token's D elements to drop, 0 to 1: keeps floor(D * (1 - sparsity) + 1e-6), at least 1.
    keep: how many elements of every token to keep, 1 to D. With neither, every nonzero is kept, by "2of4" and
        "magnitude-2of4" at most two of every four neighbours.
    method: "magnitude", per token: the `keep` largest |x|, ties to the lower channel. NaN is larger than everything.
        Or another rule of `cute_kernels.rules`, by its name or, where it takes inputs, itself. "2of4", two of every
        four neighbours, takes neither sparsity nor keep.
    role: "key" or "value", for rules that tell them apart; None: as a key for "2of4" and "magnitude-2of4".

    Returns a contiguous tensor like x, with +0 for what is dropped and for -0.0. It has no gradient: a backward pass
    through it raises RuntimeError.

    Raises TypeError for a wrong class or dtype; ValueError for a wrong shape, stride or range, both sparsity and keep,
    or a rule that does not serve the role or whose inputs do not fit x; RuntimeError if the extension has no kernels
    for x's device.
    """
    if gradients.wanted(x):
        return gradients.without_gradient(
            "prune", lambda x: prune(x, sparsity=sparsity, keep=keep, method=method, role=role), x
        )
    rule = rules.resolve(method)
    if role is not None:
        checks.role(role)
    x = checks.dense_cache(x, "x")
    kept = _kept(rule, x.shape[3], sparsity, keep)
    if _has_select_kernels(rule, x) and ops.direct(x):  # they need storage, whose size no recorded call knows
        codec = chosen_codec(None, "codec", x.dtype)
        (storage,) = _compress([_cache(x, role or "key", rule, kept, codec, BITMAP, None)])
        return decompress(from_storage(storage))
    if kept and not isinstance(rule, Magnitude):
        return rule.prune(x, kept, role)
    return _prune(x, kept) if ops.eager(x) else _PRUNE(x, kept)


def compress(
    x: Tensor,
    *,
    role: str,
    sparsity: float | None = None,
    keep: int | None = None,
    method: str | Rule = "magnitude",
    codec: str | None = None,
    tile_format: str | None = None,
    out: SparseKV | None = None,
) -> SparseKV:
    """Prunes and compresses a K or V cache.

    x, sparsity, keep, method: as for `prune`.
    role: "key" or "value".
    codec: how nonzeros are stored. None: as they are ("fp16" of float16, "bf16" of bfloat16), or as `out` was
        preallocated for. "fp8" (OCP FP8 E4M3), "int8" and "int4" are narrow: after pruning, each value is divided by
        the scales of its channel and of its token and rounded to the codec's nearest number, ties to even. The first
        512 tokens of x decide the scales of channels (docs/format.md). What is kept does not depend on the codec. No
        narrow codec stores infinity, and of them "fp8" alone NaN.
    tile_format: where the values are. "bitmap" takes every pattern. "two_of_four" is smaller and faster to multiply; it
        takes rule "2of4", or a cache that has the pattern already: at most two nonzeros in every four neighbouring
        channels of keys, or tokens of values, as they lie in memory, with method "magnitude" and neither sparsity nor
        keep. "two_of_four_bitmap", of such a cache or rule "magnitude-2of4", stores nonzeros alone. On GPUs
        `sparse_attention` alone multiplies it, with narrow codecs, and faster than "bitmap"; `sparse_qk` and
        `sparse_av` have kernels for it on CPUs only. None: "two_of_four" for rule "2of4", unless out is given, else
        "bitmap".
    out: a cache from `SparseKV.preallocate` to fill and return, like x in shape, dtype and device, of the same role
        and codec, and preallocated for at least as many elements a token. Its tile format is "bitmap".

    Any T >= 0; the last tile may be partial. Without `out` the storage has the size that x needs, which takes one
    synchronisation with the device. With `out` there is none, only temporary memory is allocated, from torch's
    allocator, and the call can be captured in a CUDA graph (with method "magnitude"; other rules may synchronise).
    torch.compile, make_fx and FakeTensorMode take the call with `out`; without, the size of the storage depends on the
    content of x, and RuntimeError says so. No gradient reaches x: what is stored is constant.
    A rule that may keep more than `keep` elements of a token (`Rule.per_token` False) needs an `out` preallocated for
    every nonzero.

    Raises what `prune` raises; TypeError or ValueError for a wrong codec or tile_format, if out does not fit x, or x
    does not have the pattern that a tile format of two of four needs; ValueError for values that the codec cannot
    store: with out on a GPU not here, but when the content's size is next looked at; without out, ValueError if the
    storage would exceed 2^31 rows of 128 bytes.
    """
    checks.role(role)
    rule = rules.resolve(method)
    x = checks.dense_cache(x, "x")
    kept = _kept(rule, x.shape[3], sparsity, keep)
    memory = None
    if out is not None:
        memory = storage_of(out, "out", role)
        check_preallocated(memory, "out", x, "x", _stored(rule, kept))
    chosen = _codec(codec, "codec", x, memory)
    form = _tile_format(tile_format, rule, kept, memory)
    (storage,) = _compress([_cache(x, role, rule, kept, chosen, form, memory)])
    return from_storage(storage) if out is None else out


def compress_kv(
    k: Tensor,
    v: Tensor,
    *,
    sparsity: float | None = None,
    keep: int | None = None,
    key_keep: int | None = None,
    value_keep: int | None = None,
    method: str | Rule | tuple[str | Rule, str | Rule] = "magnitude",
    codec: str | None = None,
    key_codec: str | None = None,
    value_codec: str | None = None,
    tile_format: str | None = None,
    out: tuple[SparseKV, SparseKV] | None = None,
) -> tuple[SparseKV, SparseKV]:
    """Prunes and compresses both caches of a layer, which then share one order of tokens per tile.

    k, v: as x of `compress`, alike in shape, dtype and device.
    sparsity or keep: for both caches. key_keep, value_keep: for one of them, in place of that.
    method: as for `prune`; a tuple of two: one for keys, one for values.
    codec: as for `compress`, for both caches. key_codec, value_codec: for one of them, in place of `codec`.
    tile_format: as for `compress`, for both caches. Without out, None is also "two_of_four_bitmap", where both caches
        have rule "magnitude-2of4", narrow codecs and at most 35 % kept: there it is the fastest to attend to.
    out: (keys, values) to fill and return, each as `compress` takes it.

    Returns (keys, values). Raises what `compress` raises; the message says which cache is meant.
    """
    key_rule, value_rule = rules.resolve_pair(method)
    k, v = checks.dense_cache(k, "k"), checks.dense_cache(v, "v")
    checks.dtype(v, "v", (k.dtype,), " like k")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    checks.device(v.device, "v", k.device, "k")
    head_dim = k.shape[3]
    checks.kept_elements(head_dim, sparsity, keep)
    kept_k, kept_v = (
        _kept(rule, head_dim, sparsity, keep) if own is None else _kept(rule, head_dim, None, own, name)
        for rule, own, name in ((key_rule, key_keep, "key_keep"), (value_rule, value_keep, "value_keep"))
    )
    memory_k = memory_v = None
    if out is not None:
        out_k, out_v = checks.pair(out, "out")
        memory_k, memory_v = storage_of(out_k, "out[0]", "key"), storage_of(out_v, "out[1]", "value")
        check_preallocated(memory_k, "out[0]", k, "k", _stored(key_rule, kept_k))
        check_preallocated(memory_v, "out[1]", v, "v", _stored(value_rule, kept_v))
    codec_k = _codec(codec, "codec", k, memory_k) if key_codec is None else _codec(key_codec, "key_codec", k, memory_k)
    codec_v = (
        _codec(codec, "codec", v, memory_v) if value_codec is None else _codec(value_codec, "value_codec", v, memory_v)
    )
    pair = (key_rule, kept_k, codec_k), (value_rule, kept_v, codec_v)
    if tile_format is None and out is None and all(is_stored_as_slots(*of_cache, head_dim) for of_cache in pair):
        tile_format = TWO_OF_FOUR_BITMAP
    keys, values = _compress(
        [
            _cache(x, role, rule, kept, chosen, _tile_format(tile_format, rule, kept, memory), memory)
            for x, role, rule, kept, chosen, memory in (
                (k, "key", key_rule, kept_k, codec_k, memory_k),
                (v, "value", value_rule, kept_v, codec_v, memory_v),
            )
        ]
    )
    return (from_storage(keys), from_storage(values)) if out is None else (out[0], out[1])


def _kept(rule: Rule, head_dim: int, sparsity: Any, keep: Any, name: str = "keep") -> int:
    """What the rule is to keep of every D elements; 0: every nonzero."""
    kept = checks.kept_elements(head_dim, sparsity, keep, name)
    return rule.checked_kept(kept, head_dim, name if sparsity is None else "sparsity")


def _codec(codec: Any, name: str, x: Tensor, out: Storage | None) -> str:
    """The codec to compress x with, into `out` if there is one. Raises where x's device has no kernels, unless the call
    is recorded: then where it runs."""
    chosen = chosen_codec(codec, name, x.dtype)
    if out is not None:
        if codec is not None and chosen != out.codec:
            raise ValueError(f"{name} must be '{out.codec}', for which out was preallocated, or None, got '{codec}'")
        chosen = out.codec
    if ops.unobserved():
        compression_kernels(x.device)
    return chosen


def _stored(rule: Rule, kept: int) -> int:
    """At most how many elements of a token the rule leaves; 0: any number."""
    return kept if rule.per_token else 0


def _tile_format(given: Any, rule: Rule, kept: int, out: Storage | None) -> str:
    """The tile format to compress into. Raises TypeError or ValueError for a wrong one, and one that does not go with
    the rule or with `out`."""
    if given is None:
        return TWO_OF_FOUR if isinstance(rule, TwoOfFour) and out is None else BITMAP
    if not isinstance(given, str):
        raise TypeError(f"tile_format must be a str or None, got {type(given).__name__}")
    if given not in TILE_FORMATS:
        raise ValueError(f"tile_format must be one of {', '.join(map(repr, TILE_FORMATS))} or None, got {given!r}")
    if given == BITMAP:
        return given
    if out is not None:
        raise ValueError(f"tile_format must be {BITMAP!r} or None with out, got {given!r}")
    own_rule: type[Rule] = TwoOfFour if given == TWO_OF_FOUR else MagnitudeTwoOfFour
    if not isinstance(rule, own_rule) and not (isinstance(rule, Magnitude) and kept == 0):
        raise ValueError(
            f"tile_format {given!r} goes with method {own_rule.name!r}, or with 'magnitude' without sparsity and keep "
            "for a cache that has the pattern already, not with method "
            f"{rule.name!r}{f' that keeps {kept}' if kept else ''}"
        )
    return given


def _cache(x: Tensor, role: str, rule: Rule, kept: int, codec: str, tile_format: str, out: Storage | None) -> Cache:
    """What the kernels have to compress: x and how much to keep, or x as the rule leaves it."""
    if tile_format != BITMAP:
        return Cache(x, role, kept, codec, out, tile_format)
    if kept == 0 or isinstance(rule, Magnitude):
        return Cache(x, role, kept, codec, out)
    if _has_select_kernels(rule, x):
        return Cache(x, role, kept if rule.per_token and kept < x.shape[3] else 0, codec, out, two_of_four=True)
    stored = 0 if out is None else _stored(rule, kept)  # without out, exactly what the rule left is stored
    return Cache(rule.prune(x, kept, role), role, stored, codec, out)


def _has_select_kernels(rule: Rule, x: Tensor) -> bool:
    """Whether kernels choose what a rule of two of four keeps for the tile format "bitmap"."""
    return isinstance(rule, (TwoOfFour, MagnitudeTwoOfFour)) and x.is_cuda


def _compress(caches: list[Cache]) -> list[Storage]:
    """Behind the checks: one cache, or a pair; all with `out` or none."""
    outs = [cache.out for cache in caches if cache.out is not None]
    tensors = [cache.x for cache in caches] + [tensor for out in outs for tensor in out.tensors().values()]
    if ops.eager(*tensors):
        return _compress_eagerly(caches)
    if not outs:
        if ops.recorded():
            raise RuntimeError(
                "compress and compress_kv without out= make storage whose size depends on the content: in "
                "torch.compile, a tracer, FakeTensorMode or torch.func.functionalize pass out=SparseKV.preallocate(...)"
            )
        return _compress_eagerly(caches)
    arguments_of = [
        (cache.role, cache.kept, cache.two_of_four, cache.codec, *_memory(out)) for cache, out in zip(caches, outs)
    ]
    if len(caches) == 1:
        _COMPRESS(caches[0].x, *arguments_of[0])
    else:
        (_, *of_keys), (_, *of_values) = arguments_of
        _COMPRESS_KV(caches[0].x, caches[1].x, *of_keys, *of_values)
    return outs


def _compress_eagerly(caches: list[Cache]) -> list[Storage]:
    form = caches[0].tile_format
    if any(cache.tile_format != form for cache in caches):
        return [storage for cache in caches for storage in _compress_eagerly([cache])]
    if form == BITMAP:
        return compress_caches(caches)
    if form == TWO_OF_FOUR_BITMAP:
        return two_of_four_bitmap.compress_caches(caches)
    return two_of_four.compress_caches(caches)


def decompress(kv: SparseKV) -> Tensor:
    """The dense cache (B, Hkv, T, D) that `kv` holds. In "fp16" and "bf16": bit for bit what `prune` gives. In a narrow
    codec: the number of each code times its two scales, rounded once to kv.dtype, but to no infinity. Products multiply
    the value before that rounding.

    Raises TypeError if kv is no SparseKV; RuntimeError if the extension has no kernels for its device.
    """
    storage = storage_of(kv, "kv")
    if ops.eager(*storage.tensors().values()):
        return _decompress(storage)
    _, _, tokens, head_dim = storage.shape
    return _DECOMPRESS(*arguments.pack(storage), storage.role, tokens, head_dim)


# ---- torch.ops.cute_kernels ------------------------------------------------------------------------------------------


def _prune(x: Tensor, kept: int) -> Tensor:
    kernels = compression_kernels(x.device)
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with kernels.launch() as stream:
        return steps.pruned(kernels, checks.plain(x), kept, stream)


def _prune_fake(x: Tensor, kept: int) -> Tensor:
    return x.new_empty(x.shape)


def _memory(out: Storage) -> tuple[list[Tensor], int]:
    """What `_into` makes a preallocated storage of, beside the cache that is to be compressed."""
    assert out.totals is not None
    return [*out.tensors().values(), out.totals], out.max_tile_rows


def _into(
    x: Tensor, role: str, kept: int, two_of_four: bool, codec: str, memory: list[Tensor], max_tile_rows: int
) -> Cache:
    *tensors, totals = memory
    storage = arguments.unpack((tensors, max_tile_rows, codec, BITMAP, x.dtype), role, *x.shape[2:])
    storage.totals = totals
    return Cache(checks.plain(x), role, kept, codec, storage, two_of_four=two_of_four)


def _compress_out(x: Tensor, *of_cache: Any) -> None:
    compress_caches([_into(x, *of_cache)])


def _compress_kv_out(k: Tensor, v: Tensor, *of_caches: Any) -> None:
    half = len(of_caches) // 2
    compress_caches([_into(k, "key", *of_caches[:half]), _into(v, "value", *of_caches[half:])])


def _decompress(storage: Storage) -> Tensor:
    kernels = compression_kernels(storage.device)
    out = torch.empty(storage.shape, dtype=storage.dtype, device=storage.device)
    if out.numel():
        with kernels.launch() as stream:
            kernels.module.decompress(storage.view(), address(out), stream)
    return out


def _decompress_op(*packed: Any) -> Tensor:
    *cache, role, tokens, head_dim = packed
    return _decompress(arguments.unpack(cache, role, tokens, head_dim))


def _decompress_fake(
    cache: list[Tensor],
    max_tile_rows: int,
    codec: str,
    tile_format: str,
    dtype: torch.dtype,
    role: str,
    tokens: int,
    head_dim: int,
) -> Tensor:
    blocks, _, _, channel_order, *_ = cache
    return blocks.new_empty((*channel_order.shape[:2], tokens, head_dim), dtype=dtype)


_PRUNE = ops.define("prune(Tensor x, SymInt kept) -> Tensor", _prune, _prune_fake)
_COMPRESS = ops.define(
    "compress_out(Tensor x, str role, SymInt kept, bool two_of_four, str codec, Tensor(a!)[] out, "
    "SymInt max_tile_rows) -> ()",
    _compress_out,
    ops.no_results,
)
_COMPRESS_KV = ops.define(
    "compress_kv_out(Tensor k, Tensor v, SymInt key_kept, bool key_two_of_four, str key_codec, "
    "Tensor(a!)[] key_out, SymInt key_max_tile_rows, SymInt value_kept, bool value_two_of_four, str value_codec, "
    "Tensor(b!)[] value_out, SymInt value_max_tile_rows) -> ()",
    _compress_kv_out,
    ops.no_results,
)
_DECOMPRESS = ops.define(
    f"decompress({arguments.schema('cache')}, str role, SymInt tokens, SymInt head_dim) -> Tensor",
    _decompress_op,
    _decompress_fake,
)
