"""Random changes of a storage's tensors and metadata; each returns what it did, in words."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import limits
from tests.fuzz.case import Case

EXTREMES = (0, 1, -1, 2, 63, 64, 127, 128, 255, 2**15 - 1, -(2**15), 2**31 - 1, -(2**31), 2**62, -(2**63))
_NUMBERS = (0, 1, -1, 3, 64, 2**31, 2**40, 2**63 - 1, 2**63, 10**400, 0.5, float("nan"))
_WORDS = (
    "",
    "key",
    "value",
    "x",
    "fp16",
    "bf16",
    "fp8",
    "int4",
    "e4m3",
    "float16",
    "bfloat16",
    "bitmap",
    "two_of_four",
    "two_of_four_bitmap",
    b"key",
)
_JUNK = (None, True, *_NUMBERS, *_WORDS, [], [1], [2, 2, 150, 80], (1,), {}, [[]])


def junk(rng: random.Random) -> Any:
    """Anything, and nobody else's."""
    return copy.deepcopy(rng.choice(_JUNK))


# ---- Values, in place ------------------------------------------------------------------------------------------------


def flip_bits(rng: random.Random, x: Tensor) -> str:
    raw = x.view(-1).view(torch.uint8)
    count = rng.choice([1, 1, 1, 2, 16, raw.numel()])
    for _ in range(count):
        raw[rng.randrange(raw.numel())] ^= 1 << rng.randrange(8)
    return f"{count} bits flipped"


def set_one(rng: random.Random, x: Tensor) -> str:
    at, value = rng.randrange(x.numel()), rng.choice(EXTREMES)
    if x.is_floating_point():
        value = rng.choice([float("nan"), float("inf"), -0.0, 1e-7, float(value % 60000)])
    else:
        info = torch.iinfo(x.dtype)
        value = (value - info.min) % (info.max - info.min + 1) + info.min
    x.view(-1)[at] = value
    return f"element {at} set to {value}"


def add_to_one(rng: random.Random, x: Tensor) -> str:
    at, by = rng.randrange(x.numel()), rng.choice([-1, 1, -8, 8])
    x.view(-1)[at] += by if not x.dtype.is_floating_point and x.dtype != torch.uint8 else abs(by)
    return f"{by} added to element {at}"


def swap_two(rng: random.Random, x: Tensor) -> str:
    flat, (a, b) = x.view(-1), (rng.randrange(x.numel()), rng.randrange(x.numel()))
    flat[[a, b]] = flat[[b, a]]
    return f"elements {a} and {b} swapped"


def fill_part(rng: random.Random, x: Tensor) -> str:
    flat, first = x.view(-1), rng.randrange(x.numel())
    end = min(x.numel(), first + rng.choice([1, 32, 64, 1000]))
    kind = rng.choice(["zeros", "ones", "noise"])
    if kind == "noise":
        flat[first:end].view(torch.uint8).random_(0, 256)
    else:
        flat[first:end].view(torch.uint8).fill_(0 if kind == "zeros" else 255)
    return f"elements {first} to {end} filled with {kind}"


def permute(rng: random.Random, x: Tensor) -> str:
    if x.dim():
        x.copy_(x.flip(0) if rng.random() < 0.5 else x.roll(1, -1))
    return "permuted"


IN_PLACE = (flip_bits, flip_bits, set_one, add_to_one, swap_two, fill_part, permute)


def one_tensor_in_place(rng: random.Random, tensors: dict[str, Tensor]) -> str:
    name = rng.choice([name for name, x in tensors.items() if x.numel()])
    return f"{name}: {rng.choice(IN_PLACE)(rng, tensors[name])}"


def of_values(case: Case, state: dict[str, Any]) -> str:
    return one_tensor_in_place(case.rng, tensors_of(state))


def tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: x for name, x in state.items() if is_plain(x) and x.is_contiguous() and (not x.dim() or x.stride(-1) == 1)
    }


def is_plain(x: Any) -> bool:
    """A tensor with data that can be changed one by one."""
    return (
        isinstance(x, Tensor)
        and x.layout == torch.strided
        and x.device.type != "meta"
        and not (x.is_complex() or x.dtype == torch.bool)
    )


# ---- Tensors of another form -----------------------------------------------------------------------------------------


