"""Which kvpress is served."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

TESTED = "0.5.5"


def check_version() -> None:
    """Raises ImportError where kvpress is missing, too old, or does not import beside the Transformers installed; warns
    of one newer than the tested one."""
    try:
        import kvpress  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"cute_kernels.integrations.kvpress needs kvpress ({error}): pip install 'cute-kernels[kvpress]'"
        ) from None
    try:
        found = version("kvpress")
    except PackageNotFoundError:
        found = "of unknown version"
    check_found(found)


def check_found(found: str) -> None:
    if _numbers(found) < _numbers(TESTED):
        raise ImportError(
            f"cute_kernels.integrations.kvpress serves kvpress {TESTED} and later, found {found}: pip install "
            "'cute-kernels[kvpress]'"
        )
    if found != TESTED:
        warnings.warn(
            f"cute_kernels.integrations.kvpress was tested with kvpress {TESTED}, found {found}", stacklevel=4
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Of an unknown version: more than any."""
    return tuple(int(part) if part.isdecimal() else 1 << 30 for part in version.split(".")[:3])
