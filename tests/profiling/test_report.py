"""Tables, plots and the documentation's figures from rows."""

from __future__ import annotations

import csv
import dataclasses
import re
import sys

import pytest

import profiling
from profiling import ceilings, plots, readme, records, report, rows
from profiling.cases import Shape
from profiling.folders import RESULTS, devices
from profiling.generation import readme as generation_readme
from profiling.generation import rows as generation
from profiling.rows import Row


@pytest.fixture(scope="module")
def h200() -> list[Row]:
    return rows.read(RESULTS / "nvidia-h200" / "sweep.json")


def moved(row: Row, **changes) -> Row:
    return dataclasses.replace(row, **changes)


# ---- Documents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", report.DOCS, ids=lambda path: path.name)
def test_documents_have_the_figures_of_the_committed_rows(path):
    text = path.read_text(encoding="utf-8")
    assert report.updated(text, path, devices()) == text


@pytest.mark.parametrize("marker", [readme.BEGIN, generation_readme.BEGIN])
def test_every_block_is_in_one_document(marker):
    assert sum(path.read_text(encoding="utf-8").count(marker) for path in report.DOCS) == 1


def test_committed_plots_are_those_that_documents_show():
    shown = "\n".join(path.read_text(encoding="utf-8") for path in report.DOCS)
    wanted = {
        path
        for folder in devices()
        for path in report.committed_plots(folder).values()
        if path.relative_to(profiling.ROOT).as_posix() in shown
    }
    assert set(RESULTS.rglob("*.png")) == wanted and wanted


def generated(side: str, batch: int, **changes) -> generation.Row:
    sparse = {"key_keep": 38, "value_keep": 40, "window": 32} if side == "sparse" else {}
    values = (
        {field.name: 1 for field in dataclasses.fields(generation.Row)}
        | dict.fromkeys(("key_keep", "value_keep", "window"))
        | {
            "model": "tiny",
            "side": side,
            "cache": side.title(),
            "batch": batch,
            "largest": False,
            "dtype": "bfloat16",
            "device": "NVIDIA X",
            "timestamp": "1",
            "command": "python",
            "head_dim": 128,
            "sdpa": "default",
            "torch": "2",
            "kv_bytes": 2**30,
            "dense_kv_bytes": 2**31,
            "peak_bytes": 2**32,
            "transformers": "5",
            "driver": "",
            "commit": "",
        }
        | sparse
    )
    return generation.Row(**values | changes)


def test_generation_is_compared_with_the_best_dense_row():
    dense = generated("dense", 8, tokens_per_s=10.0, ttft_ms=5.0)
    better = generated("dense", 8, tokens_per_s=16.0, ttft_ms=8.0, sdpa="no-cudnn")
    largest = generated("dense", 90, tokens_per_s=40.0, largest=True)
    found = [
        generated("sparse", 8, tokens_per_s=20.0, ttft_ms=10.0),
        dense,
        better,
        largest,
        generated("sparse", 200, tokens_per_s=100.0, largest=True),
        generated("sparse", 1, tokens_per_s=3.0),  # beside nothing
        generated("dense", 8, prompt=2),
        generated("sparse", 8, key_keep=64),
    ]
    lines = generation_readme.table_block(found, "x.md").splitlines()
    start = lines.index("| --- | --- | --- | --- | --- | --- | --- | --- |") + 1
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    assert [(cells[0], cells[1]) for cells in table] == [
        ("1", "Sparse"),
        ("8", "Sparse"),
        ("8", "Dense"),
        ("8", "Dense, sdpa without cuDNN"),
        ("90 (largest)", "Dense"),
        ("200 (largest)", "Sparse"),
    ]
    assert table[0][4] == "3" and table[1][2:6] == ["10 (2.00x)", "1.0", "20 (1.25x)", "1.00"]
    assert table[5][4] == "100 (2.50x)" and table[1][6:] == ["0.500", "4.0"]
    assert "38 of 128 channels of keys and 40 of values" in " ".join(lines) and "](x.md)" in " ".join(lines)
    with pytest.raises(readme.ReadmeError, match="no sparse row beside a dense one"):
        generation_readme.table_block([dense], "x")


def test_the_newest_generation_of_a_case_counts(tmp_path):
    first = [generated("dense", 125, largest=True), generated("sparse", 8)]
    generation.write(first, tmp_path)
    again = [generated("dense", 120, largest=True, timestamp="2"), generated("sparse", 8, timestamp="0")]
    generation.write(again, tmp_path, "generate-again")
    assert report.generation_rows(tmp_path) == [again[0], first[1]]
    assert report.folder_rows(tmp_path) == []
    (tmp_path / "generate.json").write_text('[{"model": "x"}]')
    with pytest.raises(ValueError, match="row 0: lacks parameters"):
        report.generation_rows(tmp_path)


def test_only_the_block_between_the_markers_changes():
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    assert readme.updated(text, "new\n") == f"before\n{readme.BEGIN}\nnew\n{readme.END}\nafter\n"
    assert readme.updated(readme.updated(text, "new\n"), "new\n") == readme.updated(text, "new\n")


