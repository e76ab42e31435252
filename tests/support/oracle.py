"""What the package must compute, without it: numpy on bit patterns, float64 products, the format read by hand."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

DTYPES = [torch.float16, torch.bfloat16]
INFINITY_BITS = {torch.float16: 0x7C00, torch.bfloat16: 0x7F80}
TILE = 64


# ---- Inputs ----------------------------------------------------------------------------------------------------------


def gaussian(*shape: int, dtype=torch.float16, device="cpu", scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype).to(device)


def lognormal_channels(batch: int, heads: int, tokens: int, head_dim: int, dtype=torch.float16) -> torch.Tensor:
    """Gaussian, times a scale for each channel of each head that is lognormal with sigma 1."""
    return (torch.randn(batch, heads, tokens, head_dim) * torch.randn(batch, heads, 1, head_dim).exp()).to(dtype)


def random_bits(*shape: int, dtype=torch.float16) -> torch.Tensor:
    """Every bit pattern is as likely: NaN of all payloads, infinities, subnormals and both zeros among them."""
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(dtype)


# ---- Bits ------------------------------------------------------------------------------------------------------------


def bits(x: torch.Tensor) -> torch.Tensor:
    """What torch.equal can compare with NaN and -0.0 told apart."""
    assert x.element_size() in (2, 4)
    return x.cpu().contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def magnitude_keys(x: torch.Tensor) -> np.ndarray:
    """Integers that sort as |x| does; all NaN alike, above infinity."""
    magnitude = bits(x).numpy().astype(np.int32) & 0x7FFF
    return np.minimum(magnitude, INFINITY_BITS[x.dtype] + 1)


def prune(x: torch.Tensor, keep: int | None) -> torch.Tensor:
    """keep None: every nonzero."""
    keys = magnitude_keys(x)
    kept = keys > 0
    if keep is not None:
        order = np.argsort(-keys, axis=-1, kind="stable")[..., :keep]
        largest = np.zeros(keys.shape, dtype=bool)
        np.put_along_axis(largest, order, True, axis=-1)
        kept &= largest
    return torch.from_numpy(np.where(kept, bits(x).numpy(), np.int16(0))).view(x.dtype).view(x.shape)


def e4m3(exact: torch.Tensor) -> torch.Tensor:
    """The nearest value of OCP FP8 E4M3 to float64: ties to even, saturating, NaN to NaN."""
    exponent = torch.frexp(exact).exponent.clamp(min=-5) - 1  # of normal numbers; the least is -6
    unit = torch.ldexp(torch.ones_like(exact), exponent - 3)  # three bits of mantissa
    rounded = ((exact / unit).round() * unit).clamp(-448, 448)  # torch rounds ties to even
    rounded = torch.where(exact.isinf(), exact.sign() * 448, rounded)
    return torch.where(exact.isnan(), float("nan"), rounded)


# Of a narrow codec: its largest number, and rounding to its numbers.
NARROW = {
    "fp8": (448.0, e4m3),
    "int8": (127.0, lambda x: x.round().clamp(-127, 127) + 0.0),
    "int4": (7.0, lambda x: x.round().clamp(-7, 7) + 0.0),
}
SCALE_TOKENS = 512  # from which the scales of channels are chosen


def channel_scales(x: torch.Tensor, scale_tokens: int = SCALE_TOKENS) -> torch.Tensor:
    """(B, H, T, D) -> (B, H, 1, D) float64: the mean magnitude of a channel's nonzeros among the first tokens, in bf16,
    at least 2^-10 of the head's largest.

    Added up in float, every 32nd token to a sum, then the sums.
    """
    first = x[:, :, :scale_tokens].float().abs()
    first = torch.where(first.isfinite(), first, 0.0)
    none = torch.zeros_like(first.sum(2, keepdim=True))
    tokens = [first[:, :, t : t + 1] for t in range(first.shape[2])]
    sums = [functools.reduce(torch.add, tokens[i::32], none) for i in range(32)]
    total, count = functools.reduce(torch.add, sums), (first > 0).sum(2, keepdim=True)
    mean = (total / count).bfloat16().double().clamp(2.0**-100, 2.0**100)
    scales = torch.where(count > 0, mean, 0.0)
    most = scales.amax(-1, keepdim=True)
    scales = torch.where(scales > 0, scales.maximum(most * 2.0**-10), most)
    return torch.where(most > 0, scales, 1.0)


def token_scales(pruned: torch.Tensor, of_channel: torch.Tensor, largest_number: float) -> torch.Tensor:
    """(B, H, T, 1) float64: bf16, rounded up, of the largest finite magnitude relative to the channels' scales; the
    least one of a token without any."""
    ratio = (pruned.float().abs() * (1 / of_channel.float())).double()
    largest = torch.where(ratio.isfinite(), ratio, 0.0).amax(-1, keepdim=True)
    quotient = (largest.float() / largest_number).numpy()
    up = ((quotient.view(np.uint32).astype(np.int64) + 0xFFFF) >> 16 << 16).astype(np.uint32).view(np.float32)
    return torch.from_numpy(up).double().clamp(2.0**-48, 2.0**48)


def narrow(
    x: torch.Tensor,
    keep: int | None,
    codec: str,
    scale_tokens: int = SCALE_TOKENS,
    pruned: torch.Tensor | None = None,
) -> torch.Tensor:
    """What a narrow codec stores of a cache that is pruned to `keep` elements a token, or to `pruned`: float64, scales
    included."""
    largest, rounded = NARROW[codec]
    pruned, of_channel = prune(x, keep) if pruned is None else pruned, channel_scales(x, scale_tokens)
    of_token = token_scales(pruned, of_channel, largest)
    relative = (pruned.float() * (1 / of_channel.float())) * (
        1 / of_token.float()
    )  # in float: ties are of its roundings
    return rounded(relative.double()) * of_token * of_channel


def to_dtype(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once, to no more than the largest number."""
    largest = torch.finfo(dtype).max
    return exact.float().clamp(-largest, largest).to(dtype)


