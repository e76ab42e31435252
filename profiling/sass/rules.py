"""What must hold for every kernel, whatever compiled it.

* No spills and no local memory, in any kernel.
* A product is of one of the kinds in `KINDS`, by its name. sparse_*_kernel copies with cp.async (LDGSTS) and multiplies
  with mma.sync (HMMA.16816). sparse_*_warps copies in bulk (UBLKCP) and multiplies with mma.sync. sparse_*_warpgroups
  copies in bulk and multiplies with WGMMAs of 64 x N x 16 whose A operand is in registers and which ptxas did not
  serialize (its notes C75xx).
* What copies in bulk takes p of sparse_av by tensor copies (UTMALDG).
* What multiplies tiles of two of four, exactly or at most, attention too, does so by sparse tensor cores
  (HMMA.SP.16832).
* Attention of more than 16 rows multiplies as sparse_*_warpgroups do.
* prefill_kernel copies in bulk and multiplies with WGMMAs of 64 x N x 16, which ptxas did not serialize.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from profiling.sass.dump import Kernel

# Kernels that multiply; those that combine, select or pack are others.
PRODUCT = re.compile(r"(?:\w+::)*(sparse_\w+?)_([a-z]+)(?:<|$)")
KINDS = ("kernel", "warps", "warpgroups")
PREFILL = re.compile(r"(?:\w+::)*prefill_kernel(?:<|$)")
PREFILL_HGMMA_SHAPE = re.compile(r"HGMMA\.64x\d+x16\..*")
HGMMA_SHAPE = re.compile(r"HGMMA\.64x\d+x16\..*\.RS")
WARPGROUP_ATTENTION = re.compile(r"(?:\w+::)*attention_kernel<Traits<\w+,\d+,32\b")


def is_product(kernel: Kernel) -> bool:
    return PRODUCT.match(kernel.name) is not None


def kind(kernel: Kernel) -> str:
    """A product's; most often one of KINDS."""
    return PRODUCT.match(kernel.name)[2]


def is_sm90(kernel: Kernel) -> bool:
    """Whether a product needs compute capability 9.0."""
    return kind(kernel) in ("warps", "warpgroups")


def is_two_of_four(kernel: Kernel) -> bool:
    """Whether it multiplies tiles of two of four, exactly or at most, by sparse tensor cores."""
    return "2of4-" in kernel.name


def violations(kernels: Iterable[Kernel]) -> list[str]:
    """A line for each rule that a kernel breaks."""
    return [f"{kernel.key} ({kernel.source}): {line}" for kernel in kernels for line in _broken(kernel)]


def _broken(kernel: Kernel) -> list[str]:
    counts, lines = kernel.code.counts, []
    if not kernel.code.instructions:
        return ["its code was not found in the disassembly"]
    if counts["STL"] or counts["LDL"] or kernel.stack or kernel.local:
        lines.append(
            f"spills or local memory: {counts['STL']} STL, {counts['LDL']} LDL, {kernel.stack} bytes of "
            f"stack, {kernel.local} local"
        )
    if is_product(kernel):
        lines += _broken_product(kernel)
    elif is_two_of_four(kernel):
        lines += _broken_mma(kernel)
    if WARPGROUP_ATTENTION.match(kernel.name):
        lines += _broken_wgmma(kernel)
    if PREFILL.match(kernel.name):
        lines += _broken_prefill(kernel)
    return lines


def _broken_prefill(kernel: Kernel) -> list[str]:
    counts = kernel.code.counts
    lines = [f"no {name}" for name in ("UBLKCP", "HGMMA") if not counts[name]]
    if sum(n for name, n in counts.items() if PREFILL_HGMMA_SHAPE.fullmatch(name)) != counts["HGMMA"]:
        lines.append("HGMMA of another shape than 64 x N x 16")
    return lines + _broken_serialized(kernel)


def _broken_product(kernel: Kernel) -> list[str]:
    what = kind(kernel)
    if what not in KINDS:
        return [f"no rule is known for products called {what}"]
    lines = _broken_bulk(kernel) if is_sm90(kernel) else []
    if what == "kernel" and not kernel.code.counts["LDGSTS"]:
        lines.append("no LDGSTS: cp.async is not what fills its stages")
    return lines + (_broken_wgmma(kernel) if what == "warpgroups" else _broken_mma(kernel))


def _broken_bulk(kernel: Kernel) -> list[str]:
    counts, lines = kernel.code.counts, []
    if not counts["UBLKCP"]:
        lines.append("no UBLKCP: nothing is copied in bulk")
    if PRODUCT.match(kernel.name)[1] == "sparse_av" and not counts["UTMALDG"]:
        lines.append("no UTMALDG: p is not taken by tensor copies")
    return lines


def _broken_mma(kernel: Kernel) -> list[str]:
    counts, lines = kernel.code.counts, []
    mma = "HMMA.SP.16832.F32" if is_two_of_four(kernel) else "HMMA.16816.F32"
    if not any(name.startswith(mma) for name in counts):
        lines.append(f"no {mma}")
    if counts["HGMMA"]:
        lines.append(f"{counts['HGMMA']} HGMMA where warps multiply")
    return lines


def _broken_wgmma(kernel: Kernel) -> list[str]:
    counts, lines = kernel.code.counts, []
    good = sum(n for name, n in counts.items() if HGMMA_SHAPE.fullmatch(name))
    if not good:
        lines.append("no HGMMA of 64 x N x 16 with A in registers and a result")
    elif good != counts["HGMMA"]:
        lines.append(
            f"{counts['HGMMA'] - good} of {counts['HGMMA']} HGMMA have another shape, A in shared memory, or no result"
        )
    return lines + _broken_serialized(kernel)


def _broken_serialized(kernel: Kernel) -> list[str]:
    if not kernel.code.serialized:
        return []
    return ["every HGMMA is waited for alone: ptxas serialized them, its notes C75xx say why"]
