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
        rows = self.rows_of(prefix) if suffix is None else self.rows_of(prefix, suffix)
        return KeyValueView([rows], prefix)

    def rows_of(self, *sources: torch.Tensor | CacheRows) -> CacheRows:
        """The prefix and what comes after it, as what attention reads."""
        prompts, heads, _, width = sources[0].shape
        rows_per_prefix = self.timeline.rows_per_prefix  # as it is now: rows may change before this is read
        return CacheRows(
            (prompts * rows_per_prefix, heads, sum(source.shape[2] for source in sources), width),
            [rows_of(source) if isinstance(source, KeyValueView) else source for source in sources],
            rows_per_prefix=rows_per_prefix,
            on_materialize=self.timeline.note_materialized,
        )

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
