"""`Feeder`: feeds a model the tokens of a run that its cache lacks, and goes on where memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers.utils import ModelOutput

from caches import CacheError, EngineCache, TokenLog
from caches.layers.read_by import ReadBy
from caches.platform.out_of_memory import is_of_onednn, is_out_of_memory, without_frames
from caches.platform.torch_api import always_writable
from caches.protocol import capabilities
from caches.transfer.split_rows import SplitCache
from engine.decoding.forward_executor import CollectedOutputs, ForwardExecutor
from engine.errors import EngineError, InputError
from engine.model.columns import Columns, room_for, widened
from engine.model.model_lock import reader_now
from engine.parallel.ranks import OneProcess, PeerError, PeerOutOfMemory
from engine.request.inputs.encoder import largest_matrix_bytes, source_of

_logger = logging.getLogger("engine")


@dataclass(frozen=True)
class SessionOptions:
    """chunk_tokens: see `ForwardOptions`. check: called before every forward; it raises to stop the run. recover:
    called with the feeder and the error, without its frames, when memory is out; it makes room or raises, and the step
    is repeated. ranks: those that run the same session.

    shares_prefixes: whether rows that come from one row share it in the cache, which compiled steps cannot read.
    rolls_back: whether the flow rolls back tokens. make_room: called with the feeder and the number of tokens that are
    about to be fed. compiled: see `ForwardOptions`. read_by: the model as it was when the call began; None for a draft,
    whose caches end with the run.
    """

    chunk_tokens: int | None
    check: Callable[[], None]
    recover: Callable[[Feeder, BaseException], None]
    ranks: OneProcess
    shares_prefixes: bool = False
    rolls_back: bool = False
    make_room: Callable[[Feeder, int], None] | None = None
    compiled: bool = True
    read_by: ReadBy | None = None


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


class Feeder:
    """ids: of the tokens that the executor's model is fed. prefix: the first columns, which are not fed as ids."""

    def __init__(self, executor: ForwardExecutor, ids: FedIds, prefix: CachedPrefix, options: SessionOptions):
        self.executor, self.ids, self.prefix = executor, ids, prefix
        self._options, self._ranks = options, options.ranks
        self.total_before = executor.cache.total_tokens  # before the run
        self._goal = 0  # columns that the cache holds after the current feed; 0 between feeds
        self.expect_cache()

    @property
    def cache(self) -> EngineCache:
        return self.executor.cache

    @property
    def waiting(self) -> int:
        """Tokens of the current feed that the cache does not hold yet."""
        return self._goal - self.cache.total_tokens

    @property
    def is_empty(self) -> bool:
        """Whether the cache holds nothing, so that the next feed begins with the first token."""
        cache = self.executor.cache
        return cache.handle is not None and cache.total_tokens == 0

    def feed(self, end: int, prefill: bool, collected: CollectedOutputs) -> tuple[ModelOutput, torch.Tensor | None]:
        """Feed the tokens before column `end` that the cache does not hold: the last outputs, and the states of all."""
        self._goal = self.prefix.columns + end
        try:
            while True:
                try:
                    with self._ranks.together():
                        cache = self.executor.cache
                        self._ranks.note([cache.total_tokens])
                        cache.finish()
                        if self._options.make_room is not None:
                            self._options.make_room(self, self.waiting)
                        return self.executor.run(self.ids.ids[:, :end], prefill, collected)
                except BaseException as error:
                    if isinstance(error, (PeerError, PeerOutOfMemory)):  # here the step may be complete
                        self.cache.abort()
                    failure = self.failure_of(error, in_step=True)
                    if failure is None:
                        raise
                # Outside of `except`: the error refers to all tensors of the step.
                if capabilities(self.cache).is_lost:
                    self.cache.reset()
                    prefill = True
                self._meet()
                if is_of_onednn(failure) and self.executor.routed:
                    _logger.warning("oneDNN failed: the run goes on with torch's own linear layers")
                    self.executor.routed = False
                else:
                    self.recover(failure)
                self._meet()
                prefill |= self.is_empty
        except BaseException:
            self.count_again()
            raise
        finally:
            self._goal = 0

    def make_room(self, end: int) -> None:
        """Make room for the tokens before column `end`, which another feeds."""
        self._goal = self.prefix.columns + end
        try:
            if self._options.make_room is not None:
                self._options.make_room(self, self.waiting)
            self.executor.reserve(self._goal)
        finally:
            self._goal = 0

    def failure_of(self, error: BaseException, can_repeat: bool = True, in_step: bool = False) -> BaseException | None:
        """The error without its frames, where all ranks can go on from it; None where the run ends with it.

        in_step: whether torch's linear layers may help: oneDNN's errors do not tell whether memory was out.
        """
        # Not without the cached columns, which were not given again.
        can_repeat = can_repeat and (self.prefix.columns == 0 or not capabilities(self.cache).is_lost)
        changes_route = in_step and self.executor.routed and is_of_onednn(error)
        recovers = can_repeat and (changes_route or is_out_of_memory(error, largest_matrix_bytes(self.executor.model)))
        return without_frames(error) if self._ranks.recovers(recovers) else None

    def recover(self, failure: BaseException) -> None:
        """Apply a fallback. Raises `Exhausted` where none is left."""
        self._options.recover(self, failure)
        self.expect_cache()

    def select_in_cache(self, select: Callable[[], None]) -> None:
        """Let the cache select rows; when memory is out in the middle of it, recover and finish."""
        selected = False  # here, but not on another rank
        try:
            while True:
                try:
                    with self._ranks.together():
                        select()
                    return
                except BaseException as error:
                    selected |= isinstance(error, PeerOutOfMemory)
                    failure = self.failure_of(error, selected or self.cache.unfinished)
                    if failure is None:
                        raise
                self.recover(failure)
                select = self.cache.finish
        except BaseException:
            if self.cache.unfinished or selected:  # better an empty cache than one with other rows than the texts
                self.discard_cache()
            raise

    def _meet(self) -> None:
        """After a failure: go back to the tokens that the caches of all ranks hold."""
        if self._ranks.size > 1 and isinstance(self.cache, SplitCache):  # its parts may be ahead on one rank
            self.cache.bring_together()
        while self._ranks.most(tokens := self.cache.total_tokens) > (common := -self._ranks.most(-tokens)):
            if common < self.prefix.columns:
                raise EngineError(f"a rank has lost the {self.prefix.columns} tokens of the cache that was given")
            if tokens > common:
                try:
                    self.cache.crop(common - tokens)
                except CacheError:
                    self.cache.reset()

    def count_again(self) -> None:
        """After an aborted step: of one that took several forwards the first ones are still in the cache."""
        if isinstance(self.cache, SplitCache):
            self.cache.bring_together()
        if self.cache.handle is not None and (self.ids.count > 0 or self.cache.total_tokens != self.total_before):
            self.ids.count = self.cache.total_tokens - self.prefix.columns

    def expect_cache(self) -> None:
        """Note what is in the cache now: before the first token it must not change until `check_cache`."""
        self._expected = self.cache.log, self.cache.total_tokens

    def check_cache(self) -> None:
        log, total = self._expected
        if self.cache.log is not log or self.cache.total_tokens != total:
            raise InputError("the cache has changed between the call and its first token: another run or loop used it")

    def discard_cache(self) -> None:
        """Empty the cache, where its content is not known or memory is out."""
        self.ids.count = 0
        self.cache.reset()

    def signed(self, log: TokenLog) -> TokenLog:
        """A copy of the log of this run's tokens that says who has read them, and how."""
        begin = self._options.read_by
        return replace(
            log.copied(),  # the ids are the result's, whose owner may write into them
            positions=self.executor.columns.own_positions(self.prefix.columns + log.ids.shape[1]),
            source=source_of(self.executor.inputs.model_kwargs),
            read_by=None if begin is None else begin.until(reader_now(self.executor.model)),
        )
