"""The peak of memory of a forward, counted tensor by tensor: on the meta device they come and go as on any other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from caches.attention.kv_view import KeyValueView
from caches.platform.torch_api import TorchDispatchMode, storage_key, tree_leaves

_Operator: TypeAlias = Callable[..., object]
_Arguments: TypeAlias = tuple[Any, ...]
_Keywords: TypeAlias = dict[str, Any] | None


class PeakMemory(TorchDispatchMode):
    """most: the most bytes that tensors made in this context took at the same time. Weights of `model` do not count."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._weights = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._sizes: dict[int, int] = {}
        self.most = self._now = 0

    def restart(self) -> int:
        """Measure the peak from here on. Returns the bytes that are allocated now."""
        self.most = self._now
        return self._now

    def __torch_dispatch__(
        self, func: _Operator, types: object, args: _Arguments = (), kwargs: _Keywords = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        counts = not self._looks_up_experts(func, args)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, counts)
        return out

    def _looks_up_experts(self, func: _Operator, args: _Arguments) -> bool:
        """Whether `func` copies expert weights for each token, which only the meta model's batched kernel does."""
        return func is torch.ops.aten.index.Tensor and args[0].ndim > 2 and storage_key(args[0]) in self._weights

    def _add(self, tensor: torch.Tensor, counts: bool) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._sizes or key in self._weights:
            return
        self._sizes[key] = storage.nbytes() if counts else 0
        self._now += self._sizes[key]
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


class FusedAttention(TorchFunctionMode):
    """Attention on the meta device as by fused kernels, which store no scores, but make a mask of numbers of one of
    bools. `bool` of a meta tensor is True, so that a check for padding finds none."""

    def __torch_function__(
        self, func: _Operator, types: object, args: _Arguments = (), kwargs: _Keywords = None
    ) -> object:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, _, value = (*args, *kwargs.values())[:3]
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if query.shape[-1] == value.shape[-1] and not isinstance(value, KeyValueView):
                added = mask.to(query.dtype) if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool else None
                out = query.new_empty(query.shape)
                del added
                return out
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **kwargs)
