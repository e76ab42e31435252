"""The machine code of the built kernels: rules, the manifest, and the reader's own mistakes. Needs no GPU."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path

import pytest

from profiling.sass import __main__ as command
from profiling.sass import dump, manifest, names, rules
from third_party import BuildError, tools


@pytest.fixture(scope="session")
def cuobjdump() -> Path:
    try:
        return tools.find_cuobjdump()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def library() -> Path:
    from cute_kernels._runtime.extension import _C

    if not _C.build_info()["cuda"]:
        pytest.skip("the extension was built without CUDA")
    return Path(_C.__file__)


@pytest.fixture(scope="session")
def kernels(library, cuobjdump) -> list[dump.Kernel]:
    return dump.read_kernels(library, cuobjdump)


# ---- The library -----------------------------------------------------------------------------------------------------


def test_no_kernel_breaks_a_rule(kernels):
    assert rules.violations(kernels) == []


def test_every_architecture_has_every_product(kernels):
    """Otherwise rules would hold for want of kernels."""
    from cute_kernels._runtime.extension import _C

    archs = {"sm_" + arch.removesuffix("+PTX").replace(".", "") for arch in _C.build_info()["archs"]}
    assert {kernel.arch for kernel in kernels} == archs
    for arch in archs:
        assert missing_products(kernels, arch, "kernel", (8, 16)) == []


def test_sm90_products(kernels):
    products = [kernel for kernel in kernels if rules.is_product(kernel) and rules.is_sm90(kernel)]
    if not products:
        pytest.skip("this library has no products for 9.0")
    assert {kernel.arch for kernel in products} == {"sm_90a"}
    assert missing_products(kernels, "sm_90a", "warps", (8, 16)) == []
    assert missing_products(kernels, "sm_90a", "warpgroups", (32, 64)) == []


def missing_products(
    kernels: list[dump.Kernel],
    arch: str,
    kind: str,
    rows: tuple[int, ...],
    names: tuple[str, ...] = ("sparse_qk", "sparse_av"),
) -> list[str]:
    """Patterns of instantiations that an architecture should have of a kind and has not."""
    there = [k.name for k in kernels if k.arch == arch and rules.is_product(k) and rules.kind(k) == kind]
    wanted = [
        rf"{name}_{kind}<\w*Traits<(key,|value,)?{element},{head_dim},{n}\b"
        for name in names
        for element in ("f16", "bf16")
        for head_dim in (64, 128, 256)
        for n in rows
    ]
    return [pattern for pattern in wanted if not any(re.search(pattern, name) for name in there)]


def test_manifest(kernels, library, cuobjdump):
    compiler, expected = manifest.load()
    built_by = dump.compiler_of(library, cuobjdump)
    if built_by != compiler:
        pytest.skip(f"the manifest is of ptxas {compiler}, this library of {built_by}: only the rules apply")
    moved = manifest.differences(expected, manifest.table(kernels))
    assert not moved, "\n".join(["kernels moved:", *moved, f"if that is meant: {manifest.REWRITE}"])


def test_launches_prefetch_the_loops_over_tiles(kernels, library, cuobjdump):
    """A launch fetches the first 64 KB of a kernel's code ahead of time; what lies behind is late to come where the
    instruction caches are cold, which is always in a model. Of values of 16 bits in bitmaps, in one token order."""
    compiler, _ = manifest.load()
    if dump.compiler_of(library, cuobjdump) != compiler:
        pytest.skip(f"where code lies is known of ptxas {compiler} only")
    wanted = re.compile(r"sm90::(sparse_\w+_warps|attention_kernel)<\w*Traits<(\w+,)?b?f16,(64|128),8(>|,\w+,false)")
    ends = {
        kernel.key: kernel.code.decoder_end
        for kernel in kernels
        if kernel.arch == "sm_90a" and wanted.match(kernel.name)
    }
    if not ends:
        pytest.skip("this library has no kernels for 9.0")
    assert len(ends) >= 16 and all(0 < end <= 64 << 10 for end in ends.values()), ends


# ---- The reader ------------------------------------------------------------------------------------------------------

HEADER = "arch = sm_90a\n\t\tFunction : k\n"
PIPELINED = """
        /*02b0*/                   WARPGROUP.ARRIVE ;
        /*02c0*/                   HGMMA.64x8x16.F32 R24, R56, gdesc[UR8], RZ, !UPT ;  /* 0x0000000838187df0 */
        /*02e0*/                   HGMMA.64x8x16.F32 R24, R52, gdesc[UR8], R24 ;
        /*03a0*/                   HGMMA.64x8x16.F32 R24, R28, gdesc[UR8], R24, gsb0 ;
        /*03b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
SERIALIZED = """
        /*01f0*/                   WARPGROUP.ARRIVE ;
        /*0200*/                   HGMMA.64x8x16.F32 R24, R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0210*/                   IADD3 R2, R2, 0x1, RZ ;
        /*0220*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0230*/                   WARPGROUP.ARRIVE ;
        /*0240*/                   HGMMA.64x8x16.F32 R24, R32, gdesc[UR8], R24, gsb0 ;
        /*0260*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
BULK = "        /*0010*/              @!P0 UBLKCP.S.G [UR4], [UR6], UR8 ;\n"
TENSOR = "        /*0010*/              @!P0 UTMALDG.3D [UR8], [UR4] ;\n"
MMA = "        /*0010*/                   HMMA.16816.F32 R4, R8, R2, R4 ;\n"
SPARSE_MMA = "        /*0010*/                   HMMA.SP.16832.F32.TID R4, R8, R2, R4, R9, 0x0 ;\n"
COPY = "        /*0000*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R5], [R2.64] ;\n"


