"""What the package must compute, without it: numpy on bit patterns, float64 products, the format read by hand."""

from __future__ import annotations

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


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest value of OCP FP8 E4M3, in float64: ties to even, saturating, NaN to NaN; -0.0 becomes +0.0."""
    exact = x.double()
    exponent = torch.frexp(exact).exponent.clamp(min=-5) - 1  # of normal numbers; the least is -6
    unit = torch.ldexp(torch.ones_like(exact), exponent - 3)  # three bits of mantissa
    rounded = ((exact / unit).round() * unit).clamp(-448, 448)  # torch rounds ties to even
    rounded = torch.where(exact.isinf(), exact.sign() * 448, rounded)
    return torch.where(exact.isnan(), float("nan"), rounded + 0.0)


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


def bitmap_bit(element: int) -> int:
    return 2 * (element // 8 % 4) + element % 2 + 8 * (element // 2 % 4)


def decode(state: dict) -> torch.Tensor:
    """The dense cache of a state dict, read word by word."""
    batch, heads, tokens, head_dim = state["metadata"]["shape"]
    role = state["metadata"]["role"]
    blocks = state["blocks"].cpu().numpy().view(np.uint32)
    offsets = state["row_offsets"].cpu().numpy()
    token_order, channel_order = state["token_order"].cpu().numpy(), state["channel_order"].cpu().numpy()
    padded = channel_order.shape[-1]
    tiles = -(-tokens // TILE)
    positions = [[element_position(role, padded, lane, e) for e in range(2 * padded)] for lane in range(32)]
    dense = np.zeros((batch, heads, tiles * TILE, padded), dtype=np.uint16)
    for index in range(batch * heads * tiles):
        b, h, tile = index // tiles // heads, index // tiles % heads, index % tiles
        block = blocks[offsets[index] : offsets[index + 1]]
        values = block[padded // 16 :]
        for lane in range(32):
            taken = [0, 0]
            for e in range(2 * padded):
                if block[e // 32, lane] >> bitmap_bit(e) & 1:
                    value = int(values[taken[e % 2], lane]) >> (16 * (e % 2)) & 0xFFFF
                    taken[e % 2] += 1
                    token, channel = positions[lane][e]
                    dense[b, h, TILE * tile + int(token_order[b, h, tile, token]), channel_order[b, h, channel]] = value
    outside = dense.copy()
    outside[:, :, :tokens, :head_dim] = 0
    assert not outside.any(), "something is stored outside the cache"
    inside = np.ascontiguousarray(dense[:, :, :tokens, :head_dim]).view(np.int16)
    return torch.from_numpy(inside).view(getattr(torch, state["metadata"]["dtype"]))


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
