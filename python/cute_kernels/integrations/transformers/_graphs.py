"""Decoding steps as replays of a CUDA graph: what `SparseKVCache(model, graphs=True)` makes of passes of one token.

The model's `forward` is wrapped once. The wrapper hands passes with such a cache to the cache's `StepGraphs`, and runs
all others as they are.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from cute_kernels.integrations.transformers.cache import SparseKVCache

Forward = Callable[..., Any]
LEAST_STEPS = 256  # that a graph has pages for, as far as the capacity goes; a capture takes as long as a few steps
_CACHE, _MASK, _IDS = "past_key_values", "attention_mask", "input_ids"


class Wrapper:
    """Stands as `model.forward`. A copy of the model gets one of its own."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        steps = getattr(kwargs.get(_CACHE), "steps", None)
        if not isinstance(steps, StepGraphs) or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        return steps.run(self, args, kwargs)


def wrap(model: PreTrainedModel) -> None:
    if not isinstance(model.forward, Wrapper):
        model.forward = Wrapper(model.forward)  # type: ignore[method-assign]


def refusal(model: PreTrainedModel, mesh: Any, prunes_in_kernels: bool) -> str:
    """Why steps of a model cannot be captured; "" if they can be."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if any(not device.startswith("cuda") for device in devices):
        return f"the model is on {', '.join(devices)}, and CUDA graphs need a GPU"
    if len(devices) > 1:
        return f"the model is spread over {', '.join(devices)}"
    if mesh is not None:
        return "the cache is spread over a mesh"
    if not prunes_in_kernels:
        return "only the rule 'magnitude' prunes in a CUDA graph"
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in parameters):
        return f"{type(model).__name__}.forward takes no position_ids"
    return ""


@dataclass(frozen=True)
class Step:
    """A pass of one token a sequence. Steps of one key are served by one graph."""

    key: tuple[Any, ...]
    inputs: dict[str, Tensor]  # without the mask
    options: dict[str, Any]
    mask: Tensor | None


@dataclass
class Captured:
    key: tuple[Any, ...]
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]  # that the graph reads
    outputs: Any  # that it writes
    seen: int  # columns of the cache, if nothing but its replays has changed it
    left: int  # replays that pages are reserved for
    alone: bool  # the caches are in no graphs of the caller's


class StepGraphs:
    """Of one cache. A step that follows another one of its kind is captured, and replayed from then on, until another
    pass or change of the cache comes between, or its pages are used up.

    A warning says once why steps are not captured where they could be expected to be.
    """

    def __init__(self, cache: SparseKVCache, refused: str) -> None:
        self._cache = cache
        self._refused = refused
        self._captured: Captured | None = None
        self._last_key: tuple[Any, ...] | None = None  # of the pass before, if it was a step
        self._changes: dict[str, int] = {}  # since the last capture
        self._warned: set[str] = set()
        if refused:
            self._warn(refused)

    def __getstate__(self) -> dict[str, Any]:  # graphs write to the memory of one cache
        return self.__dict__ | {"_captured": None, "_last_key": None}

    # ---- What the cache calls ----------------------------------------------------------------------------------------

    def changed(self, what: str) -> None:
        """Rows or tokens are moved, between passes."""
        self._drop()
        self._last_key = None
        self._changes[what] = self._changes.get(what, 0) + 1
        if self._changes[what] > 1 and what != "reset":
            self._warn(f"{what} changes the cache between steps, as beams and assisted decoding do")

    # ---- What the model calls ----------------------------------------------------------------------------------------

    def run(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs. They are new tensors, also of a replay."""
        if self._refused or torch.cuda.is_current_stream_capturing():  # in a graph of the caller's
            return wrapper.forward(*args, **kwargs)
        step = self._step(wrapper, args, kwargs)
        if step is not None:
            captured = self._captured
            if captured is not None and captured.left and self._serves(captured, step):
                return self._replay(captured, step)
            made = None
            if step.key == self._last_key and self._cache.admits(step.mask):
                made = self._capture(wrapper, step)
            if made is not None:
                return self._replay(made, step)
        self._drop()
        self._last_key = None if step is None else step.key
        return wrapper.forward(*args, **kwargs)

    def _serves(self, captured: Captured, step: Step) -> bool:
        return (
            captured.key == step.key and captured.seen == self._cache.get_seq_length() and self._cache.admits(step.mask)
        )

    def _step(self, wrapper: Wrapper, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Step | None:
        """None: the pass is none, or runs as it is, with a warning where it is a step."""
        given = {name: value for name, value in kwargs.items() if name != _CACHE and value is not None}
        if args:
            if len(args) > 1 or _IDS in given:
                return self._eager(f"forward got {len(args)} arguments without names")
            given[_IDS] = args[0]
        ids = given.get(_IDS)
        batch = self._cache.layers[0].batch_size
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.shape[1] != 1 or not self._cache.get_seq_length():
            return None
        if ids.shape[0] != batch:
            return None  # an error, raised where it always is
        mask = given.pop(_MASK, None)
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            return self._eager("attention_mask is not one of 2 dimensions")
        if torch.is_grad_enabled():
            return self._eager("gradients are enabled: torch.no_grad() and generate() disable them")
        inputs = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        options = {name: value for name, value in given.items() if name not in inputs}
        wrong = [name for name, value in options.items() if not isinstance(value, (bool, int, float, str))]
        wrong += [name for name, value in inputs.items() if value.device != ids.device]
        if wrong or not ids.is_cuda:
            return self._eager(f"{', '.join(wrong) or _IDS} cannot be an input of a graph")
        if "position_ids" not in inputs:  # the model would take them from the cache, as a number
            inputs["position_ids"] = torch.full_like(ids[:1], self._cache.get_seq_length())
        shapes = [(name, value.shape, value.dtype) for name, value in sorted(inputs.items())]
        modes = torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cuda")
        key = (id(wrapper), *shapes, *sorted(options.items()), *modes)
        return Step(key, inputs, options, mask)

    def _capture(self, wrapper: Wrapper, step: Step) -> Captured | None:
        """Takes pages for the steps to come. None: the step cannot be captured, which has changed nothing."""
        cache = self._cache
        seen, layers = cache.get_seq_length(), cache.layers
        self._drop()
        columns = cache.columns_ahead(max(LEAST_STEPS, seen // 4))
        if columns < 1:
            return None  # the pass raises the error of a full cache
        alone, graph = not any(layer.captured for layer in layers), torch.cuda.CUDAGraph()
        with torch.inference_mode(False):
            inputs = {name: value.clone() for name, value in step.inputs.items()}
        made = None
        try:
            cache.reserve(columns)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                outputs = wrapper.forward(**inputs, **step.options, **{_CACHE: cache})
            made = Captured(step.key, graph, inputs, outputs, seen, columns, alone)
        except Exception as error:
            self._refused = f"the capture failed with {type(error).__name__}: {error}"
            self._warn(self._refused)
            _release_generator(step.inputs[_IDS].device)
        finally:  # a capture runs nothing
            for layer in layers:
                layer.seen = seen
            cache.unfinished = False
            if made is None:
                self._forget(alone)
        if made is not None:
            self._changes.clear()
        self._captured = made
        return made

    def _drop(self) -> None:
        """Gives the memory of the graph back."""
        captured, self._captured = self._captured, None
        if captured is not None:
            self._forget(captured.alone)

    def _forget(self, alone: bool) -> None:
        for layer in self._cache.layers if alone else ():
            layer.forget_graphs()

    def _replay(self, captured: Captured, step: Step) -> Any:
        cache = self._cache
        for name, value in captured.inputs.items():
            value.copy_(step.inputs[name])
        cache.unfinished = True
        captured.graph.replay()
        cache.advance(1)
        cache.unfinished = False
        captured.seen, captured.left = captured.seen + 1, captured.left - 1
        self._last_key = captured.key
        return pytree.tree_map_only(Tensor, Tensor.clone, captured.outputs)

    def _eager(self, why: str) -> Step | None:
        self._warn(why)
        return None

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"SparseKVCache runs decoding steps without CUDA graphs: {why}", stacklevel=4)


def _release_generator(device: torch.device) -> None:
    """After a capture that failed torch's generator still counts as captured, and the next random number would raise.

    A capture that ends well releases it.
    """
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=device)
