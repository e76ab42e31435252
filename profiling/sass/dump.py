"""What cuobjdump says of a library: registers, memory and instructions, kernel by kernel.

Instructions are counted by what they do, not by opcode alone: an HGMMA counts with its shape and the place of its A
operand, and only if it writes registers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from profiling.sass.names import short_name

# Counted by opcode, modifiers dropped.
COUNTED = ("BAR", "IDP", "LDGSTS", "LDL", "LDS", "LDSM", "POPC", "PRMT", "STL", "STS", "UBLKCP", "UTMALDG")

_ARCH = re.compile(r"arch = (\S+)")
_SOURCE = re.compile(r"identifier = (\S+)")
_RESOURCES = re.compile(r"\s*Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_FUNCTION = re.compile(r"\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\S*)\s*(.*?)\s*;")
_HGMMA = re.compile(r"(\w+), (R\d+|gdesc\[\w+\])")  # destination, A
_COMPILER = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+\d)")  # in a note of every cubin
_WAIT_FOR_ALL = "gsb0, 0x0"
_INSTRUCTION_BYTES = 16


class DumpError(RuntimeError):
    """cuobjdump failed; the message is its own."""


@dataclass
class Code:
    """The instructions of one kernel."""

    counts: Counter[str] = field(default_factory=Counter)
    instructions: int = 0
    waited: int = 0  # HGMMAs followed by a wait for all of them
    # Bytes of code up to the end of the last IDP, the decoder's own instruction, or of the last sparse MMA.
    decoder_end: int = 0
    _open: bool = False  # an HGMMA was the last of HGMMAs and waits

    def add(self, address: int, opcode: str, operands: str) -> None:
        name = opcode.split(".")[0]
        self.instructions += name != "NOP"
        if name == "IDP" or opcode.startswith("HMMA.SP"):
            self.decoder_end = address + _INSTRUCTION_BYTES
        if name in COUNTED:
            self.counts[name] += 1
        elif name == "HMMA":
            self.counts[opcode] += 1
        elif name == "HGMMA":
            match = _HGMMA.match(operands)
            if match and match[1] != "RZ":
                self.counts[f"{opcode}.{'RS' if match[2].startswith('R') else 'SS'}"] += 1
            self.counts["HGMMA"] += 1
            self._open = True
        elif opcode == "WARPGROUP.DEPBAR.LE" and operands == _WAIT_FOR_ALL:
            self.waited += self._open
            self._open = False

    @property
    def serialized(self) -> bool:
        """Whether every HGMMA is waited for alone: what ptxas does where it reports C75xx."""
        return self.counts["HGMMA"] > 1 and self.waited == self.counts["HGMMA"]


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture."""

    name: str
    arch: str  # "sm_90a"
    source: str  # the .cu file, as nvcc was given it
    registers: int  # a thread
    stack: int  # bytes a thread
    local: int  # bytes a thread
    shared: int  # static bytes a CTA; from 9.0 on with the 1024 that the system takes
    code: Code

    @property
    def key(self) -> str:
        return f"{self.arch} {self.name}"


def read_kernels(library: Path, cuobjdump: Path) -> list[Kernel]:
    """Every kernel of a library, in the library's order.

    Raises:
        DumpError: cuobjdump failed.
    """
    codes = dict(parse_code(_lines(cuobjdump, "-sass", library)))
    kernels = []
    for arch, source, symbol, resources in parse_resources("".join(_lines(cuobjdump, "-res-usage", library))):
        registers, stack, shared, local = resources
        kernels.append(
            Kernel(short_name(symbol), arch, source, registers, stack, local, shared, codes.get((arch, symbol), Code()))
        )
    return kernels


def compiler_of(library: Path, cuobjdump: Path) -> str:
    """ptxas' version, "13.0.88"; "unknown" if the library does not say, several versions separated by commas."""
    found = set()
    with tempfile.TemporaryDirectory() as folder:
        for _ in _lines(cuobjdump.absolute(), "-xelf", "all", library.absolute(), folder=folder):
            pass
        for cubin in Path(folder).iterdir():
            found.update(match.decode() for match in _COMPILER.findall(cubin.read_bytes()))
    return ",".join(sorted(found)) or "unknown"


def parse_resources(text: str) -> Iterator[tuple[str, str, str, tuple[int, int, int, int]]]:
    """(arch, source, symbol, (registers, stack, shared, local)) from -res-usage."""
    for block in text.split("Fatbin elf code:")[1:]:
        arch, source = _ARCH.search(block), _SOURCE.search(block)
        for symbol, *numbers in _RESOURCES.findall(block):
            yield arch[1] if arch else "", source[1] if source else "", symbol, tuple(int(n) for n in numbers)


def parse_code(lines: Iterable[str]) -> Iterator[tuple[tuple[str, str], Code]]:
    """((arch, symbol), code) from -sass."""
    arch, code = "", None
    for line in lines:
        if code is not None and (match := _INSTRUCTION.match(line)):
            code.add(int(match[1], 16), match[2], match[3])
        elif match := _ARCH.match(line):
            arch = match[1]
        elif match := _FUNCTION.match(line):
            code = Code()
            yield (arch, match[1]), code


def _lines(cuobjdump: Path, *arguments: str | Path, folder: str | None = None) -> Iterator[str]:
    command = [str(cuobjdump), *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder) as process:
            yield from process.stdout
        errors.seek(0)
        error = errors.read().strip()
    # A library without device code is an empty answer, not a failure.
    if process.returncode != 0 and "does not contain device code" not in error:
        raise DumpError(f"{' '.join(command)} failed: {error}")
