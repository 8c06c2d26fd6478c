"""`PromptReader`: reads a prompt in pieces, for others that want a turn or go on from places in it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from caches import EngineCache, TokenLog
from engine.decoding.feeder import Feeder
from engine.decoding.forward_executor import CollectedOutputs


@dataclass(frozen=True)
class Pause:
    """A place in a prompt where reading pauses, so that others can go on from there.

    columns: those that the cache holds there. then: called with it; it has a log of them, and no step is open.
    """

    columns: int
    then: Callable[[EngineCache], None]


FindPauses: TypeAlias = Callable[[EngineCache], Sequence[Pause]]
"""The pauses in reading a prompt, by the cache that a call begins with."""


class PromptReader:
    """Its pieces are committed one by one. pauses: those of the run that are left, in the order of their columns."""

    def __init__(self, feeder: Feeder, pauses: Iterable[Pause]):
        self._feeder, self.pauses = feeder, deque(pauses)

    def read_to_pauses(self, end: int) -> None:
        """Read the tokens before the last pause before column `end`, unless keys depend on how much is read at once."""
        feeder = self._feeder
        if feeder.executor.why_not_in_pieces(feeder.prefix.columns + end) is None:
            while (pause := self._next_pause()) < end:
                self._read(pause)

    def can_cut(self, tokens: int, max_tokens: int) -> bool:
        """Whether `tokens` more are read in pieces: not where no more than `max_tokens` have to be fed."""
        waiting = self._begin + tokens - self._feeder.cache.total_tokens
        return waiting > max_tokens and self._feeder.executor.reads_in_pieces

    def read_piece(self, end: int, max_tokens: int) -> torch.Tensor:
        """Read a piece of the tokens before column `end`. Returns the rest; more if the cache was emptied."""
        feeder, ids = self._feeder, self._feeder.ids
        waiting = feeder.prefix.columns + end - feeder.cache.total_tokens
        pieces = -(-waiting // max_tokens)
        piece_end = end - waiting + -(-waiting // pieces)  # all of about the same size
        self._read(min(piece_end, self._next_pause()))
        return ids.ids[:, ids.count : end].clone()

    @property
    def _begin(self) -> int:
        """The column of the cache that the next token fed is in."""
        prefix = self._feeder.prefix
        return prefix.columns + (self._feeder.ids.count or prefix.columns_without_ids)

    def _next_pause(self) -> int:
        """How many columns of its own the run has fed at the next pause; more than any run feeds if there is none."""
        fed, cached_columns = self._feeder.ids.count, self._feeder.prefix.columns
        while self.pauses and self.pauses[0].columns < cached_columns + fed:
            self.pauses.popleft()
        return self.pauses[0].columns - cached_columns if self.pauses else sys.maxsize

    def _read(self, end: int) -> None:
        """Feed the tokens before column `end` and commit them."""
        feeder, ids = self._feeder, self._feeder.ids
        feeder.feed(end, ids.count == 0 or feeder.is_empty, CollectedOutputs())
        feeder.cache.commit()
        ids.count = end
        if self._next_pause() > end:
            return
        read_ids, mask, log = ids.ids[:, :end], feeder.executor.columns.mask(end), feeder.cache.log
        feeder.cache.log = feeder.signed(TokenLog(read_ids, torch.ones_like(read_ids) if mask is None else mask))
        try:
            while self._next_pause() == end:
                self.pauses.popleft().then(feeder.cache)
        finally:
            feeder.cache.log = log
