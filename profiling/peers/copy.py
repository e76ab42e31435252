"""A plain copy: the bandwidth there is, and beside compress the time of moving as many bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from profiling.cases import Case
from profiling.operations import InputSet
from profiling.peers.base import Peer, Plugin


def _copy(source: Tensor, target: Tensor) -> Tensor:
    return target.copy_(source)


def _build(case: Case, inputs: InputSet) -> Peer:
    """Beside compress: moves what it reads and writes. For itself: reads and writes one dense cache."""
    moved = 2 * inputs.dense.nbytes if case.op == "copy" else inputs.dense.nbytes + inputs.sparse.nbytes
    source = torch.ones(moved // 2, dtype=torch.uint8, device=inputs.dense.device)  # a copy moves each byte twice
    return Peer(
        "copy",
        (source, torch.zeros_like(source)),
        {"copy": _copy},
        source.nbytes,
        inputs.bits_per_element,
        tolerance=0.0,
        bytes_moved=2 * source.nbytes,
    )


PLUGINS = (Plugin("copy", ("compress", "copy"), ("cuda", "cpu"), _build),)
