"""prune, compress, compress_kv and decompress: bit for bit what numpy prunes, and the same storage everywhere."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels._storage.tile_reader import decompress as decompress_in_torch
from cute_kernels.sparse_kv import storage_of
from tests.fuzz import inputs
from tests.fuzz.case import Case
from tests.fuzz.compare import same_bits
from tests.support import oracle
from tests.support.rule_definitions import expected as by_definition

_DECODED_ELEMENTS = 8_000  # the format's reader and the rules' definitions take Python steps for each
TENSORS = ("blocks", "row_offsets", "token_order", "channel_order")


def stored(x: Tensor, kept: int | None, codec: str | None) -> Tensor:
    """What is stored of x: float64 of a narrow codec, scales included; else pruned values as they are."""
    return oracle.narrow(x, kept, codec) if codec in oracle.NARROW else oracle.prune(x, kept)


def codec(case: Case, *x: Tensor, name: str = "codec") -> str | None:
    """One that stores what x holds."""
    finite = all(bool(one.isfinite().all()) for one in x)
    return case.choose(name, [None, None, *oracle.NARROW]) if finite else None


def run(case: Case) -> None:
    shape = inputs.cache_shape(case)
    dtype = case.choose("dtype", inputs.DTYPES)
    amount = case.note("amount", inputs.amount(case, shape[3]))
    kept = inputs.kept(amount, shape[3])
    x = inputs.values(case, shape, dtype)
    view = inputs.laid_out(case, x)
    pruned = oracle.prune(x, kept)
    with case.threads():
        same_bits(case, ck.prune(view, **amount), pruned, "prune")
        if case.often(0.3):
            _pair(case, x, amount, kept)
        elif case.often(0.3):
            _rule(case, x)
        else:
            role, chosen = case.choose("role", ["key", "value"]), codec(case, x)
            options = {**amount, "role": role, "codec": chosen}
            kv = ck.compress(view, **options)
            check(case, kv, stored(x, kept, chosen), role, oracle.nonzeros(pruned))
            _into_memory(case, view, kv, options)
            _on_the_cpu_too(case, x, kv, options)
    same_bits(case, view, x, "the input, afterwards")


def check(case: Case, kv: ck.SparseKV, dense: Tensor, role: str, nonzeros: int) -> None:
    """kv holds exactly `dense`, whoever reads it."""
    rounded = oracle.to_dtype(dense, kv.dtype) if kv.codec in oracle.NARROW else dense
    case.require(kv.role == role and kv.shape == dense.shape and kv.dtype == rounded.dtype, f"{kv!r}")
    same_bits(case, decompress_in_torch(storage_of(kv, "kv")), ck.decompress(kv).cpu(), "decompress in torch")
    same_bits(case, ck.decompress(kv), rounded, "decompress")
    kv.validate()
    case.require(kv.nnz == nonzeros, f"nnz is {kv.nnz}, not {nonzeros}")
    if dense.numel() < _DECODED_ELEMENTS and case.often(0.1):
        read = oracle.decode(kv.state_dict())
        case.require(torch.equal(read.nan_to_num(1e9), dense.nan_to_num(1e9)), "the format's own reader")
    if case.often(0.1):
        copy = pickle.loads(pickle.dumps(kv)) if case.often(0.5) else ck.SparseKV.from_state_dict(kv.state_dict())
        same_storage(case, copy, kv, "a copy")


def same_storage(case: Case, one: ck.SparseKV, other: ck.SparseKV, what: str) -> None:
    a, b = one.state_dict(), other.state_dict()
    case.require(a.pop("metadata") == b.pop("metadata"), f"{what}: metadata differ")
    case.require(a.keys() == b.keys(), f"{what}: {sorted(a)} and {sorted(b)}")
    for name in a:
        case.require(torch.equal(a[name].cpu(), b[name].cpu()), f"{what}: {name} differs")


def _pair(case: Case, k: Tensor, amount: dict[str, float | int], kept: int | None) -> None:
    v = inputs.values(case, tuple(k.shape), k.dtype, name="pattern of v")
    kept_of = {"key": kept, "value": kept}
    extra: dict[str, Any] = {}
    for role in kept_of:
        if case.often(0.3):
            kept_of[role] = extra[f"{role}_keep"] = case.rng.randint(1, k.shape[3])
    codecs = codec(case, k, name="codec of keys"), codec(case, v, name="codec of values")
    case.note("of each", extra)
    pair = ck.compress_kv(
        inputs.laid_out(case, k),
        inputs.laid_out(case, v, "layout of v"),
        key_codec=codecs[0],
        value_codec=codecs[1],
        **amount,
        **extra,
    )
    for kv, x, role, chosen in zip(pair, (k, v), ("key", "value"), codecs):
        check(case, kv, stored(x, kept_of[role], chosen), role, oracle.nonzeros(oracle.prune(x, kept_of[role])))
    case.require(torch.equal(pair[0].token_order, pair[1].token_order), "token orders of a pair differ")


def _rule(case: Case, x: Tensor) -> None:
    """Other rules, by their definitions."""
    if not 0 < x.numel() < _DECODED_ELEMENTS or not x.isfinite().all():
        return
    kept, role = case.rng.randint(1, x.shape[3]), case.choose("role", ["key", "value"])
    group = case.choose("group", [1, 5, 32, 64, 1000])
    case.note("kept by the rule", kept)
    method = ck.rules.ChannelMagnitude(group)
    want = by_definition(x, kept, group, lambda b, h, magnitude: magnitude, "group")
    view = inputs.laid_out(case, x, "layout for the rule")
    same_bits(case, ck.prune(view, keep=kept, method=method, role=role), want, "prune by channel")
    check(case, ck.compress(view, role=role, keep=kept, method=method), want, role, oracle.nonzeros(want))


def _into_memory(case: Case, view: Tensor, kv: ck.SparseKV, options: dict[str, Any]) -> None:
    """The same bytes in memory that was preallocated, also where something else was in it."""
    if case.often(0.5):
        return
    sizes = {name: value for name, value in options.items() if name in ("role", "keep", "sparsity", "codec")}
    if case.often(0.5):
        sizes.pop("keep", None), sizes.pop("sparsity", None)
    memory = ck.SparseKV.preallocate(view.shape, view.dtype, device=case.device, **sizes)
    if case.often(0.5):
        other = torch.randn(view.shape).to(view.dtype).to(case.device)
        ck.compress(other, **{**options, "role": kv.role}, out=memory)
    result = ck.compress(view, **options, out=memory)
    case.require(result is memory, "compress returned another object than out")
    same_storage(case, memory, kv, "preallocated")
    memory.validate()
    same_storage(case, memory.to_exact_size(), kv, "cut to its size")


def _on_the_cpu_too(case: Case, x: Tensor, kv: ck.SparseKV, options: dict[str, Any]) -> None:
    if case.device != "cpu":
        same_storage(case, kv, ck.compress(x, **options), "the CPU's")
