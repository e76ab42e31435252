"""python -m profiling.steps, and the rows of commands that need no class for them."""

from __future__ import annotations

import argparse

import pytest

from profiling import plain_rows, records, report, steps

SMALL = ["--device", "cpu", "--head-dim", "64", "--layers", "2", "--repeats", "2", "--shape", "3,4,2,100"]


@pytest.mark.parametrize("kind, stored", [("none", 0), ("one", 1), ("all", 5), ("spread", 5)])
def test_phases(kind, stored):
    """Sequences that store a tile: in one step, or, spread, once each in 64."""
    held = steps.phases(kind, 5, 32)
    assert all(32 <= tokens <= 95 for tokens in held)
    if kind == "spread":
        due = [(95 - tokens) % 64 for tokens in held]
        assert len(set(due)) == stored
    else:
        assert held.count(95) == stored


def test_a_row_for_every_kind(tmp_path, capsys):
    assert steps.main([*SMALL, "--out", str(tmp_path)]) == 0
    rows = records.read(tmp_path / "steps.json")
    assert [(row["stores"], row["tiles a step"]) for row in rows] == [
        ("none", 0),
        ("one", 1),
        ("all", 3),
        ("spread", 3 / 64),
    ]
    assert rows[0]["ratio"] == 1 and all(row["step, us"] > 0 for row in rows)
    assert {row["B,Hq,Hkv,T,D"] for row in rows} == {"3,4,2,100,64"} and {row["keep"] for row in rows} == {19}
    assert rows[0]["command"] == " ".join(["python -m profiling.steps", *SMALL])
    assert "tiles a step" in capsys.readouterr().out


@pytest.mark.gpu
def test_steps_in_a_graph(tmp_path):
    arguments = ["--device", "cuda", *SMALL[2:], "--codec", "fp8"]
    assert steps.main([*arguments, "--out", str(tmp_path)]) == 0
    assert [row["tiles a step"] for row in records.read(tmp_path / "steps.json")] == [0, 1, 3, 3 / 64]


@pytest.mark.parametrize("text", ["1,2,3", "1,2,2,x", "1,3,2,64", "0,2,2,64"])
def test_wrong_shapes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not"):
        steps.shape(text)


def test_the_report_has_them(tmp_path, capsys):
    folder = tmp_path / "gpu"
    run = dict.fromkeys(plain_rows.OF_A_RUN, "x") | {"isa": ""}
    for name in ("steps", "ragged-32", "soak"):
        plain_rows.write([{**run, "us": 1.23456, "empty": ""}], folder, name)
    assert report.main([str(folder), "--out", str(tmp_path / "report"), "--no-plots"]) == 0
    text = (tmp_path / "report" / "gpu" / "ragged-32.md").read_text()
    assert text.startswith("# Attention over sequences of different lengths\n") and "| 1.235 |" in text
    assert "empty" not in text and "x, torch x, driver x, commit x, x: `x`" in text
    assert not report.sweep_files(folder) and len(list((tmp_path / "report" / "gpu").glob("*.csv"))) == 3
