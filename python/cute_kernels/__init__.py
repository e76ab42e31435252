"""Kernels over a bitmap-sparse KV cache: prune it, compress it, multiply with it without writing it out decompressed.

    import cute_kernels as ck

    k = ck.compress(keys, role="key", sparsity=0.7)      # keys (B, Hkv, T, D), float16 or bfloat16
    v = ck.compress(values, role="value", sparsity=0.7)
    p = torch.softmax(ck.sparse_qk(q, k, scale=D**-0.5), dim=-1)
    o = ck.sparse_av(p, v)

Preallocated memory is filled again and again without waiting for the device, as CUDA graphs need it:

    k = ck.SparseKV.preallocate(keys.shape, keys.dtype, role="key", sparsity=0.7, device=keys.device)
    ck.compress(keys, role="key", sparsity=0.7, out=k)

Shapes, throughout: B batch, Hq query heads, Hkv KV heads (Hq a multiple of Hkv), Sq query tokens, T cached tokens, D
head dim. The kernels are for inference: a backward pass through a result raises RuntimeError.

The method, per-token magnitude pruning with a bitmap and packed nonzeros, is that of Mustafar (arXiv 2505.22913).
"""

from __future__ import annotations

import sys

__version__ = "0.1.0"  # the one place: the package's metadata and the name of a wheel are read from here

try:
    from cute_kernels import mustafar, paged, rules
    from cute_kernels._runtime.backends import backends
    from cute_kernels.attention import sparse_attention
    from cute_kernels.compression import compress, compress_kv, decompress, prune
    from cute_kernels.kv_cache import KVCache
    from cute_kernels.merging import merge_states
    from cute_kernels.products import sparse_av, sparse_qk
    from cute_kernels.sparse_kv import SparseKV
except (ImportError, OSError):
    # Python imports the package before it runs `python -m cute_kernels.info`, which is to say what is missing.
    if "cute_kernels.info" not in sys.orig_argv:
        raise

__all__ = [
    "KVCache",
    "SparseKV",
    "backends",
    "compress",
    "compress_kv",
    "decompress",
    "merge_states",
    "mustafar",
    "paged",
    "prune",
    "rules",
    "sparse_attention",
    "sparse_av",
    "sparse_qk",
]
