"""Where a sweep runs: device, clock, cache size, versions, commit."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from profiling import ROOT

DEFAULT_CACHE_BYTES = 32 << 20  # of a CPU that does not tell


@dataclass(frozen=True)
class Environment:
    """One device and the software on it."""

    device: torch.device
    name: str
    cache_bytes: int  # last-level cache, all of it
    multiprocessors: int | None  # GPU only
    clock_mhz: float | None  # GPU only: the fastest SM clock
    threads: int | None  # CPU only
    isa: str  # CPU only: the instruction set of the kernels, such as "avx512bf16"
    driver: str
    torch: str
    commit: str
    timestamp: str

    @property
    def slug(self) -> str:
        """The device's name as a folder name: "nvidia-h200", "cpu-amd-epyc-avx512bf16"."""
        name = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", self.name.lower())).strip("-") or "unknown"
        return name if self.device.type == "cuda" else f"cpu-{name}-{self.isa}"

    @property
    def about(self) -> str:
        """One line for people."""
        cpu = f", {self.isa}, {self.threads} threads" if self.device.type == "cpu" else ""
        return f"{self.name}{cpu}, torch {self.torch}, commit {self.commit[:12]}"


def environment(device: torch.device) -> Environment:
    common = {
        "torch": torch.__version__,
        "commit": commit(),
        "timestamp": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return Environment(device, _cpu_name(), _cpu_cache_bytes(), None, None, threads, _cpu_isa(), "", **common)
    properties = torch.cuda.get_device_properties(device)
    driver, clock_mhz = _nvidia_smi(properties)
    return Environment(
        device,
        properties.name,
        properties.L2_cache_size,
        properties.multi_processor_count,
        clock_mhz,
        None,
        "",
        driver,
        **common,
    )


def commit(checkout: Path = ROOT) -> str:
    """A checkout's commit, with -dirty when tracked files besides results differ from it.

    A copy of this tree without its .git names its commit in CUTE_KERNELS_COMMIT; without either it is "unknown".
    """
    if checkout == ROOT and (named := os.environ.get("CUTE_KERNELS_COMMIT")):
        return named
    if not (checkout / ".git").exists():  # else it would be that of a checkout around this folder
        return "unknown"
    head = _output("git", "-C", str(checkout), "rev-parse", "HEAD")
    if not head:
        return "unknown"
    changes = _output(
        "git", "-C", str(checkout), "status", "--porcelain", "--untracked-files=no", "--", ".", ":!profiling/results"
    )
    return head + ("-dirty" if changes else "")


def _nvidia_smi(properties: Any) -> tuple[str, float | None]:
    """(driver version, fastest SM clock in MHz); without nvidia-smi the clock comes from torch, if it knows."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader,nounits"]
    uuid = getattr(properties, "uuid", None)
    rows = (_output(*query, "-i", f"GPU-{uuid}") if uuid else "") or _output(*query)
    try:
        driver, clock = (part.strip() for part in rows.splitlines()[0].split(","))
        return driver, float(clock)
    except (IndexError, ValueError):
        clock_khz = getattr(properties, "clock_rate", None)
        return "", clock_khz / 1e3 if clock_khz else None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _cpu_isa() -> str:
    """Of the kernels: CUTE_KERNELS_CPU_ISA names a lower one than the CPU has."""
    from cute_kernels import _C  # builds that are compared with one another all have it

    return str(_C.cpu.isa())


def _cpu_cache_bytes(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """The sum of the outermost caches that this process' CPUs share."""
    caches: dict[str, int] = {}  # CPUs that share it -> bytes
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    for cpu in cpus:
        try:
            folders = (root / f"cpu{cpu}" / "cache").glob("index*")
            last = max(folders, key=lambda folder: int((folder / "level").read_text()))
            size = re.fullmatch(r"(\d+)([KMG]?)", (last / "size").read_text().strip())
            caches[(last / "shared_cpu_list").read_text()] = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
        except (OSError, ValueError, TypeError):
            continue
    return sum(caches.values()) or DEFAULT_CACHE_BYTES


def _output(*command: str) -> str:
    """What a command prints, or "" if it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
