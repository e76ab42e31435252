"""A step of decoding like the one before, which most are: checked by comparison, launched by one call."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import attention
from cute_kernels._backends import launch
from cute_kernels._cache_storage import CacheStorage
from cute_kernels._extension import _C


class DecodingStep:
    """append of k, v (B, Hkv, n, D), then attend of q (B, Hq, Sq, D), for the first B rows of a cache.

    Made of what a step took that was checked and has run. It serves those tensors that `fits` says are alike, as long as
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
    ) -> None:
        self.rows, self.tokens = range(k.shape[0]), k.shape[2]
        self.factor = factor
        self._shape, self._q_shape = k.shape, q.shape
        self._strides = k.stride(), v.stride(), q.stride()
        self._dtype, self._device = k.dtype, k.device
        self._scale, self._backend, self._name = scale, backend, name
        self._kernels: _C.cuda.Step | None = None
        if name == "cpu":
            return
        windows = storage.windows
        self._kernels = _C.cuda.Step(
            storage.pool._kernel_pool,
            windows._kernel_windows,
            windows._attention_window,
            storage.lengths.data_ptr(),
            k.shape[0],
            k.shape[2],
            k.stride()[:3],
            v.stride()[:3],
            q.stride()[:3],
            q.shape[1],
            q.shape[2],
            factor,
            name,
        )

    def fits(self, k: Tensor, v: Tensor, q: Tensor, scale: float | None, backend: str) -> bool:
        """Whether these are plain tensors that would pass the same checks, and mean the same."""
        dtype, device, (k_strides, v_strides, q_strides) = self._dtype, self._device, self._strides
        return (
            type(k) is type(v) is type(q) is Tensor
            and k.layout is v.layout is q.layout is torch.strided
            and k.dtype is v.dtype is q.dtype is dtype
            and k.shape == v.shape == self._shape
            and q.shape == self._q_shape
            and k.stride() == k_strides
            and v.stride() == v_strides
            and q.stride() == q_strides
            and k.device == v.device == q.device == device
            and not (k.is_neg() or v.is_neg() or q.is_neg())
            and scale == self._scale
            and type(scale) is type(self._scale)
            and backend == self._backend
        )

    def run(self, storage: CacheStorage, k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        """Queues it all on the current stream; (B, Sq, Hq, D)."""
        batch, heads, tokens, head_dim = self._q_shape
        one = tokens == 1  # then heads may trade places with tokens where they lie
        out = q.new_empty(batch, tokens, heads, head_dim) if one else q.new_empty(batch, heads, tokens, head_dim)
        if self._kernels is None:
            storage.append(k, v, None)
            self._attend_on_cpu(storage, q, out.view(self._q_shape))
        else:
            addresses = k.data_ptr(), v.data_ptr(), q.data_ptr(), out.data_ptr()
            launch(self._kernels.run, self._device, *addresses, q.new_empty)
        return out if one else out.transpose(1, 2)

    def _attend_on_cpu(self, storage: CacheStorage, q: Tensor, out: Tensor) -> None:
        attention._attend(
            storage.pool.key_view(),
            storage.pool.value_view(),
            q,
            window=storage.windows._attention_window,
            lengths=storage.lengths,
            scale=self.factor,
            out=out,
            backend=self._name,
        )
