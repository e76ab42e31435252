"""A step of decoding like the one before, as most are: checked by comparison, launched by one call."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels._attention.problem import launch_problem
from cute_kernels._cache.storage import CacheStorage
from cute_kernels._runtime.extension import _C
from cute_kernels._runtime.launching import launch


class DecodingStep:
    """append of k, v (B, Hkv, n, D), then attend of q (B, Hq, Sq, D), for the first B rows of a cache.

    Made of the tensors of a step that was checked and has run. It serves tensors that `fits` finds alike, as long as
    the cache's storage stays where it is, and where no tile gets full. Holds no memory of the cache.

    scale: as it was passed; factor: what that means. backend: as it was passed; name: what that means, not "reference".
    """

    def __init__(
        self,
        storage: CacheStorage,
        k: Tensor,
        v: Tensor,
        q: Tensor,
        *,
        scale: float | None,
        factor: float,
        backend: str,
        name: str,
        expected: tuple[int, int],
    ) -> None:
        self.expected = expected
        self.rows, self.tokens = range(k.shape[0]), k.shape[2]
        self._shape, self._q_shape = k.shape, q.shape
        self._strides = k.stride(), v.stride(), q.stride()
        self._dtype, self._device = k.dtype, k.device
        self._scale, self._backend, self._name = scale, backend, name
        self._problem = storage.problem(q, factor, expected=expected)
        self._kernels: _C.cuda.DecodingStep | None = None
        if name != "cpu":
            self._kernels = _C.cuda.DecodingStep(
                storage.pool.kernel_pool,
                storage.windows.kernel_windows,
                self._problem,
                storage.lengths.data_ptr(),
                k.stride()[:3],
                v.stride()[:3],
                k.shape[0],
                k.shape[2],
                name,
            )

    def fits(self, k: Tensor, v: Tensor, q: Tensor, scale: float | None, backend: str) -> bool:
        """Whether these are plain tensors that would pass the same checks, and mean the same."""
        dtype, device, (k_strides, v_strides, q_strides) = self._dtype, self._device, self._strides
        return (
            type(k) is type(v) is type(q) is Tensor
            and k.layout is v.layout is q.layout is torch.strided
            and not (k.is_nested or v.is_nested or q.is_nested)
            and k.dtype is v.dtype is q.dtype is dtype
            and k.shape == v.shape == self._shape
            and q.shape == self._q_shape
            and k.stride() == k_strides
            and v.stride() == v_strides
            and q.stride() == q_strides
            and k.device == v.device == q.device == device
            and not (k.is_neg() or v.is_neg() or q.is_neg())
            and type(scale) is type(self._scale)  # first: what arrays compare to is no bool
            and scale == self._scale
            and type(backend) is str
            and backend == self._backend
        )

    def run(self, storage: CacheStorage, k: Tensor, v: Tensor, q: Tensor, out: Tensor) -> None:
        """Queues it all on the current stream. out: the memory of the result, contiguous (B, Hq, Sq, D) or, where Sq
        is 1, (B, Sq, Hq, D)."""
        if self._kernels is None:
            storage.append(k, v, None)
            launch_problem(self._problem, q, out, None, self._name, lengths=storage.lengths)
        else:
            addresses = k.data_ptr(), v.data_ptr(), q.data_ptr(), out.data_ptr()
            launch(self._kernels.run, self._device, *addresses, q.new_empty)
