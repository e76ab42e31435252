"""Reads caches in the layout of the original Mustafar project, to go on with them here.

    k, v, window = ck.mustafar.read_layer(past_key_value)       # a layer's tuple, as its kernel models keep it
    out = ck.sparse_attention(q, k, v, window=window)

    k = ck.mustafar.read(bitmaps, counts, values, role="key", shape=(B, Hkv, T, D))      # one cache's arrays

The layout, as in kernel/compression.py and models/llama_mustafar_kernel.py of github.com/dhjoo98/mustafar at d83ee7e
(May 2025). A cache has N = B * Hkv heads of T tokens, T a multiple of 64 (there: of 256), and D channels, a multiple of
64. An element group is 64 elements; a head has G = T * D / 64 of them, tile by tile of 64 tokens:

* Keys: a group is one channel of the tile's 64 tokens, the groups of a tile follow the channels 0 .. D-1.
  Group g: tokens 64 * (g // D) + 0 .. 63, channel g % D.
* Values: a group is 64 neighbouring channels of one token; within a tile the tokens 0 .. 63 of the first 64 channels
  come first, then those of the next 64. Group g: token 64 * (g // D) + g % 64, channels 64 * (g % D // 64) + 0 .. 63.

| array | dtype, shape | content |
| --- | --- | --- |
| bitmaps | int64 (N, G), or flat | bit 63 - i, so from the highest down, is element i: 1 where it is nonzero |
| counts | int32 (N, G + 1), or flat | where a group's values begin in its head, in units of two elements (4 bytes) |
| values | float16, a list of N, or one tensor | nonzeros in order, each group's padded with zeros to a multiple of 8 |
| offsets | int32 (N,) | where a head's values begin among all, in units of eight elements (16 bytes) |

A layer is (keys, key window, values, value window, compressed tokens, all tokens), keys and values each (bitmaps,
counts, list of values, offsets), or None while nothing is compressed; windows are dense, (B, Hkv, W, D).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime import checks
from cute_kernels._storage.validation import check_size
from cute_kernels.compression import compress
from cute_kernels.sparse_kv import SparseKV

GROUP = 64  # elements of a bitmap
_PADDING = 8  # values of a group fill multiples of 16 bytes
_UNIT = 2  # elements that `counts` counts by
_OFFSET_UNIT = 8
_GROUPS_AT_A_TIME = 1 << 18  # bounds the temporary memory


def read(
    bitmaps: Tensor,
    counts: Tensor,
    values: Tensor | Sequence[Tensor],
    offsets: Tensor | None = None,
    *,
    role: str,
    shape: Sequence[int],
) -> SparseKV:
    """A cache's arrays, laid out as above, as a SparseKV.

    bitmaps, counts, values, offsets: as in the table, on one device; values may also be bfloat16. offsets may be left
        out: the heads' values then follow each other without gaps, as they always do there.
    role: "key" or "value", whose layouts differ. shape: (B, Hkv, T, D).

    Every nonzero is taken over bit for bit. Raises TypeError for a wrong class or dtype; ValueError for a wrong shape
    or device, for tensors that share memory among their elements, and where counts, bitmaps and the number of values
    contradict each other.
    """
    checks.role(role)
    batch, kv_heads, tokens, head_dim = _shape(shape)
    heads, groups = batch * kv_heads, tokens * head_dim // GROUP
    parts = _values(values, heads)
    device = parts[0].device
    bitmaps = _array(bitmaps, "bitmaps", torch.int64, (heads, groups), device)
    counts = _array(counts, "counts", torch.int32, (heads, groups + 1), device).long()
    sizes = _sizes(counts, tokens * head_dim)
    if isinstance(values, Tensor):
        packed, starts = parts[0].reshape(-1), _starts(sizes, offsets, parts[0].numel())
    else:
        _check_lengths(parts, sizes)
        packed, starts = torch.cat([part.reshape(-1) for part in parts]), _consecutive(sizes)
        if offsets is not None and not torch.equal(_offsets(offsets, sizes), starts):
            raise ValueError("offsets must be where each head's values begin in the list, in units of 8 elements")
    flat = torch.empty(heads, groups, GROUP, dtype=packed.dtype, device=packed.device)
    step = max(1, _GROUPS_AT_A_TIME // max(1, heads))
    for first in range(0, groups if heads else 0, step):
        part = slice(first, first + step)
        flat[:, part] = _unpacked(bitmaps[:, part], counts[:, first : first + step + 1], starts, packed)
    return compress(_arranged(flat, role, (batch, kv_heads, tokens, head_dim)), role=role)


def read_layer(layer: Sequence[Any]) -> tuple[SparseKV, SparseKV, tuple[Tensor, Tensor]]:
    """A layer's tuple as (keys, values, (key window, value window)). Raises what `read` raises."""
    if not isinstance(layer, (tuple, list)) or len(layer) != 6:
        raise TypeError(
            "layer must be a tuple (keys, key window, values, value window, compressed tokens, all tokens), got "
            f"{type(layer).__name__}{f' of {len(layer)}' if isinstance(layer, (tuple, list)) else ''}"
        )
    keys, key_window, values, value_window, compressed, _ = layer
    for window, name in ((key_window, "key window"), (value_window, "value window")):
        checks.dense_cache(window, name)
        if window.dim() != 4 or window.shape != key_window.shape:
            raise ValueError(f"{name} must have shape (B, Hkv, W, D), alike for both, got {tuple(window.shape)}")
    batch, kv_heads, _, head_dim = key_window.shape
    tokens = checks.integer(compressed, "compressed tokens")
    if tokens < 0 or tokens % GROUP:
        raise ValueError(f"compressed tokens must be a multiple of {GROUP}, got {tokens}")
    shape = (batch, kv_heads, tokens, head_dim)
    caches = []
    for cache, role in ((keys, "key"), (values, "value")):
        if cache is None:
            if shape[2]:
                raise ValueError(f"layer has {shape[2]} compressed tokens but no compressed {role}s")
            caches.append(compress(key_window[:, :, :0], role=role))
            continue
        if not isinstance(cache, (tuple, list)) or len(cache) != 4:
            raise TypeError(
                f"compressed {role}s must be (bitmaps, counts, values, offsets), got {type(cache).__name__}"
            )
        caches.append(read(*cache, role=role, shape=shape))
    return caches[0], caches[1], (key_window, value_window)


