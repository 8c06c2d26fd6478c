"""The C++ kernels of attention over keys and values of float32 and 16 bits on a CPU: of rows that share a prefix, of
rows of several caches, of long texts, of prompts. In compiled layers a kernel also writes the new keys and values into
the cache.

A shared prefix is read once for all its rows, no tensor of scores is made, and the keys and values of a row are
prefetched. What a mask hides from a prompt is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any

import torch
from torch import library

from caches.attention.segments import CacheRows, OpenRows
from caches.platform.machine import multiplies
from caches.platform.native import DTYPES, Operators

_IS_FASTER = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # for prompts, measured on these
_TOGETHER = 16  # queries of a head that a thread takes at least: with fewer for all threads, torch's is faster


def empty_output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """An empty tensor for the result of the operator `layer_attention`, [rows, tokens, heads, width]."""
    rows, heads, tokens, _ = query.shape
    return query.new_empty(rows, tokens, heads, value.shape[-1])


def _make_traceable() -> None:
    library.register_fake("kvengine::layer_attention", empty_output)


KERNELS = Operators("The fastest attention of many rows, long texts and prompts", _make_traceable)


def c_functions() -> dict[Any, list[str]]:
    """The operator that compiled code calls, with its C declaration: see native/dense_attention.cpp."""
    tensor, out = "AtenTensorHandle", "AtenTensorHandle*"
    declaration = f"AOTITorchError aoti_torch_cpu_layer_attention({tensor}, {tensor}, {tensor}, {out})"
    return {torch.ops.kvengine.layer_attention.default: [declaration]}


def attention(
    query: torch.Tensor,
    keys: Sequence[CacheRows],
    values: Sequence[CacheRows],
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor | None:
    """Attention of the rows of one or several caches to all their slots; None where the kernel cannot compute it.

    query: [rows, heads, tokens, width]. mask: 4D, its slots aligned right, or None. scale: of the scores; None for
    width**-0.5. Returns [rows, heads, tokens, width of a value].
    """
    rows, heads, tokens, width = query.shape
    tensors = _tensors_of(keys, values)
    if tensors is None or not query.is_cpu:
        return None
    of_keys, of_values, counts = tensors
    if not all(map(_can_be_read, of_keys)) or not all(map(_can_be_read, of_values)):
        return None
    if any(tensor.dtype != query.dtype for tensor in (*of_keys, *of_values)):
        return None
    added = None
    if mask is not None:
        added = to_add(mask, torch.float32).float()
        by_head = added.expand(rows, heads, tokens, added.shape[-1]).unflatten(1, (keys[0].shape[1], -1))
        added = by_head.flatten(2, 3)
    if not _can_compute(query, *of_keys, *of_values, *(() if added is None else (added,))):
        return None
    scale = width**-0.5 if scale is None else scale
    output: torch.Tensor = KERNELS.or_error().dense_attention(query, of_keys, of_values, counts, added, scale)
    return output


def prompt_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor | None:
    """Attention of several tokens per row, [rows, tokens, heads, width of a value]; None where torch computes it, maybe
    faster.

    query: [rows, heads, tokens, width]. key, value: [rows, KV heads, slots, width]; as many consecutive heads read each
    of their heads. mask: [rows or 1, 1, tokens, slots], whether a token sees a slot; None where token i sees the slots
    up to i. scale: of the scores; None for width**-0.5.
    """
    rows, heads, tokens, width = query.shape
    is_faster = _IS_FASTER and not multiplies(str(query.dtype).removeprefix("torch."))
    if not (is_faster and _is_prompt(query, key, value, mask) and _can_compute(query, key, value)):
        return None
    kv_heads = key.shape[1]
    if rows * kv_heads * -(-tokens * heads // kv_heads // _TOGETHER) < torch.get_num_threads():
        return None
    output = empty_output(query, key, value)
    scale = width**-0.5 if scale is None else scale
    KERNELS.or_error().prompt_attention(query, key, value, mask, scale, output)
    return output


def open_layers(
    layers: Sequence[Sequence[OpenRows]], mask: torch.Tensor | None, scales: Sequence[float | None]
) -> bool:
    """Let the operator `layer_attention` compute these layers of a step, in their order, until `close_layers`.

    It computes attention of one new token per row, and writes its key and value to the last slot of its row first.
    Returns whether the kernel can do that.

    layers: of each layer the rows of the same caches, which the caller keeps until then. mask: of all heads,
    [rows or 1, 1, 1, slots], aligned right, or None. scales: of each layer, see `attention`. The operator: from query
    [rows, heads, 1, width], key and value [rows, KV heads, 1, width] to [rows, 1, heads, width].
    """
    keys, values, spans, of_first = list[torch.Tensor](), list[torch.Tensor](), list[int](), list[int]()
    for layer in layers:
        counts = list[int]()
        for rows in layer:
            counts += rows.rows, len(rows.segments)
            for of_keys, of_values, begin, end in rows.segments:
                keys.append(of_keys)
                values.append(of_values)
                spans += begin, end
        if counts != (of_first or counts):
            return False
        of_first = counts
    are_plain = _can_be_read(keys[0]) and all(type(tensor) is torch.Tensor for tensor in (*keys, *values))
    if not (are_plain and _can_compute(*keys, *values)):
        return False
    added = None if mask is None else to_add(mask, torch.float32).float()
    by_layer = [nan if scale is None else scale for scale in scales]
    opened: bool = KERNELS.or_error().open_layers(keys, values, spans, of_first, added, by_layer)
    return opened


def close_layers() -> None:
    """Let `layer_attention` compute in Python again: the layers that this thread has opened are over."""
    if (operators := KERNELS.or_none()) is not None:
        operators.close_layers()


def most_slots(caches: Sequence[CacheRows]) -> int:
    """The slots of the longest cache."""
    return max(rows.shape[2] for rows in caches)


def to_add(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The mask as it is added to scores of `dtype`; a bool mask is True for visible slots."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _tensors_of(
    keys: Sequence[CacheRows], values: Sequence[CacheRows]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]] | None:
    """The segments of all caches one after the other, and of each cache the number of its rows, then of its segments.
    None where they are not in memory as they are."""
    of_keys, of_values, counts = list[torch.Tensor](), list[torch.Tensor](), list[int]()
    for key, value in zip(keys, values, strict=True):
        if not key.sources or len(key.sources) != len(value.sources):
            return None
        for sources, tensors in ((key.sources, of_keys), (value.sources, of_values)):
            for source in sources:
                if isinstance(source, CacheRows):
                    return None
                tensors.append(source)
        counts += key.shape[0], len(key.sources)
    return of_keys, of_values, counts


def _can_be_read(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in DTYPES
    return is_plain and tensor.shape[-1] % 8 == 0 and tensor.stride(-1) == 1


def _can_compute(*tensors: torch.Tensor) -> bool:
    """Whether the kernel is there and can take the place of torch: it has no derivatives and follows no autocast."""
    needs_derivative = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    is_followed = needs_derivative or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling()
    return not is_followed and KERNELS.or_none() is not None


def _is_prompt(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    rows, heads, tokens, width = query.shape
    of_rows, kv_heads, slots = key.shape[:3]
    fit = of_rows == rows and heads % kv_heads == 0 and key.shape[3] == width and value.shape[:3] == key.shape[:3]
    if not (fit and _can_be_read(query) and _are_side_by_side(key) and _are_side_by_side(value)):
        return False
    if not query.dtype == key.dtype == value.dtype:
        return False
    if mask is None:
        return True
    is_plain = type(mask) is torch.Tensor and mask.is_cpu and mask.dtype == torch.bool and mask.stride(-1) == 1
    return is_plain and mask.shape[0] in (1, rows) and mask.shape[1:] == (1, tokens, slots)


def _are_side_by_side(slots: torch.Tensor) -> bool:
    """Whether they follow one another for each head, as in a cache. Others exclude each other from the nearest cache of
    the processor: torch's kernel copies them first, and is faster."""
    return _can_be_read(slots) and slots.stride(2) == slots.shape[3]
