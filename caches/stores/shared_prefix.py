"""The store of rows that share a prefix: what was committed before they were forked is there once for all of them.

See `ForkedTimeline` for which rows share which prefix. The prefix is the store as it was, which does not change; the
suffix is another of the same recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from caches.attention.kv_view import KeyValueView, rows_of
from caches.attention.segments import CacheRows
from caches.errors import StepError
from caches.memory.buffers import Buffer
from caches.stores.store import Store, check_alike
from caches.timeline.shared_timeline import ForkedTimeline


class ForkedStore:
    """One tensor of one layer, its prefix in one store and its suffix in another. See `Store`."""

    def __init__(self, prefix: Store, suffix: Store, timeline: ForkedTimeline):
        self.prefix, self.suffix, self.timeline = prefix, suffix, timeline
        self.row_holders = prefix, suffix
        self.is_quantized, self.storage_format = prefix.is_quantized, ("forked", prefix.storage_format)
        # A step changes the suffix alone.
        self.add, self.reserve, self.compact = suffix.add, suffix.reserve, suffix.compact
        self.commit, self.abort = suffix.commit, suffix.abort

    def append(self, new: torch.Tensor) -> torch.Tensor:
        prefix = self.prefix.read()
        if prefix is None:
            raise StepError("a layer that had no part in the steps before its rows were forked cannot have one after")
        check_alike((prefix.shape[1], prefix.shape[3]), prefix.dtype, new)
        return self._view(prefix, self.suffix.append(new))

    def read(self) -> torch.Tensor | None:
        prefix = self.prefix.read()
        return None if prefix is None else self._view(prefix, self.suffix.read())

    def committed(self) -> torch.Tensor | None:
        prefix = self.prefix.committed()
        return None if prefix is None else self._view(prefix, self.suffix.committed())

    def _view(self, prefix: torch.Tensor, suffix: torch.Tensor | None) -> KeyValueView:
        return KeyValueView([self.rows_of(prefix, suffix)], prefix)

    def rows_of(self, prefix: torch.Tensor, suffix: torch.Tensor | None) -> CacheRows:
        """Both, as what attention reads."""
        prompts, heads, slots, width = prefix.shape
        sources: tuple[torch.Tensor | CacheRows, ...] = (_source(prefix),)
        if suffix is not None:
            slots += suffix.shape[2]
            sources = *sources, _source(suffix)
        rows_per_prefix, note = self.timeline.rows_per_prefix, self.timeline.note_materialized  # rows may change later
        return CacheRows((prompts * rows_per_prefix, heads, slots, width), sources, None, rows_per_prefix, False, note)

    def merge(self) -> None:
        """Add the suffix to the prefix, of which a step is open that is as long. One row to a prompt."""
        suffix = self.suffix.committed()
        if suffix is not None:
            self.prefix.add(suffix)

    def select_rows(self, index: torch.Tensor) -> None:
        raise StepError("prefix and suffix have other rows: select them in each of the `row_holders`")

    def reset(self) -> None:
        for store in self.row_holders:
            store.reset()

    def release(self) -> None:
        for store in self.row_holders:
            store.release()

    def load_dense(self, dense: torch.Tensor) -> None:
        raise StepError("rows that share a prefix cannot be given other content: reset the cache")

    def state_dict(self) -> dict[str, Any]:
        return {"prefix": self.prefix.state_dict(), "suffix": self.suffix.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, store in (("prefix", self.prefix), ("suffix", self.suffix)):
            if state[name]:
                store.load_state_dict(state[name])

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain(self.prefix.tensors(), self.suffix.tensors())

    def offloaded_buffers(self) -> Iterator[Buffer]:
        return chain(self.prefix.offloaded_buffers(), self.suffix.offloaded_buffers())


def _source(tensor: torch.Tensor) -> torch.Tensor | CacheRows:
    return rows_of(tensor) if isinstance(tensor, KeyValueView) else tensor