def code_of(body: str) -> dump.Code:
    ((_, code),) = dump.parse_code((HEADER + body).splitlines(keepends=True))
    return code


def kernel(name: str, body: str, source: str = "matmul/av_sm90.cu", **resources: int) -> dump.Kernel:
    numbers = {"registers": 100, "stack": 0, "local": 0, "shared": 0, **resources}
    return dump.Kernel(name=name, arch="sm_90a", source=source, code=code_of(body), **numbers)


def test_hgmma_counts_by_shape_and_operand():
    code = code_of(PIPELINED)
    assert code.counts == {"HGMMA.64x8x16.F32.RS": 3, "HGMMA": 3} and not code.serialized
    from_shared = code_of(PIPELINED.replace("R24, R5", "R24, gdesc[UR4], R5"))
    assert from_shared.counts == {"HGMMA.64x8x16.F32.SS": 2, "HGMMA.64x8x16.F32.RS": 1, "HGMMA": 3}
    assert code_of(PIPELINED.replace("R24, R5", "RZ, R5")).counts["HGMMA.64x8x16.F32.RS"] == 1


def test_serialized_wgmma_is_seen():
    assert code_of(SERIALIZED).serialized
    one_behind = SERIALIZED.replace("gsb0, 0x0", "gsb0, 0x1")
    assert not code_of(one_behind).serialized and not code_of(PIPELINED + SERIALIZED).serialized


def test_predicates_and_padding():
    code = code_of("""
        /*0000*/              @P0  LDGSTS.E.BYPASS.LTC128B.128 [R5], [R2.64] ;
        /*0010*/             @!UP1 UTMALDG.2D [UR4], [UR6] ;
        /*0020*/                   LDS.U16 R4, [R5] ;
        /*0030*/                   BRA 0x30;
        /*0040*/                   NOP;
    """)
    assert code.counts == {"LDGSTS": 1, "UTMALDG": 1, "LDS": 1} and code.instructions == 4
    assert code.decoder_end == 0


