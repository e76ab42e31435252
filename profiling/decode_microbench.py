"""Builds and runs decode_microbench.cu: python -m profiling.decode_microbench [--help].

Prints, for each scheme, density and number of warps, the elements that one SM decodes a clock from shared memory.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling import ROOT, folders, records
from profiling.command_line import folder_for
from third_party import BuildError
from third_party.cuda import DEFAULT_ARCH_LIST, Arch, Toolkit, find_toolkit, parse_arch_list
from third_party.cutlass import find_cutlass

SOURCE = Path(__file__).with_suffix(".cu")
PROGRAM = folders.SCRATCH / "decode_microbench"
NVCC_FLAGS = ("-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xptxas=--warn-on-spills")


class BenchError(RuntimeError):
    """The micro-benchmark cannot go on; the message says why."""


def build(archs: Sequence[Arch], program: Path = PROGRAM) -> Path:
    """Compiles the micro-benchmark; returns the program.

    Raises:
        BenchError: nvcc or the CUTLASS headers are missing, or nvcc failed.
    """
    toolkit = _toolkit()
    try:
        includes = [ROOT, find_cutlass()]
    except BuildError as error:
        raise BenchError(str(error)) from error
    program.parent.mkdir(parents=True, exist_ok=True)
    command = [
        str(toolkit.nvcc),
        *NVCC_FLAGS,
        *(arch.gencode for arch in archs),
        *(f"-I{path}" for path in includes),
        "-o",
        str(program),
        str(SOURCE),
    ]
    if subprocess.run(command, check=False).returncode != 0:
        raise BenchError("nvcc failed")
    return program


def run(program: Path) -> list[dict[str, Any]]:
    """Runs the program; returns its rows.

    Raises:
        BenchError: there is no usable GPU.
    """
    result = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode not in (0, 1):  # 1: rows, some of them wrong
        raise BenchError("the program failed; it needs a CUDA device of an architecture that it was built for (--arch)")
    return [
        {name: value if name == "scheme" else json.loads(value) for name, value in row.items()}
        for row in csv.DictReader(result.stdout.splitlines())
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.decode_microbench", description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "--arch",
        default=DEFAULT_ARCH_LIST,
        metavar="LIST",
        help="compute capabilities to build for (default: %(default)s)",
    )
    parser.add_argument("--build-only", action="store_true", help="compile and stop: needs nvcc, but no GPU")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="keep the rows; profiling/results/DEVICE/decode.json has the roofline's decoding rates",
    )
    args = parser.parse_args(arguments)
    try:
        archs = parse_arch_list(args.arch, "--arch")
        if args.out is not None:
            folder_for(args.out.parent)  # fails now rather than after the measurements
        program = build(archs)
        if args.build_only:
            print(f"built {program}")
            return 0
        rows = run(program)
    except (BenchError, BuildError, ValueError) as error:
        print(f"decode_microbench: {error}", file=sys.stderr)
        return 2
    print(f"{'scheme':15} {'density':>7} {'warps/SM':>8} {'elements/clk/SM':>15} {'G elements/s':>12}  check")
    for row in rows:
        check = f"{row['wrong']} elements WRONG" if row["wrong"] else "ok"
        print(
            f"{row['scheme']:15} {row['density']:>7.2f} {row['warps']:>8} {row['elements_per_clk_sm']:>15.2f} "
            f"{row['gigaelements_per_s']:>12}  {check}"
        )
    if args.out:
        records.write(args.out, rows, ())
    return 1 if any(row["wrong"] for row in rows) else 0


def _toolkit() -> Toolkit:
    try:
        toolkit = find_toolkit()
    except BuildError as error:
        raise BenchError(str(error)) from error
    if toolkit is None:
        raise BenchError("nvcc not found; set CUDA_HOME to the CUDA toolkit's root")
    return toolkit


if __name__ == "__main__":
    sys.exit(main())
