"""Checks of wheels: `python -m third_party.wheels FILE...` fails if one is too large, untagged or links too much."""

from __future__ import annotations

import struct
import sys
import zipfile
from pathlib import Path

from third_party import BuildError

MAX_BYTES = 30 * 10**6
# What every Linux of the tag has. torch, Python and the CUDA runtime are not among them: one wheel serves every torch.
LIBRARIES = frozenset(
    {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "libgcc_s.so.1", "libstdc++.so.6"}
    | {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
)


def needed_libraries(elf: bytes) -> list[str]:
    """The shared libraries that a 64-bit little-endian ELF file asks for, its DT_NEEDED entries.

    Raises:
        BuildError: it is no such file.
    """
    if elf[:6] != b"\x7fELF\x02\x01":
        raise BuildError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    segments = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    dynamic = next(((at, length) for kind, _, at, _, _, length in segments if kind == 2), (0, 0))  # PT_DYNAMIC
    entries = list(struct.iter_unpack("<qQ", elf[dynamic[0] : sum(dynamic)]))
    strings = next((value for tag, value in entries if tag == 5), 0)  # DT_STRTAB, an address
    offset = next(
        (
            at + strings - address
            for kind, _, at, address, _, length in segments
            if kind == 1 and address <= strings < address + length
        ),
        0,
    )  # PT_LOAD
    names = [offset + value for tag, value in entries if tag == 1]  # DT_NEEDED
    return [elf[at : elf.index(b"\0", at)].decode() for at in names]


def check_wheel(wheel: Path) -> str:
    """One line about a wheel that is fit to hand out.

    Raises:
        BuildError: it is larger than `MAX_BYTES`, has no manylinux tag, holds no or several extension modules, or one
            that links more than `LIBRARIES`.
    """
    size = wheel.stat().st_size
    if size > MAX_BYTES:
        raise BuildError(f"{wheel.name} has {size / 1e6:.1f} MB, at most {MAX_BYTES / 1e6:.0f} MB are wanted")
    if "manylinux" not in wheel.name:
        raise BuildError(f"{wheel.name} has no manylinux tag: auditwheel repair gives it one")
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".so")]
        if len(modules) != 1:
            raise BuildError(f"{wheel.name} holds {modules or 'no extension module'}, one module is wanted")
        excess = sorted(set(needed_libraries(archive.read(modules[0]))) - LIBRARIES)
    if excess:
        raise BuildError(f"{wheel.name}: {modules[0]} links {', '.join(excess)}, which users may not have")
    return f"{wheel}: {size / 1e6:.1f} MB"


if __name__ == "__main__":
    try:
        for argument in sys.argv[1:]:
            print(check_wheel(Path(argument)))
    except BuildError as error:
        sys.exit(f"cute_kernels: {error}")