def test_where_the_decoder_ends():
    code = code_of("""
        /*0000*/                   IDP.4A.U8.U8 R4, R5, R6, R7 ;
        /*fff0*/                   IDP.4A.U8.U8 R4, R5, R6, R7 ;
        /*10000*/                  LDS.U16 R4, [R5] ;
    """)
    assert code.decoder_end == 64 << 10


@pytest.mark.parametrize(
    "body, complaint",
    [
        (TENSOR + PIPELINED, "no UBLKCP"),
        (BULK + PIPELINED, "no UTMALDG"),
        (BULK + TENSOR + SERIALIZED, "ptxas serialized"),
        (BULK + TENSOR, "no HGMMA of 64 x N x 16"),
        (BULK + TENSOR + MMA, "no HGMMA of 64 x N x 16"),
        (BULK + TENSOR + PIPELINED.replace("R24, R56", "RZ, R56"), "1 of 3 HGMMA"),
        (BULK + TENSOR + PIPELINED.replace("64x8x16", "64x8x8"), "no HGMMA of 64 x N x 16"),
        (BULK + TENSOR + PIPELINED + "        /*0400*/                   STL [R1], R4 ;\n", "1 STL"),
    ],
)
def test_broken_products_of_warpgroups_are_reported(body, complaint):
    (line,) = rules.violations([kernel("sparse_av_warpgroups<Traits>", body)])
    assert complaint in line and line.startswith("sm_90a sparse_av_warpgroups<Traits> (matmul/av_sm90.cu): ")


@pytest.mark.parametrize(
    "body, complaint",
    [
        (TENSOR + MMA, "no UBLKCP"),
        (BULK + MMA, "no UTMALDG"),
        (BULK + TENSOR, "no HMMA.16816.F32"),
        (BULK + TENSOR + MMA + PIPELINED, "3 HGMMA where warps multiply"),
    ],
)
def test_broken_products_of_warps_are_reported(body, complaint):
    (line,) = rules.violations([kernel("sm90::sparse_av_warps<Traits,true>", body)])
    assert complaint in line


def test_rules_that_hold():
    assert (
        rules.violations(
            [
                kernel("sparse_av_warpgroups<Traits,false>", BULK + TENSOR + PIPELINED),
                kernel("sm90::sparse_av_warps<Traits,false>", BULK + TENSOR + MMA),
                kernel("sm90::sparse_qk_warps<Traits>", BULK + MMA),
                kernel("sm80::sparse_qk_kernel<Traits>", COPY + MMA),
                kernel("sm90::sparse_qk_warps<WarpTraits<key,2of4-int4,128,8>>", BULK + SPARSE_MMA),
                kernel("sm90::attention_kernel<Traits<2of4-fp8,128,8>>", BULK + SPARSE_MMA + MMA),
                kernel("combine_partials<Traits>", "        /*0000*/  EXIT ;\n"),
                kernel("prefill_kernel<Traits>", BULK + PIPELINED),
                kernel("prefill_kernel<Traits<TwoOfFourCodecs,f16,128,2,2>>", BULK + PIPELINED),
            ]
        )
        == []
    )
    assert len(rules.violations([kernel("sm80::sparse_qk_kernel<>", PIPELINED)])) == 3


@pytest.mark.parametrize(
    "broken",
    [
        kernel("pack_kernel", "        /*0000*/  EXIT ;\n", stack=16),
        kernel("pack_kernel", ""),
        kernel("sm80::sparse_av_kernel<Traits>", COPY),
        kernel("sparse_av_clusters<Traits>", COPY + MMA),
        kernel("sm90::sparse_qk_warps<WarpTraits<key,2of4-int4,128,8>>", BULK + MMA),
        kernel("sm90::attention_kernel<Traits<2of4-fp8,128,8>>", BULK + MMA),
        kernel("prefill_kernel<Traits>", PIPELINED),
        kernel("prefill_kernel<Traits>", BULK),
        kernel("prefill_kernel<Traits>", BULK + PIPELINED.replace("64x8x16", "64x8x8")),
    ],
)
def test_rules_that_do_not(broken):
    assert len(rules.violations([broken])) == 1


