"""Which lm_eval is served."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

OLDEST, NEWEST = "0.4.12", "0.4.13"  # both are tested


def check_version() -> None:
    """Raises ImportError where lm_eval or what its Hugging Face models need is missing, or too old; warns of one newer
    than any tested."""
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"cute_kernels.integrations.lm_eval needs lm_eval ({error}): pip install 'cute-kernels[lm_eval]'"
        ) from None
    try:
        found = version("lm_eval")
    except PackageNotFoundError:
        found = "of unknown version"
    check_found(found)


def check_found(found: str) -> None:
    if _numbers(found) < _numbers(OLDEST):
        raise ImportError(
            f"cute_kernels.integrations.lm_eval serves lm_eval {OLDEST} and later, found {found}: pip install "
            "'cute-kernels[lm_eval]'"
        )
    if _numbers(found) > _numbers(NEWEST):
        warnings.warn(
            f"cute_kernels.integrations.lm_eval was tested with lm_eval {OLDEST} to {NEWEST}, found {found}",
            stacklevel=4,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """Of an unknown version: more than any."""
    return tuple(int(part) if part.isdecimal() else 1 << 30 for part in version.split(".")[:3])
