"""Stores that write new tokens as they are given, in place: a kernel can do that for them.

Other stores change what they are given, or copy it.
"""

from __future__ import annotations

import torch

from caches.attention.open_slots import OpenSlots
from caches.stores.dense import FixedStore, GrowingStore
from caches.stores.shared_prefix import ForkedStore
from caches.stores.sink import SinkStore
from caches.stores.store import Store
from caches.timeline.timeline import Timeline


def own_memory(store: Store | None) -> GrowingStore | None:
    """The store that shows its own memory, also where sinks are laid over it; None for others."""
    tensor = store.tensor if isinstance(store, SinkStore) else store
    return tensor if isinstance(tensor, GrowingStore) else None


def open_slots(keys: Store, values: Store) -> OpenSlots | None:
    """Those of the stores of a layer, in a step of one token; None where their `append` does more than write there."""
    of_keys, of_values = _segments(keys), _segments(values)
    if of_keys is None or of_values is None:
        return None
    return OpenSlots(of_keys, of_values, [of_keys[-1].shape[0], len(of_keys)])


def _segments(store: Store) -> list[torch.Tensor] | None:
    """What `append` is about to return, in segments."""
    if isinstance(store, ForkedStore):
        prefix = store.prefix.read() if _is_plain(store.prefix) else None
        return None if prefix is None or (suffix := _segments(store.suffix)) is None else [prefix, *suffix]
    slots = store.open_slots() if isinstance(store, GrowingStore) and _is_plain(store) else None
    return None if slots is None else [slots]


def _is_plain(store: Store) -> bool:
    """Whether store and timeline are of our own classes: those of others may do anything with what they are given."""
    is_own = type(store) in (GrowingStore, FixedStore) and type(store.timeline) is Timeline
    return is_own and "append" not in vars(store)
