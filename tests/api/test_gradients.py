"""Derivatives, which the kernels do not have: whoever asks for one gets an error, never zeros or nothing in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import cute_kernels as ck
from tests.support import oracle

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def filled(device: str) -> ck.KVCache:
    cache = ck.KVCache(max_batch=2, kv_heads=2, head_dim=64, capacity=256, keep=20, device=device)
    cache.prefill(*(oracle.gaussian(2, 2, 100, 64).to(device) for _ in range(2)))
    return cache


def calls(device: str) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Name in the message -> a call, and the tensors that it could be differentiated by."""
    x, y = (oracle.gaussian(2, 2, 100, 64).to(device) for _ in range(2))
    k, v = ck.compress_kv(x, y, keep=20)
    q, p = oracle.gaussian(2, 4, 1, 64).to(device), torch.rand(2, 4, 1, 100, device=device)
    window = [oracle.gaussian(2, 2, 5, 64).to(device) for _ in range(2)]
    token = [oracle.gaussian(2, 2, 1, 64).to(device) for _ in range(2)]
    cache = filled(device)
    return {
        "prune": (lambda x: ck.prune(x, keep=20), [x]),
        "sparse_qk": (lambda q: ck.sparse_qk(q, k), [q]),
        "sparse_av": (lambda p: ck.sparse_av(p, v), [p]),
        "sparse_attention": (lambda q, *w: ck.sparse_attention(q, k, v, window=w, return_lse=True)[0], [q, *window]),
        "KVCache.attend": (lambda q: cache.attend(q, return_lse=True)[0], [q]),
        "KVCache.step": (cache.step, [q, *token]),
    }


NAMES = pytest.mark.parametrize("name", calls("cpu"))


@DEVICES
@NAMES
def test_a_backward_pass_raises(name, device, rng):
    """Whichever input needs it; the forward pass works, and in place on its result, as in a model that is only run."""
    call, inputs = calls(device)[name]
    for needing in range(len(inputs)):
        given = [x.clone().requires_grad_(i == needing) for i, x in enumerate(inputs)]
        result = call(*given)
        assert result.requires_grad
        result.mul_(2)
        with pytest.raises(RuntimeError, match=f"{name} is for decoding and has no gradient"):
            result.sum().backward()
        assert all(x.grad is None for x in given)


@DEVICES
@NAMES
def test_results_are_those_without_autograd(name, device, rng):
    call, inputs = calls(device)[name]
    if name == "KVCache.step":
        cache = filled(device)
        twin = ck.KVCache(max_batch=2, kv_heads=2, head_dim=64, capacity=256, keep=20, device=device)
        twin.prefill(*(torch.stack(x) for x in zip(*(cache.dense(row) for row in range(2)))))
        torch.testing.assert_close(
            cache.step(*(x.clone().requires_grad_() for x in inputs)), twin.step(*inputs), atol=2e-3, rtol=2e-3
        )
        return
    recorded = call(*(x.clone().requires_grad_() for x in inputs))
    with torch.no_grad():
        silent = call(*(x.clone().requires_grad_() for x in inputs))
    assert not silent.requires_grad and oracle.same_bits(recorded.detach(), silent)


@NAMES
def test_transforms_of_torch_func_raise(name, rng):
    call, inputs = calls("cpu")[name]
    with pytest.raises(RuntimeError, match="has no gradient"):
        torch.func.grad(lambda *x: call(*x).float().sum())(*inputs)
    with pytest.raises(RuntimeError, match="no derivative in forward mode"):
        torch.func.jvp(call, tuple(inputs), tuple(map(torch.ones_like, inputs)))


@pytest.mark.parametrize("name", ["prune", "sparse_qk", "sparse_av", "sparse_attention", "KVCache.attend"])
def test_compiled_functions_raise_when_their_backward_pass_runs(name, rng):
    torch._dynamo.reset()
    call, inputs = calls("cpu")[name]
    given = [x.clone().requires_grad_() for x in inputs]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    result = compiled(*given)
    torch.testing.assert_close(result.detach(), call(*inputs))
    with pytest.raises(RuntimeError, match=f"{name} is for decoding and has no gradient"):
        result.sum().backward()
    torch._dynamo.reset()


@pytest.mark.parametrize("window, error", [((), ValueError), ("near", TypeError), (torch.zeros(2), TypeError)])
def test_windows_that_are_none_are_refused(window, error, rng):
    x = oracle.gaussian(1, 1, 70, 64)
    k, v = ck.compress_kv(x, x, keep=20)
    for needs in (False, True):
        with pytest.raises(error, match=r"window must be a pair \(k_win, v_win\)"):
            ck.sparse_attention(oracle.gaussian(1, 1, 1, 64).requires_grad_(needs), k, v, window=window)


def test_memory_of_the_caller_takes_no_part(rng):
    """As in torch: out= and autograd exclude each other."""
    x = oracle.gaussian(1, 1, 70, 64)
    k, v = ck.compress_kv(x, x, keep=20)
    q, p = oracle.gaussian(1, 1, 1, 64).requires_grad_(), torch.rand(1, 1, 1, 70).requires_grad_()
    for call in (
        lambda: ck.sparse_qk(q, k, out=torch.empty(1, 1, 1, 70)),
        lambda: ck.sparse_av(p, v, out=torch.empty(1, 1, 1, 64, dtype=torch.float16)),
        lambda: ck.sparse_attention(q, k, v, out=torch.empty_like(q, requires_grad=False)),
    ):
        with pytest.raises(RuntimeError, match="out= takes no part in autograd"):
            call()
        with torch.no_grad():
            call()


def test_bad_arguments_raise_as_they_do_without_autograd(rng):
    x = oracle.gaussian(1, 1, 70, 64)
    k = ck.compress(x, role="key", keep=20)
    with pytest.raises(ValueError, match="q must have shape"):
        ck.sparse_qk(oracle.gaussian(1, 1, 1, 32).requires_grad_(), k)
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor"):
        ck.sparse_qk("q", k)
