"""SparseKV: attributes, moving, storing, and refusing every kind of damaged storage."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import cute_kernels as ck
from cute_kernels._storage.tile_reader import decompress as decompress_reference
from cute_kernels._storage.validation import ALIGNMENT
from cute_kernels.sparse_kv import storage_of
from tests.support import oracle

TENSORS = ["blocks", "row_offsets", "token_order", "channel_order"]


def make(role="key", tokens=150, head_dim=80, keep=20, device="cpu", dtype=torch.float16) -> ck.SparseKV:
    return ck.compress(oracle.gaussian(2, 2, tokens, head_dim, dtype=dtype).to(device), role=role, keep=keep)


def cloned(kv: ck.SparseKV) -> dict:
    state = {
        name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kv.state_dict().items()
    }
    state["metadata"] = json.loads(json.dumps(state["metadata"]))
    return state


def same(a: ck.SparseKV, b: ck.SparseKV) -> bool:
    """The same cache, storage and all; the devices may differ."""
    first, second = a.state_dict(), b.state_dict()
    return first["metadata"] == second["metadata"] and all(
        torch.equal(first[n].cpu(), second[n].cpu()) for n in TENSORS
    )


# ---- Attributes ------------------------------------------------------------------------------------------------------


def test_attributes(device, rng):
    kv = make(device=device, dtype=torch.bfloat16)
    assert tuple(kv.shape) == (2, 2, 150, 80) and kv.dtype == torch.bfloat16 and kv.role == "key"
    assert kv.device.type == device.type
    assert kv.nnz == 2 * 2 * 150 * 20 and kv.nbytes > 0
    text = repr(kv)
    for part in ("key", "(2, 2, 150, 80)", "bfloat16", str(kv.device)):
        assert part in text


@pytest.mark.parametrize("name", ["shape", "dtype", "device", "role", "nnz", "nbytes", "bits_per_element"])
def test_attributes_are_read_only(name):
    with pytest.raises(AttributeError):
        setattr(make(), name, None)


def test_no_public_constructor():
    with pytest.raises(TypeError, match="compress"):
        ck.SparseKV()


def test_to(device, rng):
    kv = make(device=device)
    assert kv.to(kv.device) is kv and kv.to(device) is kv and kv.to(str(device)) is kv
    on_cpu = kv.to("cpu")
    assert on_cpu.device.type == "cpu" and same(on_cpu, kv) and on_cpu.nnz == kv.nnz
    back = on_cpu.to(device)
    assert back.device.type == device.type and same(back, kv)
    assert oracle.same_bits(ck.decompress(back), ck.decompress(kv))


def test_to_refuses_other_devices():
    with pytest.raises(ValueError, match="device"):
        make().to("meta")
    with pytest.raises(ValueError, match="nonsense"):
        make().to("nonsense")
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no CUDA device"):
            make().to("cuda")


# ---- Storing ---------------------------------------------------------------------------------------------------------


def test_state_dict_holds_tensors_and_json():
    state = make().state_dict()
    assert set(state) == {*TENSORS, "metadata"}
    assert all(isinstance(state[name], torch.Tensor) and state[name].is_contiguous() for name in TENSORS)
    assert json.loads(json.dumps(state["metadata"])) == state["metadata"]


@pytest.mark.parametrize("role", ["key", "value"])
@pytest.mark.parametrize("tokens", [0, 150])
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_from_state_dict(role, tokens, dtype, device, rng):
    kv = make(role, tokens, device=device, dtype=dtype)
    loaded = ck.SparseKV.from_state_dict(cloned(kv))
    assert same(loaded, kv) and loaded.nnz == kv.nnz and loaded.nbytes == kv.nbytes and loaded.device == kv.device
    assert oracle.same_bits(ck.decompress(loaded), ck.decompress(kv))


def test_torch_save(tmp_path, device, rng):
    kv = make(device=device)
    torch.save(kv.state_dict(), tmp_path / "kv.pt")
    loaded = ck.SparseKV.from_state_dict(torch.load(tmp_path / "kv.pt", weights_only=True))
    assert same(loaded, kv) and loaded.device == kv.device


def test_safetensors(tmp_path, device, rng):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    kv = make(device=device)
    state = kv.state_dict()
    save_file({n: state[n] for n in TENSORS}, tmp_path / "kv.st", metadata={"sparse_kv": json.dumps(state["metadata"])})
    with safetensors.safe_open(tmp_path / "kv.st", framework="pt") as file:
        loaded = {name: file.get_tensor(name) for name in TENSORS}
        loaded["metadata"] = json.loads(file.metadata()["sparse_kv"])
    assert same(ck.SparseKV.from_state_dict(loaded), kv)


def test_pickle_and_copy(rng):
    kv = make("value")
    for other in (pickle.loads(pickle.dumps(kv)), copy.deepcopy(kv)):
        assert same(other, kv)
        assert other.state_dict()["blocks"].data_ptr() != kv.state_dict()["blocks"].data_ptr()


def test_tensors_that_move_to_shared_memory(rng):
    """As they do on their way to another process."""
    x, q = oracle.gaussian(2, 2, 300, 64), oracle.gaussian(2, 4, 1, 64)
    k, v = ck.compress_kv(x, x, keep=20)
    expected = ck.sparse_attention(q, k, v), ck.decompress(k)
    storage = storage_of(k, "k")
    for tensor in storage.tensors().values():
        address, view = tensor.data_ptr(), storage.view()
        tensor.share_memory_()
        assert tensor.data_ptr() != address and storage.view() is not view
    assert oracle.same_bits(ck.sparse_attention(q, k, v), expected[0])
    assert oracle.same_bits(ck.decompress(k), expected[1])


def test_tensors_cut_out_of_a_larger_one(device, rng):
    kv = make(device=device)
    state = cloned(kv)
    for name in TENSORS:
        memory = torch.zeros(state[name].numel() + 1, dtype=state[name].dtype, device=device)
        memory[1:] = state[name].flatten()
        state[name] = memory[1:].view(state[name].shape)
    loaded = ck.SparseKV.from_state_dict(state)
    assert same(loaded, kv) and oracle.same_bits(ck.decompress(loaded), ck.decompress(kv))


# ---- Damage ----------------------------------------------------------------------------------------------------------
# Each function damages the state dict of a key cache (2, 2, 150, 80); the error must name the field.

BITMAP_ROWS = 8  # of D 80, padded to 128


def first_block(state):
    begin, end = state["row_offsets"][:2].tolist()
    return state["blocks"][begin:end]


def replace(name, make_value):
    def damage(state):
        state[name] = make_value(state[name])

    return damage


def assign(name, index, value):
    def damage(state):
        state[name].view(-1)[index] = value

    return damage


def metadata(**entries):
    def damage(state):
        state["metadata"].update(entries)

    return damage


def shift_offset(by):
    def damage(state):
        state["row_offsets"][1] += by

    return damage


def swap(name, position, with_value):
    """Exchanges what stands at a position of the last row with `with_value`: still a permutation."""

    def damage(state):
        row = state[name].view(-1, state[name].shape[-1])[-1]
        other = int((row == with_value).nonzero())
        row[[position, other]] = row[[other, position]]

    return damage


def present_position(state, name, limit):
    row = state[name].view(-1, state[name].shape[-1])[-1]
    return int((row < limit).nonzero()[0])


def swap_in_absent_token(state):  # the last tile has tokens 128 to 149, that is 0 to 21
    swap("token_order", present_position(state, "token_order", 22), 63)(state)


def swap_in_absent_channel(state):
    row = state["channel_order"].view(-1, 128)[-1]
    for position in (row < 80).nonzero().flatten().tolist()[:8]:
        swap("channel_order", position, 120 + position % 8)(state)


def set_all_bits_of_a_lane(state):
    first_block(state)[:BITMAP_ROWS, 5] = -1


def clear_a_bit(state):
    row, lane = first_block(state)[:BITMAP_ROWS].nonzero()[0].tolist()
    word = first_block(state)[row, lane]
    word &= word - 1


def set_a_bit(state):
    block = first_block(state)
    free = next(bit for bit in range(31) if not int(block[0, 9]) >> bit & 1)
    block[0, 9] |= 1 << free


def drop_first_value(state):
    first_block(state)[BITMAP_ROWS] = 0


def negative_zero_value(state):
    first_block(state)[BITMAP_ROWS, 0] = -0x7FFF8000  # both halves 0x8000


def fill_padding(value):
    def damage(state):
        last_row = first_block(state)[-1].view(torch.int16)
        last_row[int((last_row == 0).nonzero()[0])] = value

    return damage


def one_row_less(state):
    state["blocks"] = state["blocks"][:-1]


def all_rows_of_one_tile(state):
    """A tile longer than any pattern needs."""
    extra = 136 + 1 - int(state["row_offsets"][1])
    state["blocks"] = torch.cat(
        [
            first_block(state),
            torch.zeros_like(state["blocks"][:1]).expand(extra, -1),
            state["blocks"][int(state["row_offsets"][1]) :],
        ]
    )
    state["row_offsets"][1:] += extra
    state["metadata"]["max_tile_rows"] += extra


DAMAGE = {
    "blocks of another dtype": ("blocks", replace("blocks", lambda t: t.float())),
    "blocks of 31 lanes": ("blocks", replace("blocks", lambda t: t[:, :31].contiguous())),
    "flat blocks": ("blocks", replace("blocks", lambda t: t.flatten())),
    "strided blocks": ("blocks", replace("blocks", lambda t: t.t().contiguous().t())),
    "nested blocks": ("blocks", replace("blocks", lambda t: torch.nested.nested_tensor([t, t]))),
    "blocks without data": ("blocks", replace("blocks", lambda t: t.to("meta"))),
    "scalar blocks": ("blocks", replace("blocks", lambda t: t[0, 0].clone())),
    "sparse blocks": ("blocks", replace("blocks", lambda t: t.to_sparse())),
    "blocks without the last row": ("row_offsets", one_row_less),
    "blocks with a row more": ("row_offsets", replace("blocks", lambda t: torch.cat([t, t[:1]]))),
    "offsets of another dtype": ("row_offsets", replace("row_offsets", lambda t: t.long())),
    "too few offsets": ("row_offsets", replace("row_offsets", lambda t: t[:-1])),
    "offsets not from 0": ("row_offsets", assign("row_offsets", 0, 1)),
    "negative offset": ("row_offsets", assign("row_offsets", 1, -5)),
    "falling offsets": ("row_offsets", assign("row_offsets", 2, 3)),
    "huge offset": ("row_offsets", assign("row_offsets", -1, 2**31 - 1)),
    "a tile without room for its bitmap": ("row_offsets", assign("row_offsets", 1, 7)),
    "a tile longer than any": ("row_offsets", all_rows_of_one_tile),
    "a row moved to the next tile": (None, shift_offset(-1)),
    "a row taken from the next tile": (None, shift_offset(1)),
    "token order of another dtype": ("token_order", replace("token_order", lambda t: t.char())),
    "token order of another shape": ("token_order", replace("token_order", lambda t: t[:, :, :-1].contiguous())),
    "token order with a duplicate": ("token_order", assign("token_order", slice(0, 2), 7)),
    "token order out of range": ("token_order", assign("token_order", 0, 64)),
    "channel order of another shape": ("channel_order", replace("channel_order", lambda t: t[..., :80].contiguous())),
    "channel order with a duplicate": ("channel_order", assign("channel_order", slice(-2, None), 7)),
    "channel order out of range": ("channel_order", assign("channel_order", 5, 255)),
    "an absent token with values": ("blocks", swap_in_absent_token),
    "an absent channel with values": ("blocks", swap_in_absent_channel),
    "more bits than value rows": ("blocks", set_all_bits_of_a_lane),
    "a bit too few": ("blocks", clear_a_bit),
    "a bit too many": ("blocks", set_a_bit),
    "a bit whose value is zero": ("blocks", drop_first_value),
    "a bit whose value is negative zero": ("blocks", negative_zero_value),
    "padding that is not zero": ("blocks", fill_padding(5)),
    "padding that is negative zero": ("blocks", fill_padding(-(2**15))),
    "longest tile understated": (
        "max_tile_rows",
        lambda s: metadata(max_tile_rows=s["metadata"]["max_tile_rows"] - 1)(s),
    ),
    "longest tile overstated": (
        "max_tile_rows",
        lambda s: metadata(max_tile_rows=s["metadata"]["max_tile_rows"] + 1)(s),
    ),
    "negative longest tile": ("max_tile_rows", metadata(max_tile_rows=-1)),
    "longest tile not a number": ("max_tile_rows", metadata(max_tile_rows="12")),
    "another role": ("role", metadata(role="query")),
    "role of another class": ("role", metadata(role=["key"])),
    "another dtype": ("dtype", metadata(dtype="float32")),
    "three sizes": ("shape", metadata(shape=[2, 2, 150])),
    "shape of another class": ("shape", metadata(shape="2,2,150,80")),
    "negative size": ("shape", metadata(shape=[2, 2, -150, 80])),
    "fractional size": ("shape", metadata(shape=[2, 2, 150.5, 80])),
    "odd head dim": ("shape", metadata(shape=[2, 2, 150, 81])),
    "huge head dim": ("shape", metadata(shape=[2, 2, 150, 2**40])),
    "huge batch": ("shape", metadata(shape=[2**40, 2, 150, 80])),
    "huge T of an empty cache": ("shape", metadata(shape=[0, 2, 2**62, 80])),
    "sizes of more digits than Python writes": ("shape", metadata(shape=[2, 2, 10**5000, 80])),
    "version of more digits than Python writes": ("version", metadata(version=10**5000)),
    "more tokens": (None, metadata(shape=[2, 2, 250, 80])),
    "fewer tokens": ("blocks", metadata(shape=[2, 2, 149, 80])),
    "smaller head dim": ("blocks", metadata(shape=[2, 2, 150, 72])),
    "larger head dim": ("channel_order", metadata(shape=[2, 2, 150, 136])),
    "another batch": (None, metadata(shape=[3, 2, 150, 80])),
    "another version": ("version", metadata(version=1)),
    "format of another class": ("format", metadata(format=torch.tensor([1, 2]).numpy())),
    "codec of another class": ("codec", metadata(codec=torch.tensor([1, 2]).numpy())),
    "another format": ("format", metadata(format="something else")),
    "foreign metadata": ("metadata", metadata(extra=1)),
    "missing metadata": ("metadata", lambda s: s["metadata"].pop("shape")),
    "missing tensor": ("token_order", lambda s: s.pop("token_order")),
    "no metadata": ("metadata", lambda s: s.pop("metadata")),
    "foreign key": ("extra", lambda s: s.update(extra=torch.zeros(1))),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_refuses_damage(name, device, rng):
    state = cloned(make(device=device))
    field, damage = DAMAGE[name]
    damage(state)
    with pytest.raises(ValueError, match=field):
        ck.SparseKV.from_state_dict(state)


@pytest.mark.parametrize(
    "name",
    [
        "a bit too many",
        "a bit too few",
        "a bit whose value is zero",
        "token order out of range",
        "falling offsets",
        "an absent token with values",
    ],
)
def test_validate_sees_damage_done_later(name, device, rng):
    kv = make(device=device)
    kv.validate()
    DAMAGE[name][1](kv.state_dict())
    with pytest.raises(ValueError, match=DAMAGE[name][0]):
        kv.validate()


@pytest.mark.gpu
def test_refuses_tensors_on_different_devices(rng):
    state = cloned(make(device="cuda"))
    state["token_order"] = state["token_order"].cpu()
    with pytest.raises(ValueError, match="token_order"):
        ck.SparseKV.from_state_dict(state)


def endless_blocks(state, element):
    state["blocks"] = element.expand(2**45, 32)


def endless_channel_orders(state, element):
    heads = 2**31 - 1
    state["blocks"], state["row_offsets"] = state["blocks"][:0], torch.zeros(1, dtype=torch.int32)
    state["token_order"] = torch.empty(heads, 1, 0, 64, dtype=torch.uint8)
    state["channel_order"] = element.view(torch.uint8)[:1].expand(heads, 1, 128)
    state["metadata"].update(shape=[heads, 1, 0, 80], max_tile_rows=0)


@pytest.mark.parametrize("field, claim", [("blocks", endless_blocks), ("channel_order", endless_channel_orders)])
def test_a_small_file_that_claims_much_memory(field, claim, tmp_path):
    """Refused before anything is copied: its tensors are larger than a machine's memory."""
    state = cloned(make())
    element = torch.zeros(2, dtype=torch.int32)[1:]
    assert element.data_ptr() % ALIGNMENT, "an aligned one would not be copied"
    claim(state, element)
    path = tmp_path / "small.pt"
    torch.save(state, path)
    assert path.stat().st_size < 2**17
    for read in (state, torch.load(path, weights_only=True)):
        with pytest.raises(ValueError, match=f"{field}: must be contiguous"):
            ck.SparseKV.from_state_dict(read)


