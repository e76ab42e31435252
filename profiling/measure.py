"""One case: inputs, check, timing beside its peers, rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from profiling import check, operations, peers, timing
from profiling.cases import Case
from profiling.environment import Environment
from profiling.peers import Unavailable
from profiling.rows import Row, rounded


@dataclass(frozen=True)
class Outcome:
    """What came of a case: a row for each peer, and why others are missing."""

    rows: list[Row]
    missing: list[str] = field(default_factory=list)


def measure_case(case: Case, env: Environment, wanted: Sequence[str] | None = None) -> Outcome:
    """Measures a case beside its peers, those `wanted` or all; alone if there is none.

    Raises:
        RuntimeError, ValueError: the backend cannot run the case, or memory does not suffice.
    """
    if case.timing == "graph" and (env.device.type == "cpu" or case.op == "compress"):
        raise ValueError(
            "timing graph needs a CUDA device and an operation without host synchronisation, not "
            f"{case.op} on {env.device.type}"
        )
    clock = timing.timer(env.device, env.clock_mhz)
    if case.is_dense:
        return Outcome([_dense_row(case, env, clock)])
    _probe(case, env)
    inputs = operations.prepare(case, env.device)
    error = _error(case, inputs)
    moved = operations.bytes_moved(case, inputs)
    row = partial(_row, case, env, inputs.bits_per_element, inputs.cache_bytes, moved, error)
    calls = _rotation(case, inputs, env)
    rows, missing = [], []
    for plugin in peers.of(case, env.device.type, wanted):
        try:
            peer, form, peer_error = plugin.peer(case, inputs).fastest(
                lambda got: check.relative_error(case, inputs, got) if case.op != "compress" else 0.0,
                partial(_copies, case, env),
                clock,
            )
        except Unavailable as reason:
            missing.append(str(reason))
            continue
        copies = _copies(case, env, peer.nbytes)
        timings, how = _times(case, {"op": calls, "peer": peer.rotation(form, copies)}, clock)
        beside = {
            "peer": peer.name,
            "peer_form": form,
            "peer_us": rounded(timings["peer"].median_us),
            "peer_iqr_us": rounded(timings["peer"].iqr_us),
            "peer_rel_err": rounded(peer_error),
        }
        rows.append(row(timings["op"], how, **beside))
    if not rows:
        timings, how = _times(case, {"op": calls}, clock)
        rows.append(row(timings["op"], how))
    return Outcome(rows, missing)


def _dense_row(case: Case, env: Environment, clock: timing.CpuTimer | timing.CudaTimer) -> Row:
    """A peer for itself."""
    inputs = operations.prepare(case, env.device)

    def error_of(result: Tensor) -> float:
        return check.relative_error(case, inputs, result) if case.op != "copy" else float((result != 1).any())

    peer, form, error = (
        peers.named(case.backend).peer(case, inputs).fastest(error_of, partial(_copies, case, env), clock)
    )
    timings, how = _times(case, {"op": peer.rotation(form, _copies(case, env, peer.nbytes))}, clock)
    return _row(
        case,
        env,
        peer.bits_per_element,
        peer.cache_bytes,
        peer.bytes_moved,
        error,
        timings["op"],
        how,
        tolerance=peer.tolerance,
        peer_form=form,
    )


def _probe(case: Case, env: Environment) -> None:
    """Calls the operation on a tile, so that one which the backend does not have fails before a large cache is made."""
    shape = replace(case.load.shape, batch=1, query_heads=1, kv_heads=1, tokens=64)
    small = replace(case, load=replace(case.load, shape=shape))
    operations.call(small, operations.prepare(small, env.device))


def _error(case: Case, inputs: operations.InputSet) -> float:
    if inputs.out is not None:
        inputs.out.fill_(float("nan"))  # an element that the call does not write counts as wrong
    return check.relative_error(case, inputs, operations.call(case, inputs))


def _copies(case: Case, env: Environment, nbytes: int) -> int:
    return 1 if case.cache == "warm" else timing.copies_for_cold_cache(nbytes, env.cache_bytes)


def _rotation(case: Case, inputs: operations.InputSet, env: Environment) -> list[timing.Call]:
    copies = _copies(case, env, operations.bytes_moved(case, inputs))
    sets = [inputs] + [operations.copy_of(case, inputs) for _ in range(copies - 1)]
    return [lambda operands=operands: operations.call(case, operands) for operands in sets]


def _times(
    case: Case, rotations: dict[str, list[timing.Call]], clock: timing.CpuTimer | timing.CudaTimer
) -> tuple[dict[str, timing.Timing], str]:
    """(the times, "events" or "graph")."""
    interleaved = case.cache == "cold"
    if case.timing != "graph":
        timings = timing.measure(rotations, case.repeats, clock, interleaved)
        is_short = timings["op"].median_us < timing.GRAPH_BELOW_US
        if case.timing == "events" or not is_short or case.op == "compress" or isinstance(clock, timing.CpuTimer):
            return timings, "events"
    return timing.measure_graphs(rotations, case.repeats, clock, interleaved), "graph"


def _row(
    case: Case,
    env: Environment,
    bits_per_element: float,
    cache_bytes: int,
    bytes_moved: int,
    error: float,
    op_time: timing.Timing,
    how: str,
    tolerance: float | None = None,
    **beside: object,
) -> Row:
    load, shape, us = case.load, case.load.shape, op_time.median_us
    tolerance = check.tolerance(case) if tolerance is None else tolerance
    peer = {"peer": "", "peer_form": "", "peer_us": None, "peer_iqr_us": None} | beside
    return Row(
        op=case.op,
        backend=case.backend,
        device=env.name,
        B=shape.batch,
        Hq=shape.query_heads,
        Hkv=shape.kv_heads,
        Sq=shape.query_tokens,
        T=shape.tokens,
        D=shape.head_dim,
        keep=load.keep,
        dtype=load.dtype,
        data=load.data,
        codec=load.codec,
        method=load.method,
        median_us=rounded(us),
        iqr_us=rounded(op_time.iqr_us),
        tb_per_s=rounded(bytes_moved / us / 1e6),
        rel_err=rounded(error),
        tolerance=tolerance,
        check=check.METHOD,
        bits_per_element=rounded(bits_per_element),
        sm_clock_mhz=env.clock_mhz,
        multiprocessors=env.multiprocessors,
        threads=env.threads,
        repeats=case.repeats,
        seed=case.seed,
        torch=env.torch,
        driver=env.driver,
        commit=env.commit,
        timestamp=env.timestamp,
        scores=case.scores,
        cache=case.cache,
        timing=how,
        stages_ahead=case.stages_ahead,
        isa=env.isa,
        cache_tb_per_s=rounded(cache_bytes / us / 1e6),
        **peer,
    )


def is_fatal(error: Exception) -> bool:
    """Whether the device is lost for this process: after an illegal access every further call fails, but not after a
    failed capture."""
    is_cuda = isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)
    return is_cuda and "captur" not in str(error)
