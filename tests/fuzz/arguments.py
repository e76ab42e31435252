"""Right calls of every public function with some arguments replaced by wrong ones: refused with a reason, or served."""

from __future__ import annotations

import copy
import functools
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

import cute_kernels as ck
from cute_kernels import paged
from tests.fuzz import junk, limits
from tests.fuzz.case import Case, Mismatch
from tests.support import oracle
from tests.support.mustafar_layout import write
from tests.support.paged_engine import Engine

_MEBIBYTES = 1024
_RAW = re.compile(
    r"Exception raised from|enforce fail|INTERNAL ASSERT|c10::|\[torch\.\w*Tensor|Unsupported|incompatible function"
)
_SIZES = {"max_batch": 3, "kv_heads": 2, "head_dim": 16, "capacity": 300}


@dataclass
class Call:
    """function(*positional, **keywords); words: what its errors may name besides its arguments."""

    function: Callable[..., Any]
    positional: dict[str, Any]
    keywords: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    cache: ck.KVCache | None = None  # whose method it is


def _x(case: Case, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 2, 70, 16)).half().to(case.device)


def _kv(case: Case) -> tuple[ck.SparseKV, ck.SparseKV]:
    return ck.compress_kv(_x(case), _x(case), keep=5)


def _functions(case: Case) -> dict[str, Callable[[], Call]]:
    q, p = lambda: _x(case, 2, 4, 3, 16), lambda: _x(case, 2, 4, 3, 70)
    amounts = {"sparsity": None, "keep": 5}
    rule = {"method": "magnitude"}
    codecs = {"codec": None, "key_codec": None, "value_codec": None}
    keys, values = _kv(case)
    return {
        "prune": lambda: Call(ck.prune, {"x": _x(case)}, {**amounts, **rule, "role": "key"}),
        "compress": lambda: Call(
            ck.compress,
            {"x": _x(case)},
            {**amounts, **rule, "role": "key", "codec": None, "tile_format": None, "out": None},
        ),
        "compress_kv": lambda: Call(
            ck.compress_kv,
            {"k": _x(case), "v": _x(case)},
            {**amounts, **rule, **codecs, "key_keep": None, "value_keep": 3, "tile_format": None, "out": None},
        ),
        "decompress": lambda: Call(ck.decompress, {"kv": keys}),
        "sparse_qk": lambda: Call(
            ck.sparse_qk,
            {"q": q(), "k": keys},
            {"scale": 1.0, "out_dtype": torch.float16, "out": p(), "backend": "auto"},
        ),
        "sparse_av": lambda: Call(ck.sparse_av, {"p": p(), "v": values}, {"out": q(), "backend": "reference"}),
        "sparse_attention": lambda: Call(
            ck.sparse_attention,
            {"q": q(), "k": keys, "v": values},
            {
                "scale": None,
                "window": (_x(case, 2, 2, 5, 16), _x(case, 2, 2, 5, 16)),
                "seq_lens": torch.tensor([3, 70], dtype=torch.int32, device=case.device),
                "causal": True,
                "return_lse": False,
                "num_splits": None,
                "out": q(),
                "backend": "auto",
            },
        ),
        "merge_states": lambda: Call(ck.merge_states, {"outs": [q(), q()], "lses": [q()[..., 0].float()] * 2}),
        "preallocate": lambda: Call(
            ck.SparseKV.preallocate,
            {"shape": (2, 2, 70, 16), "dtype": torch.float16},
            {"role": "key", **amounts, "codec": None, "device": case.device},
        ),
        "from_state_dict": lambda: Call(
            ck.SparseKV.from_state_dict,
            {"state": keys.state_dict()},
            {},
            ("metadata", "shape", "blocks", "row_offsets", "token_order", "channel_order"),
        ),
        "to": lambda: Call(keys.to, {"device": case.device}),
        "KVCache": lambda: Call(
            ck.KVCache,
            {},
            {
                **_SIZES,
                **amounts,
                **codecs,
                "dtype": torch.float16,
                "pool_tokens": 500,
                "pool_bytes": None,
                "key_keep": None,
                "value_keep": 3,
                "key_rule": "magnitude",
                "value_rule": "magnitude",
                "window": 8,
                "page_tokens": 64,
                "max_append": 64,
                "device": case.device,
            },
        ),
        "OutputAware": lambda: Call(ck.rules.OutputAware, {"q": q(), "attention": p(), "group": 32}),
        "ThinK": lambda: Call(ck.rules.ThinK, {"q": q()}),
        "ChannelMagnitude": lambda: Call(ck.rules.ChannelMagnitude, {"group": 32}),
        "Random": lambda: Call(ck.rules.Random, {"seed": 0}),
        "attention_mass": lambda: Call(
            ck.rules.attention_mass, {"q": q(), "k": _x(case)}, {"scale": None, "causal": True}
        ),
        "prune with OutputAware": lambda: Call(
            lambda q, attention, x, role: ck.prune(
                x, keep=5, role=role, method=ck.rules.OutputAware(q=q, attention=attention)
            ),
            {"q": q(), "attention": p(), "x": _x(case), "role": "key"},
        ),
        "read": lambda: _read(case),
        "read_layer": lambda: _read_layer(case),
        "configure": lambda: Call(
            paged.configure,
            {},
            {
                **amounts,
                "kv_heads": 2,
                "head_dim": 16,
                "dtype": torch.float16,
                "key_keep": None,
                "value_keep": 3,
                "window": 8,
                "page_tokens": 128,
                "max_append": 3,
            },
        ),
        **{f"paged {name}": functools.partial(_paged, case, name) for name in _PAGED},
    }


