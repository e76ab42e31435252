"""A call of sparse_attention like the one before, which in decoding most are: checked by comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels import _attention_checks, _checks
from cute_kernels._backends import launch
from cute_kernels._extension import _C
from cute_kernels.sparse_kv import SparseKV

_STRIDED = torch.strided

_Likeness = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class AttentionCall:
    """What a call was like that was checked and has run; its k keeps the last one.

    It serves arguments that `fits` says are alike, with any window and any `out`. Holds no tensor and no cache.

    options: scale, causal, return_lse, num_splits and backend as they were passed. factor, splits and name: what scale,
        num_splits and backend mean; name is not "reference". q is not empty.
    """

    def __init__(
        self,
        q: Tensor,
        k: SparseKV,
        v: SparseKV,
        seq_lens: Tensor | None,
        options: tuple[Any, ...],
        *,
        factor: float,
        splits: int,
        name: str,
    ) -> None:
        self._keys, self._values = k._kernel_view(), v._kernel_view()
        self._q, self._seq_lens = _likeness(q), None if seq_lens is None else _likeness(seq_lens)
        self._shape, self._strides = tuple(q.shape), q.stride()[:3]
        self._options, self._classes = options, tuple(map(type, options))
        _, self._causal, self._return_lse, _, _ = options
        self._factor, self._splits, self._name = factor, splits, name
        self._window: tuple[Any, _C.Window | None] = None, None  # what the last one was like, and for kernels

    def fits(self, q: Any, k: SparseKV, v: Any, window: Any, seq_lens: Any, options: tuple[Any, ...], out: Any) -> bool:
        """Whether q, k, v, seq_lens and options would pass the same checks, and mean the same, and all tensors are
        plain ones."""
        return (
            isinstance(v, SparseKV)
            and v._view is self._values
            and _alike(q, self._q)
            and options == self._options
            and tuple(map(type, options)) == self._classes
            and (window is None or _plain_window(window))
            and (seq_lens is self._seq_lens is None or _alike(seq_lens, self._seq_lens))
            and (out is None or type(out) is Tensor)
            and k._kernel_view() is self._keys  # which is another one where storage has moved
            and v._kernel_view() is self._values
        )

    def run(
        self,
        q: Tensor,
        k: SparseKV,
        v: SparseKV,
        window: tuple[Tensor, Tensor] | None,
        seq_lens: Tensor | None,
        out: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What sparse_attention does, after the checks that are left to do."""
        kernel_window = None if window is None else self._checked_window(window, k)
        if out is None:
            out = q.new_empty(*self._shape)
        else:
            _checks.output(out, q.shape, q.dtype, q.device)
            _attention_checks.apart(out, q, k, v, *(window or ()))
        if seq_lens is not None:
            if self._name == "cpu":
                _attention_checks.lengths(seq_lens, k.shape[2])
            seq_lens = seq_lens.contiguous()
        batch, q_heads, q_tokens, _ = self._shape
        lse = q.new_empty(batch, q_heads, q_tokens, dtype=torch.float32) if self._return_lse else None
        arguments = (
            self._keys,
            self._values,
            kernel_window,
            q.data_ptr(),
            self._strides,
            batch,
            q_heads,
            q_tokens,
            0,
            0 if seq_lens is None else seq_lens.data_ptr(),
            self._factor,
            self._causal,
            out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            self._splits,
        )
        if self._name == "cpu":
            _C.cpu.sparse_attention(*arguments, torch.get_num_threads())
        else:
            launch(_C.cuda.sparse_attention, q.device, *arguments, q.new_empty, self._name)
        return out if lse is None else (out, lse)

    def _checked_window(self, window: tuple[Tensor, Tensor], k: SparseKV) -> _C.Window | None:
        keys, values = window
        likeness = _likeness(keys), _likeness(values), keys.data_ptr(), values.data_ptr()
        known, made = self._window
        if likeness != known:
            _attention_checks.window(window, k)
            made = kernel_window(keys, values) if keys.shape[2] else None
            self._window = likeness, made
        return made


def kernel_window(keys: Tensor, values: Tensor, lengths: Tensor | None = None) -> _C.Window:
    """Dense tokens as kernels take them; valid as long as the tensors live.

    keys, values: (S, Hkv, W, D) without a pending negation. lengths: (S,) int32, contiguous: how many of them count,
        from the first; None: all.
    """
    k_strides, v_strides = keys.stride()[:3], values.stride()[:3]
    address = 0 if lengths is None else lengths.data_ptr()
    return _C.Window(keys.data_ptr(), values.data_ptr(), k_strides, v_strides, keys.shape[2], address)


def _likeness(x: Tensor) -> _Likeness:
    """All that checks look at in a plain tensor."""
    return x.shape, x.stride(), x.dtype, x.device


def _plain(x: Any) -> bool:
    """Also without a pending negation."""
    return type(x) is Tensor and x.layout is _STRIDED and not x.is_neg()


def _alike(x: Any, likeness: _Likeness | None) -> bool:
    """Whether x is a plain tensor of this likeness, or both are None."""
    if x is None:
        return likeness is None
    return _plain(x) and _likeness(x) == likeness


def _plain_window(window: Any) -> bool:
    return isinstance(window, (tuple, list)) and len(window) == 2 and _plain(window[0]) and _plain(window[1])
