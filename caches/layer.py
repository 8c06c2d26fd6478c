"""One layer of a cache: the streams its spec names, each in a store."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from caches.spec import LayerSpec
from caches.store import GrowingStore
from caches.timeline import Timeline


class Layer:
    """Keys and values of one layer. `timeline` is shared with the other layers of the same reach."""

    supports_early_init = False  # transformers asks: shapes are learned from the first step

    def __init__(self, spec: LayerSpec, timeline: Timeline, store: type[GrowingStore]):
        self.spec = spec
        self.timeline = timeline
        self._keys = store(timeline)
        self._values = store(timeline)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one step's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads."""
        return self._keys.append(keys), self._values.append(values)

    def stores(self) -> Iterator[GrowingStore]:
        if self.spec.keeps_kv:
            yield self._keys
            yield self._values

    @property
    def keys(self) -> torch.Tensor | None:
        """Committed keys [rows, kv_heads, held, head_dim], or None before the first step."""
        return self._keys.committed() if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """Committed values [rows, kv_heads, held, head_dim], or None before the first step."""
        return self._values.committed() if self.is_initialized else None

    @property
    def is_initialized(self) -> bool:
        return self._keys.buffer is not None

    @property
    def is_sliding(self) -> bool:
        return self.spec.reach.size is not None

    def __repr__(self) -> str:
        return f"Layer({self.spec.layer_type}, held={self.timeline.held})"
