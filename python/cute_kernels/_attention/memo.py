"""A call of sparse_attention like the one before, as most calls in decoding are: checked by comparison alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels._attention import checks as attention_checks
from cute_kernels._attention.problem import launch_problem, pack_problem, pack_window
from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C
from cute_kernels._storage.storage import Storage

_STRIDED = torch.strided

_Likeness = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


class AttentionCall:
    """A call that was checked and has run, as a packed problem.

    It serves arguments that `fits` finds alike, with any window and any `out`. Holds no tensor and no cache.

    options: scale, causal, return_lse, num_splits and backend as they were passed. factor, splits and name: what scale,
        num_splits and backend mean; name is not "reference". q is not empty.
    """

    def __init__(
        self,
        q: Tensor,
        keys: Storage,
        values: Storage,
        seq_lens: Tensor | None,
        options: tuple[Any, ...],
        *,
        factor: float,
        splits: int,
        name: str,
    ) -> None:
        self._keys, self._values = keys.view(), values.view()
        self._shape = tuple(q.shape)
        self._q, self._seq_lens = _likeness(q), None if seq_lens is None else _likeness(seq_lens)
        self._options, self._classes = options, tuple(map(type, options))
        _, causal, self._return_lse, _, _ = options
        self._scaling = {"scale": factor, "causal": causal, "num_splits": splits}
        self._name = name
        self._memory: list[checks.Extent] | None = None  # of the caches
        # What the last window was like, and the problem with it.
        self._packed: tuple[Any, _C.AttentionProblem] = None, self._pack(q, None)

    def fits(
        self, q: Any, keys: Storage, values: Storage, window: Any, seq_lens: Any, options: tuple[Any, ...], out: Any
    ) -> bool:
        """Whether these arguments would pass the same checks and mean the same, and all tensors are plain ones."""
        return (
            _alike(q, self._q)
            and tuple(map(type, options)) == self._classes  # first: what arrays compare to is no bool
            and options == self._options
            and (window is None or _plain_window(window))
            and (seq_lens is self._seq_lens is None or _alike(seq_lens, self._seq_lens))
            and (out is None or type(out) is Tensor)
            and keys.has_view(self._keys)  # storage that has moved has another view
            and values.has_view(self._values)
        )

    def run(
        self,
        q: Tensor,
        keys: Storage,
        values: Storage,
        window: tuple[Tensor, Tensor] | None,
        seq_lens: Tensor | None,
        out: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What sparse_attention does, after the checks that are left to do."""
        problem = self._problem(q, window, keys)
        if out is None:
            out = q.new_empty(*self._shape)  # torch takes longer over a torch.Size
        else:
            checks.output(out, q.shape, q.dtype, q.device)
            if self._memory is None:
                self._memory = attention_checks.memory(keys, values)
            k_window, v_window = window or (None, None)
            attention_checks.apart(out, q, self._memory, k_window, v_window, seq_lens)
        if seq_lens is not None:
            if self._name == "cpu":
                attention_checks.lengths(seq_lens, keys.shape[2])
            seq_lens = seq_lens.contiguous()
        lse = q.new_empty(*self._shape[:3], dtype=torch.float32) if self._return_lse else None
        launch_problem(problem, q, out, lse, self._name, lengths=seq_lens)
        return out if lse is None else (out, lse)

    def _problem(self, q: Tensor, window: tuple[Tensor, Tensor] | None, keys: Storage) -> _C.AttentionProblem:
        likeness = None
        if window is not None:
            k, v = window
            likeness = _likeness(k), _likeness(v), k.data_ptr(), v.data_ptr()
        known, problem = self._packed
        if likeness != known:
            attention_checks.window(window, keys)
            problem = self._pack(q, window)
            self._packed = likeness, problem
        return problem

    def _pack(self, q: Tensor, window: tuple[Tensor, Tensor] | None) -> _C.AttentionProblem:
        packed = pack_window(*window) if window is not None and window[0].shape[2] else None
        return pack_problem(self._keys, self._values, packed, q, **self._scaling)


def _likeness(x: Tensor) -> _Likeness:
    """Everything in a plain tensor that checks depend on."""
    return x.shape, x.stride(), x.dtype, x.device


def _plain(x: Any) -> bool:
    """Whether x is a dense torch.Tensor, of no subclass, without a pending negation."""
    return type(x) is Tensor and x.layout is _STRIDED and not x.is_nested and not x.is_neg()


def _alike(x: Any, likeness: _Likeness | None) -> bool:
    """Whether x is a plain tensor of this likeness, or both are None."""
    if x is None:
        return likeness is None
    return _plain(x) and _likeness(x) == likeness


def _plain_window(window: Any) -> bool:
    return isinstance(window, (tuple, list)) and len(window) == 2 and _plain(window[0]) and _plain(window[1])