@pytest.mark.parametrize("text", ["", readme.BEGIN, readme.END + readme.BEGIN, readme.BEGIN + 2 * readme.END])
def test_broken_markers_are_left_alone(text):
    with pytest.raises(readme.ReadmeError, match="expected one line"):
        readme.updated(text, "new\n")


def test_the_best_complete_backend_is_quoted(h200):
    h200 = [row for row in h200 if row.backend == "sm80"]
    faster = [moved(row, backend="sm90", median_us=row.median_us / 1.1) for row in h200]
    assert "`sm90` backend" in readme.figures_block(h200 + faster, "x")
    incomplete = [row for row in faster if row.op == "sparse_qk"]
    assert "`sm80` backend" in readme.figures_block(h200 + incomplete, "x")
    with pytest.raises(readme.ReadmeError, match=r"20 of 30 rows are missing for sm90, .* --suite readme"):
        readme.figures_block(incomplete, "x")
    with pytest.raises(readme.ReadmeError, match="no rows of products"):
        readme.figures_block([], "x")


def test_rows_of_another_kind_are_not_quoted(h200):
    others = [
        moved(row, median_us=1.0, peer_us=row.peer_us and row.peer_us / 2, timestamp="9999", **change)
        for row in h200
        for change in ({"cache": "warm"}, {"timing": "graph"}, {"scores": "float32"}, {"codec": "int4"})
    ]
    assert readme.figures_block(rows.newest(h200 + others), "x") == readme.figures_block(h200, "x")


def test_the_newest_row_of_a_case_counts(tmp_path, h200):
    rows.write(h200, tmp_path)
    rows.write([moved(h200[0], median_us=1.0, timestamp="9999")], tmp_path, "readme")
    found = report.folder_rows(tmp_path)
    assert len(found) == len(h200) and found[0].median_us == 1.0


# ---- The program -----------------------------------------------------------------------------------------------------


