"""Prints the kernels of the built extension; --check compares them with the manifest, --write rewrites it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from profiling import ROOT
from profiling.sass import manifest, rules
from profiling.sass.dump import DumpError, compiler_of, read_kernels
from third_party import BuildError
from third_party.tools import find_cuobjdump


def find_library() -> Path:
    """The extension as it lies in this checkout, not imported: nothing of it needs to run.

    Raises:
        FileNotFoundError: it is not built.
    """
    libraries = sorted((ROOT / "python" / "cute_kernels").glob("_C.*.so"))
    if not libraries:
        raise FileNotFoundError("the extension is not built: make build, or name a library with --library")
    return libraries[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m profiling.sass", description=__doc__)
    parser.add_argument(
        "--library", type=_file, metavar="FILE", help="a library or cubin (default: the extension in this checkout)"
    )
    parser.add_argument(
        "--name", type=_pattern, default="", metavar="REGEX", help="print only what it finds in 'arch name'"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="print what breaks a rule or moved; 1 if anything does")
    action.add_argument("--write", action="store_true", help="rewrite the manifest")
    args = parser.parse_args(arguments)
    try:
        library, cuobjdump = args.library or find_library(), find_cuobjdump()
        kernels, compiler = read_kernels(library, cuobjdump), compiler_of(library, cuobjdump)
    except (BuildError, DumpError, OSError) as error:
        print(f"sass: {error}", file=sys.stderr)
        return 2
    if not kernels:
        print(f"sass: {library} holds no CUDA kernels", file=sys.stderr)
        return 2
    rows = manifest.table(kernels)
    broken = rules.violations(kernels)
    print(*broken, sep="\n", end="\n" if broken else "")
    if args.write:
        moved = manifest.write(compiler, rows)
        print(f"wrote {len(rows)} kernels of ptxas {compiler} to {manifest.PATH.relative_to(ROOT)}")
        for key in moved:
            print(
                f"{key} had two forms, of which the compiler makes one at random: compile it again until --check "
                f"reports another, and enter that as '{key}{manifest.OTHER_FORM}'"
            )
    elif args.check:
        expected_compiler, expected = manifest.load()
        if compiler != expected_compiler:
            print(f"ptxas {compiler}: the numbers of the manifest are those of {expected_compiler}, not compared")
            return 1 if broken else 0
        moved = manifest.differences(expected, rows)
        print(*moved, sep="\n", end="\n" if moved else "")
        if moved:
            print(f"if that is meant: {manifest.REWRITE}")
        return 1 if broken or moved else 0
    else:
        for key, row in sorted(rows.items()):
            if args.name.search(key):
                print(key, *(f"{name} {value}" for name, value in row.items()), sep="  ")
    return 1 if broken else 0


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no regular expression: {error}") from None


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


if __name__ == "__main__":
    sys.exit(main())
