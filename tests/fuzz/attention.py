"""sparse_attention on every backend, beside a float64 loop over queries."""

from __future__ import annotations

import torch
from torch import Tensor

import cute_kernels as ck
from tests.fuzz import inputs
from tests.fuzz.case import Case
from tests.fuzz.compare import TOLERANCE, close
from tests.fuzz.compression import codec, stored
from tests.fuzz.products import query_values
from tests.support import oracle

_LOGIT_ERROR = 2.0**-20  # of the sum of a logit's magnitudes
_ROUNDED_Q_ERROR = 2.0**-11  # where q, times the scales of a narrow codec, is rounded to float16
# Of a row's largest: those below may count as zero. GPU kernels have them in the dtype of values, others in float32.
_SMALLEST_WEIGHT = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-120}
_LARGEST_ERROR = 0.3  # beyond such errors of logits nothing is known of weights


def run(case: Case) -> None:
    shape = inputs.cache_shape(case, 40_000)
    batch, kv_heads, tokens, head_dim = shape
    dtype = case.choose("dtype", inputs.DTYPES)
    amount = case.note("amount", inputs.amount(case, head_dim))
    kept = inputs.kept(amount, head_dim)
    k = inputs.values(case, shape, dtype, name="keys", finite=True)
    v = inputs.values(case, shape, dtype, name="values", finite=True)
    lengths = _lengths(case, batch, tokens)
    if lengths is not None:
        _poison(case, k, v, lengths)
    codecs = (codec(case, k, v, name="codec of both"),) * 2
    if case.device == "cpu":  # a GPU takes keys and values in one codec
        codecs = codec(case, k, name="codec of keys"), codec(case, v, name="codec of values")
    dense = tuple(stored(x, kept, chosen) for x, chosen in zip((k, v), codecs))
    queries, groups = case.rng.choice([(1, 1), (1, 4), (1, 8), (case.rng.randint(1, 6), case.rng.randint(1, 5))])
    q = query_values(case, (batch, kv_heads * groups, queries, head_dim), dtype)
    case.note("q's shape", tuple(q.shape))
    window = _window(case, shape, dtype)
    causal = case.choose("causal", [True, True, False])
    scale = case.choose("scale", [None, None, 1.0, 0.0, -0.3])
    splits = case.choose("num_splits", [None, None, 1, 2, 7, 10**12])
    views = [inputs.laid_out(case, each, f"layout {i}") for i, each in enumerate((q, *(window or ())))]
    keys, values = _compressed(case, k, v, codecs, amount)
    on_device = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=case.device)
    with case.backend() as name:
        for _ in range(case.choose("calls", [1, 2])):  # the second takes what is known of the first
            out, lse = ck.sparse_attention(
                views[0],
                keys,
                values,
                scale=scale,
                window=None if window is None else (views[1], views[2]),
                seq_lens=on_device,
                causal=causal,
                return_lse=True,
                num_splits=splits,
                backend=name,
            )
    factor = head_dim**-0.5 if scale is None else scale
    rounds_q = case.device == "cuda" and name != "reference" and keys.channel_scale is not None
    compare(case, out, lse, q, dense, factor, window, lengths, causal, _ROUNDED_Q_ERROR if rounds_q else _LOGIT_ERROR)


def _lengths(case: Case, batch: int, tokens: int) -> list[int] | None:
    if case.often(0.5):
        return None
    return case.note("seq_lens", [case.rng.choice([0, tokens, case.rng.randint(0, tokens)]) for _ in range(batch)])


def _poison(case: Case, k: Tensor, v: Tensor, lengths: list[int]) -> None:
    """What is behind a sequence's end has no part in anything."""
    if case.choose("poison", [False, True]):
        for x in (k, v):
            special = case.rng.choice([float("nan"), float("inf")])
            for b, length in enumerate(lengths):
                hidden = x[b, :, length:]
                hidden.masked_fill_(torch.rand(hidden.shape) < 0.2, special)


def _window(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    size = case.choose("window", [None, 0, 1, 31, 32, 33, 70])
    if size is None:
        return None
    k, v = (torch.randn(shape[0], shape[1], size, shape[3]).to(dtype) for _ in range(2))
    return k, v


def _compressed(
    case: Case, k: Tensor, v: Tensor, codecs: tuple[str | None, str | None], amount: dict[str, float | int]
) -> tuple[ck.SparseKV, ck.SparseKV]:
    k, v = k.to(case.device), v.to(case.device)
    if case.choose("compressed together", [True, False]):
        return ck.compress_kv(k, v, key_codec=codecs[0], value_codec=codecs[1], **amount)
    keys = ck.compress(k, role="key", codec=codecs[0], **amount)
    return keys, ck.compress(v, role="value", codec=codecs[1], **amount)


def compare(
    case: Case,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    dense: tuple[Tensor, Tensor],
    scale: float,
    window: tuple[Tensor, Tensor] | None,
    lengths: list[int] | None,
    causal: bool,
    logit_error: float = _LOGIT_ERROR,
) -> None:
    keys, values = (torch.where(x.isfinite(), x, 0.0) for x in dense)  # what is not finite is behind the end
    want, want_lse = oracle.attention(q, keys, values, scale, window, lengths, causal)
    positive = None if window is None else (window[0], window[1].abs())
    terms, _ = oracle.attention(q, keys, values.abs(), scale, positive, lengths, causal)
    lost = _SMALLEST_WEIGHT[out.dtype if case.device == "cuda" else torch.bfloat16] / TOLERANCE[out.dtype]
    every_value = values if window is None else torch.cat([values, window[1]], dim=2)
    terms = terms + lost * oracle.for_query_heads(every_value.abs(), q.shape[1]).sum(2, keepdim=True)
    every_key = keys if window is None else torch.cat([keys, window[0]], dim=2)
    logits = oracle.qk(q.abs(), every_key.abs(), abs(scale))
    error = logit_error * (float(logits.max()) if logits.numel() else 0.0)
    case.note("error of logits", error)
    case.require(torch.equal(lse.cpu() == float("-inf"), want_lse == float("-inf")), "lse: -inf is elsewhere")
    if error <= _LARGEST_ERROR:
        close(case, out, want, terms, TOLERANCE[out.dtype] + 4 * error, "out")
        seen = want_lse != float("-inf")
        off = (lse.cpu().double() - want_lse)[seen].abs() - (2e-3 + 1e-3 * want_lse[seen].abs() + 4 * error)
        case.require(not bool((off > 0).any()) and not bool(lse.isnan().any()), "lse differs")
