"""A sweep's files: what they hold, rows of older formats, resuming, comparing."""

from __future__ import annotations

import dataclasses
import json

import pytest

from profiling import compare, records, report, rows, run, sweep, tables
from profiling.folders import RESULTS, devices

ARGUMENTS = ["--shape", "1,4,2,2,200,64", "--backend", "cpu", "--op", "sparse_qk", "--repeats", "3"]


@pytest.fixture(autouse=True)
def small_cache(monkeypatch):
    """Few operand sets are enough to leave a small cache; a commit of its own, whatever the checkout's state."""
    real = run.environment
    monkeypatch.setattr(
        run, "environment", lambda device: dataclasses.replace(real(device), cache_bytes=1 << 18, commit="now")
    )


@pytest.fixture(scope="module")
def committed():
    return rows.read(RESULTS / "nvidia-h200" / "sweep.json")


COMMITTED = [path for folder in devices() for path in report.sweep_files(folder)]
MAX_BYTES = 600_000  # of all that is committed but what follows: complete sweeps of two GPUs
MAX_SERVING_BYTES = 1_700_000  # 688 shapes, two operations, every peer
MAX_STUDIES_BYTES = 950_000  # of accuracy: 95 ways to store a cache, seven numbers each, eight models; their plot


def test_committed_results_are_small_and_no_tables():
    found = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert {path.suffix for path in found} == {".json", ".png"}
    serving = [path for path in found if path.stem == "serving"]
    studies = [path for path in found if path.stem in {study.stem for study in report.STUDIES}]
    assert sum(path.stat().st_size for path in serving) < MAX_SERVING_BYTES
    assert sum(path.stat().st_size for path in studies) < MAX_STUDIES_BYTES
    assert sum(path.stat().st_size for path in found if path not in serving + studies) < MAX_BYTES


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_rows_can_be_read_and_written(path, tmp_path):
    found = rows.read(path)
    assert rows.write(found, tmp_path, path.stem).read_bytes() == path.read_bytes()
    assert rows.read(tmp_path / path.name) == found
    assert len({row.key for row in found}) == len(found)
    assert all(row.cache_tb_per_s < row.tb_per_s for row in found)
    assert all(row.multiprocessors or row.isa for row in found)  # of a CPU with its instruction set


def test_rows_are_lines_and_runs_are_written_once(tmp_path):
    found = [
        {"device": "X", "commit": commit, "us": us, "note": None, "peer": ""}
        for commit, us in (("a", 1.5), ("b", 2.0), ("a", float("inf")))
    ]
    path = tmp_path / "rows.json"
    records.write(path, found, ("device", "commit"), {"note": None, "us": 1.5})
    assert path.read_text().splitlines()[2:] == [
        '{"device": "X", "commit": "a"},',
        '{"device": "X", "commit": "b"}',
        "],",
        '"columns": ["run", "us", "peer"],',
        '"rows": [',
        '[0, 1.5, ""],',
        '[1, 2.0, ""],',
        '[0, Infinity, ""]',
        "]}",
    ]
    assert records.read(path) == [{name: row[name] for name in row if name != "note"} for row in found]
    records.write_csv(tmp_path / "rows.csv", found)
    assert (tmp_path / "rows.csv").read_text().splitlines() == [
        "device,commit,us,note,peer",
        "X,a,1.5,,",
        "X,b,2.0,,",
        "X,a,inf,,",
    ]


def test_rows_of_the_older_format(tmp_path, committed):
    """A list of objects with the derived fields."""
    (tmp_path / "old.json").write_text(json.dumps([rows.as_object(row) for row in committed[:5]]))
    assert rows.read(tmp_path / "old.json") == committed[:5]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "Expecting"),
        ("{}", "expected rows of format"),
        ("[{}]", "lacks op"),
        ("[1]", "expected a list"),
        ("1", "expected a list"),
        ('{"runs": [], "columns": ["run", "op"], "rows": [[0, 1]]}', "IndexError"),
        ('{"runs": [{}], "columns": ["run"], "rows": [[0, 1]]}', "ValueError"),
    ],
)
def test_files_that_are_no_rows(tmp_path, text, message):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        rows.read(tmp_path / "rows.json")


def test_resume_measures_what_is_missing(tmp_path, capsys, monkeypatch):
    path = tmp_path / "mine.json"
    assert sweep.main([*ARGUMENTS, "--keep", "19", "--resume", str(path)]) == 0
    (first,) = rows.read(path)
    assert sweep.main([*ARGUMENTS, "--keep", "19", "--keep", "32", "--resume", str(path)]) == 0
    assert "1 of 2 cases are in" in capsys.readouterr().out
    old, new = rows.read(path)
    assert old == first and new.keep == 32
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]
    assert sweep.main([*ARGUMENTS, "--keep", "32", "--resume", str(path)]) == 0
    assert "1 of 1 cases are in" in capsys.readouterr().out


