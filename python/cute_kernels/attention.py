"""Attention over a compressed cache and a dense window of the newest tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cute_kernels._attention import checks as attention_checks
from cute_kernels._attention import reference
from cute_kernels._attention.memo import AttentionCall
from cute_kernels._attention.problem import launch_problem, pack_problem, pack_window
from cute_kernels._runtime import checks, gradients, ops
from cute_kernels._runtime.backends import check_name, resolve
from cute_kernels._storage import arguments, tile_reader
from cute_kernels._storage.checks import check_codecs, query_side
from cute_kernels._storage.storage import Storage
from cute_kernels.sparse_kv import SparseKV, storage_of

_MOST_SPLITS = 2**31 - 1  # more make no difference


def sparse_attention(
    q: Tensor,
    k: SparseKV,
    v: SparseKV,
    *,
    scale: float | None = None,
    window: tuple[Tensor, Tensor] | None = None,
    seq_lens: Tensor | None = None,
    causal: bool = True,
    return_lse: bool = False,
    num_splits: int | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q [K; Kw]^T) [V; Vw], query head h meeting KV head h // (Hq / Hkv).

    q: (B, Hq, Sq, D) of k's dtype, on its device, stride 1 in the last dimension.
    k, v: SparseKV of roles "key" and "value", alike in shape (B, Hkv, T, D), dtype and device; compressed together or
        not; each in any codec and tile format, on a GPU both in the same ones.
    scale: finite; None: 1 / sqrt(D).
    window: (k_win, v_win), each (B, Hkv, W, D) of k's dtype: dense tokens that follow the compressed ones.
    seq_lens: (B,) int32 on k's device, 0 to T: how many compressed tokens of each batch row count; the window follows
        them. None: all T. GPU kernels read them without a synchronisation and clamp them to 0 to T; "reference" and
        "cpu" check them.
    causal: the Sq queries stand for the Sq newest tokens; query i sees all tokens but the Sq - 1 - i newest. False:
        every query sees every token.
    return_lse: return (out, lse) with lse (B, Hq, Sq) float32, the natural logarithm of the sum of exponentials.
    num_splits: the most splits of a KV head's tokens among a kernel's workers; None lets it choose. The reference
        backend does not split.
    out: where to put the result, contiguous and apart from the inputs; default: a new tensor.
    backend: "auto" takes "cpu" on the CPU and on a GPU the kernels of its compute capability, "sm80" (8.x) or
        "sm90" (9.0, where "sm80" runs too). "reference" is plain torch. A backend that cannot serve the call raises.

    Returns (B, Hq, Sq, D) of q's dtype; softmax and accumulation in float32. A query that sees no token gives zeros
    and an lse of -inf. A token that a query does not see has no part in its result, be it NaN or infinite. "sm80" and
    "sm90" have one exception: a NaN or an infinity in a token of the query's own batch row and KV head that causality
    hides from it, but not from a later query. Results have no gradient: a backward pass through them raises
    RuntimeError.

    Raises TypeError for a wrong class or dtype, ValueError for a wrong shape, device, stride or range, RuntimeError if
    the backend cannot serve the call, or has no kernels for a codec or tile format; all before anything is launched.
    """
    operands = (q, *window) if isinstance(window, (tuple, list)) else (q,)
    if gradients.wanted(*operands):
        keywords: dict[str, Any] = {
            "scale": scale,
            "seq_lens": seq_lens,
            "causal": causal,
            "return_lse": return_lse,
            "num_splits": num_splits,
            "backend": backend,
        }

        def call(q: Tensor, *tensors: Any) -> Any:
            return sparse_attention(q, k, v, window=tensors if len(operands) > 1 else window, **keywords)

        return gradients.without_gradient("sparse_attention", call, *operands, out=out)
    keys, values = storage_of(k, "k", "key"), storage_of(v, "v", "value")
    options = scale, causal, return_lse, num_splits, backend
    known: AttentionCall | None = keys.last_call if ops.unobserved() else None
    if known is not None and known.fits(q, keys, values, window, seq_lens, options, out):
        return known.run(q, keys, values, window, seq_lens, out)
    attention_checks.pair(keys, values)
    query_side(q, "q", keys, "k", keys.shape[3], "D", (keys.dtype,), " like k")
    factor = 1 / math.sqrt(keys.shape[3]) if scale is None else checks.scale(scale)
    attention_checks.window(window, keys)
    attention_checks.seq_lens(seq_lens, keys)
    checks.flag(causal, "causal")
    checks.flag(return_lse, "return_lse")
    if num_splits is not None:
        num_splits = checks.integer(num_splits, "num_splits")
        if num_splits < 1:
            raise ValueError(f"num_splits must be at least 1, got {num_splits}")
    if out is not None:
        checks.output(out, q.shape, q.dtype, keys.device)
    check_name(backend)
    splits = min(num_splits or 0, _MOST_SPLITS)
    k_window, v_window = (None, None) if window is None else window
    if backend != "reference" and ops.eager(q, k_window, v_window, seq_lens, out, keys.blocks, values.blocks):
        inputs = q, keys, values, k_window, v_window, seq_lens, factor, causal, splits, backend
        result, lse = run(*inputs, return_lse=return_lse, out=out)
        if q.numel():
            name = resolve(backend, q.device)
            options = scale, causal, return_lse, num_splits, backend  # num_splits is an int now, and no array
            keys.last_call = AttentionCall(q, keys, values, seq_lens, options, factor=factor, splits=splits, name=name)
        return result if lse is None else (result, lse)
    tensors = q, *arguments.pack(keys), *arguments.pack(values), k_window, v_window, seq_lens
    numbers = keys.shape[2], factor, causal, splits, backend
    if out is None:
        return (_ATTENTION_LSE if return_lse else _ATTENTION)(*tensors, *numbers)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    _ATTENTION_OUT(*tensors, *numbers, out, lse)
    return out if lse is None else (out, lse)


