"""python -m profiling.ragged."""

from __future__ import annotations

import argparse
import re

import pytest
import torch

from profiling import ragged, records

SMALL = [
    "--batch",
    "2,3",
    "--query-heads",
    "4",
    "--kv-heads",
    "2",
    "--head-dim",
    "64",
    "--keep",
    "19",
    "--shortest",
    "5",
    "--longest",
    "200",
    "--draws",
    "2",
    "--repeats",
    "2",
]
LINE = re.compile(
    r"draw (\d) of 2: (\d+) tokens on average, (\d+) to (\d+): [\d.]+ us; equal [\d.]+ us \([\d.]+%\), "
    r"with seq_lens [\d.]+ us \([\d.]+%\)"
)


def draws_of(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(number) for number in LINE.fullmatch(line).groups()) for line in text.splitlines()[1:-1]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_line_and_a_row_for_every_draw(device, capsys, tmp_path):
    assert ragged.main([*SMALL, "--device", device, "--out", str(tmp_path)]) == 0
    found = draws_of(capsys.readouterr().out)
    assert [draw for draw, *_ in found] == [1, 2, 1, 2]
    assert all(5 <= shortest <= mean <= longest <= 200 for _, mean, shortest, longest in found)
    rows = records.read(tmp_path / "ragged.json")
    sizes = [(row["tokens, mean"], row["shortest"], row["longest"]) for row in rows]
    assert sizes == [(mean, shortest, longest) for _, mean, shortest, longest in found]
    assert [row["B,Hq,Hkv,D"] for row in rows] == ["2,4,2,64"] * 2 + ["3,4,2,64"] * 2
    assert all(row["of equal"] == pytest.approx(row["equal, us"] / row["ragged, us"], rel=0.1) for row in rows)


def test_lengths_are_log_uniform():
    options = argparse.Namespace(batch=4000, shortest=128, longest=32768, seed=3)
    lengths = torch.tensor(ragged.draw_lengths(options, 0), dtype=torch.float64)
    assert lengths.min() >= 128 and lengths.max() <= 32768
    shares = [(lengths < 128 * 2**octave).double().mean().item() for octave in range(1, 8)]
    assert shares == pytest.approx([octave / 8 for octave in range(1, 8)], abs=0.05)
    assert ragged.draw_lengths(options, 1) != ragged.draw_lengths(options, 0) == lengths.int().tolist()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "cpu", "--shortest", "9", "--longest", "8"], "more than --longest"),
        (["--repeats", "0"], "not a positive integer"),
        pytest.param(
            [], "no CUDA device", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
        ),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        ragged.main(arguments)
    assert message in capsys.readouterr().err
