"""Storage that was corrupted: refused with a reason, or valid, and then every operation reads the same from it."""

from __future__ import annotations

from typing import Any

import torch

import cute_kernels as ck
from cute_kernels._storage.tile_reader import decompress as decompress_in_torch
from cute_kernels._storage.tile_reader import operand
from cute_kernels.sparse_kv import storage_of
from tests.fuzz import inputs, limits, mutations
from tests.fuzz.case import Case
from tests.fuzz.compare import close, same_bits, same_values, tolerance_of
from tests.fuzz.compression import TENSORS, codec
from tests.support import oracle

_MEBIBYTES = 512  # that a check may take; the caches are of kilobytes
_ELEMENTS = 200_000  # of what is multiplied with


def run(case: Case) -> None:
    state = _state(case)
    later = case.choose("mutated", ["before from_state_dict", "before from_state_dict", "after it"]) == "after it"
    kv = ck.SparseKV.from_state_dict(state) if later else None
    if later:
        state = kv.state_dict()
    for i in range(case.rng.choice([1, 1, 1, 2, 3])):
        case.note(f"mutation {i}", (mutations.of_values if later else mutations.of_state)(case, state))
    kv = _accepted(case, state, kv)
    case.note("accepted", kv is not None)
    if kv is not None:
        _operations(case, kv)


def _state(case: Case) -> dict[str, Any]:
    shape = inputs.cache_shape(case, 12_000)
    dtype = case.choose("dtype", inputs.DTYPES)
    x = inputs.values(case, shape, dtype, finite=True)
    options = {"role": case.choose("role", ["key", "value"]), "codec": codec(case, x)}
    forms = ["bitmap", "bitmap", "bitmap", "two_of_four"]
    if case.device == "cpu" or options["codec"] in oracle.NARROW:  # GPUs have kernels for narrow codecs alone
        forms.append("two_of_four_bitmap")
    form = case.choose("tile format", forms)
    if form == "two_of_four_bitmap":
        options |= {"method": "magnitude-2of4", "keep": case.rng.randint(1, shape[3] // 2), "tile_format": form}
    else:
        options |= {"method": "2of4"} if form == "two_of_four" else inputs.amount(case, shape[3])
    state = ck.compress(x.to(case.device), **options).state_dict()
    old = form == "bitmap" and state["metadata"]["codec"] not in oracle.NARROW
    if case.often(0.1) and old:  # as version 3 wrote it
        state["metadata"] = {
            **{name: value for name, value in state["metadata"].items() if name not in ("codec", "tile_format")},
            "version": 3,
        }
    return {name: x.clone() if isinstance(x, torch.Tensor) else dict(x) for name, x in state.items()}


def _accepted(case: Case, state: Any, kv: ck.SparseKV | None) -> ck.SparseKV | None:
    """The cache, or None if it was refused as it should be."""
    with limits.memory(_MEBIBYTES):
        try:
            if kv is None:
                return ck.SparseKV.from_state_dict(state)
            kv.validate()
            return kv
        except (ValueError, TypeError) as error:
            case.require(len(str(error)) > 10, f"refused without a reason: {error!r}")
            return None


def _operations(case: Case, kv: ck.SparseKV) -> None:
    batch, kv_heads, tokens, head_dim = kv.shape
    if max(kv.shape.numel(), 2 * batch * kv_heads * max(tokens, head_dim)) > _ELEMENTS:
        case.require(not kv.shape.numel(), f"{kv!r} was made of a small cache")
        return  # nothing is stored, but the other operand would be large
    kv.validate()
    dense = ck.decompress(kv)
    narrow = kv.codec in oracle.NARROW
    same = same_values if narrow else same_bits  # a NaN is stored as a code, without its payload
    same(case, decompress_in_torch(storage_of(kv, "kv")), dense.cpu(), "decompress in torch")
    exact = operand(storage_of(kv, "kv")).cpu().double()
    # A code of a narrow codec may be 0.
    few = oracle.nonzeros(dense)
    case.require(kv.nnz >= few if narrow else kv.nnz == few, f"nnz is {kv.nnz}, not {few}")
    if dense.numel() < 5000:
        read = oracle.decode(kv.state_dict()).double()
        case.require(torch.equal(read.nan_to_num(1e9), exact.nan_to_num(1e9)), "the format's own reader")
    dense = dense.cpu()
    if kv.device.type != "cpu" and kv.tile_format == "two_of_four_bitmap":
        return  # no products there, and attention takes no other cache in another format beside it
    with case.backend() as name:
        if kv.role == "key":
            q = torch.randn(batch, 2 * kv_heads, 2, head_dim).to(kv.dtype)
            got = ck.sparse_qk(q.to(kv.device), kv, backend=name)
            want, terms = oracle.qk(q, exact), oracle.qk(q.abs(), exact.abs())
        else:
            p = torch.rand(batch, 2 * kv_heads, 2, tokens)
            got = ck.sparse_av(p.to(kv.device), kv, backend=name)
            want, terms = oracle.av(p, exact), oracle.av(p, exact.abs())
        other = ck.compress(dense.to(kv.device), role="value" if kv.role == "key" else "key")
        pair = (kv, other) if kv.role == "key" else (other, kv)
        q = torch.randn(batch, kv_heads, 1, head_dim).to(kv.dtype)
        # A GPU takes keys and values in one codec and one tile format.
        if kv.device.type == "cpu" or (not narrow and kv.tile_format == "bitmap"):
            ck.sparse_attention(q.to(kv.device), *pair, backend=name)  # in bounds; `attention` compares its results
    finite = want.isfinite() & terms.isfinite() & (terms < 1e37)
    close(
        case,
        got.masked_fill(~finite.to(got.device), 0),
        want.masked_fill(~finite, 0),
        terms.masked_fill(~finite, 0),
        tolerance_of(kv, torch.float32 if kv.role == "key" else kv.dtype),
        "product",
    )
    names = {*TENSORS, "metadata", "channel_scale"} if narrow else {*TENSORS, "metadata"}
    case.require(set(kv.state_dict()) == names, "state_dict")
