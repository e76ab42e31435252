"""The committed numbers of every kernel, for one compiler: manifest.json, one line a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from profiling.sass.dump import Kernel

PATH = Path(__file__).with_name("manifest.json")
REWRITE = "python -m profiling.sass --write"

Numbers = dict[str, int]

# How far numbers may move with the same source; all others are exact. The compiler's front end orders some choices by
# addresses of its own memory, so a checkout in another folder can have a load, or its arithmetic, repeated.
SLACK = {"instructions": 2, "LDS": 2, "PRMT": 2, "decoder_end": 128}


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


def alike(a: Numbers, b: Numbers) -> bool:
    """Whether the same source may have given both."""
    return all(abs(a.get(name, 0) - b.get(name, 0)) <= SLACK.get(name, 0) for name in {*a, *b})


def table(kernels: Iterable[Kernel]) -> dict[str, Numbers]:
    """Architecture and name -> numbers. Several files may instantiate a kernel, and the compiler may schedule each
    one differently: those that are alike are one, others are called "#2", "#3" as well, by their numbers."""
    found: dict[str, list[Numbers]] = {}
    for kernel in kernels:
        found.setdefault(kernel.key, []).append(numbers(kernel))
    table: dict[str, Numbers] = {}
    for key, rows in found.items():
        distinct: list[Numbers] = []
        for row in sorted(rows, key=lambda row: sorted(row.items())):
            if not any(alike(row, other) for other in distinct):
                distinct.append(row)
        for i, row in enumerate(distinct, start=1):
            table[key if i == 1 else f"{key} #{i}"] = row
    return table


def load(path: Path = PATH) -> tuple[str, dict[str, Numbers]]:
    """(compiler, rows)."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    return manifest["compiler"], manifest["kernels"]


def write(compiler: str, rows: Mapping[str, Numbers], path: Path = PATH) -> None:
    """Rows of architectures that `rows` does not have stay if the compiler is the same."""
    kept: dict[str, Numbers] = {}
    if path.exists():
        old_compiler, old = load(path)
        if old_compiler == compiler:
            kept = {key: row for key, row in old.items() if _arch(key) not in archs(rows)}
    lines = [f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in sorted({**kept, **rows}.items())]
    text = f'{{\n "compiler": {json.dumps(compiler)},\n "kernels": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    path.write_text(text, encoding="utf-8")


def differences(old: Mapping[str, Numbers], new: Mapping[str, Numbers]) -> list[str]:
    """A line for each kernel that moved by more than `alike` allows, appeared or went; architectures that `new` lacks
    were not built."""
    lines = []
    for key in sorted({*old, *new}):
        if key not in new:
            if _arch(key) in archs(new):
                lines.append(f"- {key}: gone from the library")
        elif key not in old:
            if _arch(key) in archs(old):
                lines.append(f"+ {key}: new, {new[key]['registers']} registers")
        elif not alike(old[key], new[key]):
            moved = [
                f"{name} {old[key].get(name, 0)} -> {new[key].get(name, 0)}"
                for name in dict.fromkeys((*old[key], *new[key]))
                if old[key].get(name) != new[key].get(name)
            ]
            lines.append(f"  {key}: {', '.join(moved)}")
    return lines


def archs(rows: Iterable[str]) -> set[str]:
    return {_arch(key) for key in rows}


def _arch(key: str) -> str:
    return key.split(" ", 1)[0]