_PAGED = ("choose_orders", "store", "append", "extend", "attend", "export")


def _paged(case: Case, name: str) -> Call:
    """Numbers on the device that attention reads are the caller's to check, so they stay as they are."""
    config = paged.configure(kv_heads=2, head_dim=16, keep=5, window=8)
    engine = Engine(config, torch.device(case.device))
    engine.extend(1, torch.randn(2, 2, 100, 16).half())
    engine.give_pages(0, 128)
    pool, windows, lengths = engine.pool, engine.windows, engine.lengths
    new = lambda n: {"k": _x(case, 1, 2, n, 16), "v": _x(case, 1, 2, n, 16)}  # noqa: E731
    numbers = {"sequences": engine.index([0]), "first_tiles": engine.index([1])}
    if name == "choose_orders":
        return Call(paged.choose_orders, {"pool": pool, **new(70)})
    if name == "store":
        return Call(paged.store, {"pool": pool, **new(64), **numbers})
    memory = {"pool": pool, "windows": windows, "lengths": lengths}
    if name == "append":
        return Call(paged.append, {**memory, **new(3), "sequences": engine.index([1])})
    if name == "extend":
        state = {"sequence": 1, "compressed": 64, "window": 36}
        return Call(paged.extend, {**memory, **new(70)}, state)
    if name == "export":
        return Call(paged.export, {"pool": pool, "sequence": 1, "first_tile": 0, "tiles": 1})
    options = {"scale": None, "causal": True, "return_lse": False, "expected": (64, 64), "backend": "auto"}
    q = {"q": _x(case, 2, 4, 3, 16)}
    attend = functools.partial(_attend, lengths, engine.index([1, 0]))
    owned = {"pool": pool, "windows": windows}
    return Call(attend, {**q, **owned}, {**options, "out": _x(case, 2, 4, 3, 16)}, ("sequences",))


def _attend(lengths: torch.Tensor, sequences: torch.Tensor, q: Any, pool: Any, windows: Any, **options: Any) -> object:
    return paged.attend(q, pool, windows, lengths, sequences, **options)


def _read(case: Case) -> Call:
    shape = (1, 1, 64, 64)
    x = oracle.prune(torch.randn(shape).half(), 10)
    bitmaps, counts, values, offsets = write(x, "key")
    arrays = {"bitmaps": bitmaps, "counts": counts, "values": values[0], "offsets": offsets}
    arrays = {name: array.to(case.device) for name, array in arrays.items()}
    return Call(ck.mustafar.read, arrays, {"role": "key", "shape": shape})


def _read_layer(case: Case) -> Call:
    window = _x(case, 1, 1, 3, 64)
    layer = {"keys": None, "key window": window, "values": None, "value window": window, "tokens": 0, "all tokens": 3}
    words = ("layer", "compressed", "window")
    return Call(lambda **parts: ck.mustafar.read_layer(tuple(parts.values())), {}, layer, words)


