"""One case: inputs, check, timing beside its peers, rows."""

from __future__ import annotations

import torch

from profiling import check, operations, peers, timing
from profiling.cases import Case
from profiling.environment import Environment
from profiling.report import Row, rounded


def measure_case(case: Case, env: Environment) -> list[Row]:
    """A row for each peer of the case.

    Raises:
        RuntimeError, ValueError: the backend cannot run the case, or memory does not suffice.
    """
    inputs = operations.prepare(case, env.device)
    error = _error(case, inputs)
    calls = _rotation(case, inputs, env.cache_bytes)
    clock = timing.timer(env.device, env.clock_mhz)
    rows = []
    for peer in peers.peers(case, inputs):
        copies = timing.copies_for_cold_cache(peer.nbytes, env.cache_bytes)
        form = peers.fastest_form(peer, copies, clock)
        timings = timing.measure({"op": calls, "peer": peer.rotation(form, copies)}, case.repeats, clock)
        rows.append(_row(case, env, inputs, error, peer.name, form, timings["op"], timings["peer"]))
    return rows


def _error(case: Case, inputs: operations.InputSet) -> float:
    if inputs.out is not None:
        inputs.out.fill_(float("nan"))  # an element that the call does not write counts as wrong
    return check.relative_error(case, inputs, operations.call(case, inputs))


def _rotation(case: Case, inputs: operations.InputSet, cache_bytes: int) -> list[timing.Call]:
    copies = timing.copies_for_cold_cache(operations.bytes_moved(case, inputs), cache_bytes)
    sets = [inputs] + [operations.copy_of(case, inputs) for _ in range(copies - 1)]
    return [lambda operands=operands: operations.call(case, operands) for operands in sets]


def _row(case: Case, env: Environment, inputs: operations.InputSet, error: float, peer: str, form: str,
         op_time: timing.Timing, peer_time: timing.Timing) -> Row:
    load, shape, us = case.load, case.load.shape, op_time.median_us
    rate = None
    if env.clock_mhz and env.multiprocessors:
        rate = rounded(shape.elements / (us * env.clock_mhz * env.multiprocessors))
    tolerance = check.tolerance(case)
    return Row(
        op=case.op, backend=case.backend, device=env.name,
        B=shape.batch, Hq=shape.query_heads, Hkv=shape.kv_heads,
        Sq=shape.query_tokens, T=shape.tokens, D=shape.head_dim,
        keep=load.keep, dtype=load.dtype, data=load.data,
        median_us=rounded(us), iqr_us=rounded(op_time.iqr_us),
        tb_per_s=rounded(operations.bytes_moved(case, inputs) / us / 1e6),
        peer=peer, peer_form=form, peer_us=rounded(peer_time.median_us), peer_iqr_us=rounded(peer_time.iqr_us),
        ratio=rounded(peer_time.median_us / us),
        rel_err=rounded(error), tolerance=tolerance,
        status="ok" if error <= tolerance else "inaccurate",  # NaN is inaccurate, too
        check=check.METHOD, bits_per_element=rounded(inputs.sparse.bits_per_element), elements_per_clk_sm=rate,
        sm_clock_mhz=env.clock_mhz, multiprocessors=env.multiprocessors, threads=env.threads,
        repeats=case.repeats, seed=case.seed, torch=env.torch, driver=env.driver, commit=env.commit,
        timestamp=env.timestamp, command=case.command)


def is_fatal(error: Exception) -> bool:
    """Whether the device is lost for this process: after an illegal access every further call fails."""
    return isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in str(error)