@pytest.mark.parametrize("state", [None, 3, "blocks", ["blocks"], torch.zeros(1)])
def test_state_of_another_class(state):
    with pytest.raises(TypeError, match="state"):
        ck.SparseKV.from_state_dict(state)


@pytest.mark.parametrize(
    "name, value", [("blocks", [[0] * 32]), ("row_offsets", None), ("metadata", "{}"), ("metadata", None)]
)
def test_entry_of_another_class(name, value, rng):
    state = cloned(make())
    state[name] = value
    with pytest.raises(TypeError, match=name):
        ck.SparseKV.from_state_dict(state)


@given(data=st.data(), role=st.sampled_from(["key", "value"]))
def test_what_passes_can_be_read(data, role):
    """Whatever is flipped: either it is refused, or kernels and reference read the same cache from it."""
    torch.manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    state = cloned(make(role, tokens=70, head_dim=data.draw(st.sampled_from([56, 128])), keep=4))
    name = data.draw(st.sampled_from(TENSORS))
    flat = state[name].view(-1)
    assume(flat.numel())
    index = data.draw(st.integers(0, flat.numel() - 1))
    bit = data.draw(st.integers(0, 8 * flat.element_size() - 1))
    raw = flat.view(torch.uint8)
    raw[index * flat.element_size() + bit // 8] ^= 1 << (bit % 8)
    try:
        kv = ck.SparseKV.from_state_dict(state)
    except ValueError:
        return
    dense = ck.decompress(kv)
    assert oracle.same_bits(dense, decompress_reference(storage_of(kv, "kv"))) and oracle.same_bits(
        dense, oracle.decode(kv.state_dict())
    )
    assert kv.nnz == oracle.nonzeros(dense)
