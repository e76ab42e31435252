"""Writes python/cute_kernels/_C.pyi, the types of the extension module, from the signatures in its docstrings.

`python -m third_party.stubs` after a build in place. A build without CUDA leaves the part of `_C.cuda` as the file has
it. A submodule is a class of static methods there: so one file has them all, and mypy refuses names that they lack.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Union

STUB = Path(__file__).resolve().parents[1] / "python" / "cute_kernels" / "_C.pyi"
MODULE = "cute_kernels._C"
OPTIONAL = "cuda"  # the submodule that only some builds have
HEADER = '''"""The extension module; written by `make stubs`. Pointers are integers, 0 is null."""

from collections.abc import Sequence
'''

# A declaration is a line of the stub; a class or a submodule holds more of them.
Declarations = dict[str, Union[str, "Declarations"]]

_NUMBERS = {"SupportsInt": "int", "SupportsFloat": "float"}


def of_module(module: ModuleType) -> Declarations:
    """What the module has."""
    return {name: _declare(name, value) for name, value in vars(module).items() if not name.startswith("_")}


def of_stub(text: str) -> Declarations:
    """What a stub file says, in the form that `of_module` has."""
    return _read(ast.parse(text).body)


def render(declarations: Declarations) -> str:
    lines = [HEADER]
    for name, entry in declarations.items():
        if isinstance(entry, str):
            lines += [entry, ""]
        else:
            lines += _class(name, entry)
    return "\n".join(lines)


def _class(name: str, members: Declarations, indent: str = "") -> list[str]:
    lines = [f"{indent}class {name}:"]
    for member, entry in members.items():
        if isinstance(entry, str):
            lines += [f"{indent}    {line}" for line in entry.splitlines()]
        else:
            lines += _class(member, entry, indent + "    ")
    return [*lines, ""]


def _declare(name: str, value: object) -> str | Declarations:
    if isinstance(value, ModuleType):
        return {n: _static(_declare(n, v)) for n, v in vars(value).items() if not n.startswith("_")}
    if isinstance(value, type):
        members = {n: v for n, v in vars(value).items() if n == "__init__" or not n.startswith("_")}
        return {n: _member(n, v) for n, v in members.items()}
    if callable(value):
        return _signature(name, value)
    return f"{name}: {_type_of(value)}"


def _member(name: str, value: object) -> str | Declarations:
    if isinstance(value, staticmethod):
        return _static(_signature(name, value.__func__))
    if isinstance(value, property):
        returned = re.search(r"-> (.*)", inspect.getdoc(value.fget) or "")
        return f"@property\ndef {name}(self) -> {_python(returned.group(1)) if returned else 'object'}: ..."
    return _declare(name, value)


def _static(entry: str | Declarations) -> str | Declarations:
    return f"@staticmethod\n{entry}" if isinstance(entry, str) and entry.startswith("def ") else entry


def _signature(name: str, function: object) -> str:
    first = (inspect.getdoc(function) or "").partition("\n")[0]
    if not first.startswith(f"{name}(") or "*args" in first:
        raise ValueError(f"{name}: its docstring begins with no signature: {first!r}")
    # Defaults may depend on the build, and those of objects are no Python: a stub only says that there is one.
    text = re.sub(r" = (?:'[^']*'|\"[^\"]*\"|<[^>]*>|[^,()]+)(?=[,)])", " = ...", first)
    text = re.sub(r"\bself: [\w.]+", "self", text)
    return ast.unparse(ast.parse(f"def {_python(text)}: ..."))


def _python(text: str) -> str:
    """pybind11's spelling of types in that of the stub; of what converts to a number, the number."""
    for accepted, number in _NUMBERS.items():
        text = re.sub(rf"typing\.{accepted}(?: \| typing\.SupportsIndex)?", number, text)
    text = re.sub(r'typing\.Annotated\[((?:[^\[\]]|\[[^\]]*\])*), "FixedSize\(\d+\)"\]', r"\1", text)
    text = re.sub(r"collections\.abc\.(?=Sequence)", "", text)
    return text.replace(f"{MODULE}.", "")


def _type_of(value: object) -> str:
    if isinstance(value, dict):
        kinds = {_type_of(v) for v in value.values()}
        return f"dict[str, {kinds.pop() if len(kinds) == 1 else 'object'}]"
    if isinstance(value, (list, tuple)):
        kinds = {_type_of(v) for v in value} or {"object"}
        inner = kinds.pop() if len(kinds) == 1 else "object"
        return f"list[{inner}]" if isinstance(value, list) else f"tuple[{inner}, ...]"
    return type(value).__name__


def _read(body: list[ast.stmt]) -> Declarations:
    found: Declarations = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = _read(node.body)
        elif isinstance(node, (ast.FunctionDef, ast.AnnAssign)):
            name = node.name if isinstance(node, ast.FunctionDef) else ast.unparse(node.target)
            found[name] = ast.unparse(node)
    return found


def main() -> None:
    # Here, so that reading a stub needs no build.
    from cute_kernels import _C  # noqa: PLC0415

    declarations = of_module(_C)
    if OPTIONAL not in declarations:
        if not STUB.is_file():
            sys.exit(f"{STUB.name} is not there, and this build has no {MODULE}.{OPTIONAL}: build with CUDA")
        declarations[OPTIONAL] = of_stub(STUB.read_text(encoding="utf-8"))[OPTIONAL]
    declarations[OPTIONAL] = declarations.pop(OPTIONAL)  # last, from whichever build
    STUB.write_text(render(declarations), encoding="utf-8")


if __name__ == "__main__":
    main()
