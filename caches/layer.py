"""One layer of a cache: the streams its spec names, each in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from caches.errors import UnsupportedLayer
from caches.spec import INDEX, KV, LayerSpec
from caches.store import Store
from caches.timeline import Timeline

_STORES_OF_STREAM = {KV: ("keys", "values"), INDEX: ("index",)}
StoreFactory = Callable[[LayerSpec, Timeline], Store]


class Layer:
    """Keys and values of one layer, the keys of its index, or nothing. Its group shares `timeline`."""

    supports_early_init = False  # transformers asks: shapes are learned from the first step

    def __init__(self, spec: LayerSpec, timeline: Timeline, new_store: StoreFactory):
        self.spec = spec
        self.timeline = timeline
        names = [name for stream, names in _STORES_OF_STREAM.items() if stream in spec.streams for name in names]
        self.stores: dict[str, Store] = {name: new_store(spec, timeline) for name in names}

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one step's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads."""
        if keys.shape[-2] != self.timeline.pending:
            raise UnsupportedLayer(
                f"a {self.spec.layer_type} layer wrote {keys.shape[-2]} columns in a step of {self.timeline.pending} "
                "tokens: this model keeps more than the tokens it is fed. Use cache='none'"
            )
        return self.stores["keys"].append(keys), self.stores["values"].append(values)

    def append_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Add one step's index keys [rows, tokens, index_dim]; returns all that are kept."""
        return self.stores["index"].append(keys[:, None])[:, 0]

    def reserve(self, room: int) -> None:
        for store in self.stores.values():
            store.reserve(room)

    def compact(self) -> None:
        for store in self.stores.values():
            store.compact()

    def settle(self, drop: int) -> None:
        for store in self.stores.values():
            store.settle(drop)

    def abort(self) -> None:
        for store in self.stores.values():
            store.abort()

    def rows(self, index: torch.Tensor) -> None:
        for store in self.stores.values():
            store.rows(index)

    def reset(self) -> None:
        for store in self.stores.values():
            store.reset()

    def mask_sizes(self, tokens: int, unsettled: int = 0) -> tuple[int, int]:
        """See `Timeline.mask_sizes`."""
        return self.timeline.mask_sizes(tokens, unsettled)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything the layer keeps."""
        for store in self.stores.values():
            yield from store.tensors()

    @property
    def keys(self) -> torch.Tensor | None:
        """Committed keys [rows, kv_heads, held, head_dim], or None before the first step."""
        return self.stores["keys"].committed() if "keys" in self.stores else None

    @property
    def values(self) -> torch.Tensor | None:
        """Committed values [rows, kv_heads, held, head_dim], or None before the first step."""
        return self.stores["values"].committed() if "keys" in self.stores else None

    @property
    def is_initialized(self) -> bool:
        return next(self.tensors(), None) is not None

    @property
    def is_sliding(self) -> bool:
        return self.spec.reach.size is not None

    def __repr__(self) -> str:
        return f"Layer({self.spec.layer_type}, held={self.timeline.held})"