def _at_an_odd_address(rng: random.Random, x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def _repeated(rng: random.Random, x: Tensor) -> Tensor:
    """Rows that share memory: of any size, and no larger than a row."""
    if not x.dim() or not len(x):
        return x
    row = x[:1] if rng.random() < 0.5 else _at_an_odd_address(rng, x)[:1]
    return row.expand(rng.choice([2, 1000, 2**22, 2**28]), *x.shape[1:])


def _strided(rng: random.Random, x: Tensor) -> Tensor:
    """Other elements of the same memory, or the same ones in another order."""
    strides = [rng.choice([0, min(1, stride), stride]) for stride in x.stride()]
    return torch.as_strided(x, x.shape, strides)


FORMS: dict[str, Callable[[random.Random, Tensor], Any]] = {
    "without the last": lambda rng, x: x[:-1] if x.dim() else x,
    "without the first": lambda rng, x: x[1:] if x.dim() else x,
    "empty": lambda rng, x: x[:0] if x.dim() else x,
    "twice": lambda rng, x: torch.cat([x, x]) if x.dim() else x,
    "flat": lambda rng, x: x.flatten(),
    "a dimension more": lambda rng, x: x[None],
    "a dimension less": lambda rng, x: x[0] if x.dim() and len(x) else x,
    "transposed": lambda rng, x: x.transpose(0, -1) if x.dim() > 1 else x,
    "stored the other way": lambda rng, x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "every second": lambda rng, x: x[::2] if x.dim() else x,
    "at an odd address": _at_an_odd_address,
    "repeated": _repeated,
    "other strides": _strided,
    "int64": lambda rng, x: x.long(),
    "int16": lambda rng, x: x.short(),
    "int8": lambda rng, x: x.to(torch.int8),
    "uint8": lambda rng, x: x.to(torch.uint8),
    "float32": lambda rng, x: x.float(),
    "bool": lambda rng, x: x.bool(),
    "complex64": lambda rng, x: x.to(torch.complex64),
    "sparse": lambda rng, x: x.to_sparse(),
    "meta": lambda rng, x: x.to("meta"),
    "a list": lambda rng, x: x.tolist(),
    "an array": lambda rng, x: (
        x.cpu().view(torch.uint8).numpy() if x.is_contiguous() and x.stride()[-1:] == (1,) else None
    ),
    "nothing": lambda rng, x: None,
    "of another class": lambda rng, x: junk(rng),
}


def another_form(rng: random.Random, x: Any) -> tuple[str, Any]:
    if not is_plain(x) or x.numel() > limits.MOST_ELEMENTS:
        return "of another class", junk(rng)
    form = rng.choice([*FORMS])
    return form, FORMS[form](rng, x)


# ---- A state dict ----------------------------------------------------------------------------------------------------


def _of_shape(rng: random.Random, shape: Any) -> Any:
    if not isinstance(shape, (list, tuple)) or not shape:
        return junk(rng)
    sizes, at = list(shape), rng.randrange(len(shape))
    kind = rng.random()
    if kind < 0.5 and isinstance(sizes[at], int):
        sizes[at] = max(-1, sizes[at] + rng.choice([-64, -8, -1, 1, 8, 64]))
    elif kind < 0.7:
        sizes[at] = rng.choice([0, 1, -1, 2**20, 2**31, 2**40, 2**62, 2**63, 1.0, True, None, "8"])
    elif kind < 0.9:
        rng.shuffle(sizes)
    else:
        sizes = sizes[:-1] if rng.random() < 0.5 else [*sizes, 1]
    return sizes


def _of_metadata(rng: random.Random, state: dict[str, Any]) -> str:
    metadata = state.get("metadata")
    if not isinstance(metadata, dict) or not metadata or rng.random() < 0.05:
        state["metadata"] = junk(rng)
        return f"metadata: {state['metadata']!r}"
    name = rng.choice(["shape", *metadata])
    kind = rng.random()
    if kind < 0.05:
        metadata.pop(name, None)
        return f"metadata: no {name}"
    if kind < 0.08:
        metadata[rng.choice(["extra", 3])] = 1
        return "metadata: one entry more"
    value = metadata.get(name)
    if name == "shape" and rng.random() < 0.9:
        metadata[name] = _of_shape(rng, value)
    elif isinstance(value, int) and rng.random() < 0.6:
        metadata[name] = value + rng.choice([-1, 1, 8])
    elif name == "role" and rng.random() < 0.6:
        metadata[name] = "value" if value == "key" else "key"
    elif name in ("dtype", "codec") and rng.random() < 0.6:
        other = {"float16": ("bfloat16", "bf16"), "bfloat16": ("float16", "fp16")}
        metadata["dtype"], metadata["codec"] = other.get(str(metadata.get("dtype")), ("float16", "int8"))
    else:
        metadata[name] = junk(rng)
    return f"metadata: {name} {metadata.get(name)!r}"


def of_state(case: Case, state: dict[str, Any]) -> str:
    rng, kind = case.rng, case.rng.random()
    tensors = tensors_of(state)
    if kind < 0.45 and any(x.numel() for x in tensors.values()):
        return one_tensor_in_place(rng, tensors)
    if kind < 0.7:
        return _of_metadata(rng, state)
    if kind < 0.73:
        state.pop(rng.choice([*state]), None)
        return "one entry less"
    if kind < 0.75:
        state[rng.choice(["extra", "codec", 1])] = junk(rng)
        return "one entry more"
    if not state:
        return "nothing"
    name = rng.choice([*state])
    form, state[name] = another_form(rng, state[name])
    return f"{name}: {form}"