def nonzeros(x: torch.Tensor) -> int:
    return int((magnitude_keys(x) > 0).sum())


# ---- The format, after docs/format.md and PTX's drawing of the A fragment of mma.m16n8k16 ----------------------------


def element_position(role: str, padded: int, lane: int, element: int) -> tuple[int, int]:
    """(token position, channel position) of a lane's element."""
    fragment, block = element % 8, element // 8
    if role == "key":
        token, channel = 16 * (block // (padded // 16)), 16 * (block % (padded // 16))
    else:
        token, channel = 16 * (block % 4), 16 * (block // 4)
    row = lane // 4 + 8 * (fragment // 4)
    column = 2 * (lane % 4) + fragment // 2 % 2 + 8 * (fragment % 2)
    exchanged = column & 0b0110 | (column & 1) << 3 | column >> 3  # its bits 0 and 3
    return (token + row, channel + exchanged) if role == "key" else (token + exchanged, channel + row)


def bitmap_bit(element: int, narrow: bool = False) -> int:
    atom, entry, stream = element // 8 % 4, element // 2 % 4, element % 2
    return 16 * (atom // 2) + 4 * entry + 2 * (atom % 2) + stream if narrow else 8 * entry + 2 * atom + stream


def _number(codec: str, code: int) -> float:
    """Of a code of 8 or 4 bits."""
    if codec != "fp8":
        return float(code - (128 if codec == "int8" else 8))
    sign, exponent, fraction = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10))


def _bf16(word: int) -> float:
    return float(np.array([word << 16], dtype=np.uint32).view(np.float32)[0])


def decode(state: dict) -> torch.Tensor:
    """The dense cache of a state dict, read word by word: float64 of a narrow codec, else of the cache's dtype."""
    batch, heads, tokens, _ = state["metadata"]["shape"]
    role, codec = state["metadata"]["role"], state["metadata"]["codec"]
    width = {"fp8": 8, "int8": 8, "int4": 4}.get(codec, 16)
    narrow, per_word = width < 16, 32 // width
    blocks = state["blocks"].cpu().numpy().view(np.uint32)
    offsets = state["row_offsets"].cpu().numpy()
    token_order, channel_order = state["token_order"].cpu().numpy(), state["channel_order"].cpu().numpy()
    padded = channel_order.shape[-1]
    tiles = -(-tokens // TILE)
    if state["metadata"]["tile_format"] == "two_of_four":
        rows = padded // 16 + (width < 16) + padded * width // 32
        return _decode_groups(state, list(blocks.reshape(batch * heads * tiles, rows, 32)), width, _every_value(width))
    if state["metadata"]["tile_format"] == "two_of_four_bitmap":
        tiles_of = [blocks[begin:end] for begin, end in itertools.pairwise(offsets)]
        return _decode_groups(state, tiles_of, width, _values_under_a_bitmap(padded, width))
    positions = [[element_position(role, padded, lane, e) for e in range(2 * padded)] for lane in range(32)]
    dense = np.zeros((batch, heads, tiles * TILE, padded), dtype=np.float64 if narrow else np.uint16)
    for index in range(batch * heads * tiles):
        b, h, tile = index // tiles // heads, index // tiles % heads, index % tiles
        block = blocks[offsets[index] : offsets[index + 1]]
        scales = (
            np.ascontiguousarray(block[padded // 16 :][:narrow]).view(np.uint16).ravel()
        )  # the row behind the bitmap
        values = block[padded // 16 + narrow :]
        for lane in range(32):
            taken = [0, 0]
            for e in range(2 * padded):
                if not block[e // 32, lane] >> bitmap_bit(e, narrow) & 1:
                    continue
                stream, (token, channel) = e % 2, positions[lane][e]
                if narrow:
                    word = int(values[2 * (taken[stream] // per_word) + stream, lane])
                    code = word >> width * (taken[stream] % per_word) & ((1 << width) - 1)
                    of_token = _bf16(int(scales[8 * (token % 8) + token // 8]))
                    value = _number(codec, code) * of_token * float(state["channel_scale"][b, h, channel])
                else:
                    value = int(values[taken[stream], lane]) >> (16 * stream) & 0xFFFF
                taken[stream] += 1
                dense[b, h, TILE * tile + int(token_order[b, h, tile, token]), channel_order[b, h, channel]] = value
    return _inside(state, dense)


def _every_value(width: int):
    """Of exactly two of four: every value has a place."""

    def code_of(block: np.ndarray, values: int, lane: int, atom: int, register: int, i: int) -> int:
        number = 8 * atom + 2 * register + i  # of the lane's values, in the order of registers
        if width == 4:
            number = 8 * atom + register + 4 * i
        return int(block[values + number * width // 32, lane]) >> number * width % 32 & ((1 << width) - 1)

    return 0, code_of


def _values_under_a_bitmap(padded: int, width: int):
    """Of at most two of four: a bit a slot; values are of one stream a lane, or of two of 16 bits, register by
    register."""
    narrow, per_word = width < 16, 32 // width

    def code_of(block: np.ndarray, values: int, lane: int, atom: int, register: int, i: int) -> int | None:
        def is_stored(atom: int, register: int, i: int) -> int:
            element = 8 * atom + register // 2 + 2 * (i + 2 * (register % 2))
            return int(block[padded // 16 + atom // 4, lane]) >> bitmap_bit(element, narrow) & 1

        if not is_stored(atom, register, i):
            return None
        before = [(a, r, j) for a in range(atom + 1) for r in range(4) for j in range(2)]
        before = [at for at in before if at < (atom, register, i) and (narrow or at[1] // 2 == register // 2)]
        rank = sum(is_stored(*at) for at in before)
        if narrow:
            return int(block[values + rank // per_word, lane]) >> width * (rank % per_word) & ((1 << width) - 1)
        return int(block[values + rank, lane]) >> 16 * (register // 2) & 0xFFFF

    return padded // 32, code_of


def _decode_groups(state: dict, blocks: list[np.ndarray], width: int, values_of) -> torch.Tensor:
    """blocks: (rows, 32) of every tile of the tile formats of two of four. After PTX's drawings of the operands of
    mma.sp.m16n8k32: A is 16 x 32, in groups of four columns of which two are candidates."""
    bitmap_rows, code_of = values_of
    batch, heads, tokens, _ = state["metadata"]["shape"]
    role, codec = state["metadata"]["role"], state["metadata"]["codec"]
    token_order, channel_order = state["token_order"].cpu().numpy(), state["channel_order"].cpu().numpy()
    padded, narrow = channel_order.shape[-1], width < 16
    tiles = -(-tokens // TILE)
    rows, columns = (TILE, padded) if role == "key" else (padded, TILE)  # of A
    dense = np.zeros((batch, heads, tiles * TILE, padded), dtype=np.float64 if narrow else np.uint16)
    for index, block in enumerate(blocks):
        b, h, tile = index // tiles // heads, index // tiles % heads, index % tiles
        before = padded // 16 + bitmap_rows
        scales = np.ascontiguousarray(block[before:][:narrow]).view(np.uint16).ravel()
        for row in range(rows):
            for group in range(columns // 4):
                atom, column = row // 16 * (columns // 32) + group // 8, group % 8  # column of groups in the atom
                word = block[atom // 2, 4 * (row % 8) + 2 * (atom % 2) + column // 4]
                kept = int(word) >> 4 * (column % 4 + 4 * (row % 16 // 8)) & 15
                register = row % 16 // 8 + 2 * (column // 4)
                for i, k in enumerate((kept & 3, kept >> 2)):
                    code = code_of(block, before + narrow, 4 * (row % 8) + column % 4, atom, register, i)
                    if code is None:
                        continue
                    token, channel = (row, 4 * group + k) if role == "key" else (4 * group + k, row)
                    value = code
                    if narrow:
                        of_token = _bf16(int(scales[8 * (token % 8) + token // 8]))
                        value = _number(codec, code) * of_token * float(state["channel_scale"][b, h, channel])
                    dense[b, h, TILE * tile + int(token_order[b, h, tile, token]), channel_order[b, h, channel]] = value
    return _inside(state, dense)


def _inside(state: dict, dense: np.ndarray) -> torch.Tensor:
    """The cache in whole tiles of padded channels, float64 or bits of 16-bit values; nothing is stored beside it."""
    _, _, tokens, head_dim = state["metadata"]["shape"]
    outside = dense.copy()
    outside[:, :, :tokens, :head_dim] = 0
    assert not outside.any(), "something is stored outside the cache"
    inside = np.ascontiguousarray(dense[:, :, :tokens, :head_dim])
    if dense.dtype == np.float64:
        return torch.from_numpy(inside)
    return torch.from_numpy(inside.view(np.int16)).view(getattr(torch, state["metadata"]["dtype"]))


# ---- Products in float64 ---------------------------------------------------------------------------------------------


def for_query_heads(dense: torch.Tensor, q_heads: int) -> torch.Tensor:
    """(B, Hkv, N, D) -> (B, Hq, N, D) float64."""
    return dense.cpu().double().repeat_interleave(q_heads // max(1, dense.shape[1]), dim=1)


def qk(q: torch.Tensor, keys: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * (q.cpu().double() @ for_query_heads(keys, q.shape[1]).transpose(-1, -2))


def av(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return p.cpu().double() @ for_query_heads(values, p.shape[1])


def attention(q, keys, values, scale, window=None, seq_lens=None, causal=True):
    """Query by query: (out, lse), float64. keys, values: dense, pruned."""
    batch, q_heads, queries, _ = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((batch, q_heads, queries), float("-inf"), dtype=torch.float64)
    for b in range(batch):
        length = keys.shape[2] if seq_lens is None else int(seq_lens[b])
        for h in range(q_heads):
            kv_head = h // (q_heads // keys.shape[1])
            k, v = keys[b, kv_head, :length], values[b, kv_head, :length]
            if window is not None:
                k, v = torch.cat([k, window[0][b, kv_head]]), torch.cat([v, window[1][b, kv_head]])
            for i in range(queries):
                seen = max(0, len(k) - (queries - 1 - i)) if causal else len(k)
                if seen:
                    logits = scale * (k[:seen].double() @ q[b, h, i].double())
                    lse[b, h, i] = logits.logsumexp(0)
                    out[b, h, i] = (logits - lse[b, h, i]).exp() @ v[:seen].double()
    return out, lse


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of what is expected."""
    difference = (actual.cpu().double() - expected).norm()
    return float(difference / expected.norm()) if difference else 0.0
