"""vLLM's part in a step, as far as one layer sees it: requests, blocks, and tensors as vLLM lays them out."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from cute_kernels.integrations._serving.layer import SparseKVLayer
from cute_kernels.integrations._serving.step import BLOCK_TOKENS, Steps
from cute_kernels.integrations.vllm._requests import RequestsByBlock
from tests.support import oracle


@dataclass
class Request:
    row: int  # of the request table
    prompt: int  # tokens
    blocks: list[int] = field(default_factory=list)
    tokens: int = 0
    start: int = 0  # tokens read from pages
    k: torch.Tensor | None = None  # (Hkv, tokens, D) of all so far, on the CPU
    v: torch.Tensor | None = None


class Scheduler:
    """names_requests: whether the runner says which request a row is of, as the second one does."""

    def __init__(self, config, device, *, heads=4, scale=0.2, most=5, blocks=40, max_tokens=640, names_requests=True):
        self.config, self.device, self.heads, self.scale = config, torch.device(device), heads, scale
        self.names_requests = names_requests
        self.layer = SparseKVLayer(config, scale, most + 1, self.device)
        self.steps = Steps([self.layer], most, max_tokens, self.device)
        self.names = RequestsByBlock(most)
        caches = torch.zeros(2, blocks, config.kv_heads, 1, config.slot_bytes, dtype=torch.int8, device=self.device)
        self.kv_cache = caches[1]  # a layer's view of the engine's buffer
        self.free = list(range(1, blocks))  # block 0 is nobody's
        self.width = -(-max_tokens // BLOCK_TOKENS)

    def tensors(self, tokens: int, padding: int = 0):
        """query, key, value as views of one projection's output, and an output, (tokens, heads, D)."""
        config, heads = self.config, (self.heads, self.config.kv_heads, self.config.kv_heads)
        width = sum(heads) * config.head_dim
        qkv = oracle.gaussian(tokens + padding, width, dtype=config.dtype, device=self.device)
        parts = qkv.split([count * config.head_dim for count in heads], dim=1)
        query, key, value = (x.unflatten(1, (count, config.head_dim)) for x, count in zip(parts, heads))
        output = torch.full((tokens + padding, heads[0], config.head_dim), 7.0, dtype=config.dtype, device=self.device)
        return query, key, value, output

    def describe(self, rows: list[tuple[Request, int]], padding: int = 0):
        """The step of requests with so many new tokens each."""
        for request, new in rows:
            while len(request.blocks) * BLOCK_TOKENS < request.tokens + new:
                request.blocks.append(self.free.pop(0))
        table = torch.zeros(len(rows) + padding, self.width, dtype=torch.int32)
        for i, (request, _) in enumerate(rows):
            table[i, : len(request.blocks)] = torch.tensor(request.blocks)
        new = np.array([new for _, new in rows])
        before = np.array([request.tokens for request, _ in rows])
        prompts = np.array([request.prompt for request, _ in rows])
        begins = ((before < prompts) & (before % BLOCK_TOKENS == 0)) | (before == 0)
        if self.names_requests:
            numbers = np.array([request.row for request, _ in rows])
        else:
            numbers = self.names.rows(table.numpy(), before, before + new, begins)
        starts = np.concatenate([[0], new.cumsum()])
        return self.steps.step(numbers, starts, before + new, begins, table.to(self.device), padding)

    def run(self, rows: list[tuple[Request, int]], padding: int = 0) -> None:
        """Runs a step and holds it against float64."""
        step = self.describe(rows, padding)
        tensors = self.tensors(sum(new for _, new in rows), padding)
        self.layer.forward(step, *tensors[:3], self.kv_cache, tensors[3])
        self.check(rows, *tensors)

    def check(self, rows: list[tuple[Request, int]], query, key, value, output) -> None:
        first, recent = 0, self.config.recent
        for request, new in rows:
            q, k, v, out = (x[first : first + new].transpose(0, 1).cpu() for x in (query, key, value, output))
            first += new
            if (request.tokens % BLOCK_TOKENS == 0 and request.tokens < request.prompt) or not request.tokens:
                request.start = request.tokens  # a window begins
            request.k = k if request.k is None else torch.cat([request.k, k], dim=1)
            request.v = v if request.v is None else torch.cat([request.v, v], dim=1)
            end = request.tokens + new
            left = max(request.start, (end - recent) // BLOCK_TOKENS * BLOCK_TOKENS)
            seen = left if new == 1 else request.start  # a decoding step appends first
            keys = oracle.prune(request.k[None, :, :seen], self.config.key_keep)
            values = oracle.prune(request.v[None, :, :seen], self.config.value_keep)
            window = request.k[None, :, seen:], request.v[None, :, seen:]
            expected, _ = oracle.attention(q[None], keys, values, self.scale, window)
            tolerance = 2e-3 if self.config.dtype == torch.float16 else 1e-2
            assert oracle.relative_error(out[None], expected) <= tolerance
            request.start, request.tokens = left, end
        assert (output[first:] == 7).all() or not len(output[first:]) or not output[first:].any()
        assert not int(self.layer.pool.error)

    def finish(self, request: Request) -> None:
        self.free += reversed(request.blocks)

    def resumed(self, request: Request, row: int) -> Request:
        """A request after pre-emption: its full blocks are still there."""
        full = request.tokens // BLOCK_TOKENS
        kept = full * BLOCK_TOKENS - (BLOCK_TOKENS if full * BLOCK_TOKENS == request.tokens else 0)
        self.free += reversed(request.blocks[kept // BLOCK_TOKENS :])
        assert request.k is not None and request.v is not None
        old = Request(row, request.tokens, request.blocks[: kept // BLOCK_TOKENS], kept, kept)
        old.k, old.v = request.k[:, :kept], request.v[:, :kept]
        return old

    def sharing(self, request: Request, row: int, tokens: int, prompt: int) -> Request:
        """A request whose prompt begins with another's first tokens, of full blocks."""
        assert request.k is not None and request.v is not None
        new = Request(row, prompt, request.blocks[: tokens // BLOCK_TOKENS], tokens, tokens)
        new.k, new.v = request.k[:, :tokens], request.v[:, :tokens]
        return new
