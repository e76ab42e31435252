"""The tile model: known tiles, measured rows, the plans of the dispatcher, and what it says to users."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import types
from pathlib import Path

import pytest
import torch

from profiling.cases import Case, Load, Shape
from profiling.sass import manifest
from profiling.tile_model import __main__ as command
from profiling.tile_model import counts, device, gemm, products, rows
from tests.support import host_programs

H100, H200, A100 = (device.find(name) for name in ("H100", "H200", "A100"))
CUBE = gemm.Shape(8192, 8192, 8192)
BACKENDS = ("sm80", "sm90")
KINDS = {"sm80": "kernel", "sm90": "warps"}  # of kernels, in their names


def make_case(op: str, shape: str, keep: int, data: str = "gaussian", backend: str = "sm80") -> Case:
    return Case(op, backend, Load(Shape.parse(shape), keep, data=data))


# ---- GEMM ------------------------------------------------------------------------------------------------------------


def test_dense_gemm_on_hopper_is_the_known_tile():
    chosen = gemm.best(H100, CUBE)
    assert chosen.tile == (128, 256, 64) and 3 <= chosen.stages <= 4 and chosen.groups == 2
    assert 0.9 * 989 < CUBE.flop / chosen.us / 1e6 < 989


def test_dense_gemm_on_ampere():
    chosen = gemm.best(A100, CUBE)
    assert sorted(chosen.tile[:2]) == [128, 256] and chosen.groups == 8 and chosen.stages >= 3
    assert 0.9 * 312 < CUBE.flop / chosen.us / 1e6 < 312.5


def test_rejections_name_the_resource():
    by_name = {c.name: c for c in gemm.candidates(H100, CUBE)}
    assert "registers" in by_name["256x256x64"].rejected
    assert "fit beside 65 KiB of C" in by_name["128x256x128"].rejected
    assert by_name["128x128x64"].limiter == "shared"  # 64 x 128 WGMMAs read as much as they multiply


def test_limits_decide():
    few = dataclasses.replace(H100, registers=32768)
    assert "registers" in {c.name: c for c in gemm.candidates(few, CUBE)}["128x256x64"].rejected
    small = dataclasses.replace(H100, shared_bytes=166912)
    assert gemm.best(small, CUBE).tile != (128, 256, 64)
    slow = dataclasses.replace(H100, dram_tb_per_s=0.1)
    assert gemm.best(slow, CUBE).limiter == "DRAM"
    assert gemm.best(dataclasses.replace(H100, l2_latency=2500), CUBE).tile != (128, 256, 64)
    with pytest.raises(ValueError, match="no tile fits H100"):
        gemm.best(dataclasses.replace(H100, shared_bytes=8192), CUBE)


def test_a_gemm_of_few_rows_is_bound_by_memory():
    shape = gemm.Shape(64, 8192, 8192)
    chosen = gemm.best(H100, shape)
    weights_us = 8192 * 8192 * 2 / (3.352e6 * H100.dram_achieved)
    assert chosen.tile[0] == 64 and chosen.limiter == "DRAM" and chosen.us == pytest.approx(weights_us, rel=0.1)


# ---- Products --------------------------------------------------------------------------------------------------------


def is_modelled(case) -> bool:
    """Single calls, cold cache, one query token, at least half pruned, not so short that a launch is most of it."""
    shape = case.load.shape
    return (
        case.backend in BACKENDS
        and case.cache == "cold"
        and case.timing == "events"
        and shape.query_tokens == 1
        and 2 * case.load.keep <= shape.head_dim
        and shape.batch * shape.kv_heads * shape.tokens >= 1 << 18
    )


MEASURED = [(case, us) for case, us in rows.load(H200) if is_modelled(case)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_there_are_rows_to_compare_with(backend):
    found = [case for case, _ in MEASURED if case.backend == backend]
    if not found:
        pytest.skip(f"no rows of {backend}")
    assert len({case.op for case in found}) == 2 and len(found) > 20


@pytest.mark.parametrize("case, us", [m for m in MEASURED if m[0].load.shape.head_dim == 128], ids=str)
def test_prediction_beside_the_committed_row(case, us):
    """25 % at head dim 128, the constants being fitted to one case at two lengths."""
    assert products.best(H200, case).us == pytest.approx(us, rel=0.25)


def test_other_head_dims_are_in_the_neighbourhood():
    """Head dim 256 at half pruned is the worst: few warps do better than in proportion to many."""
    for case, us in MEASURED:
        assert products.best(H200, case).us == pytest.approx(us, rel=0.5), case


@pytest.mark.parametrize("keep, data, bits", [(38, "gaussian", 6.24), (64, "gaussian", 9.53), (40, "equal", 6.07)])
def test_bytes_of_a_tile(keep, data, bits):
    """Bits an element of compressed caches, order and offsets counted."""
    case = make_case("sparse_qk", "8,32,8,1,16384,128", keep, data)
    tile = counts.Tile.of(case)
    stored = tile.block_rows * counts.ROW_BYTES + counts.ORDER_BYTES + counts.OFFSET_BYTES
    assert 8 * stored / (64 * 128) == pytest.approx(bits, rel=0.005)
    assert tile.dram_bytes - stored == 4 * 64 * 2  # fp16 logits of four rows


@pytest.mark.parametrize("backend, counted", [("sm80", 1120), ("sm90", 1026)])
def test_instructions_of_a_tile(backend, counted):
    tile = counts.Tile.of(make_case("sparse_qk", "8,32,8,1,16384,128", 38, backend=backend))
    assert sum(tile.instructions.values()) == counted
    decoder = {name: tile.instructions[name] * 32 / (64 * 128) for name in ("LDS", "IDP", "IMAD", "PRMT")}
    assert decoder == pytest.approx({"LDS": 1, "IDP": 0.5, "IMAD": 0.25, "PRMT": 0.5}, rel=0.04)


def test_many_rows_of_values_are_a_warpgroups():
    few, many = (counts.Tile.of(make_case("sparse_av", f"8,32,8,{q},4096,128", 38, backend="sm90")) for q in (4, 16))
    assert (few.n, few.worker_warps, many.n, many.worker_warps) == (16, 1, 64, 4)
    assert many.instructions["HMMA"] == 0 and many.instructions["HGMMA"] == 4 * 8
    plan = products.best(H200, make_case("sparse_av", "8,32,8,16,4096,128", 38, backend="sm90"))
    assert plan.warps == 4 * plan.workers == 12 and plan.registers == 152


def test_many_rows_of_keys_are_a_warpgroups():
    """Beyond 16 a pass over the cache takes 64 rows, which costs less than two passes of 16."""

    def us(queries: int) -> float:
        return products.best(H200, make_case("sparse_qk", f"8,32,8,{queries},16384,128", 38, backend="sm90")).us

    assert us(16) < 2 * us(4) and us(17) > 1.5 * us(16)
    for head_dim, warps in ((64, 16), (128, 16), (256, 12)):
        case = make_case("sparse_qk", f"8,32,8,16,4096,{head_dim}", head_dim * 3 // 10, backend="sm90")
        tile, plan = counts.Tile.of(case), products.best(H200, case)
        assert (tile.n, tile.worker_warps, plan.warps) == (64, 4, warps)
        for row in compiled("sm90", "sparse_qk", tile, "warpgroups").values():
            assert 4 * row["HGMMA"] == tile.instructions["HGMMA"] and row["registers"] <= plan.registers


def compiled(backend: str, op: str, tile: counts.Tile, kind: str = "") -> dict[str, dict[str, int]]:
    """A tile's kernels in the manifest; there are some."""
    _, kernels = manifest.load()
    traits = "WarpgroupTraits" if kind == "warpgroups" else "WarpTraits"
    name = f"{op}_{kind or KINDS[backend]}<{traits}<{tile.role},f16,{tile.head_dim},{tile.n}>"
    found = {key: row for key, row in kernels.items() if name in key}
    assert found, name
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_machine_code_holds_the_decoder_that_is_counted(backend):
    for op in ("sparse_qk", "sparse_av"):
        for head_dim in counts.HEAD_DIMS:
            tile = counts.Tile.of(make_case(op, f"1,8,8,1,128,{head_dim}", 16, backend=backend))
            expected = tile.instructions
            others = 1 if op == "sparse_av" else 0  # which counts the workers that end in a work tile
            for row in compiled(backend, op, tile).values():
                assert row["IDP"] == expected["IDP"] and row["POPC"] == expected["POPC"] + others
                assert row["HMMA.16816.F32"] == expected["HMMA"]
                assert expected["PRMT"] <= row["PRMT"] and expected["LDS"] <= row["LDS"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_registers_fit_the_warps_of_the_model(backend):
    """A kernel must not need more than the most warps that the model would give it leave."""
    for op in ("sparse_qk", "sparse_av"):
        for head_dim in counts.HEAD_DIMS:
            for n in (8, 16):
                tile = counts.Tile.of(make_case(op, f"1,{n},1,1,128,{head_dim}", 16, backend=backend))
                warps = max(w for w in products.WARPS if products.fits_registers(H200, tile, w))
                producers = 4 if backend == "sm90" else 0
                for name, row in compiled(backend, op, tile).items():
                    assert row["registers"] <= 65536 // (32 * (warps + producers)), name


def test_limits_decide_products_too():
    case = make_case("sparse_qk", "8,32,8,1,16384,128", 38)
    assert products.best(dataclasses.replace(H200, registers=32768), case).warps == 8
    assert products.best(dataclasses.replace(H200, shared_bytes=101376), case).warps == 4
    assert products.best(dataclasses.replace(H200, dram_tb_per_s=1.0), case).limiter == "DRAM"
    assert products.best(dataclasses.replace(H200, fma_heavy_lanes=16), case).limiter == "FMA-heavy"
    starved = dataclasses.replace(H200, dram_latency=20000)
    assert products.best(starved, case).limiter == "latency"
    assert products.best(starved, case).us > 1.5 * products.best(H200, case).us
    with pytest.raises(ValueError, match=r"no plan fits H200: .* bytes of shared memory"):
        products.best(dataclasses.replace(H200, shared_bytes=16384), case)


def test_time_grows_with_work():
    def us(shape: str, keep: int) -> float:
        return products.best(H200, make_case("sparse_av", shape, keep)).us

    assert us("1,8,1,1,64,128", 38) < us("8,32,8,1,4096,128", 38) < us("8,32,8,1,16384,128", 38)
    assert us("8,32,8,1,16384,128", 38) < us("8,32,8,1,16384,128", 64) < us("8,32,8,1,16384,128", 128)


# ---- The dispatcher --------------------------------------------------------------------------------------------------


def dispatched(questions: list[tuple[device.Device, Case]], folder: Path) -> list[tuple[int, int, int]]:
    """(warps, stages, registers) as dispatch/heuristics.hpp and the kernels' traits have them.

    A host program, for want of a GPU and of a plan in the extension's interface: should the module export one, it
    belongs here.
    """
    program = host_programs.compile_program(host_programs.FOLDER / "tools" / "plans.cpp", folder)
    lines = []
    for where, case in questions:
        tile, shape = counts.Tile.of(case), case.load.shape
        lines.append(
            (
                int(case.backend.removeprefix("sm")),
                int(tile.role == "value"),
                tile.head_dim,
                tile.n,
                shape.query_heads // shape.kv_heads * shape.query_tokens,
                tile.longest_rows,
                tile.p_row_bytes,
                products.tiles_of(case, tile),
                where.multiprocessors,
                where.shared_bytes,
            )
        )
    text = "\n".join(" ".join(str(number) for number in line) for line in lines)
    answer = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True).stdout
    return [tuple(int(number) for number in line.split()) for line in answer.splitlines()]


