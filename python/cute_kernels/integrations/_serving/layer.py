"""Attention of one layer, over an engine's blocks and windows of its own."""

from __future__ import annotations

import torch
from torch import Tensor

import cute_kernels as ck
from cute_kernels import paged
from cute_kernels._attention import dense
from cute_kernels.integrations._serving.step import Prompt, Step


class SparseKVLayer:
    """rows: of the request table, and one for padding. Windows are allocated at once: before the engine measures what
    memory is left for blocks."""

    def __init__(self, config: paged.PageConfig, scale: float, rows: int, device: torch.device) -> None:
        self.config = config
        self.scale = scale
        sizes = config.window_tensors(rows)
        del sizes["lengths"]  # of all layers together: `attach`
        self._window = {name: size.empty(device).zero_() for name, size in sizes.items()}
        self._page_table: Tensor | None = None
        self._bound: tuple[int, torch.Size] | None = None

    @property
    def nbytes(self) -> int:
        """Of windows, and of what a layer keeps beside the engine's blocks and the tables of all layers."""
        pool = self.pool.nbytes - self.pool.blocks.nbytes - self.pool.page_table.nbytes if self._bound else 0
        return sum(x.nbytes for x in self._window.values()) + pool

    def attach(self, page_table: Tensor, lengths: Tensor, window_lengths: Tensor) -> None:
        """Where pages and lengths of all requests are: int32 (rows, pages), (rows,) twice."""
        self._page_table, self._lengths = page_table, lengths
        self._windows = paged.make_windows(self.config, self._window | {"lengths": window_lengths})
        self._bound = None

    def forward(self, step: Step, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, output: Tensor) -> None:
        """query, output (tokens, Hq, D); key, value (tokens, Hkv, D), stride 1 in the last dimension.
        kv_cache: bytes (blocks, Hkv, 1, bytes of a slot), contiguous. Output is written for the step's tokens alone."""
        pool = self.bind(kv_cache)
        for prompt in step.prompts:
            tokens = slice(prompt.first, prompt.last)
            if step.chooses_orders and prompt is step.prompts[0]:
                paged.choose_orders(pool, *(_heads_first(x[tokens]) for x in (key, value)))
            self._attend_prompt(pool, prompt, query[tokens], key[tokens], value[tokens], output[tokens])
        if step.decodes:
            self._attend_decodes(pool, step, query, key, value, output)

    def _attend_prompt(self, pool: paged.Pool, prompt: Prompt, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """New tokens attend to each other densely and to all before them in pages and window, then enter the cache."""
        queries, keys, values = (_heads_first(x) for x in (q, k, v))
        result, lse = dense.causal(queries, keys, values, self.scale)
        if prompt.compressed + prompt.window:
            both = queries.new_empty(2, *queries.shape)
            both[0].copy_(result)
            options = {"scale": self.scale, "causal": False, "return_lse": True, "out": both[1]}
            expected = prompt.compressed, prompt.compressed
            windows = self._windows if prompt.window else None
            past = paged.attend(queries, pool, windows, self._lengths, prompt.row, expected=expected, **options)
            result, _ = ck.merge_states(both, torch.stack([lse, past[1]]))
        out.copy_(result[0].transpose(0, 1))
        new = prompt.last - prompt.first
        if new <= paged.TILE_TOKENS and prompt.window + new <= self.config.window_capacity:
            paged.append(pool, self._windows, self._lengths, keys, values, prompt.row)  # one kernel
            return
        state = {"sequence": prompt.request, "compressed": prompt.compressed, "window": prompt.window}
        paged.extend(pool, self._windows, None, keys, values, **state)  # lengths come with every step

    def _attend_decodes(self, pool: paged.Pool, step: Step, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        if step.decode_tokens is None:
            q, k, v = (x[: step.decodes] for x in (q, k, v))
        else:
            q, k, v = (x.index_select(0, step.decode_tokens) for x in (q, k, v))
        paged.append(pool, self._windows, self._lengths, k.unsqueeze(2), v.unsqueeze(2), step.append_rows)
        result = paged.attend(
            q.unsqueeze(2),
            pool,
            self._windows,
            self._lengths,
            step.attend_rows,
            scale=self.scale,
            expected=step.expected,
        ).squeeze(2)
        if step.decode_tokens is None:
            out[: step.decodes].copy_(result)
        else:
            out.index_copy_(0, step.decode_tokens, result)

    def bind(self, kv_cache: Tensor) -> paged.Pool:
        """The engine's blocks as pages. Rows and orders of tiles are beside them, 72 bytes a tile of one head."""
        place = kv_cache.data_ptr(), kv_cache.shape
        if self._bound == place:
            return self.pool
        if self._page_table is None:
            raise RuntimeError("the layer has no tables: attach must be called before the first step")
        pages, heads, states, size = kv_cache.shape
        wanted = self.config.kv_heads, 1, self.config.slot_bytes
        if (heads, states, size * kv_cache.element_size()) != wanted or not kv_cache.is_contiguous():
            raise RuntimeError(
                f"kv_cache must be contiguous, (blocks, {wanted[0]}, 1, {wanted[2]} bytes), got "
                f"{tuple(kv_cache.shape)} of {kv_cache.dtype} with strides {kv_cache.stride()}"
            )
        sizes = self.config.pool_tensors(pages, *self._page_table.shape)
        given = {
            "blocks": kv_cache.view(torch.uint8).view(torch.int32).view(sizes["blocks"].shape),
            "page_table": self._page_table,
        }
        others = {name: size.empty(kv_cache.device) for name, size in sizes.items() if name not in given}
        pool = paged.make_pool(self.config, given | others)
        pages_of_step = self._page_table.clone()
        pool.initialize()
        self._page_table.copy_(pages_of_step)
        self.pool, self._bound = pool, place
        return pool


def _heads_first(x: Tensor) -> Tensor:
    """(tokens, heads, D) -> (1, heads, tokens, D)"""
    return x.transpose(0, 1).unsqueeze(0)
