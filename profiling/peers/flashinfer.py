"""FlashInfer's paged decode attention, with keys and values in the queries' dtype and in FP8 (e4m3).

Needs the package flashinfer-python (the extra `peers`), which compiles its kernels at the first call.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
from torch import Tensor

from profiling.cases import Case
from profiling.operations import InputSet
from profiling.peers.base import Peer, Plugin, dense_peer

PAGE = 16  # tokens
WORKSPACE_BYTES = 256 << 20
FP8_TOLERANCE = 0.1  # what rounding a Gaussian cache to e4m3 costs, with a margin


def _unavailable(fp8: bool, case: Case) -> str:
    shape = case.load.shape
    if importlib.util.find_spec("flashinfer") is None:
        return "not installed (pip install 'cute-kernels[peers]' or flashinfer-python)"
    if shape.query_tokens != 1:
        return f"decode takes one query token, not {shape.query_tokens}"
    if shape.tokens % PAGE:
        return f"{shape.tokens} tokens are not a multiple of the page of {PAGE}"
    if fp8 and not hasattr(torch, "float8_e4m3fn"):
        return "this torch has no float8_e4m3fn"
    return ""


def _build(name: str, fp8: bool, case: Case, inputs: InputSet) -> Peer:
    """q (B, Hq, D), pages (B*T/PAGE, PAGE, Hkv, D); the scale of FP8 values is 1: they are about N(0, 1)."""
    import flashinfer

    shape, device = case.load.shape, inputs.dense.device
    dtype = torch.float8_e4m3fn if fp8 else inputs.dense.dtype
    keys, values = (_pages(cache, dtype) for cache in (inputs.dense, inputs.dense_values))
    pages = inputs.dense.shape[2] // PAGE
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * pages,
        torch.arange(shape.batch * pages, dtype=torch.int32, device=device),
        torch.full((shape.batch,), PAGE, dtype=torch.int32, device=device),
        shape.query_heads,
        shape.kv_heads,
        shape.head_dim,
        PAGE,
        q_data_type=inputs.left.dtype,
        kv_data_type=dtype,
    )

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return wrapper.run(q, (k, v))

    q = inputs.left.squeeze(2)
    tolerance = FP8_TOLERANCE if fp8 else None
    return dense_peer(name, (q, keys, values), {"tensor cores": run}, (keys, values), tolerance, out_bytes=q.nbytes)


def _pages(cache: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, head_dim = cache.shape
    return cache.to(dtype).transpose(1, 2).reshape(batch * tokens // PAGE, PAGE, heads, head_dim)


PLUGINS = tuple(
    Plugin(name, ("attention",), ("cuda",), partial(_build, name, fp8), partial(_unavailable, fp8))
    for name, fp8 in (("flashinfer", False), ("flashinfer fp8", True))
)