def run(
    q: Tensor,
    keys: Storage,
    values: Storage,
    k_window: Tensor | None,
    v_window: Tensor | None,
    seq_lens: Tensor | None,
    scale: float,
    causal: bool,
    num_splits: int,
    backend: str,
    *,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    stages_ahead: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """sparse_attention behind its checks, for the package's own use: does those that need tensors with data.

    stages_ahead: depth of the GPU kernels' pipeline, for measurements; 0 lets them choose.
    """
    if out is not None:
        attention_checks.apart(out, q, attention_checks.memory(keys, values), k_window, v_window, seq_lens)
    backend = resolve(backend, q.device)
    check_codecs(keys, values, backend)
    if seq_lens is not None and backend in ("reference", "cpu"):
        attention_checks.lengths(seq_lens, keys.shape[2])
    window = None
    if k_window is not None and v_window is not None and k_window.shape[2]:
        window = checks.plain(k_window), checks.plain(v_window)
    lengths = None if seq_lens is None else checks.plain(seq_lens).contiguous()
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if lse is None and return_lse:
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    if not out.numel():
        return out, lse
    if backend == "reference":
        dense = tile_reader.operand(keys), tile_reader.operand(values)
        _, computed = reference.attend(*dense, q, window=window, lengths=lengths, scale=scale, causal=causal, out=out)
        if lse is not None:
            lse.copy_(computed)
    else:
        q = checks.plain(q)
        packed = None if window is None else pack_window(*window)
        problem = pack_problem(keys.view(), values.view(), packed, q, scale=scale, causal=causal, num_splits=num_splits)
        launch_problem(problem, q, out, lse, backend, lengths=lengths, stages_ahead=stages_ahead)
    return out, lse


# ---- torch.ops.cute_kernels ------------------------------------------------------------------------------------------


def _run_op(*inputs: Any, **results: Any) -> tuple[Tensor, Tensor | None]:
    """inputs: as _ARGUMENTS declares them."""
    q, *packed = inputs[:11]
    k_window, v_window, seq_lens, tokens, *options = inputs[11:]
    keys = arguments.unpack(packed[:5], "key", tokens, q.shape[3])
    values = arguments.unpack(packed[5:], "value", tokens, q.shape[3])
    return run(q, keys, values, k_window, v_window, seq_lens, *options, **results)


def _attention(*inputs: Any) -> Tensor:
    return _run_op(*inputs)[0]


def _attention_lse(*inputs: Any) -> tuple[Tensor, Tensor | None]:
    return _run_op(*inputs, return_lse=True)


def _attention_out(*arguments: Any) -> None:
    *inputs, out, lse = arguments
    _run_op(*inputs, out=out, lse=lse)


def _attention_fake(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _attention_lse_fake(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


_ARGUMENTS = (
    f"Tensor q, {arguments.schema('keys')}, {arguments.schema('values')}, Tensor? k_window, Tensor? v_window, "
    "Tensor? seq_lens, SymInt tokens, float scale, bool causal, int num_splits, str backend"
)
_ATTENTION = ops.define(f"sparse_attention({_ARGUMENTS}) -> Tensor", _attention, _attention_fake)
_ATTENTION_LSE = ops.define(
    f"sparse_attention_lse({_ARGUMENTS}) -> (Tensor, Tensor)", _attention_lse, _attention_lse_fake
)
_ATTENTION_OUT = ops.define(
    f"sparse_attention_out({_ARGUMENTS}, Tensor(a!) out, Tensor(b!)? lse) -> ()", _attention_out, ops.no_results
)
