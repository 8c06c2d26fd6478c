"""Stores that write new tokens as they are given, in place: a kernel can do that for them.

Other stores change what they are given, or copy it.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from caches.attention.segments import OpenRows
from caches.stores.dense import FixedStore, GrowingStore
from caches.stores.shared_prefix import ForkedStore
from caches.stores.sink import SinkStore
from caches.stores.store import Store
from caches.timeline.timeline import Timeline


def own_memory(store: Store | None) -> GrowingStore | None:
    """The store that shows its own memory, also where sinks are laid over it; None for others."""
    tensor = store.tensor if isinstance(store, SinkStore) else store
    return tensor if isinstance(tensor, GrowingStore) else None


def open_slots(keys: Store, values: Store) -> OpenRows | None:
    """What a layer's attention reads in a step of one token, the last slot of each row not written yet; None where
    `append` does more than write there."""
    if isinstance(keys, ForkedStore) and isinstance(values, ForkedStore):
        prefix, suffix = _segment(keys.prefix, values.prefix, 0), _segment(keys.suffix, values.suffix, 1)
        return None if prefix is None or suffix is None else OpenRows((prefix, suffix))
    segment = _segment(keys, values, 1)
    return None if segment is None else OpenRows((segment,))


def _segment(keys: Store, values: Store, pending: int) -> tuple[torch.Tensor, torch.Tensor, int, int] | None:
    """Their slots, of which so many are not written yet; None where `append` is about to return something else."""
    if not (_is_plain(keys) and _is_plain(values) and keys.timeline is values.timeline):
        return None
    timeline = keys.timeline
    if timeline.pending != pending or timeline.rows is None or timeline.overflow or timeline.graph:
        return None  # attention reads a copy, or all slots
    of_keys, of_values = keys.slots(), values.slots()
    if of_keys is None or of_values is None:
        return None
    return of_keys, of_values, timeline.start, timeline.end + pending


def _is_plain(store: Store) -> TypeGuard[GrowingStore]:
    """Whether store and timeline are of our own classes: those of others may do anything with what they are given."""
    is_own = type(store) in (GrowingStore, FixedStore) and type(store.timeline) is Timeline
    return is_own and "append" not in vars(store)
