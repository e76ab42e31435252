"""Which backends there are, and that a backend that cannot serve says so."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

import cute_kernels as ck
from cute_kernels._runtime.launching import launch
from tests.support import oracle

HAS_CUDA = torch.cuda.is_available()


def operands(device):
    x = oracle.gaussian(1, 1, 70, 64).to(device)
    k, v = ck.compress_kv(x, x, keep=20)
    return x[:, :, :1].contiguous(), k, torch.rand(1, 1, 1, 70, device=device), v


def test_backends():
    status = ck.backends()
    assert set(status) == {"reference", "cpu", "sm80", "sm90"}
    assert all(isinstance(text, str) and text for text in status.values())
    assert status["reference"] == status["cpu"] == "ok"
    assert ck.backends() is not status


@pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device")
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_without_cuda(name):
    assert "CUDA" in ck.backends()[name]


@pytest.mark.gpu
def test_status_fits_the_device():
    major, minor = torch.cuda.get_device_capability()
    status = ck.backends()
    if major == 8 and status["sm80"] == "ok":
        assert f"{major}.{minor}" in status["sm90"] and "9.0" in status["sm90"]
    if (major, minor) not in [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0)]:
        assert "ok" not in (status["sm80"], status["sm90"])


@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_gpu_backends_refuse_cpu_tensors(name):
    q, k, p, v = operands("cpu")
    for call in (lambda: ck.sparse_qk(q, k, backend=name), lambda: ck.sparse_av(p, v, backend=name)):
        with pytest.raises(RuntimeError, match=f"'{name}'.*cpu"):
            call()


@pytest.mark.gpu
def test_cpu_backend_refuses_gpu_tensors():
    q, k, p, v = operands("cuda")
    for call in (lambda: ck.sparse_qk(q, k, backend="cpu"), lambda: ck.sparse_av(p, v, backend="cpu")):
        with pytest.raises(RuntimeError, match=r"'cpu'.*cuda"):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sm80", "sm90"])
def test_a_backend_that_is_missing_says_why(name):
    reason = ck.backends()[name]
    if reason == "ok":
        pytest.skip(f"{name} is there")
    q, k, *_ = (t.to("cuda") for t in operands("cpu"))
    with pytest.raises(RuntimeError) as caught:
        ck.sparse_qk(q, k, backend=name)
    assert reason in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "bad, error",
    [
        ("", ValueError),
        ("gpu", ValueError),
        ("CPU", ValueError),
        (None, TypeError),
        (0, TypeError),
        (["cpu"], TypeError),
    ],
)
def test_bad_names(bad, error, device):
    q, k, p, v = operands(device)
    for call in (
        lambda: ck.sparse_qk(q, k, backend=bad),
        lambda: ck.sparse_av(p, v, backend=bad),
        lambda: ck.sparse_attention(q, k, v, backend=bad),
    ):
        with pytest.raises(error, match="backend"):
            call()


def test_auto_on_the_cpu_is_cpu():
    q, k, p, v = operands("cpu")
    assert oracle.same_bits(ck.sparse_qk(q, k), ck.sparse_qk(q, k, backend="cpu"))
    assert oracle.same_bits(ck.sparse_av(p, v), ck.sparse_av(p, v, backend="cpu"))
    assert oracle.same_bits(ck.sparse_attention(q, k, v), ck.sparse_attention(q, k, v, backend="cpu"))


def test_import_touches_no_gpu():
    code = (
        "import cute_kernels, torch; assert not torch.cuda.is_initialized(); "
        "missing = [n for n in cute_kernels.__all__ if not hasattr(cute_kernels, n)]; assert not missing, missing"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("isa", ["scalar", "avx2", "avx512", "avx512bf16"])
def test_cpu_instruction_sets_agree(isa, rng):
    """Every instruction set meets the tolerances; the storage they write is the same."""
    code = f"""
import torch, cute_kernels as ck
from cute_kernels._storage.tile_reader import decompress as decompress_reference
from cute_kernels.sparse_kv import storage_of
torch.manual_seed({rng.randrange(2**31)})
for dtype in (torch.float16, torch.bfloat16):
    for head_dim in (80, 128):
        x = torch.randn(1, 2, 200, head_dim).to(dtype)
        k, v = ck.compress_kv(x, x, keep=30)
        assert torch.equal(ck.decompress(k), ck.prune(x, keep=30))
        assert torch.equal(ck.decompress(v), decompress_reference(storage_of(v, "kv")))
        q, p = torch.randn(1, 8, 3, head_dim).to(dtype), torch.rand(1, 8, 3, 200)
        window = torch.randn(1, 2, 70, head_dim).to(dtype), torch.randn(1, 2, 70, head_dim).to(dtype)
        for name, actual, expected in (
            ("qk", ck.sparse_qk(q, k, backend="cpu"), ck.sparse_qk(q, k, backend="reference")),
            ("av", ck.sparse_av(p, v, backend="cpu"), ck.sparse_av(p, v, backend="reference")),
            ("attention", *(ck.sparse_attention(q, k, v, window=window, backend=b) for b in ("cpu", "reference"))),
        ):
            error = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
            assert error < (1e-4 if name == "qk" else 1e-2), (name, error)
"""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path), "CUTE_KERNELS_CPU_ISA": isa}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    if "not available on this CPU" in result.stderr:
        pytest.skip(f"{isa} is not available on this CPU")
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("current", [0, 1])
def test_launches_on_the_tensors_device_and_its_stream(monkeypatch, current):
    device, seen = torch.device("cuda", 1), []

    @contextmanager
    def make_current(wanted):
        seen.append(wanted)
        yield
        seen.append("back")

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", make_current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    assert launch(lambda *arguments: seen.append(arguments) or "result", device, "a", 2) == "result"
    assert seen == ([("a", 2, 101)] if current == 1 else [device, ("a", 2, 101), "back"])


@pytest.mark.parametrize(
    "call",
    [
        lambda: ck.KVCache(max_batch=1, kv_heads=1, head_dim=64, capacity=64, device="cuda"),
        lambda: ck.SparseKV.preallocate((1, 1, 64, 64), torch.float16, role="key", device="cuda"),
    ],
)
def test_without_a_gpu_errors_name_the_other_device(call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"no CUDA device.*; pass device='cpu'"):
        call()
