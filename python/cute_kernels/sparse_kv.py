"""SparseKV: one compressed K or V cache, its storage and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels._runtime import checks
from cute_kernels._storage import tile_reader, validation
from cute_kernels._storage.preallocation import preallocated, refilled
from cute_kernels._storage.state import read_state, state_metadata
from cute_kernels._storage.storage import Storage


class SparseKV:
    """A pruned K or V cache (B, Hkv, T, D), stored as bitmaps and packed nonzeros, or as two of every four, in tiles of
    64 tokens.

    Made by `compress`, `compress_kv` or `SparseKV.from_state_dict`. It is immutable: treat its tensors as read-only.
    One made by `SparseKV.preallocate` changes when it is given to these as `out`, and only then. Only the device knows
    how large its content is: attributes that depend on that (blocks, max_tile_rows, nnz, nbytes, bits_per_element),
    state_dict, to and repr then synchronise with it. Its copies by pickle and copy.deepcopy are preallocated alike;
    what from_state_dict and to give has a fixed content.

    shape: torch.Size (B, Hkv, T, D) of the cache it stands for.
    dtype: torch.float16 or torch.bfloat16, of the cache that was compressed and of what `decompress` gives.
    codec: how nonzeros are stored: "fp16" and "bf16" as they are; "fp8", "int8" and "int4" rounded to codes of 8 or 4
        bits that are relative to scales of tokens and of channels.
    tile_format: where nonzeros are and in which order: "bitmap", or "two_of_four" where of every four neighbours two
        are stored, or "two_of_four_bitmap" where at most two are.
    device: where the storage lies.
    role: "key" or "value"; decides how tiles are laid out, and so which product takes it.

    The storage (docs/format.md has it byte by byte; N tiles a head, Dp = D padded to 64, 128 or 256):
    blocks: int32 (rows, 32), the tiles' blocks one after the other; a row is 128 bytes.
    row_offsets: int32 (B * Hkv * N + 1), first row of every block, then the number of rows.
    token_order: uint8 (B, Hkv, N, 64), token position in a tile -> token, counted from the tile's first. Caches that
        were compressed together share this tensor.
    channel_order: uint8 (B, Hkv, Dp), channel position -> channel.
    channel_scale: bfloat16 (B, Hkv, Dp), channel position -> its scale; None for "fp16" and "bf16". The scales of
        tokens are in the blocks.
    max_tile_rows: rows of the longest block.
    """

    __slots__ = ("__weakref__", "_storage")

    _storage: Storage

    def __init__(self) -> None:
        raise TypeError("SparseKV has no public constructor: use compress, compress_kv or SparseKV.from_state_dict")

    @classmethod
    def preallocate(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float16,
        *,
        role: str,
        sparsity: float | None = None,
        keep: int | None = None,
        codec: str | None = None,
        device: torch.device | str | int = "cuda",
    ) -> SparseKV:
        """A cache of zeros to be filled by `compress` or `compress_kv` as `out`, any number of times.

        shape: (B, Hkv, T, D) of the caches it will hold. dtype: float16 or bfloat16.
        role, sparsity, keep, codec: as for `compress`; it then takes every cache that keeps no more elements a token.
            With neither sparsity nor keep it takes any.
        device: a cpu or cuda device.

        The storage is large enough for the worst case. For every 64 tokens that is Dp / 16 rows of 128 bytes, one more
        for a narrow codec's scales, and those of min(8 * keep, Dp) values of a stream, Dp being D padded to 64, 128 or
        256. Products plan for tiles of that size too, and may take longer than on a storage that `compress` sized;
        `kv.to_exact_size()` gives such a one.

        Raises TypeError for a wrong class or dtype; ValueError for a wrong shape, role, codec, device or range, and for
        more than 2^31 rows; RuntimeError without a CUDA device.
        """
        return from_storage(preallocated(shape, dtype, role, sparsity, keep, codec, device))

    def to_exact_size(self) -> SparseKV:
        """A copy whose storage has the size that its content needs; itself if it was not preallocated.

        One device synchronisation.
        """
        if self._storage.totals is None:
            return self
        exact = self._storage.exact()
        return from_storage(exact.with_tensors({name: tensor.clone() for name, tensor in exact.tensors().items()}))

    @property
    def shape(self) -> torch.Size:
        return self._storage.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._storage.dtype

    @property
    def codec(self) -> str:
        return self._storage.codec

    @property
    def tile_format(self) -> str:
        return self._storage.tile_format

    @property
    def device(self) -> torch.device:
        return self._storage.device

    @property
    def role(self) -> str:
        return self._storage.role

    @property
    def blocks(self) -> Tensor:
        return self._storage.exact().blocks

    @property
    def row_offsets(self) -> Tensor:
        return self._storage.row_offsets

    @property
    def token_order(self) -> Tensor:
        return self._storage.token_order

    @property
    def channel_order(self) -> Tensor:
        return self._storage.channel_order

    @property
    def channel_scale(self) -> Tensor | None:
        return self._storage.channel_scale

    @property
    def max_tile_rows(self) -> int:
        return self._storage.exact().max_tile_rows

    @property
    def nnz(self) -> int:
        """Nonzeros of the whole cache; if not known yet, counted in the storage with a device synchronisation. A kept
        value that its codec rounds to zero counts in the tile formats with a bitmap, and does not in "two_of_four"."""
        storage = self._storage.exact()
        if storage.nnz is None:
            storage.nnz = tile_reader.count_nonzeros(storage)
        return storage.nnz

    @property
    def nbytes(self) -> int:
        """Bytes of all storage: blocks, offsets, orders and scales."""
        return sum(tensor.nbytes for tensor in self._storage.exact().tensors().values())

    @property
    def bits_per_element(self) -> float:
        """Bits of storage for each element of the dense cache; 0.0 for a cache without elements."""
        numel = self.shape.numel()
        return 8 * self.nbytes / numel if numel else 0.0

    def to(self, device: torch.device | str | int) -> SparseKV:
        """The same cache on another device, "cpu" or "cuda"; itself if it lies there already.

        Raises TypeError if device is no torch.device, str or int, ValueError for other devices and for an index that no
        device has, RuntimeError without a CUDA device.
        """
        target = checks.kernel_device(device)
        if self.row_offsets.to(target) is self.row_offsets:
            return self
        exact = self._storage.exact()
        return from_storage(exact.with_tensors({name: tensor.to(target) for name, tensor in exact.tensors().items()}))

    def state_dict(self) -> dict[str, Any]:
        """The storage as {"blocks", "row_offsets", "token_order", "channel_order": Tensor, "metadata": dict}, and
        "channel_scale" where the codec has scales.

        The tensors are the storage itself, not copies; the metadata holds strings, integers and a list, as JSON can.
        torch.save takes the dict as it is, and torch.load with weights_only=True gives it back. With safetensors::

            state = kv.state_dict()
            metadata = {"sparse_kv": json.dumps(state.pop("metadata"))}
            safetensors.torch.save_file(state, path, metadata=metadata)

            with safetensors.safe_open(path, framework="pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}
                state["metadata"] = json.loads(file.metadata()["sparse_kv"])
            kv = SparseKV.from_state_dict(state)

        safetensors refuses one tensor under two names: to put a K/V pair that was compressed together into one file,
        clone the token_order of one of them.
        """
        exact = self._storage.exact()
        return {**exact.tensors(), "metadata": state_metadata(exact)}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> SparseKV:
        """The cache that `state_dict` described, validated; takes over the tensors unless their alignment forbids it.

        Reads what earlier versions wrote, too, from format version 3 on.

        Raises TypeError if `state` is no mapping, a tensor is no Tensor or the metadata no mapping; ValueError for
        missing or foreign keys, another format or version, and for everything that `validate` refuses. Nothing is
        copied before strides and sizes are checked: a small file cannot ask for much memory.
        """
        kv = from_storage(read_state(state))
        kv.validate()
        return kv

    def validate(self) -> None:
        """Raises ValueError, naming the field, unless the storage is exactly what `compress` could have written.

        Kernels trust storage: none of them reads out of bounds on storage that passed. Costs a pass over it in plain
        torch and, on a GPU, device synchronisations.
        """
        storage = self._storage.exact()
        nnz = validation.check_storage(storage)
        if storage.nnz not in (None, nnz):
            raise ValueError(f"nnz: {storage.nnz} is recorded, but the bitmaps hold {nnz}")
        storage.nnz = nnz

    def __repr__(self) -> str:
        return (
            f"SparseKV({self.role}, shape={tuple(self.shape)}, {checks.dtype_name(self.dtype)}, codec={self.codec}, "
            f"tile_format={self.tile_format}, {self.device}, {self.nbytes} bytes, "
            f"{self.bits_per_element:.2f} bits per element)"
        )

    def __reduce__(self) -> tuple[Any, ...]:  # pickle, copy.deepcopy
        storage = self._storage
        if storage.totals is None:
            return SparseKV.from_state_dict, (self.state_dict(),)
        return _preallocated_from, (self.to_exact_size().state_dict(), storage.keep)


def _preallocated_from(state: Mapping[str, Any], keep: int) -> SparseKV:
    """The preallocated cache whose content `state` describes, which took caches of `keep` elements a token (0: any)."""
    return from_storage(refilled(SparseKV.from_state_dict(state)._storage, keep))


def from_storage(storage: Storage) -> SparseKV:
    """The cache that holds this storage, taken as it is; `SparseKV.validate` checks it. For the package's own use."""
    kv = object.__new__(SparseKV)
    kv._storage = storage
    return kv


def storage_of(kv: Any, name: str, role: str | None = None) -> Storage:
    """What argument `name` holds. For the package's own use.

    Raises TypeError unless it is a SparseKV, ValueError unless it is of this role.
    """
    if not isinstance(kv, SparseKV):
        raise TypeError(f"{name} must be a SparseKV, got {type(kv).__name__}")
    storage = kv._storage
    if role is not None and storage.role != role:
        raise ValueError(f"{name} must be a SparseKV of role '{role}', got role '{storage.role}'")
    return storage
