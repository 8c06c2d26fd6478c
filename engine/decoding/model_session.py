"""`ModelSession`: the state of one model during a run: its cache, the ids it was fed, and the open step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
from transformers.utils import ModelOutput

from caches import CacheError, EngineCache, TokenLog
from caches.hf.adapter import may_be_lost
from caches.platform.out_of_memory import is_of_onednn, is_out_of_memory, recovering, without_frames
from caches.platform.torch_api import always_writable
from caches.protocol import KeepsPast, capabilities
from caches.transfer.split_rows import SplitCache
from engine.decoding.collected_outputs import CollectedOutputs, last_hidden
from engine.decoding.fed_ids import CachedPrefix, FedIds
from engine.decoding.forward_executor import ForwardExecutor
from engine.decoding.pauses import Pauses
from engine.decoding.session_options import SessionOptions
from engine.errors import EngineError, InputError
from engine.model.columns import Columns
from engine.model.model_inputs import ModelInputs
from engine.model.model_lock import reader_now
from engine.model.model_runner import ModelRunner
from engine.parallel.ranks import PeerError, PeerOutOfMemory
from engine.prompt import ENCODED
from engine.request.inputs.encoder import largest_matrix_bytes, source_of
from strategies import repeat_rows_index

T = TypeVar("T")
_logger = logging.getLogger("engine")


class ModelSession:
    """columns: all of the run. prefix: the first of them, which are not fed as ids."""

    def __init__(
        self,
        runner: ModelRunner,
        cache: EngineCache,
        columns: Columns,
        inputs: ModelInputs,
        prefix: CachedPrefix,
        options: SessionOptions,
    ):
        cached_columns = prefix.columns
        settings = options.chunk_tokens, options.check, options.compiled
        self.executor = ForwardExecutor(runner, cache, columns, inputs, cached_columns, *settings)
        self._prefix, self._options, self._ranks = prefix, options, options.ranks
        self._ids, self._pauses = FedIds(columns, prefix), Pauses(options.pauses, cached_columns)
        self._log_before, self._total_before = cache.log, cache.total_tokens
        self._expected = cache.log, cache.total_tokens  # of the cache, until the first token is fed
        self._step_open = self._prefilled = False
        self._open_tokens = 0  # of the open step
        # The project's own caches keep what leaves a window until the step is committed in any case.
        self._keeps_past = cache if options.rolls_back and isinstance(cache, KeepsPast) else None
        self._goal = 0  # columns that the cache holds after the current feed; 0 between feeds
        self._selecting_rows = False  # while True, rows of the cache and of the ids may differ

    @property
    def cache(self) -> EngineCache:
        return self.executor.cache

    @property
    def fed(self) -> int:
        """Columns given to the model in this run, those of the open step included."""
        return self._ids.count

    def forward(
        self,
        tokens: torch.Tensor,
        hidden: bool = False,
        all_logits: bool = False,
        computed: ModelOutput | None = None,
    ) -> tuple[ModelOutput, torch.Tensor | None]:
        """Feed `tokens` [rows, n] after those fed before; the step stays open until `commit`.

        hidden: whether the last hidden states of all columns fed [rows, n, width] are returned too. all_logits: whether
        the outputs end with the logits after each of the tokens, not after the last alone. computed: the outputs, where
        a joined step has computed them after `prepare` and left the cache's step open.
        """
        ids = self._ids
        end = self._write(tokens) if computed is None else ids.count + tokens.shape[1]
        can_pause = self._pauses and not (hidden or all_logits)
        if can_pause and self.executor.why_not_in_pieces(self._prefix.columns + end) is None:
            while (pause := self._pauses.next_after(ids.count)) < end:
                self._read(pause)
        columns = end - ids.count
        prefilled = ids.count > 0 and not self.is_empty  # before this step
        if computed is None:
            collected = CollectedOutputs(hidden, tokens.shape[1] if all_logits else 1)
            outputs, states = self._feed(end, not prefilled, collected)
        else:
            outputs, states = computed, last_hidden(computed) if hidden else None
        ids.count, self._open_tokens, self._step_open, self._prefilled = end, columns, True, prefilled
        return outputs, None if states is None else states[:, -columns:]

    def _write(self, tokens: torch.Tensor) -> int:
        """Note `tokens` [rows, n], which are fed next: the column after the last of them."""
        self.commit()
        cache, ids = self.cache, self._ids
        log, total = self._expected
        if ids.count == 0 and (cache.log is not log or cache.total_tokens != total):
            raise InputError("the cache has changed between the call and its first token: another run or loop used it")
        if self._keeps_past is not None:
            self._keeps_past.keep_past(True)
        begin = ids.count or self._prefix.columns_without_ids
        end = begin + tokens.shape[1]
        if end > ids.ids.shape[1]:
            ids.ids = self.attempt(lambda: ids.wider(end))
        ids.ids[:, begin:end] = tokens
        return end

    @property
    def is_empty(self) -> bool:
        """Whether the cache holds nothing, so that the next feed begins with the first token."""
        return self.cache.handle is not None and self.cache.total_tokens == 0

    # Together with other sessions: see `engine.serving`.

    @property
    def why_alone(self) -> str | None:
        """Why its next step cannot be computed together with those of other sessions; None where it can."""
        if self._prefix.columns_without_ids:
            return "its prompt begins with embeddings"
        if self.is_empty and not self._step_open:
            return "its cache was emptied, so all tokens are read again"
        return self.executor.why_alone(self._prefix.columns + self._ids.count + 1)

    def prepare(self, tokens: torch.Tensor) -> torch.Tensor:
        """Before a joined step: commit the open step and make room for `tokens` [rows, 1]. Returns what is fed."""
        end = self._write(tokens)
        self._goal = self._prefix.columns + end
        try:
            if self._options.make_room is not None:
                self._options.make_room(self, self.waiting)
            self.executor.reserve(self._goal)
        finally:
            self._goal = 0
        return tokens

    def abort_joined(self) -> None:
        """Undo a joined step that this rank or another one could not complete. What was open before it stays open."""
        if not self._step_open:  # else it was not prepared
            self.cache.abort()

    def read_piece(self, tokens: torch.Tensor, max_tokens: int) -> torch.Tensor | None:
        """Feed at most `max_tokens` of `tokens` [rows, n] and commit. Returns the rest; more if the cache was emptied.

        None, with nothing done, where no more than `max_tokens` would have to be fed: they are for `forward`.
        """
        begin = self._prefix.columns + (self._ids.count or self._prefix.columns_without_ids)
        waiting = begin + tokens.shape[1] - self.cache.total_tokens
        if waiting <= max_tokens or not self.executor.reads_in_pieces:
            return None
        pieces, last_column = -(-waiting // max_tokens), self._write(tokens)
        end = last_column - waiting + -(-waiting // pieces)  # all of about the same size
        self._read(min(end, self._pauses.next_after(self._ids.count)))
        return self._ids.ids[:, self._ids.count : last_column].clone()

    def _read(self, end: int) -> None:
        """Feed the tokens before column `end`, which `_write` has noted, and commit them."""
        self._feed(end, self._ids.count == 0 or self.is_empty, CollectedOutputs())
        self.cache.commit()
        self._ids.count, self._prefilled = end, True
        if self._pauses.next_after(end) > end:
            return
        ids, mask, log = self._ids.ids[:, :end], self.executor.columns.mask(end), self.cache.log
        self.cache.log = self._signed(TokenLog(ids, torch.ones_like(ids) if mask is None else mask))
        try:
            while self._pauses.next_after(end) == end:
                self._pauses.pop().then(self.cache)
        finally:
            self.cache.log = log

    def park(self) -> None:
        """Free the memory of the cache until the next forward: it is read again then, or has moved off the device."""
        self.commit()
        if self._prefix.columns == 0 and self.executor.reads_again:
            self.executor.empty()
        else:
            self.executor.offload()
        self._expect_cache()

    def _expect_cache(self) -> None:
        """Note what this session has left in the cache: before the first token it must not change in between."""
        self._expected = self.cache.log, self.cache.total_tokens

    def _feed(self, end: int, prefill: bool, collected: CollectedOutputs) -> tuple[ModelOutput, torch.Tensor | None]:
        """Feed the tokens before column `end` that the cache does not hold: the last outputs, and the states of all."""
        self._goal = self._prefix.columns + end
        try:
            while True:
                try:
                    with self._ranks.together():
                        cache = self.cache
                        self._ranks.note([cache.total_tokens])
                        cache.finish()
                        if self._options.make_room is not None:
                            self._options.make_room(self, self.waiting)
                        return self.executor.run(self._ids.ids[:, :end], prefill, collected)
                except BaseException as error:
                    if isinstance(error, (PeerError, PeerOutOfMemory)):  # here the step may be complete
                        self.cache.abort()
                    changes_route = self._can_change_route(error)
                    failure = None if changes_route else self._out_of_memory(error)
                    if not self._ranks.recovers(failure is not None or changes_route):
                        raise
                # Outside of `except`: the error refers to all tensors of the step.
                if capabilities(self.cache).is_lost:
                    self.cache.reset()
                    prefill = True
                self._meet()
                if failure is None:
                    _logger.warning("oneDNN failed: the run goes on with torch's own linear layers")
                    self.executor.routed = False
                else:
                    self._recover(failure)
                self._meet()
                prefill |= self.is_empty
        except BaseException:
            self._count_again()
            raise
        finally:
            self._goal = 0

    def _meet(self) -> None:
        """After a failure: go back to the tokens that the caches of all ranks hold."""
        if self._ranks.size > 1 and isinstance(self.cache, SplitCache):  # its parts may be ahead on one rank
            self.cache.bring_together()
        while self._ranks.most(tokens := self.cache.total_tokens) > (common := -self._ranks.most(-tokens)):
            if common < self._prefix.columns:
                raise EngineError(f"a rank has lost the {self._prefix.columns} tokens of the cache that was given")
            if tokens > common:
                try:
                    self.cache.crop(common - tokens)
                except CacheError:
                    self.cache.reset()

    @property
    def waiting(self) -> int:
        """Tokens of the current feed that the cache does not hold yet."""
        return self._goal - self.cache.total_tokens

    def _count_again(self) -> None:
        """After an aborted step: of one that took several forwards the first ones are still in the cache."""
        if isinstance(self.cache, SplitCache):
            self.cache.bring_together()
        if self.cache.handle is not None and (self._ids.count > 0 or self.cache.total_tokens != self._total_before):
            self._ids.count = self.cache.total_tokens - self._prefix.columns

    # When memory is out.

    def attempt(self, work: Callable[[], T], repeats: Callable[[], bool] = lambda: True) -> T:
        """`work()`, repeated after each fallback when memory is out. repeats: whether it can be. Raises `Exhausted`."""
        done: list[T] = []  # on a rank where it went well it is not repeated
        while True:
            try:
                with self._ranks.together():
                    if not done:
                        done.append(work())
                return done[0]
            except BaseException as error:
                failure = self._out_of_memory(error) if done or repeats() else None
                if not self._ranks.recovers(failure is not None):
                    raise
            assert failure is not None
            self._recover_between_steps(failure)

    def _recover_between_steps(self, failure: BaseException) -> None:
        fed, rolls_back = self._ids.count, self._options.rolls_back
        reads_again = self._step_open and rolls_back and self.cache.handle is not None
        if reads_again:  # the step has to be open afterwards: a part of it may be rolled back
            self._step_open = False
            self.cache.abort()
            self._count_again()
        elif not rolls_back:
            self.commit()
        self._recover(failure)
        if reads_again:
            self._feed(fed, not self._prefilled, CollectedOutputs())
            self._ids.count, self._step_open = fed, True

    def _can_change_route(self, error: BaseException) -> bool:
        """Whether to repeat the step with torch's linear layers: oneDNN's errors do not tell whether memory was out."""
        return self._can_repeat and self.executor.routed and is_of_onednn(error)

    def _out_of_memory(self, error: BaseException) -> BaseException | None:
        """The error without its frames, if the run can recover from it."""
        is_one = self._can_repeat and is_out_of_memory(error, largest_matrix_bytes(self.executor.model))
        return without_frames(error) if is_one else None

    @property
    def _can_repeat(self) -> bool:
        """Whether a step can be repeated: not without the cached columns, which were not given again."""
        return self._prefix.columns == 0 or not capabilities(self.cache).is_lost

    def _recover(self, failure: BaseException) -> None:
        self._options.recover(self, failure)
        self._expect_cache()

    def commit(self, rejected: int = 0) -> None:
        """Commit the open step, if there is one, without its last `rejected` tokens."""
        if not self._step_open:
            if rejected:
                raise EngineError(f"Crop({rejected}) has to follow a Forward")
            return
        fed = self._ids.count - rejected
        if not rejected or (rejected <= self._pending and self.cache.can_reject(rejected)):
            self.cache.commit(rejected)
        else:
            self._read_again(fed)
        self._step_open, self._ids.count = False, fed

    def go_back(self, fed: int) -> None:
        """Discard all columns after the first `fed`."""
        if self._step_open:
            self._abort_step()
        self._roll_back(max(0, self._ids.count - max(fed, self._total_before - self._prefix.columns)))

    def crop(self, tokens: int) -> None:
        """Roll back the last `tokens` tokens, which any number of steps may have fed."""
        if self._step_open and tokens <= self._open_tokens:
            self.commit(rejected=tokens)
        else:
            self.commit()
            self._roll_back(tokens)

    @property
    def _pending(self) -> int:
        """Tokens of the cache's open step: those of the last forward, if the feed took several."""
        total = max(cache.total_tokens for _, cache in self.executor.parts)
        return self._prefix.columns + self._ids.count - total

    def _abort_step(self) -> None:
        self._ids.count -= self._pending
        self.cache.abort()
        self._step_open = False

    def _read_again(self, fed: int) -> None:
        """Bring a cache that can only roll back whole steps to the first `fed` columns."""
        prefill, cached_columns = not self._prefilled, self._prefix.columns
        self.cache.abort()
        self._step_open = False
        self._count_again()
        if self.cache.total_tokens > cached_columns + fed:  # several steps fed them
            with suppress(CacheError):
                self.cache.crop(cached_columns + fed)
        if self.cache.total_tokens > cached_columns + fed:
            if cached_columns > 0:
                raise EngineError(
                    f"the {self.cache.name} cache cannot go back to {cached_columns + fed} tokens, and the first "
                    f"{cached_columns} of them were not given to be read again: give the whole conversation"
                )
            self.cache.reset()
            prefill = True
        if cached_columns + fed > self.cache.total_tokens or self.cache.handle is None:
            self._feed(fed, prefill, CollectedOutputs())
            self.cache.commit()

    def _roll_back(self, tokens: int) -> None:
        """Discard the last `tokens` committed tokens, or all where the cache can do no less: they are read again."""
        if tokens == 0:
            return
        try:
            self.cache.crop(-tokens)
        except CacheError:
            self.cache.reset()
        self._ids.count = max(0, self._ids.count - tokens)

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]`, an index on the CPU, in everything that is kept per row."""
        if self._selecting_rows:  # the last selection was interrupted: the run ends, and nothing more is fed
            self.discard_cache()
            return
        self.commit()
        if self.cache.handle is None and ENCODED in self.executor.inputs.model_kwargs:
            raise EngineError("rows of a prompt with images cannot change places without a cache: use cache='dynamic'")
        # What may fail comes first and changes nothing; then the cache, the only large part.
        on_device, log, rows = index.to(self._ids.ids.device), self._log_before, len(self._ids.ids)
        with always_writable():
            ids, select = self._ids.ids[on_device], self.executor.row_selection(index)
        log = log.select_rows(on_device) if select is not None and log is not None else log
        times = len(index) // rows
        self._selecting_rows = True
        self.executor.discard_order()
        try:
            if self._options.shares_prefixes and times > 1 and torch.equal(index, repeat_rows_index(rows, times)):
                self._select_in_cache(lambda: self.cache.fork(times))
            else:
                self._select_in_cache(lambda: self.cache.select_rows(index))
        except Exception:  # the cache is unchanged, or empty; not so after Ctrl-C
            self._selecting_rows = False
            raise
        self._ids.ids, self._log_before = ids, log
        if select is not None:
            select()
        self._selecting_rows = False

    def _select_in_cache(self, select: Callable[[], None]) -> None:
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
                    failure = self._out_of_memory(error)
                    if not self._ranks.recovers(failure is not None and (selected or self.cache.unfinished)):
                        raise
                assert failure is not None
                self._recover(failure)
                select = self.cache.finish
        except BaseException:
            if self.cache.unfinished or selected:  # better an empty cache than one with other rows than the texts
                self.discard_cache()
            raise

    def close(self, log: TokenLog) -> None:
        """End with a cache that another call can continue: it holds the first columns of `log`, the run's tokens."""
        if self._ids.count > 0 or self._selecting_rows:
            with recovering() as outcome:
                self._leave(log)
            if outcome.failure is not None:
                self.discard_cache()  # better no cache than no text
        self.end()

    def end(self) -> None:
        """Join the parts of a split cache, and stop keeping what has left a window."""
        split = self.cache
        if isinstance(split, SplitCache):
            with recovering(CacheError) as outcome:
                self.executor.cache = split.joined()
                self.cache.log = split.log
            if (reason := outcome.failure) is not None:
                _logger.warning("the result has no cache, because its parts could not be put together: %s", reason)
                split.give_up()
        if self._keeps_past is not None:
            self._keeps_past.keep_past(False)

    def _leave(self, log: TokenLog) -> None:
        if self._selecting_rows or len(self._ids.ids) != len(log.ids):  # interrupted before the texts selected rows too
            self.discard_cache()
            return
        without_ids, cached_columns = self._prefix.columns_without_ids, self._prefix.columns
        columns = without_ids + log.ids.shape[1]
        agreed = min(self._ids.agreed(log), columns - 1)
        fed_too_far = max(0, self._ids.count - agreed)
        if not self._step_open:
            self._roll_back(fed_too_far)
        elif fed_too_far <= self._open_tokens and self.cache.can_reject(fed_too_far):
            self.commit(rejected=fed_too_far)
        elif may_be_lost(self.cache):  # it keeps the tokens that it cannot roll back
            self.commit()
            if self._ids.agreed(log) < self._ids.count:  # one of them is not in the text
                self.cache.log = None
                return
        else:
            self._abort_step()
            self._roll_back(max(0, self._ids.count - agreed))
        if without_ids > 0:
            self.cache.log = None
            return
        log = self._signed(log)
        if cached_columns == 0:
            self.cache.log = log
        elif self._log_before is not None:
            self.cache.log = self._log_before.first(cached_columns).then(log)

    def _signed(self, log: TokenLog) -> TokenLog:
        """A copy of the log of this run's tokens that says who has read them, and how."""
        begin = self._options.read_by
        return replace(
            log.copied(),  # the ids are the result's, whose owner may write into them
            positions=self.executor.columns.own_positions(self._prefix.columns + log.ids.shape[1]),
            source=source_of(self.executor.inputs.model_kwargs),
            read_by=None if begin is None else begin.until(reader_now(self.executor.model)),
        )

    def discard_cache(self) -> None:
        """Empty the cache, where its content is not known or memory is out."""
        self._ids.count = 0
        self.cache.reset()
