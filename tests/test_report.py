"""Plots and the README's table from rows."""

from __future__ import annotations

import dataclasses
import sys

import pytest

import profiling
from profiling import ceilings, plots, readme, report, rows
from profiling.cases import Shape
from profiling.rows import Row

RESULTS = profiling.ROOT / "profiling" / "results"
README = (profiling.ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def h200() -> list[Row]:
    return rows.read(RESULTS / "nvidia-h200" / "sweep.json")


def moved(row: Row, **changes) -> Row:
    return dataclasses.replace(row, **changes)


# ---- README ----------------------------------------------------------------------------------------------------------


def test_the_readme_has_the_figures_of_the_committed_rows():
    found = report.folder_rows(RESULTS / "nvidia-h200")
    assert readme.updated(README, readme.figures_block(found, "profiling/results/nvidia-h200/sweep.md")) == README


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
    faster = [moved(row, backend="sm90", ratio=1.1 * row.ratio) for row in h200]
    assert "`sm90` backend" in readme.figures_block(h200 + faster, "x")
    incomplete = [row for row in faster if row.op == "sparse_qk"]
    assert "`sm80` backend" in readme.figures_block(h200 + incomplete, "x")
    with pytest.raises(readme.ReadmeError, match=r"20 of 30 rows are missing for sm90, .* --suite readme"):
        readme.figures_block(incomplete, "x")
    with pytest.raises(readme.ReadmeError, match="no rows of products"):
        readme.figures_block([], "x")


def test_rows_of_another_kind_are_not_quoted(h200):
    others = [moved(row, median_us=1.0, timestamp="9999", **change) for row in h200
              for change in ({"cache": "warm"}, {"timing": "graph"}, {"scores": "float32"})]
    assert readme.figures_block(rows.newest(h200 + others), "x") == readme.figures_block(h200, "x")


def test_the_newest_row_of_a_case_counts(tmp_path, h200):
    rows.write(h200, tmp_path)
    rows.write([moved(h200[0], median_us=1.0, timestamp="9999")], tmp_path, "readme")
    found = report.folder_rows(tmp_path)
    assert len(found) == len(h200) and found[0].median_us == 1.0


# ---- The program -----------------------------------------------------------------------------------------------------


def test_report_writes_the_readme(tmp_path, capsys, h200):
    text = README.replace("1.75x", "9.99x")
    (tmp_path / "README.md").write_text(text)
    arguments = ["--no-plots", "--readme", str(tmp_path / "README.md"), str(RESULTS / "nvidia-h200")]
    assert report.main(arguments) == 0
    assert (tmp_path / "README.md").read_text() == README
    assert report.main(arguments) == 0
    assert "are those of the rows already" in capsys.readouterr().out


def test_what_report_leaves_out(tmp_path, capsys, monkeypatch):
    (tmp_path / "README.md").write_text("no markers")
    arguments = ["--readme", str(tmp_path / "README.md"), "--no-plots"]
    assert report.main([*arguments, str(RESULTS / "nvidia-h200")]) == 1
    assert "left as it is: expected one line" in capsys.readouterr().err
    assert report.main([*arguments, str(RESULTS / "cpu-amd-epyc")]) == 1
    assert "no rows of a GPU" in capsys.readouterr().err
    assert report.main([str(tmp_path)]) == 2
    (tmp_path / "sweep.json").write_text("[{}]")
    assert report.main([str(tmp_path)]) == 2
    with pytest.raises(SystemExit):
        report.main(["--plots", "x", "a", "b"])


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    loaded = [name for name in sys.modules if name.startswith("profiling.plots.")]
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(plots, name.rpartition(".")[2], raising=False)
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.pyplot", "matplotlib.axes", "matplotlib.ticker"):
        monkeypatch.setitem(sys.modules, name, None)
    assert report.main(["--no-readme", "--plots", str(tmp_path), str(RESULTS / "nvidia-h200")]) == 1
    assert "cute-kernels[profile]" in capsys.readouterr().err and not list(tmp_path.iterdir())


# ---- Ceilings and plots ----------------------------------------------------------------------------------------------


def test_copy_bandwidth(h200):
    assert ceilings.copy_bandwidth(h200) == pytest.approx(4.2, abs=0.05)
    copy = moved(h200[0], op="copy", tb_per_s=4.28, median_us=100.0)
    assert ceilings.copy_bandwidth([*h200, copy]) == 4.28
    assert ceilings.copy_bandwidth([moved(copy, median_us=1.0), moved(copy, cache="warm")]) is None


def test_decode_rates(tmp_path):
    assert ceilings.decode_rates(tmp_path / "decode.csv") == {}
    lines = ("scheme,density,warps,elements_per_clk_sm", "split,0.3,8,20.7", "split,0.3,24,25.6", "")
    (tmp_path / "decode.csv").write_text("\n".join(lines))
    assert ceilings.decode_rates(tmp_path / "decode.csv") == {"split": 25.6}


def full_rows(h200) -> list[Row]:
    """Rows for every plot, two backends and attention among them."""
    like = next(row for row in h200 if row.op == "sparse_qk")
    found = list(h200)
    for op, peer in (("sparse_qk", "cublas"), ("sparse_av", "cublas"), ("sparse_attention", "sdpa cudnn"),
                     ("sparse_attention", "flashinfer fp8")):
        for backend in ("sm80", "sm90"):
            row = moved(like, op=op, backend=backend, peer=peer, timestamp="9999")
            found += [moved(row, keep=keep, bits_per_element=1 + keep / 8, ratio=100 / keep)
                      for keep in range(16, 128, 16)]
            found += [moved(row, B=1, T=1 << bits, median_us=float(2 + bits)) for bits in range(10, 21)]
    return found


def test_every_plot_is_drawn(tmp_path, h200):
    pytest.importorskip("matplotlib")
    limits = ceilings.Ceilings(4.2, {"split streams": 25.6, "dense": 60.8})
    paths, missing = plots.draw(full_rows(h200), limits, tmp_path / "a")
    assert not missing and {path.stem for path in paths} == {"speedup", "bandwidth", "roofline", "tokens", "bits"}
    assert {path.suffix for path in paths} == {".png", ".svg"} and all(path.stat().st_size > 10_000 for path in paths)
    assert "sparse_attention" in (tmp_path / "a" / "speedup.svg").read_text()


def test_equal_rows_give_equal_files(tmp_path, h200):
    pytest.importorskip("matplotlib")
    from profiling.plots import bits, style

    for name in "ab":
        with style.settings():
            style.save(bits.figure(h200, ceilings.Ceilings()), tmp_path / name, "bits")
    for suffix in ("png", "svg"):
        assert (tmp_path / "a" / f"bits.{suffix}").read_bytes() == (tmp_path / "b" / f"bits.{suffix}").read_bytes()


def test_plots_say_which_rows_they_lack(tmp_path, h200):
    pytest.importorskip("matplotlib")
    paths, missing = plots.draw([row for row in h200 if row.shape == Shape(1, 32, 8, 1, 32768, 128) and row.keep == 38],
                                ceilings.Ceilings(), tmp_path)
    assert {path.stem for path in paths} == {"bandwidth"}
    assert [line.split(":")[0] for line in missing] == ["speedup", "roofline", "tokens", "bits"]
    assert all("--suite" in line for line in missing)
