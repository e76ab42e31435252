"""The tables of cute_kernels/common/architectures.def, read by the build before there is an extension module."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from third_party import BuildError

TABLES = Path(__file__).resolve().parents[1] / "cute_kernels" / "common" / "architectures.def"


@dataclass(frozen=True)
class Architecture:
    """A compute capability that the build takes. Fields are those of the table, which says what they mean."""

    name: str
    alias: str
    family: str
    oldest_cuda: str
    by_default: bool
    bulk_copies: bool
    wgmma: bool
    programmatic_launch: bool

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.alias, self.name) if self.alias else (self.name,)


@dataclass(frozen=True)
class Backend:
    """A backend of GPU kernels."""

    name: str
    oldest: str
    newest: str
    architecture: str

    @property
    def suffix(self) -> str:
        """How the names of files end that hold this backend's kernels alone."""
        return f"_{self.name}"

    def compiles_for(self, architecture: str) -> bool:
        return self.architecture in ("", architecture)


def _entries(macro: str, row: type) -> dict:
    text = re.sub(r"//.*|^\s*#.*", "", TABLES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    rows = {}
    for arguments in re.findall(rf"\b{macro}\(([^)]*)\)", text):
        literals = re.sub(r"\b(true|false)\b", lambda word: word.group().capitalize(), arguments)
        try:
            entry = row(*ast.literal_eval(f"({literals},)"))
        except (SyntaxError, TypeError, ValueError) as error:
            raise BuildError(f"{TABLES}: {macro}({arguments}) cannot be read: {error}") from error
        rows[entry.name] = entry
    if not rows:
        raise BuildError(f"{TABLES} has no entry {macro}")
    return rows


ARCHITECTURES: dict[str, Architecture] = _entries("CUTE_KERNELS_ARCHITECTURE", Architecture)  # in ascending order
BACKENDS: dict[str, Backend] = _entries("CUTE_KERNELS_BACKEND", Backend)


def families() -> dict[str, tuple[str, ...]]:
    """Family -> its members, oldest first."""
    names = dict.fromkeys(arch.family for arch in ARCHITECTURES.values())
    return {name: tuple(a.name for a in ARCHITECTURES.values() if a.family == name) for name in names}
