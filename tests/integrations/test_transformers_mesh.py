"""SparseKVCache over a mesh: processes with gloo give the tokens of a cache on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="Transformers is not installed")
if not dist.is_available():
    pytest.skip("torch without distributed", allow_module_level=True)

from cute_kernels.integrations.transformers import SparseKVCache
from profiling.generation.heads import spread
from tests.support import ranks
from tests.support.tiny_models import make, prompts

OPTIONS = {"sparsity": 0.5, "window": 8, "dtype": torch.float16, "capacity": 400}
LENGTHS = (150, 70)  # left-padded
NEW = 40


@torch.no_grad()
def logits(model: Any, cache: SparseKVCache, inputs: dict[str, torch.Tensor], prompt: int) -> torch.Tensor:
    """Of the last prompt token and of later ones, which come one by one, then a few at a time, then many."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions, found, seen = (mask.cumsum(1) - 1).clamp(min=0), [], 0
    ends = [prompt, *range(prompt + 1, prompt + 41), prompt + 47, ids.shape[1]]
    for end in ends:
        now = slice(seen, end)
        out = model(ids[:, now], attention_mask=mask[:, :end], position_ids=positions[:, now], past_key_values=cache)
        found.append(out.logits[:, -1])
        seen = end
    return torch.stack(found)


def divided_by_torch(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor import parallel

    of_style = {"colwise": parallel.ColwiseParallel, "rowwise": parallel.RowwiseParallel}
    plan = {f"model.{name}": of_style[style]() for name, style in model.config.base_model_tp_plan.items()}
    parallel.parallelize_module(model, mesh, plan)


def drive(rank: int, given: tuple[tuple[int, ...], tuple[str, ...], int]) -> dict[str, Any]:
    sizes, names, seed = given
    torch.manual_seed(seed)
    model = make(num_key_value_heads=4)
    inputs = prompts(LENGTHS)
    later = {"input_ids": torch.randint(1, 89, (2, 100)), "attention_mask": torch.ones(2, 100, dtype=torch.long)}
    whole = {name: torch.cat([inputs[name], later[name]], dim=1) for name in inputs}
    one = SparseKVCache(model, **OPTIONS)
    expected = logits(model, one, whole, LENGTHS[0])
    options = {"max_new_tokens": NEW, "do_sample": False}
    told = {"expected tokens": model.generate(**inputs, past_key_values=SparseKVCache(model, **OPTIONS), **options)}

    mesh = dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if "tp" in names:
        (divided_by_torch if len(names) == 1 else spread)(model, mesh["tp"] if len(names) > 1 else mesh)
    cache = SparseKVCache(model, mesh=mesh, **OPTIONS)
    found = logits(model, cache, whole, LENGTHS[0])
    cache.reset()
    told["tokens"] = model.generate(**inputs, past_key_values=cache, **options)
    return told | {
        "error": float((found - expected).norm() / expected.norm()),
        "heads": cache.layers[0].kv.kv_heads,
        "lengths": cache.layers[0].kv.lengths.tolist(),
        "bytes": cache.nbytes() / one.nbytes(),
    }


@pytest.mark.parametrize(
    "sizes, names",
    [((2,), ("cp",)), ((4,), ("cp",)), ((2,), ("tp",)), ((2, 2), ("tp", "cp"))],
    ids=lambda value: "x".join(map(str, value)),
)
def test_tokens_of_one_device(sizes, names, tmp_path):
    told = ranks.run(torch.Size(sizes).numel(), drive, (sizes, names, 1234), tmp_path, "cpu")
    for each in told:
        assert each["error"] < 5e-3  # outputs of ranks are rounded to float16
        assert torch.equal(each["tokens"], each["expected tokens"])
        assert each["heads"] == (2 if "tp" in names else 4)
        assert each["lengths"] == [length + NEW - 1 for length in LENGTHS]
    if "cp" in names:
        assert max(each["bytes"] for each in told) < 1  # of all tokens on one device


def refuse(rank: int, _: Any) -> None:
    model = make(num_key_value_heads=4)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    with pytest.raises(ValueError, match="takes its memory at once: pass capacity"):
        SparseKVCache(model, mesh=mesh, dtype=torch.float16)
    with pytest.raises(TypeError, match="group must be a process group, a DeviceMesh or None, got int"):
        SparseKVCache(model, mesh=2, **OPTIONS)
    odd = make(hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    heads = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    both = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "cp"))
    for wrong in (heads, both):
        with pytest.raises(ValueError, match=r"must be a multiple of the 2 ranks of the mesh's dimension 'tp', got 3"):
            SparseKVCache(odd, mesh=wrong, **OPTIONS)
    with pytest.raises(ValueError, match=r"tp=2 does not divide the model's num_attention_heads 3"):
        spread(odd, heads)
    cache = SparseKVCache(model, mesh=mesh, **OPTIONS)
    inputs = prompts((80,))
    with pytest.raises(NotImplementedError, match="over a mesh with 'cp' has no reorder_cache"):
        model.generate(**inputs, past_key_values=cache, num_beams=2, max_new_tokens=3)
    cache = SparseKVCache(model, mesh=mesh, **OPTIONS)
    model.generate(**inputs, past_key_values=cache, max_new_tokens=3)
    seen = cache.get_seq_length()
    with pytest.raises(NotImplementedError, match="has no crop"):
        cache.crop(-1)
    with pytest.raises(RuntimeError, match=f"{seen} tokens and 400 more exceed capacity = 400"):
        cache.reserve(400)
    cache.crop(0)
    assert cache.get_seq_length() == seen and not cache.unfinished


def test_refusals(tmp_path):
    ranks.run(2, refuse, None, tmp_path, "cpu")
