"""Wrong arguments: of another class, beyond the range, and tensors that differ from the right one in one way."""

from __future__ import annotations

import fractions
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import cute_kernels as ck
from tests.fuzz import limits
from tests.fuzz.case import Case

NUMBERS = (0, 1, -1, 2, 7, 64, 65, 10**6, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, -(2**63), -(2**70), 10**400)
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-45, 1e39, -1e300, float("nan"), float("inf"), float("-inf"))
OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: True,
    lambda: False,
    lambda: 1j,
    lambda: fractions.Fraction(1, 3),
    lambda: np.float32(0.5),
    lambda: np.int64(3),
    lambda: np.array([0.5, 1.0]),
    lambda: np.zeros((2, 2, 70, 16), dtype=np.float16),
    lambda: "",
    lambda: "x",
    lambda: "key",
    lambda: "value",
    lambda: "cpu",
    lambda: "auto",
    lambda: "reference",
    lambda: "sm90",
    lambda: "fp8",
    lambda: "random",
    lambda: "think",
    lambda: "cuda:99",
    lambda: "meta",
    lambda: b"key",
    list,
    tuple,
    dict,
    lambda: [0],
    lambda: [0, 0],
    lambda: [2, 1, 0],
    lambda: [-1],
    lambda: [2**70],
    lambda: [0.5],
    lambda: ["0"],
    lambda: [None],
    lambda: (None, None),
    lambda: ("magnitude", "random"),
    lambda: {"key": 1},
    lambda: {0, 1},
    lambda: range(3),
    lambda: iter([0, 1]),
    lambda: object(),
    lambda: object,
    lambda: print,
    lambda: torch.float32,
    lambda: torch.bfloat16,
    lambda: torch.int8,
    lambda: torch.device("meta"),
    lambda: torch.device("cpu"),
    lambda: torch.tensor(3),
    lambda: torch.tensor(0.5),
    lambda: torch.tensor([0, 1]),
    lambda: torch.tensor([0, 1], dtype=torch.uint8),
    lambda: torch.tensor([True, False]),
    lambda: torch.zeros(0),
    lambda: torch.randn(2, 2, 70, 16).half(),
    lambda: torch.randn(2, 2, 5, 16).bfloat16(),
    lambda: ck.compress(torch.randn(2, 2, 70, 16).half(), role="value", keep=3),
    lambda: ck.compress(torch.randn(2, 2, 70, 16).half(), role="key", codec="fp8"),
    lambda: ck.SparseKV.preallocate((2, 2, 70, 16), role="key", device="cpu"),
    lambda: ck.rules.ThinV(),
    lambda: ck.rules.ChannelMagnitude(7),
)
TENSORS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.float(),
    lambda x: x.double(),
    lambda x: x.bfloat16(),
    lambda x: x.int(),
    lambda x: x.bool(),
    lambda x: x.to(torch.complex64),
    lambda x: x.to(torch.float8_e4m3fn),
    lambda x: x[0],
    lambda x: x[None],
    lambda x: x[:0],
    lambda x: x[:1],
    lambda x: x[..., :0],
    lambda x: x[..., :-1],
    lambda x: x[..., ::2],
    lambda x: x[:, :1] if x.dim() > 1 else x,
    lambda x: x[:, :0] if x.dim() > 1 else x,
    lambda x: torch.cat([x, x]),
    lambda x: torch.cat([x, x], dim=-1),
    lambda x: x.flatten(),
    lambda x: x.transpose(0, -1),
    lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x,
    lambda x: x[:1].expand(x.shape),
    lambda x: x[..., :1].expand(x.shape),
    lambda x: x[:1].expand(2**14, *x.shape[1:]),
    lambda x: x[:1].expand(2**33, *x.shape[1:]),
    lambda x: torch.empty(1, dtype=x.dtype).expand(2, 2, 2**40, 16),
    lambda x: x.flip(-1),
    lambda x: x.to("meta"),
    lambda x: x.to_sparse(),
    lambda x: x.cpu().numpy() if x.dtype != torch.bfloat16 else None,
    lambda x: x.tolist(),
    lambda x: list(x),
    lambda x: torch.full_like(x, float("nan")) if x.is_floating_point() else x - 1,
    lambda x: torch._neg_view(x) if x.is_floating_point() else -x,
    lambda x: torch.nn.Parameter(x) if x.is_floating_point() else x,
    lambda x: torch.empty(0, dtype=x.dtype),
    lambda x: torch.empty((), dtype=x.dtype),
    lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    lambda x: torch.nested.nested_tensor([x, x]),
    lambda x: torch.empty(0, 0, 0, 0, dtype=x.dtype),
    lambda x: FakeTensorMode(allow_non_fake_inputs=True).from_tensor(x),
)


def instead_of(case: Case, value: Any) -> Any:
    """Something else."""
    rng = case.rng
    if isinstance(value, Tensor) and value.numel() <= limits.MOST_ELEMENTS and case.often(0.8):
        try:
            return rng.choice(TENSORS)(value)
        except (RuntimeError, IndexError, TypeError):  # not every tensor can be changed in every way
            return None
    if isinstance(value, (tuple, list)) and value and case.often(0.7):
        items = list(value)
        at = rng.randrange(len(items))
        if case.often(0.3):
            del items[at]
        elif case.often(0.3):
            items.append(items[at])
        else:
            items[at] = instead_of(case, items[at])
        return type(value)(items)
    if isinstance(value, dict) and value and case.often(0.8):
        changed, name = dict(value), rng.choice([*value])
        if case.often(0.2):
            del changed[name]
        else:
            changed[name] = instead_of(case, changed[name])
        return changed
    if isinstance(value, (int, float)) and case.often(0.6):
        return rng.choice([*NUMBERS, *FLOATS])
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(NUMBERS)
    if kind < 0.3:
        return rng.choice(FLOATS)
    return rng.choice(OTHERS)()


def described(value: Any) -> str:
    """Without its elements."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided:
            return f"a tensor of layout {value.layout}"
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{value.dtype} of shape {tuple(value.shape)}, strides {value.stride()}{device}"
    if isinstance(value, (tuple, list)) and any(isinstance(each, Tensor) for each in value):
        return f"{type(value).__name__} of {[described(each) for each in value][:6]}"
    if isinstance(value, dict):
        return str({name: described(each) for name, each in value.items()})
    return repr(value)[:200]
