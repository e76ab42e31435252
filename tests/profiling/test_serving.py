"""KVCache.attend in the sweep, and the heat map of where a compressed cache pays."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from profiling import check, operations, sweep
from profiling.cases import Case, Load, Shape
from profiling.rows import read
from profiling.suites import SUITES


@pytest.mark.parametrize("tokens", [64, 200, 320])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attend_is_measured_beside_dense_attention(tokens, dtype, tmp_path):
    shape = f"2,4,2,1,{tokens},64"
    arguments = ["--op", "attend", "--backend", "cpu", "--shape", shape, "--keep", "20", "--dtype", dtype]
    assert sweep.main([*arguments, "--repeats", "2", "--out", str(tmp_path)]) == 0
    (row,) = read(tmp_path / "sweep.json")
    assert (row.op, row.T, row.peer) == ("attend", tokens, "sdpa")
    assert row.accurate and row.rel_err > 0 and row.ratio


def test_the_oracle_sees_a_cache_that_attends_wrongly(monkeypatch):
    case = Case("attend", "cpu", Load(Shape(2, 4, 2, 1, 200, 64), 20))
    inputs = operations.prepare(case, torch.device("cpu"))
    assert check.relative_error(case, inputs, operations.call(case, inputs)) < check.tolerance(case)
    inputs.cache.crop(inputs.cache.capacity // 2)
    assert check.relative_error(case, inputs, operations.call(case, inputs)) > check.tolerance(case)


def test_bytes_of_a_paged_cache():
    """Tiles in pages at about 20 of 64 kept, the newest 72 tokens dense."""
    case = Case("attend", "cpu", Load(Shape(1, 2, 2, 1, 64 * 9 + 8, 64), 20))
    inputs = operations.prepare(case, torch.device("cpu"))
    dense, window = 2 * inputs.dense.nbytes, 2 * 2 * 72 * 64 * 2
    stored = inputs.cache_bytes - window
    assert inputs.dense.shape[2] == 64 * 9 + 72
    assert 0.35 < stored / (dense - window) < 0.75
    assert inputs.bits_per_element == pytest.approx(16 * inputs.cache_bytes / dense)


def test_copies_have_memory_of_their_own():
    case = Case("attend", "cpu", Load(Shape(1, 2, 2, 1, 200, 64), 20))
    inputs = operations.prepare(case, torch.device("cpu"))
    other = operations.copy_of(case, inputs)
    assert torch.equal(operations.call(case, inputs).clone(), operations.call(case, other))
    other.cache.reset()
    assert int(inputs.cache.lengths[0]) == 264 and other.out.data_ptr() != inputs.out.data_ptr()


def test_the_suite_fits_a_gpu():
    (block,) = SUITES["serving"].blocks("cuda")
    shapes = [load.shape for load in block.loads]
    assert max(shape.elements for shape in shapes) <= 2**31
    assert {shape.batch for shape in shapes} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert {1 << bits for bits in range(8, 18)} < {shape.tokens for shape in shapes}
    assert {shape.head_dim for shape in shapes} == {64, 128, 256}


def test_the_heat_map(tmp_path):
    pytest.importorskip("matplotlib")
    from profiling import ceilings, plots

    arguments = ["--op", "attend", "--op", "sparse_attention", "--backend", "cpu", "--keep", "20", "--repeats", "2"]
    shapes = [part for b in (1, 2) for t in (64, 128) for part in ("--shape", f"{b},4,2,1,{t},64")]
    assert sweep.main([*arguments, *shapes, "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "sweep.json")
    limits = ceilings.ceilings(rows, tmp_path)
    (path,), missing = plots.draw(rows, limits, tmp_path, ["serving"])
    assert path.stat().st_size > 1000 and not missing
    for fewer in ([row for row in rows if row.B == 1], [row for row in rows if row.op != "attend"]):
        paths, (why,) = plots.draw(fewer, limits, tmp_path, ["serving"])
        assert not paths and "--suite serving" in why
    alone = [dataclasses.replace(row, peer="", peer_us=None) for row in rows]
    assert not plots.draw(alone, limits, tmp_path, ["serving"])[0]
