"""The load of requests through continuous batching."""

from __future__ import annotations

import dataclasses
import statistics

import pytest

from profiling import report
from profiling.serving_load import __main__ as command
from profiling.serving_load import rows
from profiling.serving_load.requests import Lengths, Requests

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
if not (5, 16) <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) <= (5, 17):
    pytest.skip("continuous batching is served with Transformers 5.16 and 5.17", allow_module_level=True)

SMALL = [
    "--device", "cpu", "--model", "tiny", "--side", "sparse-eager", "--memory-mib", "12", "--under-way", "2",
    "--step-tokens", "100", "--prompt", "60", "--answer", "8", "--longest", "150", "--seconds", "1", "--settle", "2",
]  # fmt: skip


def test_requests():
    made = Requests(Lengths(prompt=100, answer=20, spread=0.5, longest=400), 50, 3)
    drawn = [made.next() for _ in range(300)]
    sizes = sorted(len(each.prompt) for each in drawn)
    assert 80 < statistics.median(sizes) < 125 and sizes[0] >= 1 and sizes[-1] <= 400
    assert 16 < statistics.median(each.answer for each in drawn) < 25
    assert all(0 <= token < 50 for each in drawn for token in each.prompt)
    assert statistics.fmean(made.first().answer for _ in range(300)) < 18  # half of what a whole one takes
    again = Requests(Lengths(prompt=100, answer=20, spread=0.5, longest=400), 50, 3)
    assert [again.next() for _ in range(300)] == drawn


def test_the_compressed_side(tmp_path, capsys):
    """Rows of each number of users and of the prefix; --resume measures what is not there."""
    options = [*SMALL, "--prefix", "128", "--out", str(tmp_path)]
    assert command.main([*options, "--users", "1,4"]) == 0
    prefix, one, four = rows.read(tmp_path / "load.json")
    assert (prefix.users, one.users, four.users) == (0, 1, 4)
    assert prefix.first_tokens == command.REPEATS and prefix.first_token_p50_ms > 0 and prefix.miss_ms > 0
    for row in (one, four):
        assert row.tokens_per_s > 0 and 0 < row.first_token_p50_ms <= row.first_token_p99_ms
        assert 0 < row.used <= 12 << 20 and row.step_ms > 0 and row.first_tokens > 0
    assert one.under_way <= 1 and 1 < four.under_way <= 2 and four.waiting >= 1
    assert command.main([*options, "--users", "1,3,4", "--resume"]) == 0
    assert [row.users for row in rows.read(tmp_path / "load.json")] == [0, 1, 4, 3]
    assert "sparse-eager" in capsys.readouterr().out


def row(side: str, users: int, rate: float, first: float) -> rows.Row:
    values = {field.name: 1 for field in dataclasses.fields(rows.Row)}
    values |= {"device": "NVIDIA X", "isa": "", "model": "llama3-8b", "memory": 8 << 30, "used": users << 28}
    values |= {"side": side, "users": users, "tokens_per_s": rate or None, "first_token_p50_ms": first}
    values |= {"first_token_p99_ms": 2 * first if users else None, "under_way": float(users) if users else None}
    return rows.Row(**values)


def test_table_and_plot(tmp_path, capsys):
    made = [row("sparse", 0, 0, 30), row("sdpa", 0, 0, 25)]
    made += [row(side, users, rate * users, 40.0) for side, rate in (("sparse", 90), ("sdpa", 30)) for users in (1, 8)]
    rows.write(made, tmp_path)
    assert rows.read(tmp_path / "load.json") == made
    assert rows.ratio(made[0], made, "first_token_p50_ms") == 1.2
    assert rows.ratio(made[3], made, "tokens_per_s") == 3 and rows.ratio(made[1], made, "tokens_per_s") is None
    assert "| 8 | sparse | 720 | 3.00 |" in " ".join(rows.markdown(made).split())
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    assert report.main([str(tmp_path), "--out", str(tmp_path / "report")]) == 0
    folder = tmp_path / "report" / tmp_path.name
    assert (folder / "plots" / "load.png").is_file() and (folder / "load.md").is_file()
