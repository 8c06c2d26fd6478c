"""Attention of rows that share a prefix, in a C++ kernel (float32 on a CPU).

The keys and values of the prefix are read once for all its rows, and no tensor of scores is made. The kernel is
compiled on first use, in about 4 s, once per machine. Without a compiler torch computes attention, segment by segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from caches.attention.segments import Attend, DenseSegment, PerRowSegment, Segment
from caches.kernel_build import Operators

KERNELS = Operators(Path(__file__).with_suffix(".cpp"), "The fastest attention of rows that share a prefix")


def attend_to(prefix: torch.Tensor, suffix: torch.Tensor | None) -> Attend | None:
    """`attention` if it can read these keys or values [rows, heads, slots, width], of prompts and of their rows."""
    return attention if _is_supported(prefix) and (suffix is None or _is_supported(suffix)) else None


def _is_supported(part: torch.Tensor) -> bool:
    is_plain = type(part) is torch.Tensor and not torch.compiler.is_compiling()
    return is_plain and part.is_cpu and part.dtype == torch.float32 and part.shape[-1] % 8 == 0


def attention(
    queries: torch.Tensor, keys: Iterable[Segment], values: Iterable[Segment], mask: torch.Tensor | None, width: int
) -> torch.Tensor | None:
    """An `Attend` for what `attend_to` allows; None where no rows share anything or a derivative is needed."""
    tensors = [_tensor(segment) for segment in (*keys, *values)]
    needs_derivative = torch.is_grad_enabled() and any(one.requires_grad for one in (queries, *tensors))
    if needs_derivative or len(tensors[0]) == len(queries) or KERNELS.or_none() is None:
        return None
    added = None if mask is None else mask.flatten(2, 3).float()
    found: torch.Tensor = KERNELS.or_error().shared_attention(queries, tensors, added)
    return found


def _tensor(segment: Segment) -> torch.Tensor:
    dense = segment.segment if isinstance(segment, PerRowSegment) else segment
    assert isinstance(dense, DenseSegment)
    return dense.tensor
