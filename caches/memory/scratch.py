"""Memory that the layers of a cache take turns in: only one of them computes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from caches.memory.disk_file import Slab
from caches.memory.prefetch import Staging


class Stage:
    """Scratch tensors by name. A cache has one; a copy of the cache gets an empty one of its own.

    staging: where columns that live elsewhere are while their layer computes. tail: what the tails of forked rows take
    turns in, because they are read together with their trunks. slab: the file of the tensors on disk, if there are any.
    """

    def __init__(self, slab: Slab | None = None) -> None:
        self.slab = slab
        self._scratch: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self.staging = Staging()
        self.tail: Stage | None = None

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor of this shape. What it holds lasts until the name is asked for again."""
        key, size = (name, dtype, device), torch.Size(shape).numel()
        held = self._scratch.get(key)
        if held is None or held.numel() < size:
            with torch.inference_mode(False):
                held = self._scratch[key] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)

    def slab_in(self, folder: str | None) -> Slab:
        """The cache's file in `folder`, which is made for its first tensor on disk."""
        if self.slab is None:
            self.slab = Slab(folder)
        return self.slab

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self._scratch.values()
        yield from self.staging.tensors()
        if self.tail is not None:
            yield from self.tail.tensors()

    def drop_tail(self) -> None:
        """Its stores and what is staged of them know each other: their memory would wait for a garbage collection."""
        if self.tail is not None:
            self.tail.release()
            self.tail = None

    def release(self) -> None:
        """Keep no memory."""
        self._scratch.clear()
        self.staging.clear()
        if self.tail is not None:
            self.tail.release()

    def __getstate__(self) -> dict[str, Any]:
        return {"slab": self.slab, "_scratch": {}, "staging": Staging(), "tail": self.tail}
