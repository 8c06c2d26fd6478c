"""Attention over packed codes, in C++ kernels on a CPU: keys and values of float32, bfloat16 or float16, whose products
are summed in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from caches.attention.rotation import RotatedSegment, rotated_to_read
from caches.attention.segments import DenseSegment, Segment
from caches.errors import StepError
from caches.platform.native import DTYPES, Operators

FEW = 16  # queries: for more of them, unpacking the codes once is faster
_MOST_WIDTH = 512
KERNELS = Operators("fused=True")


def is_supported(dense: torch.Tensor) -> bool:
    """Whether there are kernels for keys or values like `dense` [rows, heads, slots, width]. Meta tensors stand for
    those of a CPU."""
    width = dense.shape[-1]
    is_here = dense.device.type in ("cpu", "meta")
    return dense.dtype in DTYPES and is_here and width % 8 == 0 and width <= _MOST_WIDTH


def check_fused(dense: torch.Tensor) -> None:
    """Raise `StepError` unless there are kernels for keys or values like `dense`."""
    if not is_supported(dense):
        width = dense.shape[-1]
        raise StepError(
            "fused=True needs keys of float32, bfloat16 or float16 on a CPU and a head size that is a multiple of 8, "
            f"up to {_MOST_WIDTH}, but these are {dense.dtype} on {dense.device.type} with head size {width}: leave "
            "fused out"
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
        scores = KERNELS.or_error().scores(queries.float(), *self._described())
        return _without_derivative(scores.to(queries.dtype), queries)

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        if weights.shape[2] > FEW:
            return self.unpacked().mixed(weights)
        width = self.codes.shape[-1] * 8 // self.bits
        output = KERNELS.or_error().mixed(weights.float(), *self._described(), width)
        return _without_derivative(output.to(weights.dtype), weights)

    def materialize(self) -> torch.Tensor:
        return self.unpacked().materialize()

    def _described(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]:
        return self.codes, self.scale, self.offset, self.bits, self.block


def attention(
    queries: torch.Tensor, keys: Iterable[Segment], values: Iterable[Segment], mask: torch.Tensor | None, width: int
) -> torch.Tensor | None:
    """Attention over segments that are `QuantizedSegment`, rotated or not, or `DenseSegment`; None for others, and for
    many queries.

    queries: float32 [rows, KV heads, queries per KV head, width of a key], already scaled. mask: [rows, KV heads, heads
    per KV head, tokens, slots], added to the scores. width: of a value. Returns float32 [rows, KV heads, queries per KV
    head, width].
    """
    if queries.shape[2] > FEW:
        return None
    if mask is not None:
        mask = mask.float()
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    tensors: list[torch.Tensor] = []
    layout: list[int] = []  # for each segment: bits, block, form of the queries, number of tensors
    is_any_rotated = False
    for given in (*keys, *values):
        is_rotated = isinstance(given, RotatedSegment)
        segment = given.segment if isinstance(given, RotatedSegment) else given
        is_any_rotated |= is_rotated
        if isinstance(segment, QuantizedSegment):
            encoded = [tensor for tensor in (segment.codes, segment.scale, segment.offset) if tensor is not None]
            layout += segment.bits, segment.block, is_rotated, len(encoded)
            tensors += encoded
        elif isinstance(segment, DenseSegment):
            layout += 8 * segment.tensor.element_size(), 0, is_rotated, 1
            tensors.append(segment.tensor)
        else:
            return None
    forms = torch.stack((queries, rotated_to_read(queries))) if is_any_rotated else queries[None]
    sums = KERNELS.or_error().attention(forms, tensors, layout, mask, width)
    if is_any_rotated:
        sums = sums[..., :width] + rotated_to_read(sums[..., width:])
    return _without_derivative(sums, queries)


class _WithoutDerivative(torch.autograd.Function):
    """The kernels have none: without this, `backward` would take it for zero."""

    @staticmethod
    def forward(ctx: object, result: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return result.view_as(result)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> object:
        raise StepError(
            "backward() cannot go through attention over codes, which has no derivative: compute derivatives without "
            "a cache (use_cache=False)"
        )


def _without_derivative(result: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    if not (of.requires_grad and torch.is_grad_enabled()):
        return result
    output: torch.Tensor = _WithoutDerivative.apply(result, of)
    return output
