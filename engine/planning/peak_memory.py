"""How much memory a forward works with, counted on the meta device: there tensors come and go as they do elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from caches.attention.segmented_tensor import SegmentedTensor
from caches.torch_api import TorchDispatchMode, storage_key, tree_leaves


class PeakMemory(TorchDispatchMode):
    """most: bytes of the tensors that were there at the same time, those of `model` and those made `aside` left out."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self._weights = {storage_key(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._sizes: dict[int, int] = {}
        self._is_aside = False
        self.most = self._now = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counts = not self._is_aside and not self._looks_up_experts(func, args)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor, counts)
        return out

    def _looks_up_experts(self, func: Any, args: Any) -> bool:
        """Weights copied for every token, as only a meta_model does that computes all experts at once."""
        return func is torch.ops.aten.index.Tensor and args[0].ndim > 2 and storage_key(args[0]) in self._weights

    def _note(self, tensor: torch.Tensor, counts: bool) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in self._sizes or key in self._weights:
            return
        self._sizes[key] = storage.nbytes() if counts else 0
        self._now += self._sizes[key]
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is made in here is counted elsewhere."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False


class Fused(TorchFunctionMode):
    """Attention as kernels compute it that keep no scores. What is asked of numbers is so: there is no pad."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, _, value = (*args, *kwargs.values())[:3]
            if query.shape[-1] == value.shape[-1] and not isinstance(value, SegmentedTensor):
                return query.new_empty(query.shape)
        if func is torch.Tensor.__bool__ and args[0].is_meta:
            return True
        return func(*args, **kwargs)
