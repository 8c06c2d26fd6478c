"""What attention reads in a step of one token per row, whose tokens are not written yet: a kernel writes them too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class OpenSlots(NamedTuple):
    """Keys and values of one or several caches. The last slot of each row is not written yet.

    keys, values: the segments of all caches one after the other, [rows or prompts, kv_heads, slots, head_dim]. parts:
    of each cache the number of its rows, then of its segments, of which the last is the rows' own.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    parts: list[int]

    @property
    def most(self) -> int:
        """The slots of the longest cache."""
        slots = iter(keys.shape[2] for keys in self.keys)
        return max(sum(next(slots) for _ in range(segments)) for segments in self.parts[1::2])


def joined_slots(caches: Sequence[OpenSlots]) -> OpenSlots:
    """Of several caches, whose rows follow one another."""
    keys = [segment for cache in caches for segment in cache.keys]
    values = [segment for cache in caches for segment in cache.values]
    return OpenSlots(keys, values, [segment for cache in caches for segment in cache.parts])
