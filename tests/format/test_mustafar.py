"""The reader of the original project's caches, against a writer that follows the layout group by group."""

from __future__ import annotations

import pytest
import torch

import cute_kernels as ck
from cute_kernels import mustafar
from tests.support import oracle
from tests.support.mustafar_layout import write


def caches(dtype=torch.float16):
    full = torch.rand(1, 1, 64, 64).add(0.5).to(dtype)
    special = oracle.random_bits(1, 2, 64, 64, dtype=dtype)
    return {
        "pruned": oracle.prune(oracle.gaussian(2, 2, 128, 128, dtype=dtype), 38),
        "full": full,
        "empty": torch.zeros_like(full),
        "any bits": torch.where(special == 0, 0.0, special),
        "ragged": oracle.prune(oracle.gaussian(1, 3, 192, 64, dtype=dtype), None) * (torch.rand(1, 3, 192, 64) < 0.1),
    }


@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["pruned", "full", "empty", "any bits", "ragged"])
@pytest.mark.parametrize("role", ["key", "value"])
def test_reads_what_was_written(role, kind, dtype, device, rng):
    x = caches(dtype)[kind]
    bitmaps, counts, values, offsets = write(x, role)
    bitmaps, counts, offsets = bitmaps.to(device), counts.to(device), offsets.to(device)
    values = [head.to(device) for head in values]
    for arguments in (
        (bitmaps, counts, values, offsets),
        (bitmaps.flatten(), counts.flatten(), values),
        (bitmaps, counts, torch.cat(values), offsets),
        (bitmaps, counts, torch.cat(values)),
    ):
        kv = mustafar.read(*arguments, role=role, shape=x.shape)
        kv.validate()
        assert kv.role == role and kv.device.type == device.type
        assert oracle.same_bits(ck.decompress(kv), torch.where(x == 0, 0.0, x))


def test_keys_and_values_differ(rng):
    x = oracle.prune(oracle.gaussian(1, 1, 64, 64), 20)
    read = mustafar.read(*write(x, "key"), role="value", shape=x.shape)
    assert torch.equal(ck.decompress(read), x.transpose(2, 3))  # at D = 64 one layout is the other's transpose


