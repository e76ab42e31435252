"""The command `lm_eval` with the model `cute_kernels`."""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

from cute_kernels.integrations import lm_eval  # noqa: F401  # registers the model

if __name__ == "__main__":
    cli_evaluate()
