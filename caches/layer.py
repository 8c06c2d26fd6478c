"""One layer of a cache: the streams its spec names, each in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from caches.spec import LayerSpec
from caches.store import Store
from caches.timeline import Timeline

StoreFactory = Callable[[LayerSpec, Timeline], Store]


class Layer:
    """Keys and values of one layer, or nothing. `timeline` is shared with the other layers of its group."""

    supports_early_init = False  # transformers asks: shapes are learned from the first step

    def __init__(self, spec: LayerSpec, timeline: Timeline, new_store: StoreFactory):
        self.spec = spec
        self.timeline = timeline
        names = ("keys", "values") if spec.keeps_kv else ()
        self.stores: dict[str, Store] = {name: new_store(spec, timeline) for name in names}

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one step's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads."""
        return self.stores["keys"].append(keys), self.stores["values"].append(values)

    def settle(self, drop: int) -> None:
        for store in self.stores.values():
            store.settle(drop)

    def abort(self) -> None:
        for store in self.stores.values():
            store.abort()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything the layer keeps."""
        for store in self.stores.values():
            yield from store.tensors()

    @property
    def keys(self) -> torch.Tensor | None:
        """Committed keys [rows, kv_heads, held, head_dim], or None before the first step."""
        return self.stores["keys"].committed() if self.stores else None

    @property
    def values(self) -> torch.Tensor | None:
        """Committed values [rows, kv_heads, held, head_dim], or None before the first step."""
        return self.stores["values"].committed() if self.stores else None

    @property
    def is_initialized(self) -> bool:
        return next(self.tensors(), None) is not None

    @property
    def is_sliding(self) -> bool:
        return self.spec.reach.size is not None

    def __repr__(self) -> str:
        return f"Layer({self.spec.layer_type}, held={self.timeline.held})"
