"""Dense caches of few bits, against numbers found one by one."""

from __future__ import annotations

import bisect
import itertools
import math

import pytest
import torch

from cute_kernels.eval import arguments, models
from cute_kernels.eval.baselines import BASELINES, head_scale, quantised
from cute_kernels.eval.settings import Setting, grid
from tests.support import oracle

E4M3 = sorted({m * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(8, 16) if m * 2.0 ** (e - 3) <= 448} |
              {m * 2.0**-9 for m in range(8)})  # fmt: skip
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(x: float, numbers: list[float]) -> float:
    """Of ascending numbers from 0 on, whose codes are 0, 1, ...; ties to the even code; saturating; keeps the sign."""
    magnitude = min(abs(x), numbers[-1])
    above = min(bisect.bisect_left(numbers, magnitude), len(numbers) - 1)
    below = max(above - 1, 0)
    down, up = magnitude - numbers[below], numbers[above] - magnitude
    code = above if up < down or (up == down and above % 2 == 0) else below
    return math.copysign(numbers[code], x)


def float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def close(got: torch.Tensor, expected: list[float]) -> None:
    assert torch.allclose(got.double().flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["kivi8", "kivi4", "kivi2", "kivi4-64", "kivi2-64"])
@pytest.mark.parametrize("role", ["key", "value"])
def test_kivi(name, role, rng):
    bits, group = int(name[4]), 64 if name.endswith("-64") else 32
    x = oracle.lognormal_channels(1, 2, 128, 64, dtype=torch.float32) + 0.25
    got = quantised(x, name, role, head_scale(x))
    for head in range(2):
        lines = (x if role == "value" else x.transpose(2, 3))[0, head]
        found = (got if role == "value" else got.transpose(2, 3))[0, head]
        for line, of_line in itertools.product(range(0, lines.shape[0], 7), range(0, lines.shape[1], group)):
            values = lines[line, of_line : of_line + group].tolist()
            zero = float(torch.tensor(min(values)).half())
            extent = float32(max(values) - min(values))  # its rounding may decide that of the scale
            scale = float(torch.tensor(extent / (2**bits - 1)).half())
            codes = [min(max(round((value - zero) / scale), 0), 2**bits - 1) for value in values]
            of_group = found[line, of_line : of_line + group].double()
            exact = torch.tensor([code * scale + zero for code in codes], dtype=torch.float64)
            # float32 may find another side of a tie
            wrong = (of_group - exact).abs() > 1e-5 * exact.abs() + 1e-6
            assert wrong.sum() <= 1 and ((of_group - exact).abs() <= scale * 1.001).all()


def test_e4m3():
    x = torch.cat([torch.randn(1, 1, 200, 8) * 10.0 ** torch.linspace(-4, 1, 200)[:, None], torch.zeros(1, 1, 1, 8)], 2)
    of_head = head_scale(x[:, :, :50])  # what comes later is larger, and saturates
    scale = float(of_head) * 8 / 448
    got = quantised(x, "e4m3", "key", of_head)
    close(got, [nearest(float32(value / scale), E4M3) * scale for value in x.flatten().tolist()])
    assert got.abs().max() == pytest.approx(8 * float(of_head))


def test_nvfp4():
    x = torch.randn(1, 1, 60, 32) * 10.0 ** torch.linspace(-3, 1, 60)[:, None]
    x[0, 0, 0] = 0
    of_head = head_scale(x)
    scale = float(of_head) * 8 / (448 * 6)
    got = quantised(x, "nvfp4", "value", of_head)
    expected = []
    for block in x.flatten().unflatten(0, (-1, 16)).tolist():
        of_block = nearest(float32(max(map(abs, block)) / (6 * scale)), E4M3) * scale
        expected += [nearest(float32(value / of_block), E2M1) * of_block if of_block else 0.0 for value in block]
    close(got, expected)


