"""Memory that the layers of a cache take turns in: only one of them computes at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class Stage:
    """Scratch tensors by name. A cache has one; a copy of the cache gets an empty one of its own."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[str, torch.device, torch.dtype], torch.Tensor] = {}

    def scratch(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of this shape, in the type and on the device of `like`.

        What it holds lasts until the name is asked for again.
        """
        key, size = (name, like.device, like.dtype), torch.Size(shape).numel()
        held = self._scratch.get(key)
        if held is None or held.numel() < size:
            with torch.inference_mode(False):
                held = self._scratch[key] = like.new_empty(size)
        return held[:size].view(shape)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self._scratch.values()

    def __deepcopy__(self, memo: dict[int, Any]) -> Stage:
        return type(self)()