def test_resources():
    text = """
Fatbin elf code:
================
arch = sm_80
identifier = a/b_sm80.cu

Resource usage:
 Common:
  GLOBAL:0
 Function f:
  REG:48 STACK:16 SHARED:4608 LOCAL:8 CONSTANT[0]:440 TEXTURE:0
"""
    assert list(dump.parse_resources(text)) == [("sm_80", "a/b_sm80.cu", "f", (48, 16, 4608, 8))]


def test_a_library_without_kernels(cuobjdump, capsys):
    import _ctypes

    assert dump.read_kernels(Path(_ctypes.__file__), cuobjdump) == []
    assert command.main(["--library", _ctypes.__file__]) == 2
    assert "no CUDA kernels" in capsys.readouterr().err


def test_short_names():
    product = (
        "_ZN12cute_kernels6matmul4sm8016sparse_av_kernelINS0_6TraitsILNS_6format4RoleE1EN7cutlass10bfloat16_tE"
        "Li128ELi16EEELb1EEEvNS0_6ParamsE"
    )
    assert names.short_name(product) == "sm80::sparse_av_kernel<Traits<value,bf16,128,16>,true>"
    balance = (
        "_ZN12cute_kernels8compress43_GLOBAL__N__44791ad9_10_balance_cu_8cf4908414balance_kernelILi8EEEvNS0_14"
        "BalanceOperandES3_llliPh"
    )
    assert names.short_name(balance) == "balance_kernel<8>"
    assert names.short_name("_ZN12cute_kernels6matmul4sm906kernelILi8EEEvi") == "sm90::kernel<8>"
    assert names.short_name("plain_c") == "plain_c"


# ---- The manifest and the tools --------------------------------------------------------------------------------------


def test_differences_are_readable(tmp_path):
    old = {"sm_80 a": {"registers": 96, "LDS": 10}, "sm_80 b": {"registers": 40}, "sm_90a a": {"registers": 90}}
    new = {"sm_80 a": {"registers": 104, "LDS": 10, "STL": 2}, "sm_80 c": {"registers": 50}, "sm_86 a": {}}
    assert manifest.differences(old, new) == [
        "  sm_80 a: registers 96 -> 104, STL 0 -> 2",
        "- sm_80 b: gone from the library",
        "+ sm_80 c: new, 50 registers",
    ]
    path = tmp_path / "manifest.json"
    manifest.write("13.0", old, path)
    manifest.write("13.0", {"sm_80 a": new["sm_80 a"]}, path)
    assert manifest.load(path) == ("13.0", {"sm_80 a": new["sm_80 a"], "sm_90a a": {"registers": 90}})
    manifest.write("13.1", {"sm_80 a": {"registers": 1}}, path)
    assert manifest.load(path) == ("13.1", {"sm_80 a": {"registers": 1}})


def test_other_forms_of_a_kernel(tmp_path):
    one, other = {"registers": 96, "LDS": 40}, {"registers": 96, "LDS": 41}
    old = {"sm_80 a": one, "sm_80 a or": other, "sm_80 b": one}
    assert manifest.differences(old, {"sm_80 a": one, "sm_80 b": one}) == []
    assert manifest.differences(old, {"sm_80 a": other, "sm_80 b": one}) == []
    third = {"registers": 96, "LDS": 42}
    assert manifest.differences(old, {"sm_80 a": third, "sm_80 b": other}) == [
        "  sm_80 a: LDS 40 -> 42",
        "  sm_80 b: LDS 40 -> 41",
    ]
    assert manifest.differences(old, {"sm_80 b": one}) == ["- sm_80 a: gone from the library"]
    path = tmp_path / "manifest.json"
    assert manifest.write("13.0", old, path) == []
    assert manifest.write("13.0", {"sm_80 a": other, "sm_80 b": one}, path) == []
    assert manifest.load(path) == ("13.0", old)
    assert manifest.write("13.0", {"sm_80 a": third, "sm_80 b": other}, path) == ["sm_80 a"]
    assert manifest.load(path) == ("13.0", {"sm_80 a": third, "sm_80 b": other})


