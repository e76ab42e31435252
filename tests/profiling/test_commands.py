"""What every command has in common: its help, and short messages for arguments that are wrong, before any work."""

from __future__ import annotations

import importlib
import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

import profiling
from cute_kernels._runtime.extension import _C
from profiling import command_line, records

FOLDER = profiling.ROOT / "profiling"
COMMANDS = sorted(
    ".".join(path.relative_to(profiling.ROOT).with_suffix("").parts).removesuffix(".__main__")
    for path in FOLDER.rglob("*.py")
    if "\nif __name__ ==" in path.read_text(encoding="utf-8")
)
RECIPES = tuple(f"profiling.recipes.{name}" for name in ("associative_recall", "frontier", "language", "outputs"))
NEED_TRANSFORMERS = (*RECIPES, "cute_kernels.eval")
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def main_of(command: str):
    if command in NEED_TRANSFORMERS:
        pytest.importorskip("transformers", reason="needs the extra eval")
    if command == "cute_kernels.eval":
        return importlib.import_module("cute_kernels.eval.command").main
    folder = (profiling.ROOT / command.replace(".", "/")).is_dir()
    return importlib.import_module(f"{command}.__main__" if folder else command).main


def ended(command: str, *arguments: object) -> tuple[int, str, str]:
    """(exit status, stdout, stderr); an error that is raised is the test's."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main_of(command)([str(argument) for argument in arguments])
        except SystemExit as stopped:
            status = stopped.code
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("command", [*COMMANDS, "cute_kernels.eval"])
def test_help(command):
    status, text, _ = ended(command, "--help")
    assert status == 0 and text.startswith(f"usage: python -m {command} ")
    for wrong in ("default: None", "default: False", "default: ["):
        assert wrong not in text
    assert not re.search(r"\(default: [^()]*(\([^()]*\))?[^()]*\) \(default", text)
    described = re.split(r"\n(?=  \S)", text[text.index("\noptions:") :])
    options = [part for part in described if part.startswith("  -")]
    undocumented = [part for part in options if not re.match(r"  -\S.*?(\s{2,}|\n\s{10,})\S", part, re.DOTALL)]
    assert len(options) > 1 or command.endswith("child")
    assert not undocumented


def test_all_commands_are_found():
    assert {"profiling.sweep", "profiling.soak", "profiling.ab", "profiling.tile_model"} <= set(COMMANDS)
    assert len(COMMANDS) >= 14


CPU = ("--device", "cpu")
SWEEP = ("--shape", "1,1,1,1,64,64", "--keep", "19", "--backend", "cpu", "--op", "sparse_qk", "--repeats", "1")
WRONG = [
    ("profiling.soak", "--ops", "-5", "--ops: '-5' is not a positive integer"),
    ("profiling.soak", "--ops", "0", "--ops: '0' is not a positive integer"),
    ("profiling.soak", "--seed", "-1", "--seed: '-1' is not an integer from 0"),
    ("profiling.soak", "--processes", "0", "--processes: '0' is not a positive integer"),
    ("profiling.soak", "--minutes", "0", "--minutes: '0' is not a positive number"),
    ("profiling.soak", "--name", "x", "--name: must begin with soak, got x"),
    ("profiling.soak", "--out", "{file}", "cannot make the folder"),
    ("profiling.steps", *CPU, "--shape", "1,3,2,64", "Hq = 3 is not a multiple of Hkv = 2"),
    ("profiling.steps", *CPU, "--sparsity", "1", "--sparsity must be at least 0 and below 1"),
    ("profiling.steps", *CPU, "--head-dim", "7", "--head-dim: must be a multiple of 8"),
    ("profiling.steps", *CPU, "--out", "{file}", "cannot make the folder"),
    ("profiling.ragged", *CPU, "--batch", "3,0", "--batch: '0' is not a positive integer"),
    ("profiling.ragged", *CPU, "--out", "{file}", "cannot make the folder"),
    ("profiling.soak", "--device", "foo", "--device: 'foo' is neither cpu nor cuda"),
    ("profiling.soak", "--device", "meta", "--device: 'meta' is neither cpu nor cuda"),
    ("profiling.soak", "--backend", "sm90", "--backend: backend 'sm90' takes tensors on a cuda device"),
    ("profiling.soak", "--backend", "best", "--backend: backend must be one of 'auto'"),
    ("profiling.pages", "trim", "--tiles", "0", "--tiles: '0' is not a positive integer"),
    ("profiling.ragged", *CPU, "--backend", "sm90", "--backend: backend 'sm90'"),
    ("profiling.ragged", *CPU, "--head-dim", "7", "--head-dim: must be a multiple of 8 from 8 to 256, got 7"),
    ("profiling.ragged", *CPU, "--keep", "500", "--keep: must be at most --head-dim 128, got 500"),
    ("profiling.ragged", *CPU, "--query-heads", "3", "--query-heads: must be a multiple of --kv-heads 8, got 3"),
    ("profiling.ragged", *CPU, "--seed", "9" * 30, "--seed: '999"),
    ("profiling.ragged", "--device", "foo", "--device: 'foo' is neither"),
    ("profiling.host_cost", "--no-launch", "--head-dim", "512", "--head-dim: must be a multiple of 8"),
    ("profiling.host_cost", "--no-launch", "--tokens", "x", "--tokens: 'x' is not a positive integer"),
    ("profiling.recipes.associative_recall", "--device", "foo", "--device: 'foo' is neither"),
    ("profiling.recipes.associative_recall", "--seconds", "nan", "--seconds: 'nan' is not a positive number"),
    ("profiling.recipes.associative_recall", "--seconds", "-5", "--seconds: '-5' is not a positive number"),
    ("profiling.recipes.associative_recall", "--sequences", "-4", "--sequences: '-4' is not a positive integer"),
    ("profiling.recipes.associative_recall", "--batch", "0", "--batch: '0' is not a positive integer"),
    ("profiling.recipes.associative_recall", *CPU, "--save", "{file}", "cannot make the folder"),
    ("profiling.recipes.frontier", "--sizes", "huge", "--sizes: 'huge' is none of small, full, tiny, quick"),
    ("profiling.recipes.frontier", "--seeds", "0,x", "--seeds: 'x' is not an integer"),
    ("profiling.recipes.frontier", *CPU, "--out", "{file}", "cannot make the folder"),
    ("profiling.recipes.language", "--seconds", "0", "--seconds: '0' is not a positive number"),
    ("profiling.recipes.language", "--documents", "0", "--documents: '0' is not a positive integer"),
    ("profiling.recipes.outputs", "--tokens", "x", "--tokens: 'x' is not a positive integer"),
    ("profiling.recipes.outputs", "--out", "{file}", "cannot make the folder"),
    ("profiling.scaling", "--gpus", "0", "--gpus: '0' is not a positive integer"),
    ("profiling.scaling", "--query-heads", "3", "--query-heads: must be a multiple of --kv-heads 8, got 3"),
    ("profiling.scaling", "--plot", "a.svg", "--plot: must end in .png, got a.svg"),
    ("profiling.sass", "--name", "[", "--name: '[' is no regular expression"),
    ("profiling.sass", "--library", "{file}/none", "--library: there is no file"),
    ("profiling.tile_model", "--case", "qk", "--shape", "1,8,8,1,64,60", "--keep", "3", "60 is not a multiple of 8"),
    ("profiling.decode_microbench", "--arch", "7.0", "--arch: '7.0' is not supported"),
    ("profiling.ab", "{root}", "--again", "-5", "--again: '-5' is not an integer of at least 0"),
    ("profiling.ab", "{root}", "--limit", "nan", "--limit: 'nan' is not a positive number"),
    ("profiling.ab", "{root}", "--device", "foo", "--device: invalid choice: 'foo'"),
    ("profiling.ab", "{root}", *CPU, "--out", "{file}/x/ab.json", "cannot make the folder"),
    ("profiling.report", "{file}", "there is no folder"),
    ("profiling.report", "--docs", "{file}", "--docs goes with --update-docs"),
    ("profiling.generate", "--window", "-5", "--window: '-5' is not an integer of at least 0"),
    ("profiling.generate", "--device", "foo", "--device: 'foo' is neither"),
    ("profiling.generate", "--name", "a/b", "--name: 'a/b' is not the name of a file"),
    ("profiling.generate", *CPU, "--quick", "--out", "{file}", "cannot make the folder"),
    (
        "profiling.generate", *CPU, "--quick", "--key-keep", "500", "--value-keep", "3", "--out", "{folder}",
        "--key-keep must be from 1 to the model's head dim 64, got 500",
    ),
    ("profiling.serving_load", *CPU, "--sparsity", "2", "--sparsity: must be from 0 to 1, got 2.0"),
    ("profiling.serving_load", *CPU, "--spread", "nan", "--spread: must be a number of at least 0, got nan"),
    ("profiling.serving_load", *CPU, "--users", "1,0", "--users: '0' is not a positive integer"),
    ("profiling.serving_load", *CPU, "--side", "sparse", "sparse: it needs a GPU"),
    ("profiling.serving_load", *CPU, "--name", "x", "--name: must begin with load, got x"),
    ("profiling.sweep", *SWEEP, "--out", "{file}", "cannot make the folder"),
    ("profiling.sweep", *SWEEP, "--seed", "9" * 20, "--seed: '999"),
    ("profiling.sweep", "--shape", f"1,1,1,1,{2**40},64", "every size must be from 1 to 2147483647"),
    ("profiling.sweep", "--grid", f"T={10**20}", "every size must be from 1 to 2147483647"),
    ("profiling.sweep", *SWEEP, "--ncu-report", "{file}", "go with --ncu"),
]  # fmt: skip


@pytest.mark.parametrize("command, arguments, message", [(line[0], line[1:-1], line[-1]) for line in WRONG], ids=str)
def test_wrong_arguments(command, arguments, message, tmp_path):
    if command == "profiling.generate":
        pytest.importorskip("transformers", reason="needs the extra transformers")
    file = tmp_path / "file"
    file.touch()
    places = {"file": file, "folder": tmp_path, "root": profiling.ROOT}
    status, _, err = ended(command, *(str(argument).format(**places) for argument in arguments))
    assert status == 2 and "Traceback" not in err
    assert message in err.splitlines()[-1]


@NO_GPU
@pytest.mark.parametrize(
    "command, arguments",
    [
        ("profiling.soak", ["--device", "cuda"]),
        ("profiling.soak", ["--device", "cuda:3"]),
        ("profiling.pages", ["time"]),
        ("profiling.ragged", []),
        ("profiling.ragged", ["--device", "cuda"]),
        ("profiling.host_cost", []),
        *((recipe, ["--device", "cuda"]) for recipe in RECIPES),
        ("profiling.ab", [profiling.ROOT, "--device", "cuda"]),
        ("profiling.generate", ["--device", "cuda"]),
        ("profiling.sweep", [*SWEEP, "--ncu"]),
        ("profiling.tile_model", ["--device", "attached", "--gemm", "1", "2", "3"]),
    ],
)
def test_without_a_gpu(command, arguments):
    status, out, err = ended(command, *arguments)
    assert status == 2 and "no CUDA device" in err.splitlines()[-1] and not out


@pytest.mark.gpu
def test_devices_are_those_that_are_there():
    assert command_line.device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(command_line.argparse.ArgumentTypeError, match="CUDA devices, counted from 0"):
        command_line.device(f"cuda:{torch.cuda.device_count()}")


@NO_GPU
@pytest.mark.parametrize(
    "command, arguments",
    [("soak", []), ("ragged", CPU), ("generate", [*CPU, "--quick"]), ("host_cost", ["--no-launch"])],
)
def test_an_instruction_set_that_is_wrong(command, arguments, monkeypatch):
    """As CUTE_KERNELS_CPU_ISA=avx10k does, which a process looks at once."""
    if command == "generate":
        pytest.importorskip("transformers", reason="needs the extra transformers")

    def unknown():
        raise RuntimeError("CUTE_KERNELS_CPU_ISA=avx10k is unknown")

    monkeypatch.setattr(_C.cpu, "isa", unknown)
    status, _, err = ended(f"profiling.{command}", *arguments)
    assert status == 2 and "CUTE_KERNELS_CPU_ISA=avx10k is unknown" in err.splitlines()[-1]


def test_soak_does_what_it_counts(tmp_path):
    status, out, err = ended("profiling.soak", "--ops", "7", "--seed", "1", "--out", tmp_path)
    assert status == 0 and "7 operations on cpu, seed 1," in out and "all as the model" in out
    done = dict(re.findall(r"(\w+) (\d+)", out.splitlines()[1]))
    assert sum(int(n) for name, n in done.items() if name not in ("refused", "dropped")) == 7
    assert "[4/4]" in err and "seed 1" in err
    assert sys.modules["profiling.soak"].OPS_A_LINE > 7


def test_soak_goes_on_where_it_ended(tmp_path):
    """Pieces have rows with their seeds; the next ones follow until there are enough."""
    soak = ("profiling.soak", "--ops", "4", "--out", tmp_path)
    assert ended(*soak, "--seed", "5", "--total", "8")[0] == 0
    status, out, err = ended(*soak, "--total", "13", "--processes", "2")
    assert status == 0 and "8 operations on cpu, seeds 7 to 8," in out and "seed 7" in err
    found = records.read(tmp_path / "soak.json")
    assert sorted((row["seed"], row["operations"]) for row in found) == [(5, 4), (6, 4), (7, 4), (8, 4)]
    status, out, _ = ended(*soak, "--total", "13")
    assert status == 0 and out.startswith("16 operations of this device and commit are in ")
    assert len(records.read(tmp_path / "soak.json")) == 4


def test_soak_ends_in_time(tmp_path):
    status, out, _ = ended(
        "profiling.soak", "--ops", "4", "--seed", "1", "--total", "4000", "--minutes", "1e-6", "--out", tmp_path
    )
    assert status == 0 and out.startswith("4 operations on cpu, seed 1,")
