"""The scaling model: one GPU is what the committed rows say, several are divided and charged for what they send."""

from __future__ import annotations

import pytest

from cute_kernels._cache.config import _tile_bytes
from cute_kernels._cache.slot_rows import SlotRows
from profiling import folders, rows, scaling

SHAPE = {"batch": 1, "query_heads": 32, "kv_heads": 8, "layers": 32}


def test_one_gpu_takes_as_long_as_was_measured():
    measured = [
        row
        for row in rows.read(folders.RESULTS / "nvidia-h200" / "readme.json")
        if (row.op, row.backend, row.D, row.keep, row.Sq) == ("sparse_attention", "sm90", 128, 38, 1)
    ]
    assert len(measured) >= 5
    for row in measured:
        expected = scaling.attention_us(-(-row.T // scaling.TILE) * row.B * row.Hkv)
        assert expected == pytest.approx(row.median_us, rel=0.2), row


def test_bytes_are_those_of_the_caches_pages():
    assert _tile_bytes(SlotRows.holding(128, 38, 38).both) == scaling.PAIR_BYTES


def test_what_is_divided_and_what_is_sent():
    one, two, many = (scaling.step(1 << 20, gpus, **SHAPE) for gpus in (1, 2, 64))
    assert one.gather_us == one.merge_us == one.sent_bytes == 0
    assert one.cache_gb == pytest.approx(2 * two.cache_gb) == pytest.approx(64 * many.cache_gb)
    assert one.attention_us - scaling.CALL_US == pytest.approx(2 * (two.attention_us - scaling.CALL_US))
    assert two.sent_bytes == many.sent_bytes == 32 * (128 * 2 + 4)
    assert 0 < two.gather_us < many.gather_us and 0 < two.merge_us < many.merge_us
    # The rank with the most tiles: 3 of 5 on two ranks.
    assert scaling.step(5 * 64, 2, **SHAPE).cache_gb == pytest.approx(3 * 8 * 32 * scaling.PAIR_BYTES / 1e9)


def test_table_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert scaling.main(["--plot", str(tmp_path / "scaling.png"), "--gpus", "8,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:] if line[:1].isdigit()] == [
        ["1048576", "1"], ["1048576", "8"], ["10485760", "1"], ["10485760", "8"],
    ]  # fmt: skip
    assert any("A model, not a measurement" in line for line in lines)
    assert (tmp_path / "scaling.png").stat().st_size > 5000
