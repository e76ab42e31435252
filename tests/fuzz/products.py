"""sparse_qk and sparse_av on every backend, beside float64 products of the decompressed operands."""

from __future__ import annotations

import torch
from torch import Tensor

import cute_kernels as ck
from tests.fuzz import inputs
from tests.fuzz.case import Case
from tests.fuzz.compare import IN_RANGE, close, tolerance_of
from tests.fuzz.compression import codec, stored
from tests.support import oracle

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def run(case: Case) -> None:
    shape = inputs.cache_shape(case)
    dtype = case.choose("dtype", inputs.DTYPES)
    role = case.choose("role", ["key", "value"])
    amount = case.note("amount", inputs.amount(case, shape[3]))
    x = inputs.values(case, shape, dtype)
    chosen = codec(case, x)
    kv = ck.compress(x.to(case.device), role=role, codec=chosen, **amount)
    dense = stored(x, inputs.kept(amount, shape[3]), chosen)
    rows = case.note("query heads a KV head, queries", rows_of(case))
    (_keys if role == "key" else _values)(case, kv, dense, rows)


def rows_of(case: Case) -> tuple[int, int]:
    """Query heads a KV head and query tokens: single rows as in decoding, and more than a WGMMA has."""
    if case.often(0.03):
        return case.rng.choice([(0, 1), (1, 0)])
    return case.rng.choice([(1, 1), (4, 1), (8, 1), (case.rng.randint(1, 9), case.rng.randint(1, 9)), (3, 30)])


def _keys(case: Case, k: ck.SparseKV, dense: Tensor, rows: tuple[int, int]) -> None:
    batch, kv_heads, _, head_dim = dense.shape
    q = query_values(case, (batch, kv_heads * rows[0], rows[1], head_dim), k.dtype)
    scale = case.choose("scale", [1.0, head_dim**-0.5, 0.0, -2.5, 1e-6, 100])
    out_dtype = case.choose("out_dtype", _DTYPES)
    view = inputs.laid_out(case, q, "layout of q")
    with case.backend() as name:
        out = _memory(case, (*q.shape[:3], dense.shape[2]), out_dtype)
        got = ck.sparse_qk(view, k, scale=scale, out_dtype=out_dtype, out=out, backend=name)
    finite = torch.where(dense.isfinite(), dense, 0.0)
    sums = oracle.qk(q.abs(), finite.abs())
    want = oracle.qk(q, finite, scale)
    special = ~oracle.for_query_heads(dense, q.shape[1]).isfinite().all(-1)[:, :, None].expand(want.shape)
    _compare(case, got, want, sums, special, tolerance_of(k, out_dtype), abs(scale))
    if scale and (q != 0).all():
        certain = special & (sums * max(1, abs(scale)) < IN_RANGE)
        want = oracle.qk(q, dense, scale)
        case.require(torch.equal(got.cpu().isnan()[certain], want.isnan()[certain]), "logits: NaN are elsewhere")


def _values(case: Case, v: ck.SparseKV, dense: Tensor, rows: tuple[int, int]) -> None:
    batch, kv_heads, tokens, head_dim = dense.shape
    p_dtype = case.choose("dtype of p", _DTYPES)
    p = weights(case, (batch, kv_heads * rows[0], rows[1], tokens), p_dtype)
    view = inputs.laid_out(case, p, "layout of p")
    with case.backend() as name:
        out = _memory(case, (*p.shape[:3], head_dim), v.dtype)
        got = ck.sparse_av(view, v, out=out, backend=name)
    finite = torch.where(dense.isfinite(), dense, 0.0)
    terms, want = oracle.av(p.abs(), finite.abs()), oracle.av(p, finite)
    if tokens:  # what is far below a row's largest weight may be lost
        largest = p.cpu().double().abs().amax(-1, keepdim=True)
        terms = terms + largest * 2.0**-26 * oracle.for_query_heads(finite.abs(), p.shape[1]).sum(2, keepdim=True)
    special = ~oracle.for_query_heads(dense, p.shape[1]).isfinite().all(2)[:, :, None].expand(want.shape)
    _compare(case, got, want, terms, special, tolerance_of(v, v.dtype))


def query_values(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    kind = case.choose("q", ["gaussian", "gaussian", "small", "large", "zeros", "integers"])
    q = torch.randn(shape)
    changed = {"small": q * 1e-4, "large": (q * 1e3).clamp(-6e4, 6e4), "zeros": q * 0, "integers": q.round()}
    return changed.get(kind, q).to(dtype)


def weights(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Probabilities, and weights that are none."""
    kind = case.choose("p", ["softmax", "softmax", "gaussian", "tiny", "mixed magnitudes", "zeros", "one token"])
    p = torch.randn(shape)
    if kind == "softmax":
        p = p.mul(3).softmax(-1)
    elif kind == "tiny":
        p = p * 1e-6
    elif kind == "mixed magnitudes":
        p = p * 10.0 ** (torch.rand(shape) * 8 - 6)
    elif kind == "zeros":
        p = p * 0
    elif kind == "one token" and p.numel():
        p = torch.where(torch.arange(shape[-1]) == case.rng.randrange(shape[-1]), p, 0.0)
    return p.to(dtype)


def _memory(case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """out, sometimes: full of NaN, which must be overwritten."""
    return torch.full(shape, float("nan"), dtype=dtype, device=case.device) if case.often(0.3) else None


def _compare(
    case: Case, got: Tensor, want: Tensor, sums: Tensor, special: Tensor, tolerance: float, scale: float = 1.0
) -> None:
    """sums: of the magnitudes of products, before `scale`. special: what NaN or infinities of the cache have a part in;
    the rest is as if there were none."""
    unknown = special | (sums >= IN_RANGE)
    got, want = got.masked_fill(unknown.to(got.device), 0), want.masked_fill(unknown, 0)
    close(case, got, want, sums * scale, tolerance, "result")
