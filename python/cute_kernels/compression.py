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
from cute_kernels._runtime import checks
from cute_kernels._runtime.launching import compression_kernels
from cute_kernels._storage import steps
from cute_kernels._storage.checks import check_preallocated, chosen_codec
from cute_kernels._storage.compressor import Cache, codec_kernels, compress_caches
from cute_kernels._storage.storage import Storage
from cute_kernels.rules import Magnitude, Rule
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

    x: (B, Hkv, T, D) float16 or bfloat16, D a multiple of 8 up to 256, any strides but 1 in the last dimension.
    sparsity: share of every token's D elements to drop, 0 to 1: keeps floor(D * (1 - sparsity) + 1e-6), at least 1.
    keep: how many elements of every token to keep, 1 to D. With neither, every nonzero is kept.
    method: "magnitude", per token: the `keep` largest |x|, ties to the lower channel. NaN is larger than everything.
        Or another rule of `cute_kernels.rules`, by its name or, where it takes inputs, itself.
    role: "key" or "value", for rules that tell them apart.

    Returns a contiguous tensor like x, with +0 for what is dropped and for -0.0.

    Raises TypeError for a wrong class or dtype; ValueError for a wrong shape, stride or range, both sparsity and keep,
    or a rule that does not serve the role or whose inputs do not fit x; RuntimeError if the extension has no kernels
    for x's device.
    """
    rule = rules.resolve(method)
    if role is not None:
        checks.role(role)
    x = checks.dense_cache(x, "x")
    kept = checks.kept_elements(x.shape[3], sparsity, keep)
    kernels = compression_kernels(x.device)
    if kept and not isinstance(rule, Magnitude):
        return rule.prune(x, kept, role)
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with kernels.launch() as stream:
        return steps.pruned(kernels, x, kept, stream)


def compress(
    x: Tensor,
    *,
    role: str,
    sparsity: float | None = None,
    keep: int | None = None,
    method: str | Rule = "magnitude",
    codec: str | None = None,
    out: SparseKV | None = None,
) -> SparseKV:
    """Prunes and compresses a K or V cache.

    x, sparsity, keep, method: as for `prune`. With neither sparsity nor keep, every nonzero of x is stored exactly.
    role: "key" or "value".
    codec: how nonzeros are stored. None: as they are ("fp16" of float16, "bf16" of bfloat16), or as `out` was
        preallocated for. "e4m3" (OCP FP8 E4M3, with backends "cpu" and "reference"): rounded after pruning to the
        nearest of 8 bits, ties to even, beyond 448 to 448, NaN to NaN; what rounds to zero is dropped.
    out: a cache from `SparseKV.preallocate` to fill and return, like x in shape, dtype and device, of the same role
        and codec, and preallocated for at least as many elements a token.

    Any T >= 0; the last tile may be partial. Without `out` the storage has the size that x needs, which takes one
    synchronisation with the device. With `out` there is none, only temporary memory is allocated, from torch's
    allocator, and the call can be captured in a CUDA graph (with method "magnitude"; other rules may synchronise).
    A rule that may keep more than `keep` elements of a token (`Rule.per_token` False) needs an `out` preallocated for
    every nonzero.

    Raises what `prune` raises; TypeError or ValueError for a wrong codec, or if out does not fit x; RuntimeError if
    there are no kernels for the codec on x's device; without out, ValueError if the storage would exceed 2^31 rows of
    128 bytes.
    """
    checks.role(role)
    rule = rules.resolve(method)
    x = checks.dense_cache(x, "x")
    kept = checks.kept_elements(x.shape[3], sparsity, keep)
    memory = None
    if out is not None:
        memory = storage_of(out, "out", role)
        check_preallocated(memory, "out", x, "x", _stored(rule, kept))
    chosen = _codec(codec, "codec", x, memory)
    (storage,) = compress_caches([_cache(x, role, rule, kept, chosen, memory)])
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
    out: tuple[SparseKV, SparseKV] | None = None,
) -> tuple[SparseKV, SparseKV]:
    """Prunes and compresses both caches of a layer, which then share one order of tokens per tile.

    k, v: as x of `compress`, alike in shape, dtype and device.
    sparsity or keep: for both caches. key_keep, value_keep: for one of them, in place of that.
    method: as for `prune`; a tuple of two: one for keys, one for values.
    codec: as for `compress`, for both caches. key_codec, value_codec: for one of them, in place of `codec`.
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
    both = checks.kept_elements(head_dim, sparsity, keep)
    kept_k = both if key_keep is None else checks.kept_elements(head_dim, None, key_keep, "key_keep")
    kept_v = both if value_keep is None else checks.kept_elements(head_dim, None, value_keep, "value_keep")
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
    keys, values = compress_caches(
        [
            _cache(k, "key", key_rule, kept_k, codec_k, memory_k),
            _cache(v, "value", value_rule, kept_v, codec_v, memory_v),
        ]
    )
    return (from_storage(keys), from_storage(values)) if out is None else (out[0], out[1])


def _codec(codec: Any, name: str, x: Tensor, out: Storage | None) -> str:
    """The codec to compress x with, into `out` if there is one. Raises where no kernels on x's device have it."""
    chosen = chosen_codec(codec, name, x.dtype)
    if out is not None:
        if codec is not None and chosen != out.codec:
            raise ValueError(f"{name} must be '{out.codec}', for which out was preallocated, or None, got '{codec}'")
        chosen = out.codec
    codec_kernels(chosen, x.dtype, x.device)
    return chosen


def _stored(rule: Rule, kept: int) -> int:
    """At most how many elements of a token the rule leaves; 0: any number."""
    return kept if rule.per_token else 0


def _cache(x: Tensor, role: str, rule: Rule, kept: int, codec: str, out: Storage | None) -> Cache:
    """What the kernels have to compress: x and how much to keep, or x as the rule leaves it."""
    if kept == 0 or isinstance(rule, Magnitude):
        return Cache(x, role, kept, codec, out)
    stored = 0 if out is None else _stored(rule, kept)  # without out, exactly what the rule left is stored
    return Cache(rule.prune(x, kept, role), role, stored, codec, out)


def decompress(kv: SparseKV) -> Tensor:
    """The dense cache (B, Hkv, T, D) that `kv` holds: bit for bit what `prune` gives, rounded where the codec rounds.

    Raises TypeError if kv is no SparseKV; RuntimeError if the extension has no kernels for its device or codec.
    """
    storage = storage_of(kv, "kv")
    kernels = codec_kernels(storage.codec, storage.dtype, storage.device)
    out = torch.empty(storage.shape, dtype=storage.dtype, device=storage.device)
    if out.numel():
        with kernels.launch() as stream:
            kernels.module.decompress(storage.view(), out.data_ptr(), stream)
    return out
