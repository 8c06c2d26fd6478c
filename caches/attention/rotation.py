"""Keys and values that are rotated before they are encoded, so that no channel is far larger than the others.

The rotation is the Hadamard matrix of the largest power of two that divides the size of a head, divided by its square
root, on as many neighbouring channels at a time. It is its own inverse, and products do not change under it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from caches.attention.segments import Segment
from caches.platform.torch_api import always_writable


def rotated(dense: torch.Tensor) -> torch.Tensor:
    """`dense` [..., width], rotated, with the same bits in every batch: what is stored may not depend on other rows.

    Where `width` is odd, it stays as it is.
    """
    size = _size(dense.shape[-1])
    sums = dense.to(torch.promote_types(dense.dtype, torch.float32))
    half = 1
    while half < size:
        first, second = sums.unflatten(-1, (-1, 2, half)).unbind(-2)
        sums = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return (sums * size**-0.5).to(dense.dtype)


def rotated_to_read(dense: torch.Tensor) -> torch.Tensor:
    """`rotated`, by a matrix product: several times as fast, and not the same to the bit."""
    matrix = _matrix(_size(dense.shape[-1]), dense.dtype, dense.device)
    if len(matrix) == dense.shape[-1]:
        return dense @ matrix
    return (dense.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


@dataclass(frozen=True)
class RotatedSegment:
    """Keys or values as they were before they were rotated and became `segment`.

    Products do not rotate it back: queries and sums of values are rotated instead, which are fewer.
    """

    segment: Segment

    @property
    def slots(self) -> int:
        return self.segment.slots

    def scores(self, queries: torch.Tensor) -> torch.Tensor:
        return self.segment.scores(rotated_to_read(queries))

    def mixed(self, weights: torch.Tensor) -> torch.Tensor:
        return rotated_to_read(self.segment.mixed(weights))

    def materialize(self) -> torch.Tensor:
        return rotated_to_read(self.segment.materialize())


def _size(width: int) -> int:
    """Channels that are mixed: the largest power of two that divides `width`."""
    return width & -width


@lru_cache(maxsize=16)
def _matrix(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with always_writable():
        return rotated(torch.eye(size, dtype=dtype, device=device))
