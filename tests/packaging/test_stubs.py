"""The stub file of the extension module says what the module has."""

from __future__ import annotations

import ast
import re
from types import ModuleType

import pytest

from cute_kernels import _C
from third_party import stubs

FILE = stubs.of_stub(stubs.STUB.read_text(encoding="utf-8"))
# Before pybind11 3 its docstrings spell types differently; names and arguments are the same.
SPELLS_TYPES = "SupportsInt" in _C.backend_status.__doc__


def flat(declarations: stubs.Declarations, prefix: str = "") -> dict[str, str]:
    """Qualified name -> declaration."""
    found = {}
    for name, entry in declarations.items():
        if isinstance(entry, str):
            found[prefix + name] = entry
        else:
            found |= {prefix + name: "", **flat(entry, f"{prefix}{name}.")}
    return found


def without_types(declaration: str) -> str:
    tree = ast.parse(declaration)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.arg)):
            node.annotation = node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.unparse(tree)


def test_the_stub_has_what_the_module_has():
    module, stub = flat(stubs.of_module(_C)), flat(FILE)
    if not hasattr(_C, stubs.OPTIONAL):
        stub = {name: entry for name, entry in stub.items() if name.split(".")[0] != stubs.OPTIONAL}
    spelled = str if SPELLS_TYPES else without_types
    # On a difference: make stubs.
    assert {name: spelled(entry) for name, entry in stub.items()} == {
        name: spelled(entry) for name, entry in module.items()
    }


def test_every_signature_of_the_module_is_in_the_stub():
    """Read from the docstrings once more, and more crudely: names of functions, and of their arguments in order."""

    def walk(holder: object, stub: stubs.Declarations) -> int:
        functions = 0
        for name in vars(holder):
            if name.startswith("_") and name != "__init__":
                continue
            value = getattr(holder, name)
            if isinstance(value, (ModuleType, type)):
                functions += walk(value, stub[name])
            elif callable(value):
                (signature,) = re.findall(rf"^{name}\((.*)\) -> ", value.__doc__, re.MULTILINE)
                named = [argument for argument in re.findall(r"(?:^|, )(\w+): ", signature) if argument != "self"]
                (function,) = ast.parse(stub[name]).body
                assert [argument.arg for argument in function.args.args if argument.arg != "self"] == named
                functions += 1
        return functions

    assert walk(_C, FILE) > 10


def test_the_stub_covers_cuda():
    cpu, cuda = FILE["cpu"], FILE[stubs.OPTIONAL]
    assert {name for name in cpu if name.startswith("sparse_")} <= set(cuda)
    assert all("stream" in cuda[name] for name in cuda if name.startswith("sparse_"))


def test_what_is_written_is_read_back():
    assert stubs.of_stub(stubs.render(FILE)) == FILE
    assert stubs.of_stub(stubs.render(stubs.of_module(_C))) == stubs.of_module(_C)


def signature(text: str, *, name: str = "f") -> str:
    def function() -> None: ...

    function.__doc__ = text
    return stubs._signature(name, function)


@pytest.mark.parametrize(
    "docstring, declared",
    [
        ("f() -> None", "def f() -> None: ..."),
        ("f(a: typing.SupportsInt | typing.SupportsIndex) -> int\n\nWhat it does", "def f(a: int) -> int: ..."),
        (
            "f(a: typing.SupportsFloat | typing.SupportsIndex, b: bool) -> float",
            "def f(a: float, b: bool) -> float: ...",
        ),
        (
            'f(a: typing.Annotated[collections.abc.Sequence[typing.SupportsInt], "FixedSize(3)"]) -> tuple[int, int]',
            "def f(a: Sequence[int]) -> tuple[int, int]: ...",
        ),
        (
            "f(archs: str = '8.0;9.0a', n: typing.SupportsInt = 0) -> str",
            "def f(archs: str=..., n: int=...) -> str: ...",
        ),
        (
            "f(self: cute_kernels._C.Pool, w: cute_kernels._C.Window | None) -> None",
            "def f(self, w: Window | None) -> None: ...",
        ),
        ("f(w: cute_kernels._C.cuda.Windows) -> None", "def f(w: cuda.Windows) -> None: ..."),
    ],
)
def test_signatures_in_python(docstring, declared):
    assert ast.dump(ast.parse(signature(docstring))) == ast.dump(ast.parse(declared))


@pytest.mark.parametrize("docstring", ["", "No signature", "f(*args, **kwargs)\nOverloaded function.", "g() -> int"])
def test_a_function_without_one_signature_is_refused(docstring):
    with pytest.raises(ValueError, match="no signature"):
        signature(docstring)
