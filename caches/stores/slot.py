"""What a store is made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from caches.layers.layer_spec import LayerSpec
from caches.memory.scratch import Scratch
from caches.stores.store import Store
from caches.timeline.timeline import Timeline


@dataclass(frozen=True)
class Slot:
    """The tensor `name` ("keys", "values", "index") of a layer, for which a store is made.

    timeline: its group's. scratch: memory that all layers of the cache share.
    """

    spec: LayerSpec
    name: str
    timeline: Timeline
    scratch: Scratch


StoreFactory = Callable[[Slot], Store]
