"""Attention over packed codes, in C++ kernels (AVX2, float32 on a CPU) that are compiled on first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caches.attention.segments import DenseSegment, Segment
from caches.errors import StepError
from caches.quantization.kernel_build import compiled

FEW = 16  # queries: for more of them, unpacking the codes once is faster
_MOST_WIDTH = 512
_SOURCE = Path(__file__).with_name("fused_attention.cpp")


def kernels() -> Any:
    """The compiled `fused_attention.cpp`. Raises `ConfigError` if it cannot be compiled."""
    return compiled(_SOURCE, "fused=True")


def check_fused(dense: torch.Tensor) -> None:
    """Raise `StepError` unless the kernels support keys or values like `dense` [rows, heads, slots, width]."""
    width = dense.shape[-1]
    if dense.dtype != torch.float32 or dense.device.type != "cpu" or width % 8 or width > _MOST_WIDTH:
        raise StepError(
            f"fused=True needs float32 keys on a CPU and a head size that is a multiple of 8, up to {_MOST_WIDTH}, but "
            f"these are {dense.dtype} on {dense.device.type} with head size {width}: leave fused out"
        )


@dataclass(frozen=True)
class QuantizedSegment:
    """A segment of packed codes, for the kernels.

    block: slots that share a scale per channel; 0 for groups of neighbouring channels. unpacked: the same segment with
    unpacked codes, for what the kernels do not support.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    offset: torch.Tensor | None
    bits: int
    block: int
    unpacked: Callable[[], Segment]

    @property
    def slots(self) -> int:
        return self.codes.shape[2]

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        if queries.shape[2] > FEW:
            return self.unpacked().scores(queries)
        result: torch.Tensor = kernels().scores(_described(self), queries)
        return result

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        if weights.shape[2] > FEW:
            return self.unpacked().mixed(weights)
        result: torch.Tensor = kernels().mixed(_described(self), weights, self.codes.shape[-1] * 8 // self.bits)
        return result

    def materialize(self) -> torch.Tensor:
        return self.unpacked().materialize()


def attention(
    queries: torch.Tensor, keys: Iterable[Segment], values: Iterable[Segment], mask: torch.Tensor | None, width: int
) -> torch.Tensor | None:
    """An `Attend` for segments that are `QuantizedSegment` or `DenseSegment`."""
    if queries.shape[2] > FEW:
        return None
    if mask is not None and mask.stride(-1) != 1:
        mask = mask.contiguous()
    described = ([_described(segment) for segment in segments] for segments in (keys, values))
    result: torch.Tensor = kernels().attention(queries, *described, mask, width)
    return result


def _described(segment: Segment) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int, int]:
    """(codes or elements, scale, offset, bits, block): `Segment` of `fused_attention.cpp`."""
    if isinstance(segment, QuantizedSegment):
        return segment.codes, segment.scale, segment.offset, segment.bits, segment.block
    assert isinstance(segment, DenseSegment)
    return segment.tensor, None, None, 32, 0