def _shape(shape: Any) -> tuple[int, int, int, int]:
    sizes = checks.cache_shape(shape)
    if sizes[2] % GROUP or sizes[3] % GROUP:
        raise ValueError(f"shape must have T and D that are multiples of {GROUP}, got T = {sizes[2]}, D = {sizes[3]}")
    check_size(sizes)
    return sizes


def _array(value: Any, name: str, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> Tensor:
    checks.tensor(value, name)
    checks.dtype(value, name, (dtype,))
    checks.device(value.device, name, device, "values")
    if value.shape != shape and value.shape != (shape[0] * shape[1],):
        raise ValueError(f"{name} must have shape {shape} or {(shape[0] * shape[1],)}, got {tuple(value.shape)}")
    checks.own_memory(value, name)
    return value.reshape(shape)


def _values(values: Any, heads: int) -> Sequence[Tensor]:
    """All values in one tensor, or those of each head."""
    if isinstance(values, Tensor):
        _check_values(values, "values", checks.CACHE_DTYPES)
        return (values,)
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"values must be a torch.Tensor or a list of them, got {type(values).__name__}")
    if len(values) != heads or not heads:
        raise ValueError(f"values must be one tensor or a list of B * Hkv = {heads} tensors, got {len(values)}")
    for i, value in enumerate(values):
        _check_values(value, f"values[{i}]", (values[0].dtype,) if i else checks.CACHE_DTYPES)
        checks.device(value.device, f"values[{i}]", values[0].device, "values[0]")
    return values


def _check_values(value: Any, name: str, dtypes: Sequence[torch.dtype]) -> None:
    checks.tensor(value, name)
    checks.dtype(value, name, dtypes)
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} must be on a cpu or cuda device, got {value.device}")
    checks.own_memory(value, name)


def _sizes(counts: Tensor, most: int) -> Tensor:
    """(N,) int64: how many values each head has, at most `most`."""
    sizes = counts[:, -1] * _UNIT
    if (counts[:, 0] != 0).any():
        raise ValueError("counts must begin with 0 in every head")
    if ((sizes < 0) | (sizes > most)).any():
        raise ValueError(f"counts must end between 0 and T * D / {_UNIT} = {most // _UNIT} in every head")
    return sizes


def _check_lengths(parts: Sequence[Tensor], sizes: Tensor) -> None:
    """Before they are joined: parts that share memory could be far larger together than what was read."""
    for head, (part, size) in enumerate(zip(parts, sizes.tolist())):
        if part.numel() != size:
            raise ValueError(f"values[{head}] must have the {size} elements that counts says, got {part.numel()}")


def _consecutive(sizes: Tensor) -> Tensor:
    """(N,) int64: where each head's values begin if they follow each other without gaps."""
    return sizes.cumsum(0) - sizes


def _offsets(offsets: Any, sizes: Tensor) -> Tensor:
    """(N,) int64: where the caller says that they begin."""
    return _array(offsets, "offsets", torch.int32, (1, len(sizes)), sizes.device).reshape(-1).long() * _OFFSET_UNIT


def _starts(sizes: Tensor, offsets: Any, available: int) -> Tensor:
    """(N,) int64: where each head's values begin among all, checked to lie inside what there is."""
    starts = _consecutive(sizes) if offsets is None else _offsets(offsets, sizes)
    if bool(((starts < 0) | (starts + sizes > available)).any()):
        raise ValueError(f"values must have all elements that counts and offsets point at, got {available}")
    return starts


def _unpacked(bitmaps: Tensor, counts: Tensor, starts: Tensor, packed: Tensor) -> Tensor:
    """(N, groups, 64): the elements of some groups. counts: (N, groups + 1)."""
    shifts = torch.arange(GROUP - 1, -1, -1, device=bitmaps.device)
    present = (bitmaps[..., None] >> shifts & 1).bool()
    rank = present.cumsum(dim=-1)
    padded = (rank[..., -1] + _PADDING - 1) // _PADDING * _PADDING
    if not torch.equal(counts.diff(dim=1) * _UNIT, padded):
        raise ValueError(
            "counts must grow by the group's nonzeros, rounded up to a multiple of 8, over 2: bitmaps say otherwise"
        )
    index = starts[:, None, None] + counts[:, :-1, None] * _UNIT + rank - 1
    elements = torch.zeros(present.shape, dtype=packed.dtype, device=packed.device)
    elements[present] = packed[index[present]]
    return elements


def _arranged(flat: Tensor, role: str, shape: tuple[int, int, int, int]) -> Tensor:
    """(N, G, 64) -> (B, Hkv, T, D), contiguous."""
    batch, kv_heads, tokens, head_dim = shape
    tiles = tokens // GROUP
    if role == "key":  # tile, channel, token
        dense = flat.view(batch * kv_heads, tiles, head_dim, GROUP).transpose(2, 3)
    else:  # tile, 64 channels, token, channel
        dense = flat.view(batch * kv_heads, tiles, head_dim // GROUP, GROUP, GROUP).transpose(2, 3)
    return dense.reshape(batch, kv_heads, tokens, head_dim).contiguous()
