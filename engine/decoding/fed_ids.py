"""`FedIds`: the token ids that a session has fed to its model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from caches import TokenLog
from caches.platform.torch_api import always_writable
from engine.errors import EngineError
from engine.model.columns import Columns, room_for, widened


@dataclass(frozen=True)
class CachedPrefix:
    """The first columns of a run. columns: those in the cache that the prompt does not repeat.

    columns_without_ids: those fed next as embeddings, or as `ids` [rows, columns_without_ids] that no flow feeds.
    """

    columns: int = 0
    columns_without_ids: int = 0
    ids: torch.Tensor | None = None


class FedIds:
    """ids: [rows, columns] after the cached columns, written in place. count: columns fed, with or without ids."""

    def __init__(self, columns: Columns, prefix: CachedPrefix):
        self.count, self._prefix = 0, prefix
        self._most = columns.total - prefix.columns
        room = room_for(columns.prompt - prefix.columns, self._most)
        with always_writable():
            self.ids = torch.zeros(columns.rows, room, dtype=torch.long, device=columns.device)
        if prefix.ids is not None:
            self.ids[:, : prefix.columns_without_ids] = prefix.ids

    def wider(self, columns: int) -> torch.Tensor:
        """A copy of `ids` with room for `columns`. Raises `EngineError` beyond the last column of the run."""
        if columns > self._most:
            tokens = columns - (self.count or self._prefix.columns_without_ids)
            raise EngineError(
                f"the strategy feeds {tokens} tokens after {self.count}, but this run ends after "
                f"{self._most}: it may not look further ahead than max_new_tokens"
            )
        return widened(self.ids, room_for(columns, self._most, self.ids.shape[1]))

    def agreed(self, log: TokenLog) -> int:
        """How many of the columns fed are those of `log`, where padding agrees with any token."""
        without_ids = self._prefix.columns_without_ids
        ids = self.ids[:, without_ids : self.count]
        columns = min(ids.shape[1], log.ids.shape[1])
        agrees = (ids[:, :columns] == log.ids[:, :columns]) | (log.mask[:, :columns] == 0)
        return without_ids + int(agrees.all(dim=0).long().cumprod(dim=0).sum())
