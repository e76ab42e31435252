"""A small engine over caller-owned pages: it owns all memory, deals out pages, and remembers every token densely."""

from __future__ import annotations

import torch

from cute_kernels import paged
from tests.support import oracle

TILE = 64


class Engine:
    """Sequences over the pages of `config`; `guard` bytes of a known pattern surround every tensor."""

    def __init__(self, config: paged.PageConfig, device, *, sequences=3, pages=12, pages_per_sequence=6, guard=256):
        self.config, self.device, self.guard = config, device, guard
        self.memory: list[tuple[torch.Tensor, int]] = []
        pool = config.pool_tensors(pages, sequences, pages_per_sequence)
        self.pool = paged.make_pool(config, {name: self.take(size) for name, size in pool.items()})
        windows = config.window_tensors(sequences)
        self.windows = paged.make_windows(config, {name: self.take(size) for name, size in windows.items()})
        self.pool.initialize()
        self.windows.initialize()
        self.lengths = torch.zeros(sequences, dtype=torch.int32, device=device)
        self.free = torch.randperm(pages).tolist()
        nothing = torch.zeros(2, config.kv_heads, 0, config.head_dim, dtype=config.dtype)
        self.tokens = [nothing] * sequences  # of each sequence (2, Hkv, T, D), on the CPU
        self.starts = [0] * sequences  # tokens whose dense window a sequence never had

    def take(self, size: paged.TensorSize) -> torch.Tensor:
        buffer = torch.full((size.nbytes + 2 * self.guard,), 0xA5, dtype=torch.uint8, device=self.device)
        self.memory.append((buffer, size.nbytes))
        return buffer[self.guard : self.guard + size.nbytes].view(size.dtype).view(size.shape)

    def check_memory(self) -> None:
        """Nothing was written outside of what the sizes asked for."""
        for buffer, size in self.memory:
            assert (buffer[: self.guard] == 0xA5).all() and (buffer[self.guard + size :] == 0xA5).all()

    def give_pages(self, sequence: int, tokens: int) -> None:
        """Pages for so many tokens more."""
        table, page = self.pool.page_table, self.config.page_tokens
        total = self.tokens[sequence].shape[2] + tokens
        for i in range(-(-total // page)):
            if int(table[sequence, i]) < 0:
                table[sequence, i] = self.free.pop()

    def extend(self, sequence: int, new: torch.Tensor) -> None:
        """new: (2, Hkv, T, D) on the CPU."""
        self.give_pages(sequence, new.shape[2])
        compressed, window = self.split(sequence)
        k, v = new[:, None].to(self.device)
        state = {"sequence": sequence, "compressed": compressed, "window": window}
        paged.extend(self.pool, self.windows, self.lengths, k, v, **state)
        self.tokens[sequence] = torch.cat([self.tokens[sequence], new], dim=2)

    def append(self, sequences: list[int], new: torch.Tensor, call=paged.append) -> None:
        """new: (2, n, Hkv, m, D) on the CPU."""
        for sequence in sequences:
            self.give_pages(sequence, new.shape[3])
        k, v = new.to(self.device)
        call(self.pool, self.windows, self.lengths, k, v, self.index(sequences))
        for row, sequence in enumerate(sequences):
            self.tokens[sequence] = torch.cat([self.tokens[sequence], new[:, row]], dim=2)

    def share(self, sequence: int, other: int, tokens: int) -> None:
        """An empty sequence begins with another's first tokens, a multiple of 64, of full pages."""
        assert tokens % self.config.page_tokens == 0 and not self.tokens[sequence].shape[2]
        pages = tokens // self.config.page_tokens
        self.pool.page_table[sequence, :pages] = self.pool.page_table[other, :pages]
        self.lengths[sequence], self.windows.lengths[sequence] = tokens, 0
        self.tokens[sequence], self.starts[sequence] = self.tokens[other][:, :, :tokens], tokens

    def split(self, sequence: int) -> tuple[int, int]:
        """(compressed, window), as they must be."""
        tokens, start = self.tokens[sequence].shape[2], self.starts[sequence]
        compressed = max(start, (tokens - self.config.recent) // TILE * TILE)
        return compressed, tokens - compressed

    def index(self, sequences: list[int]) -> torch.Tensor:
        return torch.tensor(sequences, dtype=torch.int32, device=self.device)

    def expected(self, sequence: int, q: torch.Tensor, scale: float, causal: bool = True):
        """(out, lse) in float64 of q (1, Hq, Sq, D)."""
        compressed, _ = self.split(sequence)
        k, v = (x[None] for x in self.tokens[sequence])
        keeps = self.config.key_keep, self.config.value_keep
        tiles = [oracle.prune(x[:, :, :compressed], keep or None) for x, keep in zip((k, v), keeps)]
        return oracle.attention(q.cpu(), *tiles, scale, (k[:, :, compressed:], v[:, :, compressed:]), causal=causal)

    def check(self) -> None:
        """Lengths, and every full tile in its page, held against what pruning gives."""
        assert int(self.pool.error) == 0 and not self.windows.arrivals.any()
        for sequence, (k, v) in enumerate(self.tokens):
            found = int(self.lengths[sequence]), int(self.windows.lengths[sequence])
            assert found == self.split(sequence)
            tiles = k.shape[1] // TILE
            stored = paged.export(self.pool, sequence, 0, tiles)
            for x, keep, tile in zip((k, v), (self.config.key_keep, self.config.value_keep), stored):
                assert oracle.same_bits(tile.cpu(), oracle.prune(x[:, : tiles * TILE], keep or None))
        self.check_memory()
