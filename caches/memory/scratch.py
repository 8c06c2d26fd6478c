"""Memory that the layers of a cache take turns in: only one of them computes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from caches.memory.disk_file import DiskFile
from caches.memory.prefetch import Prefetcher


class Scratch:
    """Scratch tensors by name. A cache has one; a copy of the cache gets an empty one of its own.

    prefetcher: where columns that live elsewhere are while their layer computes. suffix: what the tails of forked rows
    take turns in, because they are read together with their trunks. disk_file: the file of tensors on disk, if
    there are any.
    """

    def __init__(self, disk_file: DiskFile | None = None) -> None:
        self.disk_file = disk_file
        self._scratch: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self.prefetcher = Prefetcher()
        self.suffix: Scratch | None = None

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor of this shape. What it holds lasts until the name is asked for again."""
        key, size = (name, dtype, device), torch.Size(shape).numel()
        held = self._scratch.get(key)
        if held is None or held.numel() < size:
            with torch.inference_mode(False):
                held = self._scratch[key] = torch.empty(size, dtype=dtype, device=device)
        return held[:size].view(shape)

    def disk_file_in(self, folder: str | None) -> DiskFile:
        """The cache's file in `folder`, which is made for its first tensor on disk."""
        if self.disk_file is None:
            self.disk_file = DiskFile(folder)
        return self.disk_file

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self._scratch.values()
        yield from self.prefetcher.tensors()
        if self.suffix is not None:
            yield from self.suffix.tensors()

    def drop_tail(self) -> None:
        """Its stores and what is staged of them know each other: their memory would wait for a garbage collection."""
        if self.suffix is not None:
            self.suffix.release()
            self.suffix = None

    def release(self) -> None:
        """Keep no memory."""
        self._scratch.clear()
        self.prefetcher.clear()
        if self.suffix is not None:
            self.suffix.release()

    def __getstate__(self) -> dict[str, Any]:
        return {"disk_file": self.disk_file, "_scratch": {}, "prefetcher": Prefetcher(), "suffix": self.suffix}
