"""Several processes, one a device: `torchrun --nproc-per-node N -m profiling.generate --mesh tp=N`."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

import torch

HEADS, TOKENS = "tp", "cp"


def sizes(text: str) -> dict[str, int]:
    """ "tp=2,cp=2" -> {"tp": 2, "cp": 2}"""
    found: dict[str, int] = {}
    for word in text.split(","):
        name, _, size = word.strip().partition("=")
        if name not in (HEADS, TOKENS) or name in found or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"must be as tp=2, cp=4 or tp=2,cp=2, got '{text}'")
        found[name] = int(size)
    return found


def spelled(mesh: dict[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def check_processes(mesh: dict[str, int], device: torch.device) -> None:
    """Raises ValueError unless torchrun started as many processes as the mesh has, and a device for each of this
    host's."""
    wanted = math.prod(mesh.values())
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != wanted:
        raise ValueError(
            f"--mesh {spelled(mesh)} takes {wanted} processes, there are {found}: "
            f"torchrun --nproc-per-node {wanted} -m profiling.generate ..."
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda" and torch.cuda.device_count() < local:
        raise ValueError(f"--mesh {spelled(mesh)}: {local} processes on a host of {torch.cuda.device_count()} GPUs")


def start(mesh: dict[str, int], device: torch.device) -> tuple[Any, torch.device]:
    """(DeviceMesh, this process's device), in a new default group."""
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sides of graphs capture collectives
    torch.distributed.init_process_group("gloo" if device.type == "cpu" else "nccl")
    made = torch.distributed.device_mesh.init_device_mesh(device.type, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    return made, device
