"""Which backends there are, and which of them serves a call.

reference: plain torch, any device. cpu: vectorised C++. The others run on GPUs: which of them on which device, and
which of them "auto" prefers, the extension says (cute_kernels/common/architectures.def).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from cute_kernels._runtime.extension import _C

BACKENDS = ("reference", "cpu", *_C.BACKENDS)
OK = "ok"


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

    backend: a name that `check_name` passed. "auto" takes "cpu" on the CPU and the newest backend for a GPU's compute
        capability. Any other name is taken as it is.

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


def missing_kernels(device: torch.device) -> str:
    """What is missing for kernels that prune, compress and decompress on `device`; empty: nothing."""
    return "" if device.type == "cpu" else _cuda_status() or _C.build_status(*_capability(device))


def _automatic(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    if _cuda_status():
        return next(iter(_C.BACKENDS))  # whose status says what is missing
    return _C.automatic_backend(*_capability(device))


def _status(name: str, device: torch.device | None) -> str:
    if name in ("reference", "cpu"):
        return OK
    return _cuda_status() or _C.backend_status(name, *_capability(device)) or OK


def _cuda_status() -> str:
    """What is missing for any CUDA kernel; empty: nothing."""
    if not _C.build_info()["cuda"]:
        return _C.build_status(0, 0)  # the same for every device
    if not torch.cuda.is_available():
        return "no CUDA device" + (" (this PyTorch was built without CUDA)" if torch.version.cuda is None else "")
    return ""


def _capability(device: torch.device | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