def test_nvfp4_rounds_ties_to_even_codes():
    x = torch.zeros(1, 1, 1, 16)
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x[..., :8] = torch.tensor([*ties, 6.0])
    x[..., 8:15] = -torch.tensor(ties)
    of_head = torch.full((1, 1, 1, 1), 56.0 * 6)  # the scale of the block is then 1
    want = torch.tensor([0, 1, 1, 2, 2, 4, 4])
    got = quantised(x, "nvfp4", "key", of_head)
    assert torch.equal(got[0, 0, 0, :7], want) and torch.equal(got[0, 0, 0, 8:15], -want) and got[0, 0, 0, 7] == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_baseline(dtype):
    x = (torch.randn(2, 2, 128, 64) * 3).to(dtype)
    errors = {}
    for name, baseline in BASELINES.items():
        for role in ("key", "value"):
            got = quantised(x, name, role, head_scale(x))
            assert got.dtype == dtype and got.shape == x.shape
            zeros = quantised(torch.zeros_like(x), name, role, head_scale(torch.zeros_like(x)))
            assert torch.equal(zeros, torch.zeros_like(x))
            errors[name] = oracle.relative_error(got, x.double())
        assert baseline.value_bits <= baseline.bits <= baseline.value_bits + 1
    assert errors["kivi8"] < 0.01 < errors["e4m3"] < 0.03 < errors["kivi4"] < errors["kivi4-64"] < 0.12
    assert 0.12 < errors["kivi2"] < errors["kivi2-64"] < 0.6
    assert {name: BASELINES[name].bits for name in ("kivi4", "kivi2-64", "nvfp4", "e4m3")} == {
        "kivi4": 5,
        "kivi2-64": 2.5,
        "nvfp4": 4.5,
        "e4m3": 8,
    }


def test_bad_input():
    x = torch.randn(1, 1, 30, 24)
    with pytest.raises(ValueError, match=r"baseline must be one of e4m3, .* got 'fp3'"):
        quantised(x, "fp3", "key", head_scale(x))
    with pytest.raises(ValueError, match="tokens must be a multiple of the group of 32, got 30"):
        quantised(x, "kivi4", "key", head_scale(x))
    with pytest.raises(ValueError, match="head_dim must be a multiple of the group of 32, got 24"):
        quantised(x, "kivi4", "value", head_scale(x))
    with pytest.raises(ValueError, match="codec 'kivi4' is that of a dense cache"):
        Setting(codec="kivi4", key_sparsity=0.5)
    with pytest.raises(ValueError, match="--cache sparse does not store codec 'nvfp4'"):
        models.check([Setting(codec="nvfp4")], "sparse")
    with pytest.raises(SystemExit):
        arguments.parse(["m", "--tasks", "recall", "--codec", "kivi3"])


def test_they_come_once_in_a_grid():
    codecs = arguments.parse(["m", "--tasks", "recall", "--codec", "own,kivi4,int4"]).codec
    names = [setting.name for setting in grid(["magnitude"], ["keys", "both"], [0.5], codecs=codecs)]
    pruned = [f"magnitude-{part}-0.5{codec}" for part in ("keys", "both") for codec in ("", "-int4")]
    assert names == ["dense", "dense-kivi4", *pruned]


def test_a_cache_stores_them_in_groups_of_tokens():
    pytest.importorskip("transformers", reason="needs the extra eval")
    from cute_kernels.eval.pruned_cache import PrunedLayer

    layer = PrunedLayer(Setting(codec="kivi4", window=5))
    k, v = torch.randn(2, 1, 2, 120, 64)
    layer.update(k[:, :, :75], v[:, :, :75])
    for i in range(75, 119):
        keys, values = layer.update(k[:, :, i : i + 1], v[:, :, i : i + 1])
        old = (i - 5) // 32 * 32
        for role, got, x in (("key", keys, k), ("value", values, v)):
            assert torch.equal(got[:, :, :old], quantised(x[:, :, :old], "kivi4", role, head_scale(x)))
            assert torch.equal(got[:, :, old:], x[:, :, old : i + 1])
