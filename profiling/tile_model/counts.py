"""What one tile of the sparse products uses: registers, bytes, instructions by pipe.

A tile is 64 tokens of one KV head times the head's channels, 2 D elements a lane. A warp multiplies it by N query rows;
on CC 9.0 a warpgroup multiplies by more rows than a warp takes, a quarter of the tile in each of its warps.
Instructions of the decoder are counted from mma/bitmap16_decoder.hpp, those around it come from counters:

    an element of a lane  1 LDS, 0.5 PRMT, 0.5 IDP (for four: an address by dp4a and a selector by dp2a), 0.25 IMAD
                          (the other selector), 0.25 LOP3
    a bitmap word         1 LDS, 3 SHF, 1 POPC (both streams, every other word), 2 others
    an m16n8k16 atom      1 HMMA
    the rest, sparse_qk   1312 instructions a tile were counted at D 128, N 8, 4 rows (docs/notes/products.md), 920 of
                          them MMAs and a decoder of 128 more: 392 for copies, offsets, loop and epilogue; of the
                          latter 12 a row
    the rest, sparse_av   198 more: the loops over tiles differ by that much in the machine code (profiling.sass)
    on CC 9.0, by warps   1218 were counted then for sparse_qk, 298 of them the rest; the loop of sparse_av had 1095 if
                          p is aligned, 175 of them the rest, and its producers are taken to be those of sparse_qk,
                          some 50
    by warpgroups         a warp finds its quarter by the words before it, a warpgroup issues 4 x 8 HGMMA at D 128; the
                          rest is that of p: 81 a row in the machine code (884 and 1536 in the loop of a warp at N 32
                          and 64), taken to be 97, for 32 rows more took 29 clocks a row and tile
                          (docs/notes/products.md); that of keys is 520 and 6.4 a row: 415 and 470 in the loop of a warp
                          at N 32 and 64 if rows of the output are on 16 bytes, and producers as above
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from profiling.cases import Case

TILE_TOKENS = 64
ROW_BYTES = 128  # of a block: one word a lane
ROWS_BEHIND = 2  # it, that the decoder may read
ORDER_BYTES = TILE_TOKENS
OFFSET_BYTES = 4
HEAD_DIMS = (64, 128, 256)
ROW_BLOCKS = {
    ("sm80", "key"): (8, 16),
    ("sm80", "value"): (8, 16),  # N
    ("sm90", "key"): (8, 16, 32, 64),
    ("sm90", "value"): (8, 16, 32, 64),
}
WARP_ROWS = 16  # the largest N of a warp; more are a warpgroup's

# Registers besides accumulators and B fragments, or a warpgroup's A fragments: traits.hpp of the kernels, from the
# compiler's reports.
WORKING_REGISTERS = {
    ("key", 8): 64,
    ("key", 16): 64,
    ("value", 8): 84,
    ("value", 16): 90,
    ("key", 32): 40,
    ("key", 64): 40,
    ("value", 32): 44,
    ("value", 64): 44,
}

# A stream is as long as the longest of 64; balanced streams exceed the mean by this many standard deviations of
# a binomial count, and the longest of all tiles by as many rows more (docs/notes/compress.md, token order; 2048 to
# 16384 tokens, Gaussian).
PADDING_DEVIATIONS = 0.65
LONGEST_TILE_ROWS = 3

REST = {
    ("sm80", "key"): 392 - 4 * 12,
    ("sm80", "value"): 392 + 198 - 4 * 12,
    ("sm90", "key"): 298 - 4 * 12,
    ("sm90", "value"): 175 + 50 - 4 * 12,
}
REST_A_ROW = 12
WARPGROUP_REST = {"key": 520, "value": 0}
WARPGROUP_REST_A_ROW = {"key": 6.4, "value": 97}
BARRIER_BYTES = 3 * 8 * 48  # of a CTA on CC 9.0
CONFLICTS = 2.0  # wavefronts of an access in the order of tokens, which no layout can foresee (assumed)
MATRIX_CONFLICTS = 2.6  # of 8 rows of 16 bytes that lie at random


@dataclass(frozen=True)
class Tile:
    """A worker's, a warp's or a warpgroup's, work on a tile. Instructions are of warps, wavefronts 128 bytes of shared
    memory."""

    backend: str  # sm80, sm90
    role: str
    head_dim: int  # padded: 64, 128 or 256
    n: int  # query rows that are multiplied
    rows: int  # of those, that exist
    block_rows: float  # rows of 128 bytes: the bitmap and the values, mean
    longest_rows: int  # of any tile
    element_bytes: int

    @classmethod
    def of(cls, case: Case) -> Tile:
        """The tile of a sweep's case.

        Raises:
            ValueError: the head dim is one that no kernel takes, or the backend is not one of CUDA.
        """
        if (case.backend, case.role) not in ROW_BLOCKS:
            raise ValueError(f"backend {case.backend} is not modelled")
        shape, keep = case.load.shape, case.load.keep
        head_dim = next((d for d in HEAD_DIMS if shape.head_dim <= d), None)
        if head_dim is None:
            raise ValueError(f"head dim {shape.head_dim} is more than {HEAD_DIMS[-1]}, the largest that kernels take")
        if shape.head_dim % 8:
            raise ValueError(f"head dim {shape.head_dim} is not a multiple of 8, which kernels take")
        rows = shape.query_heads // shape.kv_heads * shape.query_tokens
        blocks = ROW_BLOCKS[case.backend, case.role]
        n = next((n for n in blocks if rows <= n), blocks[-1])
        uneven = keep < shape.head_dim and case.load.data != "equal"
        padding = PADDING_DEVIATIONS * math.sqrt(keep * (1 - keep / shape.head_dim)) if uneven else 0.0
        mean = head_dim // 16 + keep + padding  # 64 tokens x keep values in 64 streams
        longest = math.ceil(mean) + (LONGEST_TILE_ROWS if uneven else 0)
        return cls(case.backend, case.role, head_dim, n, min(rows, n), mean, min(longest, head_dim // 16 + head_dim), 2)

    @property
    def elements(self) -> int:
        """Of a lane."""
        return TILE_TOKENS * self.head_dim // 32

    @property
    def words(self) -> int:
        """Bitmap words of a lane."""
        return self.elements // 32

    @property
    def worker_warps(self) -> int:
        """That multiply a tile together."""
        return 1 if self.n <= WARP_ROWS else 4

    @property
    def registers(self) -> int:
        """A thread's: accumulators, two elements of B (or of a warpgroup's A) each, and the decoder's."""
        m, k = (TILE_TOKENS, self.head_dim) if self.role == "key" else (self.head_dim, TILE_TOKENS)
        operand = self.n * k // 64 if self.worker_warps == 1 else 16 * min(2, self.words // 4)
        return m * self.n // (32 * self.worker_warps) + operand + WORKING_REGISTERS[self.role, self.n]

    @property
    def most_warpgroups(self) -> int:
        """That kernels are compiled for, for want of shared memory: traits.hpp of the warpgroups."""
        return 3 if self.worker_warps > 1 and self.role == "key" and self.n * self.head_dim > 64 * 128 else 4

    @property
    def logits_bytes(self) -> int:
        """Of 16 bits."""
        return 2 * self.n * TILE_TOKENS

    @property
    def p_row_bytes(self) -> int:
        """One row of p in a stage; none for keys."""
        return 0 if self.role == "key" else TILE_TOKENS * self.element_bytes + 16

    @property
    def stage_bytes(self) -> int:
        """The longest block, its order and p, or a warp's results, which take the block's place: logits, and on CC 9.0
        partials."""
        in_stages = self.worker_warps == 1 and (self.role == "key" or self.backend == "sm90")
        results = self.n * 4 * (TILE_TOKENS if self.role == "key" else self.head_dim) if in_stages else 0
        block = _aligned(max(self.longest_rows * ROW_BYTES, results))
        return _aligned(block + max(ORDER_BYTES + self.rows * self.p_row_bytes, ROWS_BEHIND * ROW_BYTES))

    @property
    def copied_bytes(self) -> float:
        """From memory into a stage, mean."""
        p = self.rows * TILE_TOKENS * self.element_bytes if self.role == "value" else 0
        return self.block_rows * ROW_BYTES + ORDER_BYTES + p

    @property
    def dram_bytes(self) -> float:
        """Read and written, mean; q, the output of sparse_av and its partial sums are small beside it."""
        out = self.rows * TILE_TOKENS * self.element_bytes if self.role == "key" else 0
        return self.copied_bytes + OFFSET_BYTES + out

    @property
    def instructions(self) -> dict[str, float]:
        """By kind. "rest" stands for all that is around the decoder."""
        e, w = self.elements, self.words
        before = 1.5 * w if self.worker_warps > 1 else 0.0  # words that lie before a warpgroup's quarters
        mma = {"HMMA": e / 8 * (self.n / 8), "HGMMA": 0.0}
        rest = REST[self.backend, self.role] + REST_A_ROW * self.rows
        if self.worker_warps > 1:
            mma = {"HMMA": 0.0, "HGMMA": e / 8}
            rest = WARPGROUP_REST[self.role] + WARPGROUP_REST_A_ROW[self.role] * self.rows
        return {
            "LDS": e + w + before,
            "IDP": 0.5 * e,
            "IMAD": 0.25 * e,
            "PRMT": 0.5 * e,
            "LOP3": 0.25 * e,
            "SHF": 3.0 * w,
            "POPC": w + before,
            "other": 2.0 * w,
            **mma,
            "rest": rest,
        }

    @property
    def wavefronts(self) -> float:
        """Of shared memory: loads of the decoder, the copies' writes, and the exchange of logits or loads of p; HGMMAs
        read B once each, of which p was written once for the tile."""
        exchange = TILE_TOKENS * self.n / 32 * CONFLICTS + (2.0 * self.rows if self.role == "key" else 0)
        if self.worker_warps > 1:
            if self.role == "key":
                exchange = self.logits_bytes / ROW_BYTES * (MATRIX_CONFLICTS + 1)
            else:
                exchange += self.rows
            exchange += self.instructions["HGMMA"] / 4 * self.n * 16 * self.element_bytes / ROW_BYTES
        return self.instructions["LDS"] + self.copied_bytes / ROW_BYTES + exchange

    def fixed_bytes(self, warpgroups: int) -> int:
        """Shared memory of a CTA besides stages, if at most so many warpgroups work: on CC 9.0 barriers, and a
        warpgroup's q and two tiles' logits, or p in order, twice, with its scales."""
        if self.backend == "sm80":
            return 0
        if self.worker_warps == 1:
            return _aligned(BARRIER_BYTES)
        if self.role == "key":
            operand = self.n * self.head_dim * self.element_bytes + 2 * self.logits_bytes
        else:
            operand = 2 * self.n * TILE_TOKENS * self.element_bytes + 4 * 4 * self.n
        return _aligned(warpgroups * _aligned(operand, 1024) + BARRIER_BYTES, 1024)


def _aligned(size: int, unit: int = 128) -> int:
    return -(-size // unit) * unit
