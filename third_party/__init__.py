"""Where the build finds what it does not ship: the CUTLASS headers, the CUDA toolkit, pybind11 and ninja.

No sources live here. `cutlass` pins CUTLASS and finds its headers, `cuda` finds nvcc and the CUDA headers and reads
TORCH_CUDA_ARCH_LIST, `architectures` reads the library's table of them, `tools` finds pybind11 and ninja,
`wheels` checks a built wheel, `build_wheels` makes one for every Python, `test_wheel` tests one that is installed. Only
the standard library is imported.
"""

from __future__ import annotations


class BuildError(RuntimeError):
    """The build cannot go on; the message says what is missing or wrong, and what to do about it."""
