"""Attention over codes as they are, in kernels that are compiled when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caches.attention.segments import DenseSegment, Segment
from caches.errors import StepError
from caches.quantization.kernel_build import compiled

FEW = 16  # queries: for more of them it takes less time to unpack the codes once
_MOST_WIDTH = 512
_SOURCE = Path(__file__).with_name("fused_attention.cpp")


def kernels() -> Any:
    """`fused_attention.cpp`. Raises `ConfigError` where it cannot be compiled."""
    return compiled(_SOURCE, "fused=True")


def check_fused(columns: torch.Tensor) -> None:
    """Raise `StepError` unless the kernels can read what is written of such columns."""
    width = columns.shape[-1]
    if columns.dtype != torch.float32 or columns.device.type != "cpu" or width % 8 or width > _MOST_WIDTH:
        raise StepError(
            f"fused=True is for keys of float32 on a CPU in heads as wide as a multiple of 8, up to {_MOST_WIDTH}, but "
            f"these are of {columns.dtype} on {columns.device.type}, {width} wide: leave it out"
        )


@dataclass(frozen=True)
class QuantizedSegment:
    """See `Segment`. block: columns that share scales per channel; 0 where neighbouring channels of a column do.

    unpacked: the same as numbers, for what the kernels are not for.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    bits: int
    block: int
    unpacked: Callable[[], Segment]

    @property
    def columns(self) -> int:
        return self.codes.shape[2]

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        if queries.shape[2] > FEW:
            return self.unpacked().scores(queries)
        found: torch.Tensor = kernels().scores(_described(self), queries)
        return found

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        if weights.shape[2] > FEW:
            return self.unpacked().mixed(weights)
        found: torch.Tensor = kernels().mixed(_described(self), weights, self.codes.shape[-1] * 8 // self.bits)
        return found

    def materialize(self) -> torch.Tensor:
        return self.unpacked().materialize()


def attention(
    queries: torch.Tensor, keys: Iterable[Segment], values: Iterable[Segment], mask: torch.Tensor | None, width: int
) -> torch.Tensor | None:
    """See `Attend`; the segments are `QuantizedSegment` or `DenseSegment`."""
    if queries.shape[2] > FEW:
        return None
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    described = ([_described(segment) for segment in segments] for segments in (keys, values))
    found: torch.Tensor = kernels().attention(queries, *described, mask, width)
    return found


def _described(segment: Segment) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int]:
    """As `fused_attention.cpp` has it."""
    if isinstance(segment, QuantizedSegment):
        return segment.codes, segment.scale, segment.offset, segment.bits, segment.block
    assert isinstance(segment, DenseSegment)
    return segment.held, None, None, 32, 0
