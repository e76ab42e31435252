"""What is installed here, to paste into a bug report: `python -m cute_kernels.info`, with --json for programs.

Works where the extension module is missing or cannot be loaded, and where torch is: it says so in its place.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cute_kernels import __version__
from cute_kernels._runtime.loading import PACKAGE, why_not

_VARIABLES = re.compile(r"CUTE_KERNELS_|CUDA_|NVIDIA_VISIBLE_DEVICES$|OMP_|LD_LIBRARY_PATH$|PYTORCH_")


def collect() -> dict[str, Any]:
    """All that is known, as JSON can hold it. What cannot be had is None, or a dict whose "error" says why."""
    torch = _torch()
    extension = _extension()
    loaded = "error" not in extension
    return {
        "cute_kernels": __version__,
        "package": str(PACKAGE),
        "format_version": importlib.import_module("cute_kernels._storage.state").FORMAT_VERSION if loaded else None,
        "extension": extension,
        "backends": importlib.import_module("cute_kernels").backends() if loaded else None,
        "torch": torch,
        "python": f"{platform.python_version()} ({sys.implementation.name}, {sys.executable})",
        "platform": f"{platform.platform()}, {' '.join(platform.libc_ver()) or 'libc unknown'}",
        "cpu": {"model": _cpu_model(), "threads": os.cpu_count()},
        "driver": _driver(),
        "gpus": _gpus() if "error" not in torch else [],
        "environment": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.match(name)},
    }


def text(info: dict[str, Any]) -> str:
    """The lines that a person reads, of what `collect` gives."""
    extension, torch = info["extension"], info["torch"]
    if "error" in extension:
        built = ["NOT LOADED: " + extension["error"]]
    else:
        cuda = (
            f"CUDA {extension['cuda_version']} for {', '.join(extension['archs'])}" if extension["cuda"] else "no CUDA"
        )
        built = [
            extension["file"],
            f"built with {cuda}; CUTLASS {extension['cutlass']}; {extension['compiler'] or 'compiler unknown'}",
            f"instruction set in use: {extension['cpu_isa']}",
        ]
    backends = info["backends"]
    rows: list[tuple[str, list[str]]] = [
        ("cute_kernels", [f"{info['cute_kernels']}, in {info['package']}"]),
        ("storage format", [f"version {info['format_version']}" if info["format_version"] else "unknown"]),
        ("extension", built),
        ("backends", [f"{k}: {v}" for k, v in backends.items()] if backends else ["none: the extension is not loaded"]),
        ("torch", [torch.get("error") or f"{torch['version']}, {_torch_cuda(torch)}"]),
        ("python", [info["python"]]),
        ("platform", [info["platform"]]),
        ("cpu", [f"{info['cpu']['model'] or 'unknown'}, {info['cpu']['threads']} threads"]),
        ("driver", [info["driver"] or "no NVIDIA driver found"]),
        ("gpus", info["gpus"] or ["none that torch sees"]),
        ("environment", [f"{k}={v}" for k, v in info["environment"].items()] or ["nothing of note"]),
    ]
    return "\n".join(f"{name if i == 0 else '':<15} {line}" for name, lines in rows for i, line in enumerate(lines))


def _torch_cuda(torch: dict[str, Any]) -> str:
    return f"for CUDA {torch['cuda']}" if torch["cuda"] else "built without CUDA"


def _torch() -> dict[str, Any]:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return {"error": f"NOT LOADED: {error}"}
    return {"version": str(torch.__version__), "cuda": torch.version.cuda}


def _extension() -> dict[str, Any]:
    try:
        module = importlib.import_module("cute_kernels._C")
    except ImportError as error:
        return {"error": why_not(error)}
    try:
        importlib.import_module("cute_kernels._runtime.backends")
    except (ImportError, OSError) as error:
        return {"error": f"loaded, but the package cannot be used: {error}"}
    try:
        isa = module.cpu.isa()
    except RuntimeError as error:  # CUTE_KERNELS_CPU_ISA names one that is unknown, or that this CPU lacks
        isa = f"none: {error}"
    return {"file": module.__file__, **module.build_info(), "cpu_isa": isa}


def _cpu_model() -> str | None:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1) if found else None


def _driver() -> str | None:
    """The NVIDIA driver's version: of nvidia-smi, else of the kernel module."""
    program = shutil.which("nvidia-smi")
    if program:
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"nvidia-smi failed: {error}"
        lines = (result.stdout or result.stderr).strip().splitlines()
        if lines:
            return lines[0] if result.returncode == 0 else f"nvidia-smi failed: {lines[0]}"
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return None


def _gpus() -> list[str]:
    cuda = importlib.import_module("torch").cuda
    if not cuda.is_available():
        return []
    found = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
    return [f"{g.name}, compute capability {g.major}.{g.minor}, {g.total_memory / 2**30:.0f} GiB" for g in found]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cute_kernels.info", description="What is installed here.")
    parser.add_argument("--json", action="store_true", help="JSON in place of text")
    options = parser.parse_args(arguments)
    info = collect()
    print(json.dumps(info, indent=2) if options.json else text(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
