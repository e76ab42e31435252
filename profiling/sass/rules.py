"""What must hold for every kernel, whatever compiled it.

* No spills and no local memory, in any kernel.
* The products of *_sm80.cu copy with cp.async (LDGSTS) and multiply with mma.sync (HMMA.16816).
* The products for 9.0, which have sm90 in their kernel's or file's name, copy in bulk (UBLKCP, UTMALDG) and multiply
  with WGMMAs of 64 x N x 16 whose A operand is in registers and which ptxas did not serialize (its notes C75xx).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

from profiling.sass.dump import Kernel

PRODUCT = re.compile(r"(\w+::)?sparse_\w+")  # kernels that multiply; those that combine, select or pack are others
HGMMA_SHAPE = re.compile(r"HGMMA\.64x\d+x16\..*\.RS")


def is_product(kernel: Kernel) -> bool:
    return PRODUCT.match(kernel.name) is not None


def is_sm90(kernel: Kernel) -> bool:
    return "sm90" in f"{kernel.name} {PurePath(kernel.source).stem}".lower()


def violations(kernels: Iterable[Kernel]) -> list[str]:
    """A line for each rule that a kernel breaks."""
    return [f"{kernel.key} ({kernel.source}): {line}" for kernel in kernels for line in _broken(kernel)]


def _broken(kernel: Kernel) -> list[str]:
    counts, lines = kernel.code.counts, []
    if not kernel.code.instructions:
        return ["its code was not found in the disassembly"]
    if counts["STL"] or counts["LDL"] or kernel.stack or kernel.local:
        lines.append(f"spills or local memory: {counts['STL']} STL, {counts['LDL']} LDL, {kernel.stack} bytes of "
                     f"stack, {kernel.local} local")
    if is_product(kernel):
        lines += _broken_sm90(kernel) if is_sm90(kernel) else _broken_sm80(kernel)
    return lines


def _broken_sm80(kernel: Kernel) -> list[str]:
    counts, lines = kernel.code.counts, []
    if not counts["LDGSTS"]:
        lines.append("no LDGSTS: cp.async is not what fills its stages")
    if not any(name.startswith("HMMA.16816.F32") for name in counts):
        lines.append("no HMMA.16816.F32")
    return lines


def _broken_sm90(kernel: Kernel) -> list[str]:
    counts, lines = kernel.code.counts, []
    if not counts["UBLKCP"] and not counts["UTMALDG"]:
        lines.append("neither UBLKCP nor UTMALDG: nothing is copied in bulk")
    good = sum(n for name, n in counts.items() if HGMMA_SHAPE.fullmatch(name))
    if not good:
        lines.append("no HGMMA of 64 x N x 16 with A in registers and a result")
    elif good != counts["HGMMA"]:
        lines.append(f"{counts['HGMMA'] - good} of {counts['HGMMA']} HGMMA have another shape, A in shared memory, or "
                     "no result")
    if kernel.code.serialized:
        lines.append("every HGMMA is waited for alone: ptxas serialized them, its notes C75xx say why")
    return lines
