"""Training steps of a small Llama, on a GPU a CUDA graph for each shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from profiling.recipes.llama import forward

IGNORED = -100  # a target that the loss leaves out


class Steps:
    """AdamW on the cross-entropy of a LlamaForCausalLM without dropout. graphs: whether to capture steps on a GPU."""

    def __init__(self, model: Any, betas: tuple[float, float], weight_decay: float, graphs: bool = True) -> None:
        self._model, device = model, model.device
        self._graphs = graphs and device.type == "cuda"
        # A graph reads its learning rate from memory.
        self._rate = torch.zeros((), device=device) if device.type == "cuda" else 0.0
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=self._rate,
            betas=betas,
            weight_decay=weight_decay,
            fused=device.type == "cuda",
            capturable=device.type == "cuda",
        )
        self._captured: dict[tuple[Any, ...], tuple[torch.cuda.CUDAGraph, Tensor, Tensor, tuple[Tensor, Tensor]]] = {}

    def __call__(self, ids: Tensor, targets: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """(loss, share of the targets that the model finds likeliest) before the step; on a GPU until the next call.

        ids: (B, n). targets: (B, m), m <= n, what follows the last m of ids, or IGNORED.
        """
        if isinstance(self._rate, Tensor):
            self._rate.fill_(rate)
        else:
            self._optimizer.param_groups[0]["lr"] = rate
        if not self._graphs:
            return self._step(ids, targets)
        key = (*ids.shape, *targets.shape)
        if key not in self._captured:
            self._captured[key] = self._capture(ids, targets)
        graph, static_ids, static_targets, out = self._captured[key]
        static_ids.copy_(ids)
        static_targets.copy_(targets)
        graph.replay()
        return out

    def _step(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self._optimizer.zero_grad(set_to_none=True)
        logits = forward(self._model, ids, targets.shape[1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        right = (logits.argmax(-1) == targets).sum() / (targets != IGNORED).sum()
        return loss.detach(), right

    def _capture(self, ids: Tensor, targets: Tensor) -> Any:
        static_ids, static_targets = ids.clone(), targets.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # what is allocated once must be there before the capture
            for _ in range(2):
                self._step(static_ids, static_targets)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self._step(static_ids, static_targets)
        return graph, static_ids, static_targets, out
