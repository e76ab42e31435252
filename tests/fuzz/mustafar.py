"""Caches in the original project's layout, read as they are and corrupted."""

from __future__ import annotations

from typing import Any

import torch

import cute_kernels as ck
from cute_kernels import mustafar
from tests.fuzz import inputs, limits, mutations
from tests.fuzz.case import Case
from tests.fuzz.compare import same_bits
from tests.support import oracle
from tests.support.mustafar_layout import write

_NAMES = ("bitmaps", "counts", "values", "offsets")
_MEBIBYTES = 512


def run(case: Case) -> None:
    rng = case.rng
    sizes = rng.choice([1, 1, 2]), rng.choice([1, 2]), 64 * rng.choice([0, 1, 1, 2]), 64 * rng.choice([1, 1, 2])
    shape = case.note("shape", sizes)
    role, dtype = case.choose("role", ["key", "value"]), case.choose("dtype", inputs.DTYPES)
    x = oracle.prune(inputs.values(case, shape, dtype), rng.choice([None, 1, 20, 64]))
    arrays = _arrays(case, x, role)
    if case.choose("values in one tensor", [True, False]):
        arrays["values"] = torch.cat(arrays["values"])
    options: dict[str, Any] = {"role": role, "shape": list(shape)}
    changes = 0 if case.choose("as they are", [False] * 4 + [True]) else rng.choice([1, 1, 2])
    for i in range(changes):
        case.note(f"mutation {i}", _mutate(case, arrays, options))
    layer = _layer(case, x, arrays, role) if case.choose("in a layer", [False, False, True]) else None
    with limits.memory(_MEBIBYTES):
        try:
            kv = mustafar.read(**arrays, **options) if layer is None else mustafar.read_layer(layer)[role == "value"]
        except (ValueError, TypeError) as error:
            case.require(changes > 0 and len(str(error)) > 10, f"refused: {error!r}")
            return
    kv.validate()
    dense = ck.decompress(kv)
    case.require(dense.shape == kv.shape and kv.nnz == oracle.nonzeros(dense), f"{kv!r}")
    if not changes:
        same_bits(case, dense, torch.where(x == 0, 0.0, x), "read")


def _arrays(case: Case, x: torch.Tensor, role: str) -> dict[str, Any]:
    return {
        name: [each.to(case.device) for each in array] if name == "values" else array.to(case.device)
        for name, array in zip(_NAMES, write(x, role))
    }


def _layer(case: Case, x: torch.Tensor, arrays: dict[str, Any], role: str) -> tuple[Any, ...]:
    """The arrays as keys or values of a layer, beside right ones."""
    batch, kv_heads, tokens, head_dim = x.shape
    window = torch.zeros(batch, kv_heads, 3, head_dim, dtype=x.dtype, device=case.device)
    other = _arrays(case, x, "value" if role == "key" else "key")
    keys, values = (arrays, other) if role == "key" else (other, arrays)
    return tuple(keys.values()), window, tuple(values.values()), window, tokens, tokens + 3


def _mutate(case: Case, arrays: dict[str, Any], options: dict[str, Any]) -> str:
    rng, kind = case.rng, case.rng.random()
    if kind < 0.1:
        name = rng.choice(["role", "shape"])
        options[name] = mutations.junk(rng)
        return f"{name}: {options[name]!r}"
    if kind < 0.2 and isinstance(options["shape"], list) and options["shape"]:
        options["shape"][rng.randrange(len(options["shape"]))] = rng.choice([0, 1, 2, 63, 64, 128, 2**20, 2**62])
        return f"shape: {options['shape']}"
    name = rng.choice(_NAMES)
    array, within = arrays[name], None
    if isinstance(array, list) and array and rng.random() < 0.8:
        within = rng.randrange(len(array))
        array = array[within]
    if isinstance(array, list):
        arrays[name] = rng.choice([array[:-1], array * 2, tuple(array), None, 3])
        return f"{name}: another list"
    if mutations.tensors_of({name: array}) and array.numel() and rng.random() < 0.7:
        return mutations.one_tensor_in_place(rng, {name: array})
    form, changed = mutations.another_form(rng, array)
    if within is None:
        arrays[name] = changed
    else:
        arrays[name][within] = changed
    return f"{name}{'' if within is None else f'[{within}]'}: {form}"