def test_resume_measures_rows_of_another_commit_again(tmp_path):
    path = tmp_path / "sweep.json"
    assert sweep.main([*ARGUMENTS, "--keep", "19", "--keep", "32", "--resume", str(path)]) == 0
    rows.write([dataclasses.replace(row, commit="before", median_us=1e6) for row in rows.read(path)], tmp_path)
    assert sweep.main([*ARGUMENTS, "--keep", "19", "--resume", str(path)]) == 0
    assert {row.keep: row.commit for row in rows.read(path)} == {19: "now", 32: "before"}


def test_a_long_run_saves_now_and_then(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)
    counts = []
    write = rows.write
    monkeypatch.setattr(rows, "write", lambda found, *where: counts.append(len(found)) or write(found, *where))
    assert sweep.main([*ARGUMENTS, "--keep", "19", "--keep", "32", "--out", str(tmp_path)]) == 0
    assert counts == [1, 2, 2]


def faster(row, factor, peer_factor=1.0, **changes):
    return dataclasses.replace(row, median_us=row.median_us * factor, peer_us=row.peer_us * peer_factor, **changes)


def test_compare_lists_what_moved_beyond_noise(committed):
    new = [
        faster(committed[0], 1.2),
        faster(committed[1], 0.8),
        faster(committed[2], 1.02),
        faster(committed[3], 1.2, 1.2),
        dataclasses.replace(committed[4], rel_err=1.0),
        *committed[6:],
    ]
    lines = compare.summary(committed, new).splitlines()
    assert len(lines) == 5
    assert "+20.0%" in lines[0] or "+20.0%" in lines[1]
    assert sum("the machine moved" in line for line in lines) == 1
    assert sum("ok -> inaccurate" in line for line in lines) == 1
    assert "-20.0%" in lines[3]
    assert lines[4] == (
        f"3 of {len(new)} rows moved beyond noise, 2 for the worse; 0 only in the new sweep, 1 only in the old one"
    )


def test_noise_is_at_least_the_spread(committed):
    spread = dataclasses.replace(committed[0], iqr_us=0.3 * committed[0].median_us)
    assert not compare.Change(spread, faster(spread, 1.2)).moved


def test_compare_files(tmp_path, capsys, committed):
    rows.write(committed[:3], tmp_path, "old")
    rows.write([faster(committed[0], 1.2), *committed[1:3]], tmp_path, "new")
    old, new = str(tmp_path / "old.json"), str(tmp_path / "new.json")
    assert compare.main([old, old]) == 0 and compare.main([old, new]) == 1 and compare.main([new, old]) == 0
    assert compare.main([old, str(tmp_path / "none.json")]) == 2
    rows.write(committed[5:6], tmp_path, "other")
    assert compare.main([old, str(tmp_path / "other.json")]) == 2
    assert "no row is in both" in capsys.readouterr().err


def test_compare_after_a_sweep(tmp_path, capsys):
    assert sweep.main([*ARGUMENTS, "--keep", "19", "--out", str(tmp_path)]) == 0
    old = str(tmp_path / "sweep.json")
    assert sweep.main([*ARGUMENTS, "--keep", "19", "--out", str(tmp_path / "new"), "--compare", old]) == 0
    assert "of 1 rows moved beyond noise" in capsys.readouterr().out
    assert sweep.main([*ARGUMENTS, "--keep", "19", "--compare", str(tmp_path / "none.json")]) == 2


def test_dense_rows_and_settings_show_in_tables(tmp_path):
    arguments = [
        "--grid",
        "op=copy,dense_attention,sparse_av",
        "T=128",
        "Hq=4",
        "Hkv=2",
        "D=64",
        "keep=19",
        "scores=float32",
        "cache=warm",
        "--repeats",
        "2",
    ]
    backends = ["--backend", "cpu", "--backend", "copy", "--backend", "sdpa"]
    assert sweep.main([*arguments, *backends, "--out", str(tmp_path)]) == 0
    found = {row.op: row for row in rows.read(tmp_path / "sweep.json")}
    assert set(found) == {"copy", "dense_attention", "sparse_av"}
    for op in ("copy", "dense_attention"):
        assert (found[op].peer, found[op].ratio, found[op].keep) == ("", None, 64)
        assert found[op].bits_per_element == (32.0 if found[op].peer_form.startswith("fp32") else 16.0)
    assert found["sparse_av"].scores == "float32" and found["sparse_av"].cache == "warm"
    table = tables.markdown(list(found.values()))
    isa = found["sparse_av"].isa
    assert f"| sparse_av | cpu {isa} | 1,4,2,1,128,64 | 19 | float16, p float32 | gaussian warm |" in table
