"""Tiny random models of several architectures, and their answers with a dense and with a SparseKVCache."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from cute_kernels.integrations.transformers import SparseKVCache

HEAD_DIM = 16
PROMPT, NEW = 100, 40  # with a window of 8, a tile before the first new token and one among the new ones

CONFIGS = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen3": ("Qwen3", {"use_sliding_window": False}),
    "gemma": ("Gemma", {"head_dim": 256, "num_key_value_heads": 1}),
}


class RoundingAttention:
    """sdpa in float32 from float16 to float16, as a cache of float16 computes: what is left between two runs is the
    order of float32 sums, and now and then a value rounded otherwise. noise: a relative error on top, more than that;
    on a GPU four times as much, where probabilities are rounded too."""

    def __init__(self):
        self.noise = 0.0

    def __call__(self, module, query, key, value, mask, **kwargs):
        operands = (x.half().float() for x in (query, key, value))
        out, weights = sdpa_attention_forward(module, *operands, mask, **kwargs)
        return self.shake(out).half().float(), weights

    def shake(self, out):
        if not self.noise:
            return out
        generator = torch.Generator().manual_seed(out.numel())  # samplers keep theirs
        noise = self.noise * (4 if out.is_cuda else 1) * torch.randn(out.shape, generator=generator)
        return out * (1 + noise.to(out.device))


def make(name="llama", dtype=torch.float32, device="cpu", **changes):
    kind, own = CONFIGS[name]
    shape = {
        "vocab_size": 89,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**shape | own | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(device, dtype)
    assert model.config._attn_implementation == "sdpa"
    return model


def sparse(model, **options):
    head_dim = model.config.head_dim
    options = {"keep": head_dim, "window": 8, "dtype": torch.float16} | options
    return SparseKVCache(model.config, **options)


def prompts(lengths=(PROMPT,), width=None):
    """Left-padded: (ids, mask)."""
    width = width or max(lengths)
    ids = torch.randint(1, 89, (len(lengths), width))
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def tokens(model, inputs, cache, seed=None, **options):
    """On the CPU, as inputs may be."""
    inputs = {name: x.to(model.device) for name, x in inputs.items()}
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    with torch.random.fork_rng(enabled=seed is not None):  # further inputs are drawn from another sequence
        if seed is not None:
            torch.manual_seed(seed)
        return model.generate(**inputs, past_key_values=cache, **options).cpu()


def assert_same_tokens(attention, draw, run, caches, counts=lambda cache: True):
    """Draws inputs until their answer does not hang on the last bits of a near tie, then compares the answers.

    draw() -> inputs. run(inputs, cache) -> tokens. caches: makers of the expected and of the tested cache, for inputs.
    counts: whether the tested cache, once used, is to be compared. Returns the inputs and the tested cache.
    """
    missed = 0  # one in a thousand hangs on a near tie all the same
    for _ in range(40):
        inputs = draw()
        expected = run(inputs, caches[0](inputs))
        attention.noise = 5e-4  # of every value: as if all were rounded otherwise
        shaken = run(inputs, caches[0](inputs))
        attention.noise = 0.0
        if torch.equal(shaken, expected):
            cache = caches[1](inputs)
            found = run(inputs, cache)
            if torch.equal(found, expected) and counts(cache):
                return inputs, cache
            missed += counts(cache)
            assert missed < 2, (found, expected)
    pytest.fail("every answer hung on a near tie")


def assert_sdpa_tokens(attention, draw, seed=None, kept=None, **options):
    """Generates with a DynamicCache and with a SparseKVCache that keeps everything. draw() -> (model, prompts)."""

    def run(drawn, cache):
        return tokens(*drawn, cache, seed, **options)

    return assert_same_tokens(attention, draw, run, (dense, lambda drawn: sparse(drawn[0], **kept or {})))


def dense(drawn):
    return DynamicCache(config=drawn[0].config)


def forward(model, cache, ids, mask=None):
    """Logits of the last token, (B, vocabulary) float32; without padding positions need no mask."""
    with torch.no_grad():
        position_ids = None
        if mask is not None:
            position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        return model(ids, attention_mask=mask, position_ids=position_ids, past_key_values=cache).logits[:, -1].float()


def ids_and_mask(inputs):
    return {"ids": inputs["input_ids"], "mask": inputs["attention_mask"]}