def test_the_dispatcher_chooses_the_plans_of_the_model(tmp_path):
    shapes = [
        "8,32,8,1,16384,{d}",
        "1,32,8,1,32768,{d}",
        "8,32,32,1,4096,{d}",
        "8,64,8,1,16384,{d}",
        "8,32,8,4,4096,{d}",
    ]
    questions = [
        (where, make_case(op, shape.format(d=d), d * percent // 100, backend=backend))
        for where, backend in ((H200, "sm80"), (H200, "sm90"), (A100, "sm80"))
        for op in ("sparse_qk", "sparse_av")
        for shape in shapes
        for d in counts.HEAD_DIMS
        for percent in (30, 50, 100)
    ]
    questions = [
        (where, case)
        for where, case in questions
        if any(not plan.rejected for plan in products.candidates(where, case))
    ]
    answers = dispatched(questions, tmp_path)
    assert len(answers) == len(questions) > 230
    for (where, case), (warps, stages, registers) in zip(questions, answers, strict=True):
        said = f"{where.name} {case}"
        plan = products.best(where, case)
        assert counts.Tile.of(case).registers == registers, said
        assert (plan.warps, plan.stages) == (warps, stages), said


# ---- Devices and the command -----------------------------------------------------------------------------------------


def test_devices_are_found_by_name():
    assert device.find("h200") is device.find("nvidia-h200") is H200
    with pytest.raises(device.UnknownDevice, match="no device 'B200'; there are A100, H100, H200 and attached"):
        device.find("B200")


def properties(**changes) -> types.SimpleNamespace:
    given = {"name": "NVIDIA H200", "major": 9, "minor": 0, "multi_processor_count": 132, "L2_cache_size": 60 << 20}
    return types.SimpleNamespace(**{**given, **changes})


def test_an_attached_device_tells_what_it_can():
    part = device.from_properties(properties(multi_processor_count=66), 1500.0)
    assert (part.name, part.multiprocessors, part.clock_mhz, part.l2_bytes) == ("H200", 66, 1500.0, 60 << 20)
    assert part.tensor_clock_mhz == 1500.0 and part.dram_tb_per_s == H200.dram_tb_per_s
    other = device.from_properties(
        properties(name="NVIDIA GH200 480GB", memory_clock_rate=2619000, memory_bus_width=6144), None
    )
    assert other.capability == (9, 0) and other.dram_tb_per_s == pytest.approx(4.02, rel=0.01)
    with pytest.raises(device.UnknownDevice, match=r"NVIDIA B200 has compute capability 10\.0"):
        device.from_properties(properties(name="NVIDIA B200", major=10), None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is attached")
def test_without_a_device(capsys):
    assert command.main(["--device", "attached", "--gemm", "64", "64", "64"]) == 2
    assert "no CUDA device is attached; name one: A100, H100, H200" in capsys.readouterr().err


def test_gemm_explains_itself(capsys):
    assert command.main(["--device", "H100", "--gemm", "8192", "8192", "8192"]) == 0
    said = capsys.readouterr().out
    assert "-> 128x256x64, 3 stages (4 if C is staged half by half)" in said
    assert "296 registers a thread of 240 there are" in said and "more with --all" in said
    assert command.main(["--device", "H100", "--gemm", "8192", "8192", "8192", "--all"]) == 0
    assert capsys.readouterr().out.count("\n") > said.count("\n")


def test_product_explains_itself_beside_the_row(capsys):
    case, us = next(m for m in MEASURED if m[0].op == "sparse_av" and m[0].backend == "sm80")
    arguments = ["--case", "av", "--backend", "sm80", "--shape", str(case.load.shape), "--keep", str(case.load.keep)]
    assert command.main(arguments) == 0
    said = capsys.readouterr().out
    assert f"measured {us:.1f} us: predicted " in said and "-> 12 warps (3 warpgroups) x 2 stages a warp" in said
    assert command.main([*arguments, "--device", "A100"]) == 0
    assert "not in profiling/results/nvidia-a100/sweep.json" in capsys.readouterr().out
    rows_of_64 = ["--case", "av", "--shape", "8,32,8,16,16384,128", "--keep", "38"]
    assert command.main(rows_of_64) == 0  # on 9.0 the default is sm90
    assert " stages for all, one CTA an SM beside a warpgroup of producers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gemm", "4096", "4096", "4096", "--device", "A100"],
        ["--case", "qk", "--shape", "8,32,8,1,16384,128", "--keep", "128"],
    ],
)
def test_json(arguments, capsys):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert command.main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert answer["chosen"] == answer["candidates"][0] and answer["chosen"]["us"] > 0
    assert any(candidate["us"] is None and candidate["rejected"] for candidate in answer["candidates"])


def test_list_devices(capsys):
    assert command.main(["--list-devices"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in device.DEVICES) and all(source in said for source in device.SOURCES.values())
    assert command.main(["--list-devices", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["devices"]) == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "one of the arguments --gemm --case --list-devices is required"),
        (["--case", "qk"], "--case takes --shape"),
        (["--gemm", "1", "2", "3", "--keep", "4"], "go with --case"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        command.main(arguments)
    assert exit_info.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gemm", "0", "64", "64"], "at least 1"),
        (["--case", "qk", "--shape", "1,2,3", "--keep", "4"], "six integers"),
        (["--case", "av", "--shape", "1,8,8,1,64,512", "--keep", "4"], "head dim 512 is more than 256"),
        (["--case", "av", "--shape", "1,8,8,1,64,128", "--keep", "129"], "keep 129 is not in 1..128"),
        (
            ["--case", "av", "--shape", "1,8,8,1,64,128", "--keep", "9", "--backend", "sm90", "--device", "A100"],
            "sm90 needs compute capability 9.0, A100 has 8.0",
        ),
    ],
)
def test_contradictions(arguments, message, capsys):
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err
