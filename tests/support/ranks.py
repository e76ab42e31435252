"""Processes of a torch.distributed group, and what they return."""

from __future__ import annotations

import datetime
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)  # of a collective


def run(world_size: int, function: Callable[[int, Any], Any], argument: Any, folder: Path, device: str) -> list[Any]:
    """function(rank, argument) in as many processes, with gloo for the CPU and NCCL for GPUs. Returns their results."""
    folder.mkdir(exist_ok=True)
    torch.multiprocessing.start_processes(
        _child, (world_size, function, argument, folder, device), nprocs=world_size, start_method="spawn"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def _child(
    rank: int, world_size: int, function: Callable[[int, Any], Any], argument: Any, folder: Path, device: str
) -> None:
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )
    try:
        torch.save(function(rank, argument), folder / f"{rank}.pt")
    except BaseException:
        traceback.print_exc()
        dist.destroy_process_group()
        raise
    end_process()


def end_process() -> NoReturn:
    """Leaves the group and ends the process with status 0, but not the interpreter first.

    A mesh keeps its groups, and gloo's threads may hold tensors of collectives: to give them up while the interpreter
    ends can abort the process (pytorch/pytorch#179291).
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
