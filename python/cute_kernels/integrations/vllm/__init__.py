"""vLLM's attention over compressed pages (extra `vllm`).

    vllm serve MODEL --attention-backend CUSTOM --block-size 64 \\
        --additional-config '{"cute_kernels": {"sparsity": 0.7}}'

vLLM finds `register` by its entry point and keeps its scheduler, prefix cache, pre-emption and chunked prefill; blocks
hold compressed tiles, so that more of them fit. See docs/serving.md.
"""

from __future__ import annotations

import os

__all__ = ["CPU_VARIABLE", "register"]

CPU_VARIABLE = "CUTE_KERNELS_VLLM_CPU"  # set to 1: take the place of CPU_ATTN, as the CPU platform knows no CUSTOM

_BACKEND = "cute_kernels.integrations.vllm._backend"


def register() -> None:
    """Makes the backend known, in every process of vLLM; it is imported where it is chosen."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{_BACKEND}.SparseKVBackend")
    if os.environ.get(CPU_VARIABLE) == "1":
        register_backend(AttentionBackendEnum.CPU_ATTN, f"{_BACKEND}.SparseKVCPUBackend")
