"""Stores that write new tokens as they are given, in place: a kernel can do that for them.

Other stores change what they are given, or copy it.
"""

from __future__ import annotations

import torch

from caches.attention.segments import CacheRows, KeysAndValues
from caches.stores.dense import FixedStore, GrowingStore
from caches.stores.shared_prefix import ForkedStore
from caches.stores.sink import SinkStore
from caches.stores.store import Store
from caches.timeline.timeline import Timeline


def own_memory(store: Store | None) -> GrowingStore | None:
    """The store that shows its own memory, also where sinks are laid over it; None for others."""
    tensor = store.tensor if isinstance(store, SinkStore) else store
    return tensor if isinstance(tensor, GrowingStore) else None


def open_slots(keys: Store, values: Store) -> KeysAndValues | None:
    """What a layer's attention reads in a step of one token, the last slot of each row not written yet; None where
    `append` does more than write there."""
    of_keys, of_values = _rows(keys), _rows(values)
    return None if of_keys is None or of_values is None else ([of_keys], [of_values])


def _rows(store: Store) -> CacheRows | None:
    """What `append` is about to return."""
    if not isinstance(store, ForkedStore):
        slots = _slots(store)
        return None if slots is None else CacheRows.of_tensor(slots)
    prefix, suffix = store.prefix.read() if _is_plain(store.prefix) else None, _slots(store.suffix)
    return None if prefix is None or suffix is None else store.rows_of(prefix, suffix)


def _slots(store: Store) -> torch.Tensor | None:
    return store.open_slots() if isinstance(store, GrowingStore) and _is_plain(store) else None


def _is_plain(store: Store) -> bool:
    """Whether store and timeline are of our own classes: those of others may do anything with what they are given."""
    is_own = type(store) in (GrowingStore, FixedStore) and type(store.timeline) is Timeline
    return is_own and "append" not in vars(store)