def _methods(case: Case) -> dict[str, Callable[[ck.KVCache], Call]]:
    new = lambda n: {"k": _x(case, 2, 2, n, 16), "v": _x(case, 2, 2, n, 16)}  # noqa: E731
    q = lambda n: _x(case, 2, 4, n, 16)  # noqa: E731
    return {
        "prefill": lambda c: Call(
            c.prefill, {"k": new(70)["k"][:1], "v": new(70)["v"][:1]}, {"lengths": [50], "sequences": [2]}
        ),
        "append": lambda c: Call(c.append, new(2), {"sequences": [0, 1]}),
        "attend": lambda c: Call(
            c.attend,
            {"q": q(2)},
            {
                "scale": None,
                "causal": True,
                "return_lse": False,
                "out": q(2),
                "sequences": [1, 0],
                "backend": "auto",
            },
        ),
        "attend packed": lambda c: Call(
            lambda q, cu_seqlens_q, **options: c.attend(q, cu_seqlens_q=cu_seqlens_q, **options),
            {"q": _x(case, 1, 4, 5, 16), "cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)},
            {"max_seqlen_q": 3, "causal": True, "return_lse": False, "sequences": [1, 0], "backend": "auto"},
        ),
        "step": lambda c: Call(c.step, {"q": q(1), **new(1)}, {"scale": 0.5, "backend": "auto"}),
        "dense": lambda c: Call(c.dense, {"sequence": 0}),
        "reserve": lambda c: Call(c.reserve, {"tokens": 3}, {}, ("capacity", "pages")),
        "grow": lambda c: Call(c.grow, {}, {"capacity": 301, "max_batch": 3}),
        "crop": lambda c: Call(c.crop, {"length": [3, -5, 1]}, {"sequences": [0, 1, 2]}),
        "reorder": lambda c: Call(c.reorder, {"beam_idx": [1, 0, 0]}),
        "repeat_interleave": lambda c: Call(c.repeat_interleave, {"repeats": 1}),
        "select": lambda c: Call(c.select, {"indices": [1, 1]}),
        "free": lambda c: Call(c.free, {"sequence": 1}),
        "fork": lambda c: Call(c.fork, {"sequence": 1}, {}, ("max_batch",)),
    }


def _cache(case: Case) -> ck.KVCache:
    cache = ck.KVCache(**_SIZES, keep=12, window=8, device=case.device)
    cache.prefill(_x(case, 2, 2, 100, 16), _x(case, 2, 2, 100, 16), lengths=[100, 33])
    cache.add()
    return cache


def run(case: Case) -> None:
    functions, methods = _functions(case), _methods(case)
    name = case.choose("function", [*functions, *methods])
    if name in functions:
        call = functions[name]()
    else:
        cache = _cache(case)
        call = methods[name](cache)
        call.cache = cache
    changed = []
    for _ in range(case.rng.choice([1, 1, 1, 2])):
        arguments = call.positional if call.positional and case.often(0.5) else call.keywords or call.positional
        argument = case.rng.choice([*arguments])
        arguments[argument] = junk.instead_of(case, arguments[argument])
        changed.append(argument)
        case.note(f"argument {argument}", junk.described(arguments[argument]))
    _made(case, call)


def _made(case: Case, call: Call) -> None:
    before = None if call.cache is None else _content(call.cache)
    try:
        with limits.memory(_MEBIBYTES):
            call.function(*call.positional.values(), **call.keywords)
    except (TypeError, ValueError, RuntimeError) as error:
        _check_message(case, call, error)
        if call.cache is not None:
            case.require(_content(call.cache) == before, f"refused, but the cache has changed: {error!r}")
            _still_works(case, call.cache)
    except Exception as error:
        raise Mismatch(f"{type(error).__name__} instead of a TypeError, ValueError or RuntimeError: {error}") from error
    else:
        if call.cache is not None:
            _still_works(case, call.cache)


def _check_message(case: Case, call: Call, error: Exception) -> None:
    message = str(error)
    if "can't allocate memory" in message or "out of memory" in message:
        return
    if type(error).__module__ == FakeTensor.__module__ or "need tensors with data" in message:
        return  # torch's own errors are what tracers expect; ours says what to do and may come from anywhere
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{type(error).__name__} from {where.filename.rsplit('/', 1)[-1]}:{where.lineno}: {message}"
    case.require(type(error) in (TypeError, ValueError, RuntimeError), f"of a class of its own: {place}")
    names = "|".join(re.escape(name) for name in (*call.positional, *call.keywords, *call.words))
    case.require(bool(re.search(rf"\b({names})\b", message)), f"it names no argument: {place}")
    case.require(not _RAW.search(message) and len(message) < 2000, f"it is not for users: {place}")


def _content(cache: ck.KVCache) -> tuple[Any, ...]:
    """All that can be seen of it, as bytes."""
    used = [row for row in range(cache.batch) if int(cache.lengths[row])]
    rows = [tuple(x.cpu().view(torch.int16).numpy().tobytes() for x in cache.dense(row)) for row in used]
    return cache.max_batch, cache.capacity, cache.lengths.tolist(), cache.statistics(), rows


def _still_works(case: Case, cache: ck.KVCache) -> None:
    """A token more, on a copy: the cache itself may be full."""
    if cache.nbytes() > limits.MOST_COPIED_BYTES:
        return
    twin = copy.deepcopy(cache)
    rows = min(twin.batch, 2)
    if rows and all(twin.lengths[:rows] < twin.capacity):
        new = [_x(case, rows, 2, 1, 16) for _ in range(2)]
        out = twin.step(_x(case, rows, 4, 1, 16), *new)
        case.require(bool(out.isfinite().all()) or _has_specials(twin), "attends to what is not there")


def _has_specials(cache: ck.KVCache) -> bool:
    return any(not bool(x.isfinite().all()) for row in range(cache.batch) for x in cache.dense(row))
