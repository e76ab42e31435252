"""Tiles, stages and times from a device's limits: `python -m profiling.tile_model`.

A resource-constrained roofline: candidates that registers, shared memory or latency forbid are dropped, the rest are
timed by the slowest of the resources that they use. `device` holds limits and their sources, `gemm` plans a dense fp16
GEMM, `counts` says what a tile of the sparse products uses, `products` plans and times them, `rows` finds measured
times, `explain` prints the reasoning.
"""
