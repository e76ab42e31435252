"""Random tensors: shapes, patterns of values that are hard for packers and products, and layouts in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.fuzz.case import Case
from tests.support import oracle

HEAD_DIMS = (64, 128, 64, 128, 256, 8, 16, 40, 56, 72, 80, 96, 120, 136, 200, 248)
DTYPES = (torch.float16, torch.bfloat16)
_LONG = 40_000


def tokens(case: Case, most: int = 300) -> int:
    """About the ends of tiles as often as anywhere."""
    rng = case.rng
    kind = rng.random()
    if kind < 0.05:
        return 0
    if kind < 0.5:
        return min(most, max(0, 64 * rng.randint(0, 4) + rng.randint(-1, 1)))
    return rng.randint(1, most)


def cache_shape(case: Case, most_elements: int = 60_000) -> tuple[int, int, int, int]:
    """(B, Hkv, T, D), mostly with so many elements at most, for the oracles' sake."""
    rng = case.rng
    if most_elements >= _LONG and case.often(0.03):  # enough tiles for splits and for rings that turn
        return case.note("shape", (1, rng.choice([1, 2]), rng.randint(1000, 4000), rng.choice([64, 128])))
    head_dim = rng.choice(HEAD_DIMS)
    batch, heads = rng.choice([1, 1, 2, 3]), rng.choice([1, 1, 2, 3, 5])
    if case.often(0.02):
        batch, heads = rng.choice([(0, 2), (2, 0), (0, 0)])
    most = max(1, most_elements // (max(1, batch * heads) * head_dim))
    return case.note("shape", (batch, heads, tokens(case, min(most, 300)), head_dim))


def amount(case: Case, head_dim: int) -> dict[str, float | int]:
    """keep, sparsity or neither, as `compress` takes it."""
    kind = case.rng.random()
    if kind < 0.3:
        return {}
    if kind < 0.5:
        return {"sparsity": case.rng.choice([0.0, 0.5, 0.7, 0.99, 1.0, case.rng.random()])}
    return {"keep": case.rng.choice([1, head_dim // 2, head_dim, case.rng.randint(1, head_dim)])}


def kept(amount: dict[str, float | int], head_dim: int) -> int | None:
    """What an amount means, counted in exact fractions; None: every nonzero."""
    if "keep" in amount:
        return int(amount["keep"])
    if "sparsity" not in amount:
        return None
    return max(1, int(head_dim * (1 - float(amount["sparsity"])) + 1e-6))


# ---- Patterns: from gaussian float32 (B, H, T, D), T and D at least 1 ------------------------------------------------


def _only(x: Tensor, token: Tensor | bool, channel: Tensor | bool) -> Tensor:
    return torch.where(torch.as_tensor(token) & torch.as_tensor(channel), x, 0.0)


def _ids(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(x.shape[2])[:, None], torch.arange(x.shape[3])[None, :]


def one_token(x: Tensor, case: Case) -> Tensor:
    token, _ = _ids(x)
    return _only(x, token == case.rng.randrange(x.shape[2]), True)


def one_channel(x: Tensor, case: Case) -> Tensor:
    _, channel = _ids(x)
    return _only(x, True, channel == case.rng.randrange(x.shape[3]))


def one_element(x: Tensor, case: Case) -> Tensor:
    return one_channel(one_token(x, case), case)


def one_group(x: Tensor, case: Case) -> Tensor:
    """All nonzeros in tokens of one group: few lanes have them."""
    token, _ = _ids(x)
    return _only(x, token % 8 == case.rng.randrange(8), True)


def one_class(x: Tensor, case: Case) -> Tensor:
    _, channel = _ids(x)
    return _only(x, True, channel % 8 == case.rng.randrange(8))


def one_stream(x: Tensor, case: Case) -> Tensor:
    return one_class(one_group(x, case), case)


def one_tile(x: Tensor, case: Case) -> Tensor:
    """Every other tile is empty; plans are made for the dense one."""
    token, _ = _ids(x)
    return _only(x, token // 64 == case.rng.randrange(x.shape[2]) // 64, True)


def rising(x: Tensor, case: Case) -> Tensor:
    """Later tokens and channels have more nonzeros."""
    token, channel = _ids(x)
    return _only(x, (token * 7 + channel * 13) % (x.shape[2] + x.shape[3]) < token + channel, True)


def scattered(x: Tensor, case: Case) -> Tensor:
    return x.masked_fill(torch.rand(x.shape) < case.rng.choice([0.3, 0.9, 0.99]), 0.0)


def ties(x: Tensor, case: Case) -> Tensor:
    return x.round()


def channel_scales(x: Tensor, case: Case) -> Tensor:
    return x * torch.randn(*x.shape[:2], 1, x.shape[3]).exp()


def tiny(x: Tensor, case: Case) -> Tensor:
    """Subnormal in float16."""
    return x * 1e-6


def large(x: Tensor, case: Case) -> Tensor:
    return (x * 2e4).clamp(-6e4, 6e4)


FINITE: dict[str, Callable[[Tensor, Case], Tensor]] = {
    "gaussian": lambda x, case: x,
    "zeros": lambda x, case: torch.zeros_like(x),
    "negative zeros": lambda x, case: torch.where(x > 0.5, x, -0.0),
    "constant": lambda x, case: torch.full_like(x, 0.75),
    **{
        each.__name__.replace("_", " "): each
        for each in (
            one_token,
            one_channel,
            one_element,
            one_group,
            one_class,
            one_stream,
            one_tile,
            rising,
            scattered,
            ties,
            channel_scales,
            tiny,
            large,
        )
    },
}


def with_specials(x: Tensor, case: Case) -> Tensor:
    """A few NaN and infinities."""
    for _ in range(case.rng.randint(1, 4)):
        x.view(-1)[case.rng.randrange(x.numel())] = case.rng.choice([float("nan"), float("inf"), float("-inf")])
    return x


def values(
    case: Case, shape: tuple[int, ...], dtype: torch.dtype, *, name: str = "pattern", finite: bool = False
) -> Tensor:
    """(B, H, T, D) of `dtype` on the CPU, contiguous."""
    pattern = case.choose(name, [*FINITE, *([] if finite else ["with specials", "any bits"])])
    if pattern == "any bits":
        return oracle.random_bits(*shape, dtype=dtype)
    x = torch.randn(shape)
    if not x.numel():
        return x.to(dtype)
    if pattern == "with specials":
        return with_specials(x, case).to(dtype)
    return FINITE[pattern](x, case).to(dtype)


# ---- Layouts ---------------------------------------------------------------------------------------------------------


def laid_out(case: Case, x: Tensor, name: str = "layout") -> Tensor:
    """The same values on the case's device, with other strides, at another offset or with a negation pending."""
    x = x.to(case.device)
    layouts = ["contiguous", "contiguous", "tokens first", "heads last", "cut out", "odd offset", "step", "padded rows"]
    if x.is_floating_point() and bool(x.isfinite().all()):
        layouts.append("negation")
    layout = case.choose(name, layouts)
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "heads last":
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    if layout == "cut out":
        whole = x.new_full((x.shape[0] + 1, x.shape[1] + 2, x.shape[2] + 3, x.shape[3] + 8), 7)
        part = whole[1:, 1:-1, 2:-1, 8:]
        return part.copy_(x)
    if layout == "odd offset":
        return x.new_full((x.numel() + 1,), 7)[1:].view(x.shape).copy_(x)
    if layout == "step":
        return x.new_full((x.shape[0], x.shape[1], 2 * x.shape[2], x.shape[3]), 7)[:, :, ::2].copy_(x)
    if layout == "padded rows":
        return x.new_full((*x.shape[:3], x.shape[3] + 3), 7)[..., : x.shape[3]].copy_(x)
    if layout == "negation":
        return torch._neg_view(-x)
    return x
