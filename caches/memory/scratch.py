"""Scratch memory that the layers of a cache share, since one layer computes at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from caches.memory.disk_file import DiskFile
from caches.memory.prefetch import Prefetcher
from caches.platform.torch_api import always_writable


class Scratch:
    """Scratch tensors by name. A cache has one `Scratch`; a copy of the cache gets an empty one.

    prefetcher: for offloaded slots. suffix: the scratch of the suffixes of forked rows, which are read together with
    their prefixes. disk_file: the cache's file; None if no tensor is on disk.
    """

    def __init__(self, disk_file: DiskFile | None = None) -> None:
        self.disk_file = disk_file
        self._scratch: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self.prefetcher = Prefetcher()
        self.suffix: Scratch | None = None

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A contiguous tensor of this shape, uninitialized; valid until the next call with the same name."""
        key, size = (name, dtype, device), torch.Size(shape).numel()
        memory = self._scratch.get(key)
        if memory is None or memory.numel() < size:
            with always_writable():
                memory = self._scratch[key] = torch.empty(size, dtype=dtype, device=device)
        return memory[:size].view(shape)

    def disk_file_in(self, folder: str | None) -> DiskFile:
        """The cache's file in `folder`; made in the first call."""
        if self.disk_file is None:
            self.disk_file = DiskFile(folder)
        return self.disk_file

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self._scratch.values()
        yield from self.prefetcher.tensors()
        if self.suffix is not None:
            yield from self.suffix.tensors()

    def release_suffix(self) -> None:
        """Free the suffixes' scratch at once: a reference cycle would keep it until a garbage collection."""
        if self.suffix is not None:
            self.suffix.release()
            self.suffix = None

    def release(self) -> None:
        """Free all memory."""
        self._scratch.clear()
        self.prefetcher.clear()
        if self.suffix is not None:
            self.suffix.release()

    def __getstate__(self) -> dict[str, object]:
        return {"disk_file": self.disk_file, "_scratch": {}, "prefetcher": Prefetcher(), "suffix": self.suffix}
