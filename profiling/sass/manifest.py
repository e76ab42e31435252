"""The committed numbers of every kernel, for one compiler: manifest.json, one line a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from profiling.sass.dump import Kernel

PATH = Path(__file__).with_name("manifest.json")
REWRITE = "python -m profiling.sass --write"

Numbers = dict[str, int]

# Ends the key of a kernel's other form. The compiler's front end (cicc) loads one of a few neighbouring words of shared
# memory twice or not, by chance: two compilations of one source may differ.
OTHER_FORM = " or"


def numbers(kernel: Kernel) -> Numbers:
    """What is compared: registers a thread, static bytes of shared memory, instructions in all and by kind, and in how
    many bytes of code the decoder lies, where there is one."""
    decoder = {"decoder_end": kernel.code.decoder_end} if kernel.code.decoder_end else {}
    return {
        "registers": kernel.registers,
        "shared": kernel.shared,
        "instructions": kernel.code.instructions,
        **decoder,
        **{name: kernel.code.counts[name] for name in sorted(kernel.code.counts)},
    }


def table(kernels: Iterable[Kernel]) -> dict[str, Numbers]:
    """Architecture and name -> numbers. Several files may instantiate a kernel, and the compiler may schedule each
    one differently: those that are alike are one, others are called "#2", "#3" as well, by their numbers."""
    found: dict[str, list[Numbers]] = {}
    for kernel in kernels:
        row = numbers(kernel)
        rows = found.setdefault(kernel.key, [])
        if row not in rows:
            rows.append(row)
    table: dict[str, Numbers] = {}
    for key, rows in found.items():
        for i, row in enumerate(sorted(rows, key=lambda row: sorted(row.items())), start=1):
            table[key if i == 1 else f"{key} #{i}"] = row
    return table


def load(path: Path = PATH) -> tuple[str, dict[str, Numbers]]:
    """(compiler, rows)."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    return manifest["compiler"], manifest["kernels"]


def write(compiler: str, rows: Mapping[str, Numbers], path: Path = PATH) -> list[str]:
    """Rows of architectures that `rows` does not have stay if the compiler is the same, and so do all forms of a kernel
    if it has one of them. Returns the kernels that had two forms and have a third: their next other form is entered by
    hand, once a build has it."""
    kept: dict[str, Numbers] = {}
    moved: list[str] = []
    if path.exists():
        old_compiler, old = load(path)
        if old_compiler == compiler:
            kept = {key: row for key, row in old.items() if _arch(key) not in archs(rows)}
            for key, row in rows.items():
                forms = _forms(old, key)
                if row in forms.values():
                    kept |= forms
                elif key + OTHER_FORM in forms:
                    moved.append(key)
    lines = [f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted({**rows, **kept}.items())]
    text = f'{{\n "compiler": {json.dumps(compiler)},\n "kernels": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")
    return moved


def differences(old: Mapping[str, Numbers], new: Mapping[str, Numbers]) -> list[str]:
    """A line for each kernel that moved, appeared or went; architectures that `new` lacks were not built. `old` may
    have other forms of a kernel, `new` has the one that was built."""
    lines = []
    for key in sorted({key for key in old if not key.endswith(OTHER_FORM)} | new.keys()):
        if key not in new:
            if _arch(key) in archs(new):
                lines.append(f"- {key}: gone from the library")
        elif key not in old:
            if _arch(key) in archs(old):
                lines.append(f"+ {key}: new, {new[key]['registers']} registers")
        elif new[key] not in _forms(old, key).values():
            moved = [
                f"{name} {old[key].get(name, 0)} -> {new[key].get(name, 0)}"
                for name in dict.fromkeys((*old[key], *new[key]))
                if old[key].get(name) != new[key].get(name)
            ]
            lines.append(f"  {key}: {', '.join(moved)}")
    return lines


def _forms(rows: Mapping[str, Numbers], key: str) -> dict[str, Numbers]:
    return {form: rows[form] for form in (key, key + OTHER_FORM) if form in rows}


def archs(rows: Iterable[str]) -> set[str]:
    return {_arch(key) for key in rows}


def _arch(key: str) -> str:
    return key.split(" ", 1)[0]
