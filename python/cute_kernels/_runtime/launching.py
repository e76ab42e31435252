"""How kernels are called: the extension's functions for a device, and their last argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from cute_kernels._runtime.backends import missing_kernels
from cute_kernels._runtime.extension import _C

_Result = TypeVar("_Result")


def launch(function: Callable[..., _Result], device: torch.device, *arguments: object) -> _Result:
    """function(*arguments, stream) with CUDA device `device` current; stream is its current one.

    Decoding calls this once a kernel, so it does without the context managers of torch.cuda and without making a
    torch.cuda.Stream.
    """
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if device.index == torch._C._cuda_getDevice():
        return function(*arguments, stream)
    with torch.cuda.device(device):
        return function(*arguments, stream)


def address(tensor: Tensor) -> int:
    """The tensor's data pointer. RuntimeError for a tensor that has elements but no data, as under FakeTensorMode."""
    pointer = tensor.data_ptr()
    if pointer == 0 and tensor.numel():
        raise RuntimeError(
            "kernels need tensors with data, and this call met one without: under FakeTensorMode, a transform of "
            "torch.func or a tracer, only what torch.ops.cute_kernels offers can be called"
        )
    return pointer


@dataclass(frozen=True)
class Kernels:
    """The extension's functions for one device."""

    module: Any  # _C.cpu or _C.cuda; some functions are in one of them only, or take other arguments
    device: torch.device

    @contextmanager
    def launch(self) -> Iterator[int]:
        """Makes the device current; gives every kernel function's last argument: threads (cpu) or the stream (cuda)."""
        if self.device.type == "cpu":
            yield torch.get_num_threads()
        else:
            with torch.cuda.device(self.device):
                yield torch.cuda.current_stream(self.device).cuda_stream


@lru_cache(maxsize=64)
def compression_kernels(device: torch.device) -> Kernels:
    """Kernels that prune, compress and decompress on `device`. RuntimeError says what is missing."""
    if missing := missing_kernels(device):
        raise RuntimeError(f"there are no kernels for {device}: {missing}")
    return Kernels(_C.cpu if device.type == "cpu" else _C.cuda, device)
