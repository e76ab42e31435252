"""Pruning and compression: dense K and V to SparseKV, and back.

Method: per-token magnitude pruning with a bitmap and packed nonzeros, after Mustafar (arXiv 2505.22913). The steps run
as kernels, the same on CPU and GPU and bit for bit with the same result: select what is kept, balance the tiles, pack
them. Other pruning rules (`cute_kernels.rules`) choose in torch operations what is handed to the kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import _checks, rules
from cute_kernels._backends import compression_kernels
from cute_kernels._compressor import Cache, compress_caches
from cute_kernels._extension import DTYPE_CODES
from cute_kernels.rules import Magnitude, Rule
from cute_kernels.sparse_kv import SparseKV


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
        _checks.role(role)
    x = _checks.dense_cache(x, "x")
    kept = _checks.kept_elements(x.shape[3], sparsity, keep)
    kernels = compression_kernels(x.device)
    if kept and not isinstance(rule, Magnitude):
        return rule.prune(x, kept, role)
    pruned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with kernels.launch() as stream:
            kernels.module.select(
                x.data_ptr(), x.stride()[:3], *x.shape, DTYPE_CODES[x.dtype], kept, 0, 0, pruned.data_ptr(), stream
            )
    return pruned


def compress(
    x: Tensor,
    *,
    role: str,
    sparsity: float | None = None,
    keep: int | None = None,
    method: str | Rule = "magnitude",
    out: SparseKV | None = None,
) -> SparseKV:
    """Prunes and compresses a K or V cache.

    x, sparsity, keep, method: as for `prune`. With neither sparsity nor keep, every nonzero of x is stored exactly.
    role: "key" or "value".
    out: a cache from `SparseKV.preallocate` to fill and return, like x in shape, dtype and device, of the same role,
        and preallocated for at least as many elements a token.

    Any T >= 0; the last tile may be partial. Without `out` the storage has the size that x needs, which takes one
    synchronisation with the device. With `out` there is none, nothing is allocated but temporary memory from torch's
    allocator, and the call can be captured in a CUDA graph (with method "magnitude": the other rules promise nothing).
    A rule that may keep more than `keep` elements of a token (`Rule.per_token` False) needs an `out` preallocated for
    every nonzero.

    Raises what `prune` raises; TypeError or ValueError if out does not fit x; without out, ValueError if the storage
    would exceed 2^31 rows of 128 bytes.
    """
    _checks.role(role)
    rule = rules.resolve(method)
    x = _checks.dense_cache(x, "x")
    kept = _checks.kept_elements(x.shape[3], sparsity, keep)
    if out is not None:
        _checks.preallocated(out, "out", x, "x", role, _stored(rule, kept))
    return compress_caches([_cache(x, role, rule, kept, out)])[0]


def compress_kv(
    k: Tensor,
    v: Tensor,
    *,
    sparsity: float | None = None,
    keep: int | None = None,
    key_keep: int | None = None,
    value_keep: int | None = None,
    method: str | Rule | tuple[str | Rule, str | Rule] = "magnitude",
    out: tuple[SparseKV, SparseKV] | None = None,
) -> tuple[SparseKV, SparseKV]:
    """Prunes and compresses both caches of a layer, which then share one order of tokens per tile.

    k, v: as x of `compress`, alike in shape, dtype and device.
    sparsity or keep: for both caches. key_keep, value_keep: for one of them, in place of what is said for both.
    method: as for `prune`; a tuple of two: one for keys, one for values.
    out: (keys, values) to fill and return, each as `compress` takes it.

    Returns (keys, values). Raises what `compress` raises; the message says which cache is meant.
    """
    key_rule, value_rule = rules.resolve_pair(method)
    k, v = _checks.dense_cache(k, "k"), _checks.dense_cache(v, "v")
    _checks.dtype(v, "v", (k.dtype,), " like k")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {tuple(k.shape)}, got {tuple(v.shape)}")
    _checks.device(v, "v", k.device, "k")
    head_dim = k.shape[3]
    both = _checks.kept_elements(head_dim, sparsity, keep)
    kept_k = both if key_keep is None else _checks.kept_elements(head_dim, None, key_keep, "key_keep")
    kept_v = both if value_keep is None else _checks.kept_elements(head_dim, None, value_keep, "value_keep")
    out_k, out_v = (None, None) if out is None else _checks.pair(out, "out")
    if out is not None:
        _checks.preallocated(out_k, "out[0]", k, "k", "key", _stored(key_rule, kept_k))
        _checks.preallocated(out_v, "out[1]", v, "v", "value", _stored(value_rule, kept_v))
    keys, values = compress_caches(
        [_cache(k, "key", key_rule, kept_k, out_k), _cache(v, "value", value_rule, kept_v, out_v)]
    )
    return keys, values


def _stored(rule: Rule, kept: int) -> int:
    """At most how many elements of a token the rule leaves; 0: any number."""
    return kept if rule.per_token else 0


def _cache(x: Tensor, role: str, rule: Rule, kept: int, out: SparseKV | None) -> Cache:
    """What the kernels have to compress: x and how much to keep, or x as the rule leaves it."""
    if kept == 0 or isinstance(rule, Magnitude):
        return Cache(x, role, kept, out)
    compression_kernels(x.device)  # an error for want of them comes before any work
    stored = 0 if out is None else _stored(rule, kept)  # exactly what the rule left, where memory can have any size
    return Cache(rule.prune(x, kept, role), role, stored, out)


def decompress(kv: SparseKV) -> Tensor:
    """The dense cache (B, Hkv, T, D) that `kv` holds: bit for bit what `prune` gives.

    Raises TypeError if kv is no SparseKV; RuntimeError if the extension has no kernels for its device.
    """
    _checks.sparse(kv, "kv")
    kernels = compression_kernels(kv.device)
    out = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    if out.numel():
        with kernels.launch() as stream:
            kernels.module.decompress(kv._kernel_view(), out.data_ptr(), stream)
    return out
