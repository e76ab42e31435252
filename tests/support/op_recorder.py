"""Which of this package's operations torch is asked for."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """The names of this package's operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cute_kernels":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
