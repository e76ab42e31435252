"""What `SparseKV.preallocate` makes a cache of, and how one comes back from a pickle."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels._runtime import checks
from cute_kernels._runtime.extension import _C
from cute_kernels._storage import steps, tile_reader
from cute_kernels._storage.checks import chosen_codec
from cute_kernels._storage.storage import Storage


def preallocated(shape: Any, dtype: Any, role: Any, sparsity: Any, keep: Any, codec: Any, device: Any) -> Storage:
    """A cache of zeros whose tensors are large enough for any other; checks the arguments."""
    sizes = checks.cache_shape(shape)
    checks.chosen_dtype(dtype, "dtype", checks.CACHE_DTYPES)
    checks.role(role)
    kept = checks.kept_elements(sizes[3], sparsity, keep)
    codec = chosen_codec(codec, "codec", dtype)
    target = checks.kernel_device(device)
    padded = _C.format.padded_head_dim(sizes[3])
    tiles = sizes[0] * sizes[1] * tile_reader.tiles_per_head(sizes[2])
    shortest = steps.rows_before_values(padded, codec)
    totals = [tiles * shortest, shortest if tiles else 0, 0, 0]
    with torch.inference_mode(False):  # tensors made in it could not be written to outside of it
        return Storage(
            **steps.empty_tensors(sizes, kept, codec, target),
            role=role,
            dtype=dtype,
            codec=codec,
            shape=torch.Size(sizes),
            max_tile_rows=steps.rows_of_tile(padded, kept, codec) if tiles else 0,
            keep=kept,
            totals=torch.tensor(totals, dtype=torch.int64, device=target),
        )


def refilled(content: Storage, keep: int) -> Storage:
    """Preallocated for `keep` elements a token (0: any number), and filled with `content`, which is exact."""
    kept = keep or None
    storage = preallocated(content.shape, content.dtype, content.role, None, kept, content.codec, content.device)
    rows = content.blocks.shape[0]
    storage.blocks[:rows] = content.blocks
    for name, tensor in storage.tensors().items():
        if name != "blocks":
            tensor.copy_(getattr(content, name))
    assert storage.totals is not None and content.nnz is not None
    storage.totals.copy_(torch.tensor([rows, content.max_tile_rows, content.nnz, 0], dtype=torch.int64, device="cpu"))
    return storage
