"""Runs cases under Nsight Compute, in a child process, and reads its report through the ncu_report module.

The module comes from the package ncu-report (extra `profile`) or from Nsight Compute's own folder extras/python.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from profiling import ROOT
from profiling.cases import Case, Load, Shape
from profiling.counters import child
from profiling.counters.fields import METRIC_NAMES, Counters
from profiling.counters.join import counters_of, kernels_by_case

WITHOUT_KERNELS = ("cpu", "reference")  # backends
PROBE = {Case("dense_qk", "cublas", Load(Shape(1, 8, 8, 1, 256, 64), 64)): "matmul"}  # needs no kernels of this build
PERMISSION = "ERR_NVGPUCTRPERM"


class CountersError(RuntimeError):
    """There are no counters; the message says why and what would help."""


@dataclass(frozen=True)
class Options:
    """How to run Nsight Compute."""

    ncu: Path | None = None  # the program; None: look for it
    clock_control: str = "none"  # or "base"
    report: Path | None = None  # where to keep the report of a cold cache; of a warm one: -warm before the suffix
    plugins: tuple[str, ...] = ()  # modules of peers


def check(cases: Iterable[Case], options: Options) -> None:
    """Looks for all that counters need before anything is measured: a small product of cuBLAS is counted.

    Raises:
        CountersError: as `collect`, or no case runs a GPU kernel.
    """
    if not torch.cuda.is_available():
        raise CountersError("no CUDA device")
    if all(case.backend in WITHOUT_KERNELS for case in cases):
        raise CountersError("no case runs a GPU kernel")
    collect(PROBE, replace(options, report=None))


def collect(forms: Mapping[Case, str], options: Options) -> dict[Case, Counters]:
    """Counters of the cases that ran. forms: case -> which form to run, for a dense operation.

    Raises:
        CountersError: there is no GPU, no ncu, no permission, no module, or nothing was profiled.
    """
    forms = {case: form for case, form in forms.items() if case.backend not in WITHOUT_KERNELS}
    if not torch.cuda.is_available():
        raise CountersError("no CUDA device")
    if not forms:
        raise CountersError("no row ran a GPU kernel")
    ncu = find_ncu(options.ncu)
    module = find_module(ncu)
    multiprocessors = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    torch.cuda.empty_cache()  # the child needs the memory
    found: dict[Case, Counters] = {}
    chosen, profiled = list(forms), 0
    with tempfile.TemporaryDirectory(prefix="counters-") as folder:
        for cache in ("cold", "warm"):
            numbered = [(i, child.to_object(case, forms[case])) for i, case in enumerate(chosen) if case.cache == cache]
            if not numbered:
                continue
            report = _report_path(options.report, cache) or Path(folder) / f"{cache}.ncu-rep"
            listing = Path(folder) / f"{cache}.json"
            listing.write_text(json.dumps({"plugins": options.plugins, "cases": numbered}), encoding="utf-8")
            _profile(command(ncu, report, listing, options.clock_control, cache), report)
            context = _loaded(module, report)
            profiled += sum(context.range_by_idx(i).num_actions() for i in range(context.num_ranges()))
            for index, kernels in kernels_by_case(context).items():
                case = chosen[index]
                found[case] = counters_of(kernels, case.elements, multiprocessors)
    if not found:
        raise CountersError(f"Nsight Compute profiled {profiled} kernels, none of them in a case's NVTX range")
    return found


def command(ncu: Path, report: Path, listing: Path, clock_control: str, cache: str) -> list[str]:
    """ncu flushes the caches before every pass, or leaves them as the pass before did."""
    return [
        str(ncu),
        "--export",
        str(report),
        "--force-overwrite",
        "--replay-mode",
        "kernel",
        "--clock-control",
        clock_control,
        "--cache-control",
        "all" if cache == "cold" else "none",
        "--profile-from-start",
        "off",
        "--nvtx",
        "--metrics",
        ",".join(METRIC_NAMES),
        "--log-file",
        str(listing.with_suffix(".log")),
        sys.executable,
        "-m",
        "profiling.counters.child",
        str(listing),
    ]


def find_ncu(path: Path | None) -> Path:
    """The program given, or on the PATH, or of CUDA_HOME. CountersError if there is none."""
    if path is not None:
        if not path.is_file():
            raise CountersError(f"there is no {path}")
        return path
    homes = [Path(os.environ[name]) / "bin" / "ncu" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for candidate in (shutil.which("ncu"), *homes, Path("/usr/local/cuda/bin/ncu")):
        if candidate and Path(candidate).is_file():
            return Path(candidate)
    raise CountersError("Nsight Compute (ncu) not found: it comes with the CUDA toolkit; --ncu-path names it elsewhere")


def find_module(ncu: Path) -> ModuleType:
    """ncu_report, of the environment or of Nsight Compute's folder. CountersError if there is none."""
    try:
        return importlib.import_module("ncu_report")
    except ImportError as error:
        reason = str(error)
    for folder in _module_folders(ncu):
        if (folder / "ncu_report.py").is_file() or (folder / "ncu_report").is_dir():
            sys.path.append(str(folder))
            try:
                return importlib.import_module("ncu_report")
            except ImportError as error:
                reason = str(error)
    raise CountersError(
        f"cannot import ncu_report ({reason}): pip install 'cute-kernels[profile]', or an ncu-report "
        f"not older than {ncu}"
    )


def _module_folders(ncu: Path) -> list[Path]:
    """ncu may be a script or a link in the toolkit's bin; the tool lies in nsight-compute-VERSION beside that."""
    roots = [folder for start in (ncu, ncu.resolve()) for folder in start.parents]
    found = [root / "extras" / "python" for root in roots]
    found += [path for root in roots[:3] for path in sorted(root.glob("nsight-compute*/extras/python"), reverse=True)]
    found += sorted(Path("/opt/nvidia/nsight-compute").glob("*/extras/python"), reverse=True)
    return found


def _loaded(module: ModuleType, report: Path) -> Any:
    try:
        return module.load_report(str(report))
    except Exception as error:  # the module documents no types; an older one cannot read a newer tool's report
        raise CountersError(f"{module.__name__} cannot read the report ({error}): pip install -U ncu-report") from error


def _report_path(path: Path | None, cache: str) -> Path | None:
    if path is None:
        return None
    path = path.absolute().with_suffix(".ncu-rep")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path if cache == "cold" else path.with_stem(f"{path.stem}-warm")


def _profile(line: Sequence[str], report: Path) -> None:
    """Runs ncu. What it profiled before the program failed is still in the report."""
    log = Path(line[line.index("--log-file") + 1])
    python_path = os.pathsep.join(filter(None, (str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH"))))
    report.unlink(missing_ok=True)
    try:
        status = subprocess.run(line, cwd=ROOT, env={**os.environ, "PYTHONPATH": python_path}, check=False).returncode
    except OSError as error:
        raise CountersError(f"{line[0]}: {error.strerror}") from None
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    if PERMISSION in text:
        raise CountersError(
            "this user may not read GPU performance counters: run as root, or load the driver's module "
            f"with NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/{PERMISSION})"
        )
    if not report.is_file():
        errors = [part for part in text.splitlines() if "ERROR" in part or "WARNING" in part]
        message = "; ".join(errors[:3]) or "no message"
        raise CountersError(f"Nsight Compute wrote no report (status {status}): {message}")