def test_report_writes_tables(tmp_path, capsys, h200):
    assert report.main(["--no-plots", "--out", str(tmp_path)]) == 0
    assert f"wrote {tmp_path / 'nvidia-h200' / 'sweep.md'}" in capsys.readouterr().out
    written = {path.name for path in (tmp_path / "nvidia-h200").iterdir()}
    names = {path.stem for path in RESULTS.glob("nvidia-h200/*.json")} - {"decode"}
    names |= {path.stem for path in RESULTS.glob("nvidia-h200/accuracy/*.json")}
    assert written == {f"{name}.{suffix}" for name in names for suffix in ("csv", "md")}
    with (tmp_path / "nvidia-h200" / "sweep.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    text = (tmp_path / "nvidia-h200" / "sweep.md").read_text()
    assert "float16 | gaussian" in text and "| TB/s | cache TB/s | el/clk/SM |" in text
    for line, row in zip(table, h200, strict=True):
        values = rows.as_object(row)
        assert line == {name: "" if values[name] is None else str(values[name]) for name in line}
        assert line["command"] == row.case.command and line["status"] == "ok"
    assert set(values) - set(line) == {"stages_ahead", "isa", "codec", "method"} | {
        name for name in values if name.startswith("ncu_")
    }


def document(folder, text: str):
    """A document beside rows: the figures' links are short."""
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_report_updates_documents(tmp_path, capsys):
    path = document(
        tmp_path,
        "\n".join(
            [
                "before",
                readme.BEGIN,
                "old",
                readme.END,
                "between",
                generation_readme.BEGIN,
                "old",
                generation_readme.END,
                "after",
            ]
        ),
    )
    arguments = ["--update-docs", "--docs", str(path)]
    assert report.main(arguments) == 0 and "README.md: written" in capsys.readouterr().out
    text = path.read_text(encoding="utf-8")
    assert report.updated(text, path, devices()) == text and "old" not in text.splitlines()
    assert text.startswith("before\n<!--") and "-->\nbetween\n<!--" in text and text.endswith("-->\nafter")
    for target in ("nvidia-h100-80gb-hbm3", "nvidia-h200/generate.json"):
        (link,) = re.findall(rf"\]\(([^)]*/{re.escape(target)})\)", text)
        assert (tmp_path / link).samefile(RESULTS / target)
    assert report.main(arguments) == 0
    assert "has the rows' figures already" in capsys.readouterr().out


def test_the_plots_that_documents_show_are_drawn(tmp_path, monkeypatch, h200):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    folder = tmp_path / "results" / "x"
    rows.write(h200, folder)
    path = document(tmp_path, "![storage](results/x/plots/bits.png)")
    assert report.main(["--update-docs", "--docs", str(path), "--", str(folder)]) == 0
    assert [plot.name for plot in tmp_path.rglob("*.png")] == ["bits.png"]


def test_what_report_leaves_out(tmp_path, capsys, h200):
    path = document(tmp_path, readme.BEGIN)
    arguments = ["--update-docs", "--docs", str(path)]
    assert report.main([*arguments, "--", str(RESULTS / "nvidia-h200")]) == 1
    assert "left as it is: expected one line" in capsys.readouterr().err
    rows.write([moved(row, multiprocessors=None) for row in h200], tmp_path / "cpu")
    path.write_text(f"{readme.BEGIN}\n{readme.END}\n")
    assert report.main([*arguments, "--", str(tmp_path / "cpu")]) == 1
    assert "no rows of a GPU" in capsys.readouterr().err
    out = ["--out", str(tmp_path / "out")]
    (tmp_path / "none").mkdir()
    assert report.main([*out, "--", str(tmp_path / "none")]) == 2
    assert "no rows" in capsys.readouterr().err
    (tmp_path / "cpu" / "sweep.json").write_text("[{}]")
    assert report.main([*out, "--", str(tmp_path / "cpu")]) == 2
    assert "lacks op" in capsys.readouterr().err


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    loaded = [name for name in sys.modules if name.startswith("profiling.plots.")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(plots, name.rpartition(".")[2], raising=False)
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.pyplot", "matplotlib.axes", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    assert report.main(["--out", str(tmp_path), str(RESULTS / "nvidia-h200")]) == 1
    assert "cute-kernels[profile]" in capsys.readouterr().err and not list(tmp_path.rglob("*.png"))


# ---- Ceilings and plots ----------------------------------------------------------------------------------------------


def test_copy_bandwidth(h200):
    assert ceilings.copy_bandwidth(h200) == pytest.approx(4.2, abs=0.05)
    copy = moved(h200[0], op="copy", tb_per_s=4.28, median_us=100.0)
    assert ceilings.copy_bandwidth([*h200, copy]) == 4.28
    assert ceilings.copy_bandwidth([moved(copy, median_us=1.0), moved(copy, cache="warm")]) is None


def test_decode_rates(tmp_path):
    assert ceilings.decode_rates(tmp_path / "decode.json") == {}
    records.write(
        tmp_path / "decode.json",
        [{"scheme": "split", "warps": warps, "elements_per_clk_sm": rate} for warps, rate in ((8, 20.7), (24, 25.6))],
        (),
    )
    assert ceilings.decode_rates(tmp_path / "decode.json") == {"split": 25.6}


def full_rows(h200) -> list[Row]:
    """Rows for every plot, two backends and attention among them."""
    like = next(row for row in h200 if row.op == "sparse_qk")
    found = list(h200)
    for op, peer in (
        ("sparse_qk", "cublas"),
        ("sparse_av", "cublas"),
        ("sparse_attention", "sdpa cudnn"),
        ("sparse_attention", "flashinfer fp8"),
    ):
        for backend in ("sm80", "sm90"):
            row = moved(like, op=op, backend=backend, peer=peer, timestamp="9999")
            found += [
                moved(row, keep=keep, bits_per_element=1 + keep / 8, median_us=row.peer_us * keep / 100)
                for keep in range(16, 128, 16)
            ]
            found += [moved(row, B=1, T=1 << bits, median_us=float(2 + bits)) for bits in range(10, 21)]
    attend = moved(like, op="attend", backend="sm90", peer="sdpa cudnn", timestamp="9999")
    found += [moved(attend, B=1 << b, T=256 << t, median_us=40.0 + b * t) for b in range(8) for t in range(10)]
    return found


def test_every_plot_is_drawn(tmp_path, h200):
    pytest.importorskip("matplotlib")
    limits = ceilings.Ceilings(4.2, {"split streams": 25.6, "dense": 60.8})
    paths, missing = plots.draw(full_rows(h200), limits, tmp_path / "a")
    assert not missing and {path.stem for path in paths} == set(plots.NAMES)
    assert {path.suffix for path in paths} == {".png"} and all(10_000 < path.stat().st_size < 60_000 for path in paths)


def test_equal_rows_give_equal_files(tmp_path, h200):
    pytest.importorskip("matplotlib")
    from profiling.plots import bits, style

    narrow = [moved(row, codec="int4", bits_per_element=3.0) for row in h200]  # of other values than the figure's
    for name, found in (("a", h200), ("b", h200 + narrow)):
        with style.settings():
            style.save(bits.figure(found, ceilings.Ceilings()), tmp_path / name, "bits")
    assert (tmp_path / "a" / "bits.png").read_bytes() == (tmp_path / "b" / "bits.png").read_bytes()


def test_plots_say_which_rows_they_lack(tmp_path, h200):
    pytest.importorskip("matplotlib")
    paths, missing = plots.draw(
        [row for row in h200 if row.shape == Shape(1, 32, 8, 1, 32768, 128) and row.keep == 38],
        ceilings.Ceilings(),
        tmp_path,
    )
    assert {path.stem for path in paths} == {"bandwidth"}
    assert [line.split(":")[0] for line in missing] == ["speedup", "roofline", "tokens", "bits", "serving"]
    assert all("--suite" in line for line in missing)