def test_heads_may_lie_anywhere(rng):
    x = oracle.prune(oracle.gaussian(1, 2, 64, 64), 20)
    bitmaps, counts, values, offsets = write(x, "key")
    gap = torch.full((16,), 7.0).half()
    packed = torch.cat([gap, values[1], gap, values[0]])
    offsets = torch.tensor([(32 + len(values[1])) // 8, 2], dtype=torch.int32)
    kv = mustafar.read(bitmaps, counts, packed, offsets, role="key", shape=x.shape)
    assert torch.equal(ck.decompress(kv), x)


def test_appended_caches(rng):
    """The original appends 256 tokens at a time by concatenating bitmaps, shifted counts and values, head by head."""
    x = oracle.prune(oracle.gaussian(2, 1, 256, 64), 20)
    for role in ("key", "value"):
        (bits_a, counts_a, values_a, _), (bits_b, counts_b, values_b, _) = (
            write(x[:, :, part], role) for part in (slice(0, 128), slice(128, 256))
        )
        counts = torch.cat([counts_a[:, :-1], counts_b + counts_a[:, -1:]], dim=1)
        values = [torch.cat(pair) for pair in zip(values_a, values_b)]
        bitmaps = torch.cat([bits_a, bits_b], dim=1)
        kv = mustafar.read(bitmaps.flatten(), counts.flatten(), values, role=role, shape=x.shape)
        assert torch.equal(ck.decompress(kv), x)


def test_in_parts(rng, monkeypatch):
    monkeypatch.setattr(mustafar, "_GROUPS_AT_A_TIME", 50)
    x = oracle.prune(oracle.gaussian(2, 2, 64, 128), 38)
    assert torch.equal(ck.decompress(mustafar.read(*write(x, "value"), role="value", shape=x.shape)), x)


def test_layer(rng):
    k, v = (oracle.prune(oracle.gaussian(2, 2, 64, 64), 20) for _ in range(2))
    windows = oracle.gaussian(2, 2, 40, 64), oracle.gaussian(2, 2, 40, 64)
    keys, values, window = mustafar.read_layer((write(k, "key"), windows[0], write(v, "value"), windows[1], 64, 104))
    assert torch.equal(ck.decompress(keys), k) and torch.equal(ck.decompress(values), v)
    assert window[0] is windows[0] and window[1] is windows[1]
    q = oracle.gaussian(2, 4, 1, 64)
    out = ck.sparse_attention(q, keys, values, window=window, backend="reference")
    expected, _ = oracle.attention(q, k, v, 64**-0.5, window=windows)
    assert oracle.relative_error(out, expected) < 2e-3
    keys, values, window = mustafar.read_layer((None, windows[0], None, windows[1], 0, 40))
    assert keys.shape == (2, 2, 0, 64) and values.role == "value"


@pytest.mark.parametrize("shape", [(1, 2, 0, 64), (0, 2, 64, 64)])
def test_empty(shape):
    x = torch.empty(shape, dtype=torch.float16)
    bitmaps, counts, values, offsets = write(x, "key")
    counts = torch.zeros(shape[0] * shape[1], shape[2] * shape[3] // 64 + 1, dtype=torch.int32)
    packed = torch.cat(values) if values else torch.empty(0, dtype=torch.float16)
    assert mustafar.read(bitmaps, counts, packed, offsets, role="key", shape=shape).shape == shape


def test_arrays_that_claim_much_memory():
    """Refused before anything is copied: files may hold tensors that are larger than a machine's memory."""
    tokens, zero = 2**32, torch.zeros(1)
    groups = tokens * 64 // 64
    bitmaps, counts = zero.long().expand(1, groups), zero.int().expand(1, groups + 1)
    empty = zero.half()[:0]

    def refused(message, *arguments, shape=(1, 1, tokens, 64)):
        with pytest.raises(ValueError, match=message):
            mustafar.read(*arguments, role="key", shape=shape)

    refused("bitmaps must have memory for each", bitmaps, counts, [empty])
    small = {"shape": (1, 1, 64, 64)}
    bitmaps, counts = zero.long().expand(1, 64).contiguous(), zero.int().expand(1, 65)
    refused("counts must have memory for each", bitmaps, counts, [empty], **small)
    counts = counts.contiguous()
    refused("values must have memory for each", bitmaps, counts, zero.half().expand(2**45), **small)
    refused(r"values\[0\] must have memory for each", bitmaps, counts, [zero.half().expand(2**45)], **small)
    counts[0, -1] = 2**30
    refused("counts must end between 0 and .* = 2048", bitmaps, counts, [zero.half()], **small)
    heads, one = 2**10, torch.zeros(2**12).half()
    counts = torch.zeros(heads, 65, dtype=torch.int32)
    refused(
        r"values\[0\] must have the 0",
        bitmaps.expand(heads, 64).clone(),
        counts,
        [one] * heads,
        shape=(heads, 1, 64, 64),
    )


def test_a_layout_without_heads_and_with_many_tokens():
    shape = (0, 2, 2**40, 64)
    bitmaps, counts = (
        torch.empty(0, 2**40 + more, dtype=dtype) for more, dtype in ((0, torch.int64), (1, torch.int32))
    )
    assert mustafar.read(bitmaps, counts, torch.empty(0).half(), role="value", shape=shape).shape == shape


def test_contradictions_are_refused(rng):
    x = oracle.prune(oracle.gaussian(1, 2, 64, 64), 20)
    bitmaps, counts, values, offsets = write(x, "key")

    def refused(error, message, *arguments, shape=x.shape, role="key"):
        with pytest.raises(error, match=message):
            mustafar.read(*arguments, role=role, shape=shape)

    other = bitmaps.clone()
    group = int((bitmaps[1] != 0).nonzero()[0])
    other[1, group] = -1
    refused(ValueError, "counts must grow", other, counts, values)
    swapped = counts.clone()
    swapped[:, 1] += 4
    refused(ValueError, "counts must grow", bitmaps, swapped, values)
    shifted = counts + 4
    refused(ValueError, "begin with 0", bitmaps, shifted, values)
    refused(ValueError, r"values\[1\] must have", bitmaps, counts, [values[0], values[1][:-8]])
    refused(ValueError, "all elements", bitmaps, counts, torch.cat(values)[:-1])
    refused(ValueError, "all elements", bitmaps, counts, torch.cat(values), offsets + 1)
    refused(ValueError, "all elements", bitmaps, counts, torch.cat(values), offsets - 1)
    refused(ValueError, "offsets must be where", bitmaps, counts, values, offsets + 1)
    refused(ValueError, "list of B", bitmaps, counts, values[:1])
    refused(TypeError, "bitmaps must be int64", bitmaps.int(), counts, values)
    refused(TypeError, "counts must be int32", bitmaps, counts.long(), values)
    refused(TypeError, "float16 or bfloat16", bitmaps, counts, torch.cat(values).float())
    refused(TypeError, "list", bitmaps, counts, None)
    refused(ValueError, "bitmaps must have shape", bitmaps[:, 1:], counts, values)
    refused(ValueError, "counts must have shape", bitmaps, counts[:, 1:], values)
    refused(ValueError, "multiples of 64", bitmaps, counts, values, shape=(1, 2, 32, 128))
    refused(ValueError, "four sizes", bitmaps, counts, values, shape=(2, 64, 64))
    refused(TypeError, "shape must be a sequence", bitmaps, counts, values, shape=5)
    refused(ValueError, "shape", bitmaps, counts, values, shape=(1, 2, 2**70, 64))
    refused(TypeError, "values must be a dense", bitmaps, counts, values[0].to_sparse())
    refused(ValueError, "values must be on a cpu or cuda device", bitmaps, counts, torch.cat(values).to("meta"))
    refused(ValueError, "role", bitmaps, counts, values, role="keys")
    refused(ValueError, "on the device", bitmaps.to("meta"), counts, values)


def test_layers_of_another_form_are_refused(rng):
    window = oracle.gaussian(1, 1, 40, 64)
    with pytest.raises(TypeError, match="layer must be"):
        mustafar.read_layer((window, window))
    with pytest.raises(ValueError, match="no compressed keys"):
        mustafar.read_layer((None, window, None, window, 64, 104))
    with pytest.raises(ValueError, match="compressed tokens must be a multiple of 64, got -1"):
        mustafar.read_layer((None, window, None, window, -1, 40))
    with pytest.raises(ValueError, match="value window"):
        mustafar.read_layer((None, window, None, window[:, :, 1:], 0, 40))
    with pytest.raises(TypeError, match="value window must be float16 or bfloat16"):
        mustafar.read_layer((None, window, None, window.float(), 0, 40))
    with pytest.raises(ValueError, match="key window must be on a cpu or cuda device"):
        mustafar.read_layer((None, window.to("meta"), None, window.to("meta"), 0, 40))
    with pytest.raises(TypeError, match="compressed keys must be"):
        mustafar.read_layer(((window,), window, None, window, 64, 104))
