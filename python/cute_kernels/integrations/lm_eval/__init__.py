"""lm-evaluation-harness: tasks scored through a compressed KV cache.

    python -m cute_kernels.integrations.lm_eval run --model cute_kernels \
        --model_args pretrained=FOLDER,sparsity=0.7 --tasks longbench_hotpotqa

The module runs the harness's own command with one model more, `cute_kernels`; importing it registers that model for
`lm_eval.simple_evaluate(model="cute_kernels", ...)`. Serves lm_eval 0.4.12 and 0.4.13 (extra `lm_eval`).
"""

from __future__ import annotations

from cute_kernels.integrations.lm_eval._support import check_version

check_version()

from cute_kernels.integrations.lm_eval._model import NAME, SparseKVLM

__all__ = ["NAME", "SparseKVLM"]
