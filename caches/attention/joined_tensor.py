"""Keys or values of the rows of several caches, each of its own length, as a tensor subclass.

`one_token_attention` computes attention in a kernel, `attend` cache by cache: nothing is copied, no padding is read.
Any other operation gets an ordinary tensor [rows, heads, slots, width], in which the rows are aligned right and shorter
ones begin with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from caches.attention.segmented_tensor import METADATA, plain
from caches.platform.torch_api import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map


class JoinedTensor(torch.Tensor):
    """parts: of every cache its keys or values [rows, heads, slots, width], in segments or not.

    is_visible: whether a new token attends to all of its cache's slots.
    """

    parts: Sequence[torch.Tensor]
    is_visible: bool

    @staticmethod
    def __new__(cls, tensors: Sequence[torch.Tensor], is_visible: bool) -> JoinedTensor:
        reference = tensors[0]
        rows, slots = sum(tensor.shape[0] for tensor in tensors), max(tensor.shape[2] for tensor in tensors)
        shape = (rows, reference.shape[1], slots, reference.shape[3])
        joined = make_wrapper_subclass(cls, shape, dtype=reference.dtype, device=reference.device)
        joined.parts, joined.is_visible = tensors, is_visible
        return joined

    def materialize(self) -> torch.Tensor:
        """An ordinary tensor [rows, heads, slots, width], aligned right."""
        with DisableTorchFunctionSubclass():
            out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            begin = 0
            for tensor in self.parts:
                rows, _, slots, _ = tensor.shape
                out[begin : begin + rows, :, out.shape[2] - slots :] = plain(tensor)
                begin += rows
            return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return func(*tree_map(_materialized, args), **tree_map(_materialized, kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map(_materialized, args), **tree_map(_materialized, kwargs or {}))


def _materialized(value: Any) -> Any:
    return value.materialize() if isinstance(value, JoinedTensor) else value


def attend(
    attention: Callable[..., tuple[torch.Tensor, None]],
    query: torch.Tensor,
    key: JoinedTensor,
    value: JoinedTensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """`attention(query, key, value, mask)` of every cache, one after the other: [rows, tokens, heads, width].

    query: [rows, heads, tokens, width]. mask: 4D, its slots aligned right, or None.
    """
    outputs, begin = [], 0
    for keys, values in zip(key.parts, value.parts, strict=True):
        end = begin + keys.shape[0]
        cache_mask = None if mask is None or key.is_visible else mask[begin:end, ..., mask.shape[-1] - keys.shape[2] :]
        outputs.append(attention(query[begin:end], keys, values, cache_mask)[0])
        begin = end
    return torch.cat(outputs)
