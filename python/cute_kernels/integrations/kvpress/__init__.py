"""kvpress: pruning by elements as one of its presses, and a cache that stays compressed behind any of them.

    from kvpress import SnapKVPress
    from cute_kernels.integrations.kvpress import ElementPress, prefill

    cache = prefill(model, context_ids, SnapKVPress(compression_ratio=0.5), sparsity=0.7)
    model.generate(torch.cat([context_ids, question_ids], dim=1), past_key_values=cache)

Serves kvpress 0.5.5 (extra `kvpress`) with Transformers 5.0 to 5.2, the versions that both serve. `ElementPress` writes
zeros into dense caches, for comparison with other presses; `prefill` and `SparseKVPressPipeline` hold what any press
that evicts tokens has left in a `SparseKVCache`, pruned and compressed.
"""

from __future__ import annotations

from cute_kernels.integrations.kvpress._support import check_version

check_version()

from cute_kernels.integrations.kvpress._pipeline import SparseKVPressPipeline
from cute_kernels.integrations.kvpress._prefill import prefill
from cute_kernels.integrations.kvpress._press import ElementPress

__all__ = ["ElementPress", "SparseKVPressPipeline", "prefill"]
