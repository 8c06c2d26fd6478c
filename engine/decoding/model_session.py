"""One model's side of a run: its cache, the mask and positions of its columns, and what it was fed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from transformers.utils import ModelOutput

from caches import CacheError, EngineCache, TokenLog
from caches.hf.adapter import may_be_lost
from caches.out_of_memory import is_of_onednn, is_out_of_memory
from caches.protocol import capabilities
from caches.transfer.split_rows import SplitCache
from engine.decoding.collected_outputs import CollectedOutputs
from engine.decoding.forward_executor import ForwardExecutor
from engine.errors import EngineError, InputError
from engine.model.forward import ModelRunner
from engine.model.growing_columns import room_for, widened
from engine.model.masks import Columns
from engine.out_of_memory import without_frames
from engine.request.encoder import source_of
from engine.request.model_kwargs import ENCODED
from strategies import repeat_rows_index

T = TypeVar("T")
_logger = logging.getLogger("engine")


class ModelSession:
    """columns: all of the run. before: how many of them the cache holds of tokens that are not given again.

    embeds: those of the prompt's columns after `before`, None when ids are fed. columns_without_ids: how many of them
    have no id. model_kwargs: further model inputs. flags: output_attentions and the like. chunk_tokens, check: see
    `ModelRunner.feed`. shares: whether rows that come from one row may share in the cache what they have in common; a
    graph cannot read that. beginning: the ids of the columns that are not named, where they are known. takes_back:
    whether tokens will be taken back for sure. recover: called with this session and the error, which has no frames any
    more, when memory is out; the session then goes on where it stands. make_room: called with this session and how many
    tokens are about to be fed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: EngineCache,
        columns: Columns,
        *,
        rows: int,
        before: int,
        embeds: torch.Tensor | None,
        columns_without_ids: int,
        model_kwargs: dict[str, Any],
        flags: dict[str, bool],
        chunk_tokens: int | None,
        shares: bool,
        beginning: torch.Tensor | None = None,
        takes_back: bool = False,
        check: Callable[[], None] | None = None,
        recover: Callable[[ModelSession, BaseException], None] | None = None,
        make_room: Callable[[ModelSession, int], None] | None = None,
    ):
        self.executor = ForwardExecutor(
            runner,
            cache,
            columns,
            rows=rows,
            before=before,
            embeds=embeds,
            model_kwargs=model_kwargs,
            flags=flags,
            chunk_tokens=chunk_tokens,
            check=check,
        )
        self._recover, self._make_room, self._takes_back = recover, make_room, takes_back
        self._shares, self._before, self._unnamed = shares, before, columns_without_ids
        # The tokens fed are written in place: a step copies no history.
        self._most = columns.total - before
        room = room_for(columns.prompt - before, self._most)
        self._ids = torch.zeros(rows, room, dtype=torch.long, device=columns.device)
        if beginning is not None:
            self._ids[:, :columns_without_ids] = beginning
        self.fed = 0  # tokens given to the model in this run, those of the open step included
        self._log_before, self._seen_before = cache.log, cache.total_tokens
        self._step_open = self._prefilled = False
        self._open = 0  # tokens of the open step
        # Our own caches keep what leaves a window until the step is settled, whatever comes.
        self._keeping = cache if takes_back and may_be_lost(cache) else None
        self._goal = 0  # columns that the cache will have seen after what is being fed; 0 while nothing is
        self._choosing = False  # rows: what the cache holds may be of other rows than the ids

    @property
    def cache(self) -> EngineCache:
        return self.executor.cache

    @cache.setter
    def cache(self, cache: EngineCache) -> None:
        self.executor.cache = cache

    @property
    def linears(self) -> str:
        """See `Stats`."""
        return self.executor.linears

    def forward(
        self, tokens: torch.Tensor, hidden: bool = False, every: bool = False
    ) -> tuple[ModelOutput, torch.Tensor | None]:
        """Feed `tokens` [rows, n] that come after what was fed; the step stays open until `commit`.

        hidden: whether the last hidden states of all columns fed [rows, n, width] are wanted too. every: whether the
        outputs end with the logits after each of the tokens, not after the last alone.
        """
        self.commit()
        if self.fed == 0 and (self.cache.log is not self._log_before or self.cache.total_tokens != self._seen_before):
            raise InputError("the cache has changed between the call and its first token: another run or loop used it")
        if self._keeping is not None:
            self._keeping.keep_past(True)
        begin = self.fed or self._unnamed
        fed = begin + tokens.shape[1]
        if fed > self._most:
            raise EngineError(
                f"the strategy feeds {tokens.shape[1]} tokens after {self.fed}, but this run ends after "
                f"{self._most}: it may not look further ahead than max_new_tokens"
            )
        if fed > self._ids.shape[1]:
            room = room_for(fed, self._most, self._ids.shape[1])
            self._ids = self.attempt(lambda: widened(self._ids, room))
        self._ids[:, begin:fed] = tokens
        emptied = self.cache.handle is not None and self.cache.total_tokens == 0
        prefill, columns = self.fed == 0 or emptied, fed - self.fed
        prefilled = self.fed > 0 and not emptied  # before this step
        outputs, states = self._feed(fed, prefill, CollectedOutputs(hidden, tokens.shape[1] if every else 1))
        self.fed, self._open, self._step_open, self._prefilled = fed, columns, True, prefilled
        return outputs, None if states is None else states[:, -columns:]

    def _feed(self, fed: int, prefill: bool, gathered: CollectedOutputs) -> tuple[ModelOutput, torch.Tensor | None]:
        """Feed what the cache has not seen of the first `fed` tokens: the last outputs, and the states of all."""
        self._goal = self._before + fed
        try:
            while True:
                try:
                    self.cache.finish()
                    if self._make_room is not None:
                        self._make_room(self, self.waiting)
                    return self.executor.computed(self._ids[:, :fed], prefill, gathered)
                except BaseException as error:
                    changes_route = self._can_change_route(error)
                    failure = None if changes_route else self._out_of_memory(error)
                    if failure is None and not changes_route:
                        raise
                # Outside of `except`: the error holds on to all that the step had made.
                if self._has_lost_the_cache:
                    self.cache.reset()
                    prefill = True
                if failure is None:
                    _logger.warning("oneDNN failed: the run goes on with torch's own linear layers")
                    self.executor.routes = False
                else:
                    self._go_on_after(failure)
        except BaseException:
            self._count_again()
            raise
        finally:
            self._goal = 0

    def _can_change_route(self, error: BaseException) -> bool:
        """Whether the step can be tried again with torch's own linear layers.

        oneDNN rearranges whole matrices in memory of its own, and does not say whether that was the reason.
        """
        lost = self._has_lost_the_cache and self._before > 0
        return self._recover is not None and self.executor.routes and is_of_onednn(error) and not lost

    def attempt(self, work: Callable[[], T], repeats: Callable[[], bool] = lambda: True) -> T:
        """`work()`, a computation between two forwards; once more after every fallback taken when memory is out in it.

        repeats: whether it can still be done once more after it has failed. Raises `Exhausted`.
        """
        while True:
            try:
                return work()
            except BaseException as error:
                failure = self._out_of_memory(error) if repeats() else None
                if failure is None:
                    raise
            self._recover_between_steps(failure)

    def _recover_between_steps(self, failure: BaseException) -> None:
        fed, reads_again = self.fed, self._step_open and self._takes_back and self.cache.handle is not None
        if reads_again:  # a step that may be taken back in part has to be open afterwards
            self._step_open = False
            self.cache.abort()
            self._count_again()
        elif not self._takes_back:
            self.commit()
        self._go_on_after(failure)
        if reads_again:
            self._feed(fed, not self._prefilled, CollectedOutputs(hidden=False, tokens=1))
            self.fed, self._step_open = fed, True

    def _count_again(self) -> None:
        """A step was aborted; of one that took several forwards the first ones are still there."""
        if isinstance(self.cache, SplitCache):
            self.cache.bring_together()
        if self.cache.handle is not None and (self.fed > 0 or self.cache.total_tokens != self._seen_before):
            self.fed = self.cache.total_tokens - self._before

    # When memory is out.

    def _out_of_memory(self, error: BaseException) -> BaseException | None:
        """The error without its frames, if it is one that can be recovered from."""
        lost = self._has_lost_the_cache and self._before > 0
        if self._recover is None or lost or not is_out_of_memory(error, self.executor.largest_matrix_bytes):
            return None
        return without_frames(error)

    @property
    def _has_lost_the_cache(self) -> bool:
        return capabilities(self.cache).is_lost

    def _go_on_after(self, failure: BaseException) -> None:
        assert self._recover is not None
        self._recover(self, failure)

    @property
    def waiting(self) -> int:
        """Tokens of what is being fed that the cache has not seen."""
        return self._goal - self.cache.total_tokens

    # Between forwards.

    def commit(self, rejected: int = 0) -> None:
        """Commit the open step, if there is one, without its last `rejected` tokens."""
        if not self._step_open:
            if rejected:
                raise EngineError(f"Crop({rejected}) has to follow a Forward")
            return
        fed = self.fed - rejected
        if rejected <= self._pending and self.cache.can_reject(rejected):
            self.cache.commit(rejected)
        else:
            self._read_again(fed)
        self._step_open = False
        self.fed = fed

    def go_back(self, fed: int) -> None:
        """Have fed only the first `fed` tokens: what came later is worth nothing, or the memory of it is spoilt."""
        if self._step_open:
            self.fed -= self._pending
            self.cache.abort()
            self._step_open = False
        self._take_back(max(0, self.fed - max(fed, self._seen_before - self._before)))

    def crop(self, tokens: int) -> None:
        """Take back the last `tokens` tokens, fed in any number of steps."""
        if self._step_open and tokens <= self._open:
            self.commit(rejected=tokens)
        else:
            self.commit()
            self._take_back(tokens)

    @property
    def _pending(self) -> int:
        """Tokens of the cache's open step: of those fed together the last ones, if that took several steps."""
        seen = max(cache.total_tokens for _, cache in self.executor.parts)
        return self._before + self.fed - seen

    def _read_again(self, fed: int) -> None:
        """Bring the cache back to the first `fed` tokens, where it can only take back whole steps."""
        prefill = not self._prefilled
        self.cache.abort()
        self._step_open = False
        self._count_again()
        if self.cache.total_tokens > self._before + fed:  # they were fed in several steps
            with suppress(CacheError):
                self.cache.crop(self._before + fed)
        if self.cache.total_tokens > self._before + fed:
            if self._before > 0:
                raise EngineError(
                    f"the {self.cache.name} cache cannot go back to {self._before + fed} tokens, and the first "
                    f"{self._before} of them were not given to be read again: give the whole conversation"
                )
            self.cache.reset()
            prefill = True
        if self._before + fed > self.cache.total_tokens or self.cache.handle is None:
            self._feed(fed, prefill, CollectedOutputs(hidden=False, tokens=1))
            self.cache.commit()

    @property
    def fed_ids(self) -> torch.Tensor:
        """The ids that were fed in this run [rows, n], those of the prompt first."""
        return self._ids[:, self._unnamed : self.fed]

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]`, an index on the CPU, in everything that is kept per row."""
        if self._choosing:  # interrupted in the last choice: the run ends, and nothing more is fed
            self.forget()
            return
        self.commit()
        if self.cache.handle is None and ENCODED in self.executor.model_kwargs:
            raise EngineError("rows of a prompt with images cannot change places without a cache: use cache='dynamic'")
        # What may fail comes first and changes nothing; then the cache, which is all that is large.
        on_device, log, rows = index.to(self._ids.device), self._log_before, len(self._ids)
        ids, choose = self._ids[on_device], self.executor.choosing(index)
        log = log.select_rows(on_device) if choose is not None and log is not None else log
        times = len(index) // rows
        self._choosing = True
        try:
            if self._shares and times > 1 and torch.equal(index, repeat_rows_index(rows, times)):
                self._turn(lambda: self.cache.fork(times))
            else:
                self._turn(lambda: self.cache.select_rows(index))
        except Exception:  # the cache is as it was, or empty; not so where Ctrl-C comes
            self._choosing = False
            raise
        self._ids, self._log_before = ids, log
        if choose is not None:
            choose()
        self._choosing = False

    def _turn(self, choose: Callable[[], None]) -> None:
        """Let the cache choose rows; when memory is out in the middle of it, go on from there."""
        try:
            while not self._has_turned(choose):
                choose = self._finish
        except BaseException:
            if self.cache.unfinished:  # better no cache than one of other rows than the texts
                self.forget()
            raise

    def _has_turned(self, choose: Callable[[], None]) -> bool:
        try:
            choose()
            return True
        except BaseException as error:
            failure = self._out_of_memory(error)
            if failure is None or not self.cache.unfinished:
                raise
        self._go_on_after(failure)
        return False

    def _finish(self) -> None:
        self.cache.finish()

    def close(self, log: TokenLog) -> None:
        """End with a cache that can be continued: what is in it begins the log, and there is a token it has not seen.

        log: the run's tokens.
        """
        try:
            if self.fed > 0 or self._choosing:
                self._leave(log)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.forget()  # better no cache than no text
        self.end()

    def end(self) -> None:
        """Have one cache again, which keeps no more of the past than it shows."""
        if isinstance(self.cache, SplitCache):
            self._join(self.cache)
        if self._keeping is not None:
            self._keeping.keep_past(False)

    def _leave(self, log: TokenLog) -> None:
        if self._choosing or len(self._ids) != len(log.ids):  # interrupted before the texts had chosen rows too
            self.forget()
            return
        known = self._unnamed + log.ids.shape[1]
        agreed = min(self._agreed(log), known - 1)
        fed_too_far = max(0, self.fed - agreed)
        if not self._step_open:
            self._take_back(fed_too_far)
        elif fed_too_far <= self._open and self.cache.can_reject(fed_too_far):
            self.commit(rejected=fed_too_far)
        elif may_be_lost(self.cache):  # what it cannot take back it keeps
            self.commit()
            if self._agreed(log) < self.fed:  # then it holds a token that is not in the text
                self.cache.log = None
                return
        else:
            self.fed -= self._pending
            self.cache.abort()
            self._take_back(max(0, self.fed - agreed))
        if self._unnamed > 0:
            self.cache.log = None
            return
        log = replace(
            log.copied(),  # the ids are the result's, which its owner may write into
            positions=self.executor.columns.own_positions(self._before + known),
            source=source_of(self.executor.model_kwargs),
            reader=self.executor.reader,
        )
        if self._before == 0:
            self.cache.log = log
        elif self._log_before is not None:
            self.cache.log = self._log_before.first(self._before).then(log)

    def _join(self, split: SplitCache) -> None:
        """One cache again, or none where memory is out for that too."""
        try:
            self.cache = split.joined()
            self.cache.log = split.log
        except Exception as error:
            if not (isinstance(error, CacheError) or is_out_of_memory(error)):
                raise
            _logger.warning("the result has no cache, because its parts could not be put together: %s", error)
            split.give_up()

    def forget(self) -> None:
        """Nothing is known any more of what the cache holds: it is emptied."""
        self.fed = 0
        self.cache.reset()

    def _agreed(self, log: TokenLog) -> int:
        """How many of the tokens fed are those of the log, column by column. Pads may be any token."""
        columns = min(self.fed_ids.shape[1], log.ids.shape[1])
        same = (self.fed_ids[:, :columns] == log.ids[:, :columns]) | (log.mask[:, :columns] == 0)
        return self._unnamed + int(same.all(dim=0).long().cumprod(dim=0).sum())

    def _take_back(self, tokens: int) -> None:
        """Forget the last tokens that were committed, or everything where that is all that can be done."""
        if tokens == 0:
            return
        try:
            self.cache.crop(-tokens)
        except CacheError:  # what is kept of the tokens to stay is gone: they have to be read again
            self.cache.reset()
        self.fed = max(0, self.fed - tokens)
