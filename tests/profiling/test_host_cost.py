"""python -m profiling.host_cost, without a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from cute_kernels._cache import page_pool
from cute_kernels._runtime.extension import _C
from profiling import host_cost

SMALL = ["--no-launch", "--rounds", "2", "--batch", "2", "--query-heads", "4", "--kv-heads", "2", "--tokens", "100"]
NAMES = {
    "sparse_qk",
    "sparse_av",
    "sparse_attention",
    "sparse_attention, window",
    "sparse_attention, window, out",
    "KVCache.append",
    "KVCache.attend",
    "KVCache.step",
}
BESIDE = {"scaled_dot_product_attention"}
if find_spec("transformers"):
    NAMES |= {"SparseKVCache, layer"}
    BESIDE |= {"DynamicCache and sdpa, layer"}


def times(text: str) -> dict[str, list[float]]:
    rows = [line.rsplit(maxsplit=3) for line in text.splitlines()[2:]]
    return {name: [float(value) for value in values] for name, *values in rows}


def test_every_function_has_its_times(capsys):
    before = _C.cpu.attention, _C.cpu.sparse_qk, page_pool.append_on_cpu
    assert host_cost.main(SMALL) == 0
    assert (_C.cpu.attention, _C.cpu.sparse_qk, page_pool.append_on_cpu) == before
    found = times(capsys.readouterr().out)
    assert set(found) == NAMES
    assert all(0 < median <= ninth for median, ninth, _ in found.values())


@pytest.mark.gpu
def test_beside_torch_on_a_gpu(capsys):
    assert host_cost.main(SMALL[1:]) == 0
    assert set(times(capsys.readouterr().out)) == NAMES | BESIDE


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--query-heads", "5", "--kv-heads", "2"], "multiple of --kv-heads"),
        (["--rounds", "0"], "not a positive integer"),
        pytest.param(
            [], "no CUDA device", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
        ),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        host_cost.main(arguments)
    assert message in capsys.readouterr().err