def test_write_says_whose_other_form_is_lost(tmp_path, monkeypatch, capsys):
    now = kernel("combine_partials<>", "        /*0000*/  EXIT ;\n", registers=36)
    row = manifest.numbers(now)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(command, "find_cuobjdump", lambda: Path("cuobjdump"))
    monkeypatch.setattr(command, "read_kernels", lambda library, cuobjdump: [now])
    monkeypatch.setattr(command, "compiler_of", lambda library, cuobjdump: "13.0")
    path = tmp_path / "manifest.json"
    monkeypatch.setattr(manifest, "PATH", path)
    monkeypatch.setattr(manifest, "write", functools.partial(manifest.write, path=path))
    library = tmp_path / "some.so"
    library.touch()
    other = f"{now.key}{manifest.OTHER_FORM}"
    for registers, said in ((36, False), (40, True)):
        manifest.write("13.0", {now.key: {**row, "registers": registers}, other: {**row, "registers": 44}})
        assert command.main(["--write", "--library", str(library)]) == 0
        assert (other in capsys.readouterr().out) == said
        assert (other in manifest.load(path)[1]) == (not said)


def test_kernels_of_several_files():
    twin = kernel("combine_partials<>", "        /*0000*/  EXIT ;\n")
    other = kernel("combine_partials<>", "        /*0000*/  EXIT ;\n", registers=twin.registers + 7)
    assert len(manifest.table([twin, twin])) == 1
    table = manifest.table([other, twin, other])
    assert table == manifest.table([twin, other])
    assert [row["registers"] for row in table.values()] == [twin.registers, other.registers]
    assert list(table) == [twin.key, f"{twin.key} #2"]


def test_check_says_what_moved(tmp_path, monkeypatch, capsys):
    now = kernel("combine_partials<>", "        /*0000*/  EXIT ;\n", registers=36)
    monkeypatch.setattr(command, "find_cuobjdump", lambda: Path("cuobjdump"))
    monkeypatch.setattr(command, "read_kernels", lambda library, cuobjdump: [now])
    monkeypatch.setattr(command, "compiler_of", lambda library, cuobjdump: "13.0")
    library = tmp_path / "some.so"
    library.touch()
    check = ["--check", "--library", str(library)]
    monkeypatch.setattr(manifest, "load", lambda: ("13.0", {now.key: manifest.numbers(now)}))
    assert command.main(check) == 0 and capsys.readouterr().out == ""
    monkeypatch.setattr(manifest, "load", lambda: ("13.0", {now.key: {**manifest.numbers(now), "registers": 40}}))
    assert command.main(check) == 1
    said = capsys.readouterr().out
    assert "sm_90a combine_partials<>: registers 40 -> 36" in said and manifest.REWRITE in said
    monkeypatch.setattr(manifest, "load", lambda: ("12.8", {}))
    assert command.main(check) == 0
    assert "not compared" in capsys.readouterr().out


def test_cuobjdump_needs_its_disassembler(tmp_path, monkeypatch):
    monkeypatch.setattr(tools, "DEFAULT_ROOT", tmp_path / "none")
    monkeypatch.setattr(tools, "_locations", lambda module: [str(tmp_path / "wheel")] if module == "nvidia" else [])
    programs = tmp_path / "wheel" / "cu13" / "bin"
    programs.mkdir(parents=True)
    for name in ("cuobjdump", "nvdisasm"):
        with pytest.raises(BuildError, match="pip install"):
            tools.find_cuobjdump({"PATH": ""})
        shutil.copy(shutil.which("true"), programs / name)
    assert tools.find_cuobjdump({"PATH": ""}) == programs / "cuobjdump"
