"""torch's scaled_dot_product_attention on the dense cache: a plug-in for each of its GPU backends, one for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiling.cases import Case
from profiling.operations import InputSet
from profiling.peers.base import Peer, Plugin, dense_peer, in_dtypes

_BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def _attention(backend: SDPBackend | None, folded: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Not causal, so query heads of a group may be folded into rows of one head, which reads each KV head once."""
    if folded:
        q = q.view(k.shape[0], k.shape[1], -1, k.shape[3])
    grouped = q.shape[1] != k.shape[1]
    if backend is None:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)


def _build(name: str, case: Case, inputs: InputSet) -> Peer:
    return _in_dtype(name, case, inputs, inputs.dense.dtype)


def _in_dtype(name: str, case: Case, inputs: InputSet, dtype: torch.dtype, prefix: str = "") -> Peer:
    backend = _BACKENDS.get(name)
    forms: dict[str, Callable[..., Tensor]] = {f"{prefix}gqa": partial(_attention, backend, False)}
    if case.load.shape.query_heads != case.load.shape.kv_heads:
        forms[f"{prefix}folded"] = partial(_attention, backend, True)
    q, *caches = (x.to(dtype) for x in (inputs.left, inputs.dense, inputs.dense_values))
    return dense_peer(name, (q, *caches), forms, tuple(caches), out_bytes=q.nbytes)


def _build_on_cpu(case: Case, inputs: InputSet) -> Peer:
    """Which dtype is fastest depends on the CPU's instruction set, so all are tried."""
    return in_dtypes(lambda dtype, name: _in_dtype("sdpa", case, inputs, dtype, f"{name} "), own=inputs.dense.dtype)


PLUGINS = (
    *(Plugin(name, ("attention",), ("cuda",), partial(_build, name)) for name in _BACKENDS),
    Plugin("sdpa", ("attention",), ("cpu",), _build_on_cpu),
)
