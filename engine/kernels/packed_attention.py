"""Attention on a CPU, with the query heads that share a key head packed together.

torch's kernel for grouped heads reads the keys and values once per query head, and a model that repeats them copies
them. Packed, the query heads of a group are the tokens of one head, and the kernel reads its keys once. Where keys are
many, kernels of this package are faster: for one new token per row (`caches.attention.dense_attention`) and for several
(`caches.attention.prompt_attention`). Results differ by rounding, so 16 bits are left to the original.

The model is not changed. While there are runners, transformers' attention function "sdpa" is replaced by one that does
the same as the original, unless the calling thread is in a step of the engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any
from weakref import WeakSet, finalize

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from caches.attention.dense_attention import one_token_attention
from caches.attention.joined_tensor import JoinedTensor, attend
from caches.attention.prompt_attention import prompt_attention

_MUCH = 2**17  # elements of the keys: with fewer, calling the kernel takes as long as what it saves
_NOT_PACKED = ("position_bias", "cache", "softcap")
_ONLY_ORIGINAL = ("dropout", "output_attentions")  # which the original computes, or warns of
_EXACT_ENOUGH = (torch.float32, torch.float64)  # in 16 bits another order of sums is another text


class _ActivePacking(threading.local):
    packs: bool = False


active = _ActivePacking()
"""`packs`: whether attention in this thread is packed; False outside of the engine's steps."""


def install(user: Any) -> None:
    """Replace transformers' function while `user` lives, also if another library has replaced it meanwhile."""
    current = ALL_ATTENTION_FUNCTIONS["sdpa"]
    packed = current if isinstance(current, _PackedAttention) else _PackedAttention(current)
    packed.users.add(user)
    finalize(user, packed.restore).atexit = False
    AttentionInterface.register("sdpa", packed)


class _PackedAttention:
    def __init__(self, original: Callable[..., Any]):
        self._original = self.__wrapped__ = original  # whose signature it has
        self.users: WeakSet[Any] = WeakSet()

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
        can_differ = is_plain(self, kwargs) and not torch.compiler.is_compiling()
        scale, found = kwargs.get("scaling"), None
        if isinstance(key, JoinedTensor) and isinstance(value, JoinedTensor):
            if can_differ:
                mask = None if key.is_visible else attention_mask
                found = one_token_attention(query, key.parts, value.parts, mask, scale)
            if found is None:
                found = attend(partial(self, module, **kwargs), query, key, value, attention_mask)
            return found, None
        if can_differ and active.packs and _can_be_packed(query, key, value, attention_mask):
            if query.shape[2] == 1:
                found = _of_one_token(query, key, value, attention_mask, scale)
            else:
                found = _of_several(module, query, key, value, attention_mask, **kwargs)
        if found is None:
            return self._original(module, query, key, value, attention_mask, **kwargs)
        return found, None


def is_plain(function: Any, options: dict[str, Any]) -> bool:
    """Whether an attention function, given these options, is transformers' "sdpa" as it can be packed."""
    is_own = isinstance(function, _PackedAttention) and function._original is sdpa_attention_forward
    return is_own and all(map(is_, map(options.get, _NOT_PACKED), repeat(None)))  # no frame for each of them


def _of_one_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    found = one_token_attention(query, [key], [value], mask, scale) if key.numel() >= _MUCH else None
    if found is not None:
        return found
    rows, heads, _, width = query.shape
    packed = query.reshape(rows, key.shape[1], -1, width)
    found = scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return found.reshape(rows, 1, heads, value.shape[-1])


def _of_several(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """None where the original computes it."""
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    sees_all = mask is None and not is_causal  # which torch computes as fast
    if sees_all or key.numel() < _MUCH or any(map(others.get, _ONLY_ORIGINAL)):
        return None
    return prompt_attention(query, key, value, mask, scaling)


def _can_be_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    is_plain = query.is_cpu and query.dtype in _EXACT_ENOUGH and type(key) is torch.Tensor
    if not is_plain or query.ndim != 4 or key.ndim != 4:
        return False
    is_of_groups = query.shape[1] >= key.shape[1] == value.shape[1] and query.shape[0] == key.shape[0]
    is_of_all_heads = mask is None or (mask.shape[1] == 1 and mask.shape[-1] == key.shape[2])
    return is_of_groups and is_of_all_heads
