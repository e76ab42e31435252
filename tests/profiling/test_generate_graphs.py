"""Sides of profiling.generate whose steps are captured, on the CPU with what would be captured run as it is."""

from __future__ import annotations

import importlib.util
import sys
import warnings

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is not installed")

from profiling.generation import graphs, measure, models

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_graphs_write_what_generate_writes(device, monkeypatch):
    """Nothing pruned, a model whose next token is clear: the same tokens, and as many in the cache. On the CPU what
    would be captured is run as it is."""
    if device == "cpu":
        warnings.filterwarnings("ignore", "SparseKVCache runs decoding steps without CUDA graphs: the model is on cpu")
    if device == "cpu":
        monkeypatch.setattr(graphs.generate, "__defaults__", (lambda step: step, None))
    model = models.load(None, "tiny", torch.bfloat16, torch.device(device), 0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6 if parameter.dim() > 1 else 1)
    ids = torch.randint(1, 1024, (3, 150), device=device)
    written = {}
    sides = list(measure.SIDES)
    if device == "cpu":
        monkeypatch.setitem(sys.modules, "flashinfer", FlashInferInTorch)
    elif importlib.util.find_spec("flashinfer") is None:
        sides.remove("flashinfer-graph")
    for name in sides:
        side, clock = measure.Side(name, key_keep=64, value_keep=64), Tokens()
        with torch.inference_mode():
            cache = side.generate(model, ids, 30, clock)
        written[name] = torch.cat([tokens.view(3, -1).cpu() for tokens in clock.tokens], dim=1)
        assert written[name].shape == (3, 180)
        if side.sparse:
            assert cache.layers[0].kv.lengths.tolist() == [179] * 3 and cache.get_seq_length() == 179
    for name, tokens in written.items():
        same = (tokens == written["dense"])[:, 150:].int().cumprod(1).sum(1)
        assert same.float().mean() > 10, (name, same)  # then a near tie may have gone the other way


class FlashInferInTorch:
    """What of the package is used, on the CPU."""

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, workspace, layout, *, use_cuda_graph, use_tensor_cores, **buffers):
            assert layout == "NHD" and use_cuda_graph
            self.buffers = tuple(buffers[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len"))

        def plan(self, indptr, indices, last_page_len, query_heads, kv_heads, head_dim, page, **dtypes):
            self.page = page
            for buffer, new in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: len(new)] = new

        def run(self, q, pages):
            outs = []
            indptr, indices, last_page_len = self.buffers
            for row, begin, end, last in zip(q, indptr, indptr[1:], last_page_len, strict=False):
                tokens = int(end - begin - 1) * self.page + int(last)
                k, v = (cache[indices[begin:end].long()].flatten(0, 1)[:tokens].transpose(0, 1) for cache in pages)
                outs.append(
                    torch.nn.functional.scaled_dot_product_attention(row[:, None], k, v, enable_gqa=True).squeeze(1)
                )
            return torch.stack(outs)

    @staticmethod
    def append_paged_kv_cache(keys, values, batch_indices, positions, pages, indices, indptr, last_page_len):
        page_size = pages[0].shape[1]
        for row, position in zip(batch_indices.tolist(), positions.tolist(), strict=True):
            page = indices[indptr[row] + position // page_size]
            assert position == (indptr[row + 1] - indptr[row] - 1) * page_size + last_page_len[row] - 1
            for cache, new in zip(pages, (keys, values), strict=True):
                cache[page, position % page_size] = new[row]


def test_flashinfer_says_what_it_lacks(monkeypatch):
    from profiling.generation.flashinfer import FlashInferCache

    model = models.load(None, "tiny", torch.bfloat16, torch.device("cpu"), 0)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(RuntimeError, match="FlashInfer is not installed"):
        FlashInferCache(model.config, 32)
    monkeypatch.setitem(sys.modules, "flashinfer", FlashInferInTorch)
    model.config.sliding_window = 16
    with pytest.raises(ValueError, match="a sliding window"):
        FlashInferCache(model.config, 32)
    model.config.sliding_window = None
    side, ids = measure.Side("flashinfer-graph"), torch.ones(1, 16, dtype=torch.long)
    monkeypatch.setattr(graphs.generate, "__defaults__", (lambda step: step, None))
    monkeypatch.setattr(measure.Side, "cache", lambda self, model, capacity: FlashInferCache(model.config, 17))
    with torch.inference_mode(), pytest.raises(ValueError, match="no room beyond 32 tokens"):
        side.generate(model, ids, 20, Tokens())
    assert model.config._attn_implementation == "sdpa"


class Tokens:
    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens.append(tokens.clone())  # steps write to the same

    def end(self):
        pass
