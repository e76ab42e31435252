"""The direction of imports and includes: every layer knows the layers below it and no other; no cycles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "python" / "cute_kernels"
LIBRARY = ROOT / "cute_kernels"

# Lower layers first. A module belongs to the layer that names it or its package.
PYTHON_LAYERS = (
    {"_runtime"},
    {"_storage"},
    {"_attention"},
    {"sparse_kv", "rules"},
    {"compression", "products", "attention", "merging", "mustafar"},
    {"_cache"},
    {"kv_cache", "paged"},
    {"distributed"},
    {""},  # the package itself: its public names
    {"integrations", "eval", "info"},
)
LIBRARY_LAYERS = (
    {"common"},
    {"format"},
    {"schedule", "pipeline", "mma"},
    {"reduce"},
    {"ops"},
    {"compress", "cpu"},
    {"dispatch"},
    {"bindings"},
)
OTHERS_NAMES = {"_attn_implementation"}  # of Transformers' configs
EXTRAS = {"kvpress", "lm_eval", "transformers"}  # what modules may import that the package does not require

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}
EXTENSION = "_C"


def level(layers: tuple[set[str], ...], name: str) -> int:
    """The index of the layer of a module or folder."""
    (found,) = [i for i, layer in enumerate(layers) if name in layer]
    return found


def imported(node: ast.stmt) -> Iterator[str]:
    """The package's own modules that a statement imports."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        within = [f"{node.module}.{alias.name}" for alias in node.names]
        own = [name.removeprefix("cute_kernels.") for name in within]
        names = [name if part in MODULES or part == EXTENSION else node.module for name, part in zip(within, own)]
    else:
        return
    for name in names:
        if name == "cute_kernels" or name.startswith("cute_kernels."):
            module = name.removeprefix("cute_kernels").removeprefix(".")
            if module != EXTENSION:
                yield module


def statements(tree: ast.AST, *, types: bool) -> Iterator[ast.stmt]:
    """All statements; types: also those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
            and not types
        ):
            continue
        if isinstance(node, ast.stmt):
            yield node
        yield from statements(node, types=types)


def test_every_module_has_a_layer():
    for name in MODULES:
        level(PYTHON_LAYERS, name.split(".")[0])


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_no_higher_layer(name):
    own = level(PYTHON_LAYERS, name.split(".")[0])
    higher = {
        other
        for node in statements(TREES[name], types=True)
        for other in imported(node)
        if level(PYTHON_LAYERS, other.split(".")[0]) > own
    }
    assert not higher


def test_no_module_imports_itself_by_way_of_others():
    graph = {
        name: {other for node in statements(tree, types=False) for other in imported(node)} - {name}
        for name, tree in TREES.items()
    }
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError


def needs_an_extra(name: str) -> bool:
    """Whether a module cannot be imported without what the package does not require."""
    roots = {
        module.split(".")[0]
        for node in TREES[name].body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for module in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names])
    }
    return bool(roots & EXTRAS) or any(
        needs_an_extra(other) for node in TREES[name].body for other in imported(node) if other != name
    )


@pytest.mark.parametrize("name", MODULES)
def test_functions_import_only_what_needs_an_extra(name):
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    assert all(needs_an_extra(other) for each in functions for node in ast.walk(each) for other in imported(node))


def own_names(tree: ast.AST) -> set[str]:
    """Names that a module gives to its functions, classes and variables, and to their attributes."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            names.add(node.attr)
    return names


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def root(node: ast.AST) -> str:
    """a of a.b.c"""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("name", MODULES)
def test_a_module_reads_no_underscore_name_of_another(name):
    """Modules and packages may have such names: they say that what is inside is the package's own."""
    tree = TREES[name]
    allowed = own_names(tree) | OTHERS_NAMES
    foreign = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not any(imported(node)))
        for alias in node.names
    }
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and not is_self(node.value)
        and root(node) not in foreign
    }
    taken = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cute_kernels")
        for alias in node.names
        if is_private(alias.name)
        and alias.name != EXTENSION
        and f"{node.module}.{alias.name}".removeprefix("cute_kernels.") not in MODULES
    }
    assert not read - allowed and not taken


FOLDERS = sorted(path.name for path in LIBRARY.iterdir() if path.is_dir() and path.name != "__pycache__")


def includes(folder: str) -> set[str]:
    """Folders of the library whose headers a folder's files include."""
    found: set[str] = set()
    for path in (LIBRARY / folder).rglob("*"):
        if path.suffix in (".hpp", ".cpp", ".cu", ".cuh", ".def"):
            found.update(re.findall(r'#include "cute_kernels/(\w+)/', path.read_text()))
    return found - {folder}


def test_every_folder_has_a_layer():
    for folder in FOLDERS:
        level(LIBRARY_LAYERS, folder)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_includes_no_higher_layer(folder):
    own = level(LIBRARY_LAYERS, folder)
    assert not {other for other in includes(folder) if level(LIBRARY_LAYERS, other) > own}


def test_no_folder_includes_itself_by_way_of_others():
    tuple(TopologicalSorter({folder: includes(folder) for folder in FOLDERS}).static_order())
