"""Attention of several tokens per row, as of a prompt, in a C++ kernel (float32 on a CPU), which leaves out what a mask
hides. The kernel is one of those of `dense_attention`."""

from __future__ import annotations

import torch

from caches.attention.dense_attention import KERNELS, can_compute, is_supported

_IS_FASTER = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")  # measured on these
_TOGETHER = 16  # queries of a head that a thread takes at least: with fewer for all threads, torch's is faster


def prompt_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor | None:
    """What each token finds, [rows, tokens, heads, width of a value]; None where torch computes it, maybe faster.

    query: [rows, heads, tokens, width]. key, value: [rows, KV heads, slots, width]; as many consecutive heads read each
    of their heads. mask: [rows or 1, 1, tokens, slots], whether a token sees a slot; None where token i sees the slots
    up to i. scale: of the scores; None for width**-0.5.
    """
    rows, heads, tokens, width = query.shape
    if not (_IS_FASTER and _is_readable(query, key, value, mask) and can_compute(query, key, value)):
        return None
    kv_heads = key.shape[1]
    if rows * kv_heads * -(-tokens * heads // kv_heads // _TOGETHER) < torch.get_num_threads():
        return None
    output = query.new_empty(rows, tokens, heads, value.shape[-1])
    scale = width**-0.5 if scale is None else scale
    KERNELS.or_error().prompt_attention(query, key, value, mask, scale, output)
    return output


def _is_readable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    rows, heads, tokens, width = query.shape
    of_rows, kv_heads, slots = key.shape[:3]
    fit = of_rows == rows and heads % kv_heads == 0 and key.shape[3] == width and value.shape[:3] == key.shape[:3]
    if not (fit and is_supported(query) and _are_side_by_side(key) and _are_side_by_side(value)):
        return False
    if mask is None:
        return True
    is_plain = type(mask) is torch.Tensor and mask.is_cpu and mask.dtype == torch.bool and mask.stride(-1) == 1
    return is_plain and mask.shape[0] in (1, rows) and mask.shape[1:] == (1, tokens, slots)


def _are_side_by_side(slots: torch.Tensor) -> bool:
    """Whether they follow one another for each head, as in a cache. Others exclude each other from the nearest cache of
    the processor: torch's kernel copies them first, and is faster."""
    return is_supported(slots) and slots.stride(2) == slots.shape[3]
