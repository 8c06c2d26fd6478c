"""Attention of one new token per row, in a C++ kernel (float32 on a CPU): of rows that share a prefix, of rows of
several caches, of long texts. In compiled layers the kernel also writes the new keys and values into the cache.

A shared prefix is read once for all its rows, no tensor of scores is made, and the keys and values of a row are
prefetched. `KERNELS` has the kernel of `prompt_attention` too. Without kernels torch computes attention, segment by
segment and cache by cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import library

from caches.attention.open_slots import OpenSlots
from caches.attention.segmented_tensor import SegmentedTensor, to_add
from caches.attention.segments import Attend, DenseSegment, PerRowSegment, Segment
from caches.platform.native import Operators


def like_found(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An empty tensor for what the operator `layer_attention` finds, [rows, tokens, heads, width]."""
    rows, heads, tokens, _ = query.shape
    return query.new_empty(rows, tokens, heads, value.shape[-1])


def _make_traceable() -> None:
    library.register_fake("kvengine::layer_attention", like_found)


KERNELS = Operators("The fastest attention of many rows, long texts and prompts", _make_traceable)


def attend_to(prefix: torch.Tensor, suffix: torch.Tensor | None) -> Attend | None:
    """`attention` if it can read these keys or values [rows, heads, slots, width], of prompts and of their rows."""
    return attention if is_supported(prefix) and (suffix is None or is_supported(suffix)) else None


def is_supported(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype == torch.float32
    return is_plain and tensor.shape[-1] % 8 == 0 and tensor.stride(-1) == 1


def attention(
    queries: torch.Tensor, keys: Iterable[Segment], values: Iterable[Segment], mask: torch.Tensor | None, width: int
) -> torch.Tensor | None:
    """An `Attend` for what `attend_to` allows; None where no rows share anything or the kernel cannot compute it."""
    tensors = [_tensor(segment) for segment in keys], [_tensor(segment) for segment in values]
    if len(tensors[0][0]) == len(queries):
        return None
    return _computed(queries, *tensors, [len(queries), len(tensors[0])], mask, 1.0)


def one_token_attention(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor | None:
    """Attention of the rows of one or several caches; None where the kernel cannot compute it.

    query: of one new token per row, [rows, heads, 1, width]. keys, values: of each cache [rows, KV heads, slots,
    width], in segments or not. mask: 4D, its slots aligned right, or None. scale: of the scores; None for width**-0.5.
    Returns [rows, 1, heads, width].
    """
    rows, heads, tokens, width = query.shape
    if tokens != 1:
        return None
    of_keys, of_values, counts = list[torch.Tensor](), list[torch.Tensor](), list[int]()
    for key, value in zip(keys, values, strict=True):
        segments = _tensors(key), _tensors(value)
        if segments[0] is None or segments[1] is None or len(segments[0]) != len(segments[1]):
            return None
        of_keys += segments[0]
        of_values += segments[1]
        counts += key.shape[0], len(segments[0])  # `len(key)` would materialize segments
    by_head = None
    if mask is not None:
        added = to_add(mask, query.dtype)
        by_head = added.expand(rows, heads, 1, added.shape[-1]).unflatten(1, (keys[0].shape[1], -1))
    output = _computed(query, of_keys, of_values, counts, by_head, width**-0.5 if scale is None else scale)
    return None if output is None else output.transpose(1, 2)


def open_layers(layers: Sequence[OpenSlots], mask: torch.Tensor | None, scales: Sequence[float | None]) -> bool:
    """Let the operator `layer_attention` compute these layers of a step, in their order, until `close_layers`.

    It computes attention of one new token per row, and writes its key and value to the last slot of its row first.
    Returns whether the kernel can do that.

    layers: of the same caches. mask: of all heads, [rows or 1, 1, 1, slots], aligned right, or None. scales: of each
    layer, see `one_token_attention`. The operator: from query [rows, heads, 1, width], key and value
    [rows, KV heads, 1, width] to [rows, 1, heads, width].
    """
    keys = [tensor for slots in layers for tensor in slots.keys]
    values = [tensor for slots in layers for tensor in slots.values]
    are_plain = is_supported(keys[0]) and all(type(tensor) is torch.Tensor for tensor in (*keys, *values))
    if not (are_plain and can_compute(*keys, *values)):
        return False
    if any(slots.parts != layers[0].parts for slots in layers):
        return False
    if mask is not None and not (mask.ndim == 4 and all(mask.shape[1:] == (1, 1, slots.most) for slots in layers)):
        return False
    added = None if mask is None else to_add(mask, torch.float32).float()
    by_layer = [slots.keys[0].shape[-1] ** -0.5 if scale is None else scale
                for slots, scale in zip(layers, scales, strict=True)]  # fmt: skip
    opened: bool = KERNELS.or_error().open_layers(keys, values, layers[0].parts, added, by_layer)
    return opened


def close_layers() -> None:
    """Let go of the tensors of the layers that this thread has opened."""
    if (operators := KERNELS.or_none()) is not None:
        operators.close_layers()


def _tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """The keys or values of a cache; None if the kernel cannot read them."""
    if isinstance(tensor, SegmentedTensor):
        return [_tensor(segment) for segment in tensor.segments()] if tensor.attend is attention else None
    return [tensor] if is_supported(tensor) else None


def _tensor(segment: Segment) -> torch.Tensor:
    dense = segment.segment if isinstance(segment, PerRowSegment) else segment
    assert isinstance(dense, DenseSegment)
    return dense.tensor


def _computed(
    queries: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    counts: list[int],
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor | None:
    added = None if mask is None else mask.flatten(2, 3).float()
    is_float = queries.dtype == torch.float32 and queries.is_cpu
    if not (is_float and can_compute(queries, *keys, *values, *(() if added is None else (added,)))):
        return None
    output: torch.Tensor = KERNELS.or_error().dense_attention(queries, keys, values, counts, added, scale)
    return output


def can_compute(*tensors: torch.Tensor) -> bool:
    """Whether the kernel is there and can take the place of torch: it has no derivatives and follows no autocast."""
    needs_derivative = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    is_followed = needs_derivative or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    return not is_followed and KERNELS.or_none() is not None
