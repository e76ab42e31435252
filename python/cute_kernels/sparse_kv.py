"""SparseKV: one compressed K or V cache, its storage and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cute_kernels import _state, _tiles, _validation
from cute_kernels._extension import _C, DTYPE_CODES, ROLE_CODES

if TYPE_CHECKING:
    from cute_kernels._attention_call import AttentionCall


class SparseKV:
    """A pruned K or V cache (B, Hkv, T, D), stored as bitmaps and packed nonzeros in tiles of 64 tokens.

    Made by `compress`, `compress_kv` or `SparseKV.from_state_dict`. It is immutable: treat its tensors as read-only.
    One made by `SparseKV.preallocate` changes when it is given to these as `out`, and only then. How large its content
    is only the device knows: attributes that depend on that (blocks, max_tile_rows, nnz, nbytes, bits_per_element),
    state_dict, to and repr then synchronise with it.

    shape: torch.Size (B, Hkv, T, D) of the cache it stands for.
    dtype: torch.float16 or torch.bfloat16, of the stored values.
    device: where the storage lies.
    role: "key" or "value"; decides how tiles are laid out, and so which product takes it.

    The storage (cute_kernels/format/FORMAT.md has it byte by byte; N tiles a head, Dp = D padded to 64, 128 or 256):
    blocks: int32 (rows, 32), the tiles' blocks one after the other; a row is 128 bytes.
    row_offsets: int32 (B * Hkv * N + 1), first row of every block, then the number of rows.
    token_order: uint8 (B, Hkv, N, 64), token position in a tile -> token, counted from the tile's first. Caches that
        were compressed together share this tensor.
    channel_order: uint8 (B, Hkv, Dp), channel position -> channel.
    max_tile_rows: rows of the longest block.
    """

    __slots__ = (
        "_blocks",
        "_row_offsets",
        "_token_order",
        "_channel_order",
        "_role",
        "_dtype",
        "_shape",
        "_max_tile_rows",
        "_nnz",
        "_keep",
        "_totals",
        "_view",
        "_addresses",
        "_stays",
        "_attention_call",
        "__weakref__",
    )

    _blocks: Tensor
    _row_offsets: Tensor
    _token_order: Tensor
    _channel_order: Tensor
    _role: str
    _dtype: torch.dtype
    _shape: torch.Size
    _max_tile_rows: int
    _nnz: int | None
    _keep: int  # preallocated: for so many elements a token, 0: any number
    _totals: Tensor | None  # preallocated: _steps.TOTALS on the device; _blocks and _max_tile_rows are bounds then
    _view: _C.SparseView | None
    _addresses: tuple[int, ...]  # that _view was made of
    _stays: bool  # the storage where it is: torch moves none but a CPU's, to memory that processes share
    _attention_call: AttentionCall | None  # the last one with these keys

    def __init__(self) -> None:
        raise TypeError("SparseKV has no public constructor: use compress, compress_kv or SparseKV.from_state_dict")

    @classmethod
    def _from_parts(
        cls,
        *,
        blocks: Tensor,
        row_offsets: Tensor,
        token_order: Tensor,
        channel_order: Tensor,
        role: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        max_tile_rows: int,
        nnz: int | None = None,
        keep: int = 0,
        totals: Tensor | None = None,
    ) -> SparseKV:
        """Takes the parts as they are; `validate` is what checks them."""
        self = object.__new__(cls)
        self._blocks = blocks
        self._row_offsets = row_offsets
        self._token_order = token_order
        self._channel_order = channel_order
        self._role = role
        self._dtype = dtype
        self._shape = torch.Size(shape)
        self._max_tile_rows = max_tile_rows
        self._nnz = nnz
        self._keep = keep
        self._totals = totals
        self._view, self._addresses = None, ()
        self._stays = blocks.device.type != "cpu"
        self._attention_call = None
        return self

    @classmethod
    def preallocate(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float16,
        *,
        role: str,
        sparsity: float | None = None,
        keep: int | None = None,
        device: torch.device | str | int = "cuda",
    ) -> SparseKV:
        """A cache of zeros to be filled by `compress` or `compress_kv` as `out`, as often as one likes.

        shape: (B, Hkv, T, D) of the caches it will hold. dtype: float16 or bfloat16.
        role, sparsity, keep: as for `compress`; it then takes every cache that keeps no more elements a token. With
            neither sparsity nor keep it takes any.
        device: a cpu or cuda device.

        The storage has room for the worst case: Dp / 16 + min(8 * keep, Dp) rows of 128 bytes for every 64 tokens, Dp
        being D padded to 64, 128 or 256. Products plan for tiles of that size too, and may take longer than on a
        storage that `compress` sized; `kv.to_exact_size()` gives such a one.

        Raises TypeError for a wrong class or dtype; ValueError for a wrong shape, role, device or range, and for more
        than 2^31 rows; RuntimeError without a CUDA device.
        """
        from cute_kernels import _preallocation  # its checks need this class

        return cls._from_parts(**_preallocation.parts(shape, dtype, role, sparsity, keep, device))

    def to_exact_size(self) -> SparseKV:
        """A copy whose storage has the size that its content needs; itself if it was not preallocated.

        One device synchronisation.
        """
        if self._totals is None:
            return self
        rows, max_tile_rows, nnz = self._totals.tolist()
        tensors: dict[str, Any] = {**self._tensors(), "blocks": self._blocks[:rows]}
        return SparseKV._from_parts(
            **{name: tensor.clone() for name, tensor in tensors.items()},
            role=self._role,
            dtype=self._dtype,
            shape=self._shape,
            max_tile_rows=max_tile_rows,
            nnz=nnz,
        )

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._blocks.device

    @property
    def role(self) -> str:
        return self._role

    @property
    def blocks(self) -> Tensor:
        return self._blocks if self._totals is None else self._blocks[: int(self._totals[0])]

    @property
    def row_offsets(self) -> Tensor:
        return self._row_offsets

    @property
    def token_order(self) -> Tensor:
        return self._token_order

    @property
    def channel_order(self) -> Tensor:
        return self._channel_order

    @property
    def max_tile_rows(self) -> int:
        return self._max_tile_rows if self._totals is None else int(self._totals[1])

    @property
    def nnz(self) -> int:
        """Nonzeros of the whole cache; if not known yet, counted from the bitmaps with a device synchronisation."""
        if self._totals is not None:
            return int(self._totals[2])
        if self._nnz is None:
            self._nnz = sum(int(_tiles.element_bits(self, *chunk).sum()) for chunk in _tiles.chunks(self))
        return self._nnz

    @property
    def nbytes(self) -> int:
        """Bytes of all storage: blocks, offsets and orders."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def bits_per_element(self) -> float:
        """Bits of storage for each element of the dense cache; 0.0 for a cache without elements."""
        numel = self._shape.numel()
        return 8 * self.nbytes / numel if numel else 0.0

    def to(self, device: torch.device | str | int) -> SparseKV:
        """The same cache on another device, "cpu" or "cuda"; itself if it lies there already.

        Raises ValueError for anything else, RuntimeError without a CUDA device.
        """
        from cute_kernels import _checks  # which needs this class

        target = _checks.kernel_device(device)
        if self._row_offsets.to(target) is self._row_offsets:
            return self
        exact = self.to_exact_size()
        moved: dict[str, Any] = {name: tensor.to(target) for name, tensor in exact._tensors().items()}
        return SparseKV._from_parts(
            **moved,
            role=self._role,
            dtype=self._dtype,
            shape=self._shape,
            max_tile_rows=exact._max_tile_rows,
            nnz=exact._nnz,
        )

    def state_dict(self) -> dict[str, Any]:
        """The storage as {"blocks", "row_offsets", "token_order", "channel_order": Tensor, "metadata": dict}.

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
        metadata = _state.metadata(self._role, self._dtype, self._shape, self.max_tile_rows)
        return {**self._tensors(), "metadata": metadata}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> SparseKV:
        """The cache that `state_dict` described, validated; takes over the tensors unless their alignment forbids it.

        Raises TypeError if `state` is no mapping, a tensor is no Tensor or the metadata no mapping; ValueError for
        missing or foreign keys, another format or version, and for everything that `validate` refuses.
        """
        kv = cls._from_parts(**_state.parts(state))
        kv.validate()
        return kv

    def validate(self) -> None:
        """Raises ValueError, naming the field, unless the storage is exactly what `compress` could have written.

        Kernels trust storage: none of them reads out of bounds on storage that passed. Costs a pass over it in plain
        torch and, on a GPU, device synchronisations.
        """
        nnz = _validation.check_storage(self)
        recorded = self._nnz if self._totals is None else self.nnz
        if recorded not in (None, nnz):
            raise ValueError(f"nnz: {recorded} is recorded, but the bitmaps hold {nnz}")
        if self._totals is None:
            self._nnz = nnz

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "blocks": self.blocks,
            "row_offsets": self._row_offsets,
            "token_order": self._token_order,
            "channel_order": self._channel_order,
        }

    def _kernel_view(self) -> _C.SparseView:
        """The storage as kernels take it: pointers and sizes. Valid as long as this object lives and its tensors stay
        where they are."""
        if self._stays and self._view is not None:
            return self._view
        addresses = (
            self._blocks.data_ptr(),
            self._row_offsets.data_ptr(),
            self._token_order.data_ptr(),
            self._channel_order.data_ptr(),
        )
        if self._view is None or addresses != self._addresses:
            batch, kv_heads, tokens, head_dim = self._shape
            self._addresses = addresses
            self._view = _C.SparseView(
                *addresses,
                ROLE_CODES[self._role],
                DTYPE_CODES[self._dtype],
                batch,
                kv_heads,
                tokens,
                head_dim,
                self._max_tile_rows,
            )
        return self._view

    def __repr__(self) -> str:
        dtype = str(self._dtype).removeprefix("torch.")
        return (
            f"SparseKV({self._role}, shape={tuple(self._shape)}, {dtype}, {self.device}, {self.nbytes} bytes, "
            f"{self.bits_per_element:.2f} bits per element)"
        )

    def __reduce__(self) -> tuple[Any, ...]:  # pickle, copy.deepcopy
        return SparseKV.from_state_dict, (self.state_dict(),)
