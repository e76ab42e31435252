"""Which backends there are, which of them serves a call, and how its kernels are launched.

reference: plain torch, any device. cpu: vectorised C++. sm80: mma.sync kernels, compute capability 8.x and 9.0.
sm90: kernels for 9.0 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import TypeVar

import torch

from cute_kernels._extension import _C

BACKENDS = ("reference", "cpu", "sm80", "sm90")
OK = "ok"

_Result = TypeVar("_Result")


def backends() -> dict[str, str]:
    """Backend -> "ok", or why it cannot serve a call, for the current CUDA device if there is one."""
    return {name: _status(name, None) for name in BACKENDS}


def check_name(backend: str) -> str:
    """Raises TypeError if backend is no str, ValueError for an unknown name."""
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a str, got {type(backend).__name__}")
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, ('auto', *BACKENDS)))}, got {backend!r}")
    return backend


@lru_cache(maxsize=64)
def resolve(backend: str, device: torch.device) -> str:
    """The backend that serves a call on `device`, one of BACKENDS.

    backend: a name that `check_name` passed. "auto" takes "cpu" on the CPU, "sm80" on compute capability 8.x and "sm90"
        on 9.0. Any other name is taken as it is; "sm80" runs on 9.0 too.

    Raises RuntimeError, saying what is missing, if that backend cannot serve tensors on `device`. Nothing else is tried
    in its place.
    """
    name = _automatic(device) if backend == "auto" else backend
    if name == "reference":
        return name
    expected = "cpu" if name == "cpu" else "cuda"
    if device.type != expected:
        raise RuntimeError(f"backend '{name}' takes tensors on a {expected} device, these are on {device}")
    status = _status(name, device)
    if status != OK:
        raise RuntimeError(f"backend '{name}' cannot serve this call: {status}")
    return name


def launch(function: Callable[..., _Result], device: torch.device, *arguments: object) -> _Result:
    """function(*arguments, stream) with a CUDA device current and its current stream, which it queues work on.

    What decoding calls: without the context managers of torch.cuda and a torch.cuda.Stream made for every call.
    """
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    if device.index == torch._C._cuda_getDevice():
        return function(*arguments, stream)
    with torch.cuda.device(device):
        return function(*arguments, stream)


@dataclass(frozen=True)
class Kernels:
    """The extension's functions for one device."""

    module: ModuleType
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
    if device.type == "cpu":
        return Kernels(_C.cpu, device)
    status = _cuda_status(device) or _arch_status(device)
    if status:
        raise RuntimeError(f"there are no kernels for {device}: {status}")
    return Kernels(_C.cuda, device)


def _automatic(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    if _cuda_status(device):
        return "sm80"  # whose status says what is missing
    return "sm90" if _capability(device) == (9, 0) else "sm80"


def _status(name: str, device: torch.device | None) -> str:
    if name in ("reference", "cpu"):
        return OK
    return _cuda_status(device) or _product_status(name, device) or _arch_status(device) or OK


def _cuda_status(device: torch.device | None) -> str:
    """What is missing for any CUDA kernel; empty: nothing."""
    if not hasattr(_C, "cuda"):
        return "extension built without CUDA (no nvcc at build time, or CUTE_KERNELS_CUDA=0)"
    if not torch.cuda.is_available():
        return "no CUDA device" + (" (this PyTorch was built without CUDA)" if torch.version.cuda is None else "")
    return ""


def _product_status(name: str, device: torch.device | None) -> str:
    major, minor = _capability(device)
    if name == "sm90":
        if (major, minor) != (9, 0):
            return f"device has compute capability {major}.{minor}, needs 9.0"
        if "sm90" not in _C.cuda.BACKENDS:
            return "extension built without sm_90a kernels (TORCH_CUDA_ARCH_LIST without 9.0a)"
    elif name not in _C.cuda.BACKENDS:
        return f"extension built without {name} kernels"
    elif not (major == 8 or (major, minor) == (9, 0)):
        return f"device has compute capability {major}.{minor}, needs 8.x or 9.0"
    return ""


def _arch_status(device: torch.device | None) -> str:
    capability = _capability(device)
    archs = _C.build_info()["archs"]
    if not any(_runs_on(arch, capability) for arch in archs):
        major, minor = capability
        return f"extension built without kernels for compute capability {major}.{minor} (built for {', '.join(archs)})"
    return ""


def _runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Machine code runs on its own major version from its minor version up, for 9.0a, its PTX too, on 9.0 alone; other
    PTX on all later."""
    number = arch.removesuffix("+PTX").removesuffix("a")
    major, minor = (int(part) for part in number.split("."))
    if arch.removesuffix("+PTX").endswith("a"):
        return capability == (major, minor)
    if arch.endswith("+PTX"):
        return capability >= (major, minor)
    return capability[0] == major and capability[1] >= minor


def _capability(device: torch.device | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
