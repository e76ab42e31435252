"""The attention function that Transformers calls, and the function that makes its mask.

They are registered under one name, which `SparseKVCache` sets as the model's attention implementation. For every cache
but a `SparseKVCache`, and without one, they do what "sdpa" does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cute_kernels.integrations.transformers import _padding

if TYPE_CHECKING:
    from cute_kernels.integrations.transformers._layer import SparseLayer
    from cute_kernels.integrations.transformers.cache import SparseKVCache

NAME = "sparse_kv"
DENSE = "sdpa"  # the model's own attention, for prompts and for other caches

# Options that some models pass to their attention function, and the value of each that means plain softmax(q K^T) V.
_PLAIN = {
    "softcap": None,
    "sliding_window": None,
    "s_aux": None,
    "position_bias": None,
    "is_causal": None,
    "output_attentions": False,
}


_NOT_TENSORS = (
    "SparseKVCache holds keys and values compressed, but the model's attention function wants them as tensors: its "
    f"attention implementation is not {NAME!r}. Make the cache of the model itself, SparseKVCache(model, "
    f"...), after any change of the implementation, or call model.set_attn_implementation({NAME!r})"
)


class KVLength(int):
    """How many columns keys have, for the mask; tells the mask function the cache that asks."""

    cache: SparseKVCache

    @classmethod
    def of(cls, length: int, cache: SparseKVCache) -> KVLength:
        made = cls(length)
        made.cache = cache
        return made


class TracedLength:
    """KVLength where Dynamo traces. It compiles anew for every value of a subclass of int, but hands this over as it
    is."""

    def __init__(self, length: int, cache: SparseKVCache) -> None:
        self.length, self.cache = length, cache


class NewTokens:
    """What `SparseLayer.update` returns in place of keys and values: the new ones, and where they belong.

    Only the attention function of this module knows what to do with it; any other stops at its first access.
    """

    __slots__ = ("keys", "layer", "values")

    def __init__(self, layer: SparseLayer, keys: Tensor, values: Tensor) -> None:
        self.layer, self.keys, self.values = layer, keys, values

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(_NOT_TENSORS)

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_NOT_TENSORS)


class ForwardPass:
    """One forward pass of the model with a `SparseKVCache`; stands where the attention mask does."""

    def __init__(
        self, cache: SparseKVCache, columns: _padding.Columns, dense_mask: Callable[[], Tensor | None]
    ) -> None:
        self.cache, self.columns = cache, columns
        self._make_mask: Callable[[], Tensor | None] | None = dense_mask
        self._mask: Tensor | None = None

    def dense_mask(self) -> Tensor | None:
        """The mask of the model's own attention, of the whole batch; made at the first call."""
        if self._make_mask is not None:
            self._mask, self._make_mask = self._make_mask(), None
        return self._mask


@torch.compiler.disable
def mask(
    *,
    kv_length: int | TracedLength,
    attention_mask: Tensor | None = None,
    mask_function: Any = causal_mask_function,
    **kwargs: Any,
) -> ForwardPass | Tensor | None:
    """Registered as mask function. With a `SparseKVCache`: what its layers need to know of the pass."""

    length = kv_length.length if isinstance(kv_length, TracedLength) else int(kv_length)

    def dense() -> Tensor | None:
        return ALL_MASK_ATTENTION_FUNCTIONS[DENSE](
            kv_length=length, attention_mask=attention_mask, mask_function=mask_function, **kwargs
        )

    if not isinstance(kv_length, (KVLength, TracedLength)):
        return dense()
    if mask_function is not causal_mask_function:
        raise ValueError(
            "SparseKVCache serves plain causal attention; the model asks for another mask "
            f"({getattr(mask_function, '__qualname__', mask_function)})"
        )
    cache = kv_length.cache
    return ForwardPass(cache, cache.arrive(length, attention_mask, kwargs.get("config")), dense)


@torch.compiler.disable
def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | NewTokens,
    value: Tensor | NewTokens,
    attention_mask: ForwardPass | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Registered as attention function. query (B, Hq, Sq, D); returns ((B, Sq, Hq, D), None)."""
    if type(key) is not NewTokens:
        if isinstance(attention_mask, ForwardPass):
            raise RuntimeError(
                f"{type(module).__name__} attends to keys that are not in the SparseKVCache, which the "
                "cache does not serve"
            )
        return dense_attention(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    if type(attention_mask) is not ForwardPass:
        raise ValueError(
            "SparseKVCache takes padding from a 2-dimensional attention_mask and makes causal masks "
            f"itself; got a ready mask ({_describe(attention_mask)})"
        )
    if dropout:
        raise ValueError(f"attention over a SparseKVCache has no dropout, got {dropout}; call model.eval()")
    for name, found in kwargs.items():
        if name in _PLAIN and found is not None and found is not _PLAIN[name]:
            _check_option(name, found)
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{type(module).__name__} is not causal, which SparseKVCache does not serve")
    return key.layer.attend(module, query, key.keys, key.values, attention_mask, scaling), None


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    function: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS[DENSE]
    # By name always: what others register in its place, such as kvpress, need not have a default.
    return function(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


def _check_option(name: str, found: Any) -> None:
    if name == "is_causal" and found is True:
        return
    raise ValueError(
        f"attention over a SparseKVCache is softmax(scale q K^T) V alone; the model passes {name}={_describe(found)}"
    )


def _describe(found: Any) -> str:
    shape = getattr(found, "shape", None)
    return repr(found) if shape is None else f"a tensor of shape {tuple(shape)}"


def register() -> None:
    """The function of this module stands under its name, also where another library has wrapped it: kvpress, when it is
    imported, wraps every attention function in one that reads the shape of the keys, which a SparseKVCache does not
    hand over. The model's own attention stays wrapped."""
    if ALL_ATTENTION_FUNCTIONS[NAME] is not attention:
        ALL_ATTENTION_FUNCTIONS[NAME] = attention


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)
