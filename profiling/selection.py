"""From arguments to the cases of a sweep: suites, grids and shapes, filters, and the backends at hand."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from profiling import cases, grid, peers, suites
from profiling.cases import Block, Case, Load
from profiling.options import QUICK_REPEATS, REPEATS, selects_all

ON_HOST = ("cpu", "reference")  # backends of the products that run without a GPU; all others need one


def choose(args: argparse.Namespace, backends: Mapping[str, str]) -> list[Case]:
    """The cases that the arguments ask for, in order and once each; ValueError if they contradict each other."""
    for module in args.plugin:
        peers.load(module)
    _check_names("--backend", args.backend, {*backends, "cuda", *peers.names()})
    _check_names("--peer", args.peer, set(peers.names()))
    device = _device(args.backend, backends)
    repeats = args.repeats or (QUICK_REPEATS if args.quick else REPEATS)
    found: dict[Case, None] = {}
    for block in _blocks(args, device):
        block = _overridden(block, args)
        for op in block.ops:
            if args.op and op not in args.op:
                continue
            names = [
                name
                for name in serving(op, device, backends, block.backends or args.backend)
                if not args.backend or name in args.backend
            ]
            if block.best_backend and not args.backend:
                names = names[-1:]
            found.update(dict.fromkeys(block.cases(op, names, args.seed, repeats)))
    return list(found)


def results_name(args: argparse.Namespace) -> str:
    """Of the results that the rows of all chosen cases are: "sweep" of all suites, the suite's, or "" for a part."""
    return (args.suite[0] if args.suite else "sweep") if selects_all(args) else ""


def serving(op: str, device: str, backends: Mapping[str, str], asked: Iterable[str] | None) -> list[str]:
    """The backends that an operation is measured on: those asked for that it has, by default all of the device."""
    if op in cases.DENSE_OPS:
        product = op.removeprefix("dense_")
        known, default = peers.names(product), peers.names(product, device)
    elif op == "compress":  # takes no backend argument: the device of its input decides
        known, default = ["cpu", "cuda"], [device]
    else:
        known, default = list(backends), default_backends(backends) if device == "cuda" else ["cpu"]
    return default if not asked else [name for name in known if name in asked]


def default_backends(backends: Mapping[str, str]) -> list[str]:
    """A GPU's backends that work, else the CPU's."""
    return [name for name in backends if name not in ON_HOST and backends[name] == "ok"] or ["cpu"]


def device_of(case_or_backend: Case | str) -> str:
    """The kind of device that a backend is measured on; reference runs on either and is measured on the GPU, if any."""
    name = case_or_backend if isinstance(case_or_backend, str) else case_or_backend.backend
    if name in peers.names():
        devices = peers.named(name).devices
        return devices[0] if len(devices) == 1 else "cuda" if torch.cuda.is_available() else "cpu"
    if name == "reference":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if name == "cpu" else "cuda"


def unavailable(backend: str, backends: Mapping[str, str]) -> str | None:
    """Why a backend cannot run here, or None. compress's "cuda" works when any GPU backend does."""
    if backend in peers.names():
        return "no CUDA device" if device_of(backend) == "cuda" and not torch.cuda.is_available() else None
    names = [name for name in backends if name not in ON_HOST] if backend == "cuda" else [backend]
    states = [backends.get(name, "unknown to this build") for name in names]
    return None if "ok" in states else next(iter(states), "this build has no GPU backend")


def left_out(args: argparse.Namespace, backends: Mapping[str, str]) -> list[str]:
    """What a user might miss among the rows, and why."""
    if args.backend:
        return []
    measured = default_backends(backends)
    others = [
        f"{name} ({state if state != 'ok' else f'measured with --backend {name}'})"
        for name, state in backends.items()
        if name not in measured
    ]
    where = "the CPU backend" if measured == ["cpu"] else "the GPU backends"
    return [f"measuring {where}; left out: {', '.join(others)}"] if others else []


def _device(asked: Sequence[str] | None, backends: Mapping[str, str]) -> str:
    return "cuda" if any(device_of(name) == "cuda" for name in asked or default_backends(backends)) else "cpu"


def _blocks(args: argparse.Namespace, device: str) -> list[Block]:
    if args.shape:
        loads = [
            Load(shape, keep, dtype, data, args.codec or "", args.method or "")
            for shape in args.shape
            for keep in args.keep or cases.usual_keeps(shape.head_dim)
            for dtype in args.dtype or cases.DTYPES[:1]
            for data in args.data or cases.DATA[:1]
        ]
        return [Block((op,), tuple(loads)) for op in args.op or cases.SPARSE_OPS]
    if args.quick:
        return suites.quick(device)
    names, blocks = list(args.suite or ()), [grid.from_words(words) for words in args.grid or ()]
    for path in args.grid_file or ():
        more, grids = grid.from_file(path)
        _check_names(f"{path}: suites", more, set(suites.SUITES))
        names, blocks = names + more, blocks + grids
    if not names and not blocks:
        names = [name for name, suite in suites.SUITES.items() if suite.by_default]
    return [block for name in names for block in suites.SUITES[name].blocks(device)] + blocks


def _overridden(block: Block, args: argparse.Namespace) -> Block:
    """The block after the filters; --scores, --cache, --timing and --stages-ahead replace its own."""
    loads = tuple(
        replace(load, codec=args.codec or load.codec, method=args.method or load.method)
        for load in block.loads
        if (not args.keep or load.keep in args.keep)
        and (not args.dtype or load.dtype in args.dtype)
        and (not args.data or load.data in args.data)
    )
    return replace(
        block,
        loads=loads,
        scores=tuple(args.scores or block.scores),
        caches=tuple(args.cache or block.caches),
        timings=(args.timing,) if args.timing else block.timings,
        stages_ahead=tuple(args.stages_ahead or block.stages_ahead),
    )


def _check_names(what: str, names: Iterable[str] | None, known: set[str]) -> None:
    if wrong := [name for name in names or () if name not in known]:
        raise ValueError(f"{what} {', '.join(wrong)}: there are {', '.join(sorted(known))}")
