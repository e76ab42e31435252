"""A packed attention problem and its launch: the one way from Python to the attention kernels.

A problem holds all that is the same from call to call: both caches, the window, how queries lie, and the options. A
launch adds pointers. Problems and windows hold pointers, too: they are valid as long as the caches' and the window's
tensors stay where they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._attention.packed import PackedQueries
from cute_kernels._runtime.extension import _C
from cute_kernels._runtime.launching import launch


def pack_window(keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> _C.Window:
    """Dense tokens that follow the compressed ones.

    keys, values: (S, Hkv, W, D) without a pending negation. lengths: (S,) int32, contiguous: how many of them count,
        from the first; None: all.
    """
    k_strides, v_strides = keys.stride()[:3], values.stride()[:3]
    address = 0 if lengths is None else lengths.data_ptr()
    return _C.Window(keys.data_ptr(), values.data_ptr(), k_strides, v_strides, keys.shape[2], address)


def pack_problem(
    keys: _C.SparseView,
    values: _C.SparseView,
    window: _C.Window | None,
    q: Tensor,
    *,
    scale: float,
    causal: bool = True,
    num_splits: int = 0,
    expected: tuple[int, int] = (0, 0),
    packed: PackedQueries | None = None,
) -> _C.AttentionProblem:
    """Attention of queries like q (B, Hq, Sq, D); only its shape and strides matter.

    keys, values: both contiguous, or both in pages of one table; S caches. num_splits: 0 lets the kernels choose.
    expected: compressed tokens of the longest of q's sequences, and of all of them together, where launches will pass
        lengths; it decides how work is split, so no more than the last bits of results. (0, 0): not known.
    packed: queries of several sequences in one row of q; launches will pass where each begins.
    """
    sizes, (_, *strides), tokens = q.shape[:3], q.stride()[:3], 0
    row_stride = q.stride()[0]
    if packed is not None:
        sizes, row_stride, tokens = (packed.rows, q.shape[1], packed.most), 0, q.shape[2]
    options = scale, causal, num_splits, expected, tokens
    return _C.AttentionProblem(keys, values, window, sizes, (row_stride, *strides), *options)


def launch_problem(
    problem: _C.AttentionProblem,
    q: Tensor,
    out: Tensor,
    lse: Tensor | None,
    backend: str,
    *,
    sequences: Tensor | None = None,
    lengths: Tensor | None = None,
    query_starts: Tensor | None = None,
    stages_ahead: int = 0,
) -> None:
    """Runs the kernels of "cpu", "sm80" or "sm90" for queries q, which are not empty. Arguments were checked.

    out, lse: (B, Hq, Sq, D) of q's dtype and (B, Hq, Sq) float32, contiguous.
    sequences: (B,) int32, contiguous: the cache that a row of q meets; None: row b meets cache b.
    lengths: (S,) int32, contiguous: how many tokens of each compressed cache count, from the first; None: all.
    query_starts: `PackedQueries.starts`, where the problem was packed with them; (B + 1) for B rows of the batch.
    stages_ahead: depth of the GPU kernels' pipeline, for measurements; 0 lets them choose.
    """
    pointers = (
        q.data_ptr(),
        0 if sequences is None else sequences.data_ptr(),
        0 if lengths is None else lengths.data_ptr(),
        0 if query_starts is None else query_starts.data_ptr(),
        out.data_ptr(),
        0 if lse is None else lse.data_ptr(),
    )
    if backend == "cpu":
        _C.cpu.attention(problem, *pointers, torch.get_num_threads())
    else:
        launch(_C.cuda.attention, q.device, problem, *pointers, q.new_empty, backend, stages_ahead)
