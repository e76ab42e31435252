"""The extension module, with a clear error where it is not built, and how it numbers roles and dtypes."""

from __future__ import annotations

import torch

try:
    from cute_kernels import _C  # type: ignore[attr-defined]
except ImportError as error:
    raise ImportError(
        f"cute_kernels: the extension module cute_kernels._C cannot be imported ({error}). In a checkout, build it "
        "with the same Python: 'make build' or 'python setup.py build_ext --inplace'. Otherwise reinstall the package."
    ) from error

ROLE_CODES = {"key": 0, "value": 1}
DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}

__all__ = ["DTYPE_CODES", "ROLE_CODES", "_C"]
