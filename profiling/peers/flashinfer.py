"""FlashInfer's paged attention, with keys and values in the queries' dtype and in FP8 (e4m3).

Needs the package flashinfer-python (the extra `peers`), which compiles its kernels at the first call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
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
    if fp8 and shape.query_tokens != 1:
        return f"measured with one query token, not {shape.query_tokens}"
    if shape.tokens % PAGE:
        return f"{shape.tokens} tokens are not a multiple of the page of {PAGE}"
    if fp8 and not hasattr(torch, "float8_e4m3fn"):
        return "this torch has no float8_e4m3fn"
    return ""


def _build(name: str, fp8: bool, case: Case, inputs: InputSet) -> Peer:
    """Pages (B*T/PAGE, PAGE, Hkv, D); the scale of FP8 values is 1: they are about N(0, 1)."""
    dtype = torch.float8_e4m3fn if fp8 else inputs.dense.dtype
    keys, values = (_pages(cache, dtype) for cache in (inputs.dense, inputs.dense_values))
    q, forms = _decode(case, inputs, dtype) if case.load.shape.query_tokens == 1 else _prefill(case, inputs, dtype)
    return dense_peer(
        name, (q, keys, values), forms, (keys, values), FP8_TOLERANCE if fp8 else None, out_bytes=q.nbytes
    )


def _decode(case: Case, inputs: InputSet, dtype: torch.dtype) -> tuple[Tensor, dict[str, Callable[..., Tensor]]]:
    """q (B, Hq, D)."""
    import flashinfer

    shape = case.load.shape
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(inputs), "NHD", use_tensor_cores=True)
    heads = shape.query_heads, shape.kv_heads, shape.head_dim
    wrapper.plan(*_page_table(case, inputs), *heads, PAGE, q_data_type=inputs.left.dtype, kv_data_type=dtype)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return wrapper.run(q, (k, v))

    return inputs.left.squeeze(2), {"tensor cores": run}


def _prefill(case: Case, inputs: InputSet, dtype: torch.dtype) -> tuple[Tensor, dict[str, Callable[..., Tensor]]]:
    """q (B*Sq, Hq, D); not causal, like the other peers."""
    import flashinfer

    shape, device = case.load.shape, inputs.dense.device
    queries = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.query_tokens
    heads = shape.query_heads, shape.kv_heads, shape.head_dim

    def form(backend: str) -> Callable[..., Tensor]:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(inputs), "NHD", backend=backend)
        table, dtypes = _page_table(case, inputs), {"q_data_type": inputs.left.dtype, "kv_data_type": dtype}
        wrapper.plan(queries, *table, *heads, PAGE, causal=False, **dtypes)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = wrapper.run(q, (k, v))
            return out.view(shape.batch, shape.query_tokens, *out.shape[1:]).transpose(1, 2)

        return run

    backends = ("fa2", "fa3") if torch.cuda.get_device_capability(device) == (9, 0) else ("fa2",)
    return inputs.left.transpose(1, 2).flatten(0, 1).contiguous(), {backend: form(backend) for backend in backends}


def _workspace(inputs: InputSet) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.dense.device)


def _page_table(case: Case, inputs: InputSet) -> tuple[Tensor, Tensor, Tensor]:
    """First pages of the sequences, their pages, and how many tokens the last one has."""
    batch, pages = case.load.shape.batch, inputs.dense.shape[2] // PAGE
    kind = {"dtype": torch.int32, "device": inputs.dense.device}
    return (
        torch.arange(batch + 1, **kind) * pages,
        torch.arange(batch * pages, **kind),
        torch.full((batch,), PAGE, **kind),
    )


def _pages(cache: Tensor, dtype: torch.dtype) -> Tensor:
    batch, heads, tokens, head_dim = cache.shape
    return cache.to(dtype).transpose(1, 2).reshape(batch * tokens // PAGE, PAGE, heads, head_dim)


PLUGINS = tuple(
    Plugin(name, ("attention",), ("cuda",), partial(_build, name, fp8), partial(_unavailable, fp8))
    for name, fp8 in (("flashinfer", False), ("flashinfer fp8", True))
)
