"""The engine's hook in transformers' attention function "sdpa".

The model is not changed. While there are runners, the function is replaced by one that does the same as the original,
unless the calling thread is in a step of the engine: there `caches.attention.dispatch` chooses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import repeat
from operator import is_
from typing import Any
from weakref import WeakSet, finalize

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from caches.attention import dispatch, kernels
from caches.attention.kv_view import KeyValueView

_NOT_OURS = ("position_bias", "cache", "softcap")
_ONLY_ORIGINAL = ("dropout", "output_attentions")  # which the original computes, or warns of


class _EngineSteps(threading.local):
    dtypes: tuple[torch.dtype, ...] = ()


active = _EngineSteps()
"""`dtypes`: those of which this thread computes attention otherwise than transformers; none outside of the engine's
steps."""


def install(user: object) -> None:
    """Replace transformers' function while `user` lives, also if another library has replaced it meanwhile."""
    current = ALL_ATTENTION_FUNCTIONS["sdpa"]
    hook = current if isinstance(current, _Hook) else _Hook(current)
    hook.users.add(user)
    finalize(user, hook.restore).atexit = False
    AttentionInterface.register("sdpa", hook)


class _Hook:
    def __init__(self, original: Callable[..., tuple[torch.Tensor, None]]):
        self._original = self.__wrapped__ = original  # whose signature it has
        self.users: WeakSet[object] = WeakSet()

    def restore(self) -> None:
        """Give its place back to the original, if there are no users any more."""
        if not [*self.users] and ALL_ATTENTION_FUNCTIONS["sdpa"] is self:
            AttentionInterface.register("sdpa", self._original)
            if [*self.users]:  # another thread has installed it since the first look
                AttentionInterface.register("sdpa", self)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' interface: query [rows, heads, tokens, width] to [rows, tokens, heads, width]."""
        output = None
        can_differ = is_plain(self, kwargs) and not torch.compiler.is_compiling()
        if isinstance(key, KeyValueView) and isinstance(value, KeyValueView) and key.is_joined and value.is_joined:
            mask = None if key.is_visible else attention_mask
            if can_differ and query.shape[2] == 1:
                output = kernels.attention(query, key.caches, value.caches, mask, kwargs.get("scaling"))
            if output is None:
                return self._by_cache(module, query, key, value, mask, **kwargs), None
            return output.transpose(1, 2), None
        if can_differ and query.dtype in active.dtypes:
            is_causal = kwargs.get("is_causal")
            if is_causal is None:
                is_causal = getattr(module, "is_causal", True)
            output = dispatch.attention(query, key, value, attention_mask, kwargs.get("scaling"), is_causal)
        if output is None:
            return self._original(module, query, key, value, attention_mask, **kwargs)
        return output, None

    def _by_cache(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: KeyValueView,
        value: KeyValueView,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of every cache, one after the other. mask: 4D, its slots aligned right, or None."""
        outputs, begin = list[torch.Tensor](), 0
        for keys, values in zip(key.of_each_cache(), value.of_each_cache(), strict=True):
            end = begin + keys.shape[0]
            of_cache = None if mask is None else mask[begin:end, ..., mask.shape[-1] - keys.shape[2] :]
            outputs.append(self(module, query[begin:end], keys, values, of_cache, **kwargs)[0])
            begin = end
        return torch.cat(outputs)


def is_plain(function: object, options: Mapping[str, object]) -> bool:
    """Whether an attention function, given these options, is transformers' "sdpa" as it can be computed otherwise."""
    is_own = isinstance(function, _Hook) and function._original is sdpa_attention_forward
    if not is_own or any(map(options.get, _ONLY_ORIGINAL)):
        return False
    return all(map(is_, map(options.get, _NOT_OURS), repeat(None)))  # no frame for each of them
