"""What pruning the KV cache does to a model's answers: python -m cute_kernels.eval --help.

Needs Transformers 5 (extra `eval`). The cache is pruned as the method does it (Mustafar, arXiv 2505.22913): a prompt is
prefilled densely, then every token older than the local window is pruned, and what follows reads that cache.

| module | job |
| --- | --- |
| `settings` | what is pruned, by which rule, how much |
| `rounding` | what a narrow codec makes of it |
| `baselines` | what dense caches of few bits make of it: FP8, KIVI, NVFP4 |
| `pruned_cache` | a Transformers cache, dense in memory, whose older tokens are pruned |
| `models` | local model folders, and the cache that a setting asks for |
| `decoding` | prefill, then read the pruned cache: log-likelihoods and greedy answers |
| `perplexity`, `recall`, `benchmarks` | the tasks: a text; needles and key-value lists; LongBench and RULER folders |
| `metrics` | the scores of LongBench and RULER |
| `results` | rows, resumed runs, tables |
"""

from __future__ import annotations

from cute_kernels.eval.settings import DENSE, Setting, grid

__all__ = ["DENSE", "Setting", "grid"]
