"""`ModelSession`: the state of one model during a run: its cache, the ids it was fed, and the open step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from transformers.utils import ModelOutput

from caches import CacheError, EngineCache, TokenLog
from caches.hf.adapter import may_be_lost
from caches.platform.out_of_memory import recovering
from caches.platform.torch_api import always_writable
from caches.protocol import KeepsPast
from caches.transfer.split_rows import SplitCache
from engine.decoding.chunking import Pause, PromptReader
from engine.decoding.feeder import CachedPrefix, FedIds, Feeder, SessionOptions
from engine.decoding.forward_executor import CollectedOutputs, ForwardExecutor, last_hidden
from engine.decoding.open_step import OpenStep
from engine.errors import EngineError
from engine.model.columns import Columns
from engine.model.model_inputs import ModelInputs
from engine.model.model_runner import ModelRunner
from engine.prompt import ENCODED
from strategies import repeat_rows_index

T = TypeVar("T")
_logger = logging.getLogger("engine")


class ModelSession:
    """columns: all of the run. prefix: the first of them, which are not fed as ids.

    pauses: in the order of their columns; a prompt whose last hidden states or logits are all wanted is read without
    them, and so is one whose keys depend on how much is read at once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: EngineCache,
        columns: Columns,
        inputs: ModelInputs,
        prefix: CachedPrefix,
        options: SessionOptions,
        pauses: Iterable[Pause] = (),
    ):
        settings = options.chunk_tokens, options.check, options.compiled
        self.executor = ForwardExecutor(runner, cache, columns, inputs, prefix.columns, *settings)
        self._prefix, self._options, self._ranks = prefix, options, options.ranks
        self._ids = FedIds(columns, prefix)
        self._feeder = Feeder(self.executor, self._ids, prefix, options)
        self._step = OpenStep(self._feeder, options.rolls_back)
        self._reader = PromptReader(self._feeder, pauses)
        self._log_before = cache.log
        # The project's own caches keep what leaves a window until the step is committed in any case.
        self._keeps_past = cache if options.rolls_back and isinstance(cache, KeepsPast) else None
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
        if self._reader.pauses and not (hidden or all_logits):
            self._reader.read_to_pauses(end)
        columns, is_prefill = end - ids.count, ids.count == 0 or self._feeder.is_empty
        states = None
        if computed is None:
            collected = CollectedOutputs(hidden, tokens.shape[1] if all_logits else 1)
            computed, states = self._feeder.feed(end, is_prefill, collected)
        elif hidden:
            states = last_hidden(computed)
        self._step.begin(end, columns, is_prefill)
        return computed, None if states is None else states[:, -columns:]

    def _write(self, tokens: torch.Tensor) -> int:
        """Note `tokens` [rows, n], which are fed next: the column after the last of them."""
        self._step.commit()
        ids = self._ids
        if ids.count == 0:
            self._feeder.check_cache()
        if self._keeps_past is not None:
            self._keeps_past.keep_past(True)
        begin = ids.count or self._prefix.columns_without_ids
        end = begin + tokens.shape[1]
        if end > ids.ids.shape[1]:
            ids.ids = self.attempt(lambda: ids.wider(end))
        ids.ids[:, begin:end] = tokens
        return end

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
                failure = self._feeder.failure_of(error, bool(done) or repeats())
                if failure is None:
                    raise
            self._step.recover(failure)

    def commit(self, rejected: int = 0) -> None:
        """Commit the open step, if there is one, without its last `rejected` tokens."""
        self._step.commit(rejected)

    def go_back(self, fed: int) -> None:
        """Discard all columns after the first `fed`."""
        self._step.go_back(fed)

    def crop(self, tokens: int) -> None:
        """Roll back the last `tokens` tokens, which any number of steps may have fed."""
        self._step.crop(tokens)

    # Together with other sessions: see `engine.serving`.

    @property
    def why_alone(self) -> str | None:
        """Why its next step cannot be computed together with those of other sessions; None where it can."""
        if self._prefix.columns_without_ids:
            return "its prompt begins with embeddings"
        if self._feeder.is_empty and not self._step.is_open:
            return "its cache was emptied, so all tokens are read again"
        return self.executor.why_alone(self._prefix.columns + self._ids.count + 1)

    def prepare(self, tokens: torch.Tensor) -> torch.Tensor:
        """Before a joined step: commit the open step and make room for `tokens` [rows, 1]. Returns what is fed."""
        self._feeder.make_room(self._write(tokens))
        return tokens

    def abort_joined(self) -> None:
        """Undo a joined step that this rank or another one could not complete. What was open before it stays open."""
        if not self._step.is_open:  # else it was not prepared
            self.cache.abort()

    def read_piece(self, tokens: torch.Tensor, max_tokens: int) -> torch.Tensor | None:
        """Feed at most `max_tokens` of `tokens` [rows, n] and commit. Returns the rest; more if the cache was emptied.

        None, with nothing done, where no more than `max_tokens` would have to be fed: they are for `forward`.
        """
        if not self._reader.can_cut(tokens.shape[1], max_tokens):
            return None
        return self._reader.read_piece(self._write(tokens), max_tokens)

    def park(self) -> None:
        """Free the memory of the cache until the next forward: it is read again then, or has moved off the device."""
        self._step.commit()
        if self._prefix.columns == 0 and self.executor.reads_again:
            self.executor.empty()
        else:
            self.executor.offload()
        self._feeder.expect_cache()

    # Rows.

    def select_rows(self, index: torch.Tensor) -> None:
        """Row i becomes row `index[i]`, an index on the CPU, in everything that is kept per row."""
        if self._selecting_rows:  # the last selection was interrupted: the run ends, and nothing more is fed
            self.discard_cache()
            return
        self._step.commit()
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
                self._feeder.select_in_cache(lambda: self.cache.fork(times))
            else:
                self._feeder.select_in_cache(lambda: self.cache.select_rows(index))
        except Exception:  # the cache is unchanged, or empty; not so after Ctrl-C
            self._selecting_rows = False
            raise
        self._ids.ids, self._log_before = ids, log
        if select is not None:
            select()
        self._selecting_rows = False

    # The end.

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
        ids, step = self._ids, self._step
        if self._selecting_rows or len(ids.ids) != len(log.ids):  # interrupted before the texts selected rows too
            self.discard_cache()
            return
        without_ids, cached_columns = self._prefix.columns_without_ids, self._prefix.columns
        columns = without_ids + log.ids.shape[1]
        agreed = min(ids.agreed(log), columns - 1)
        fed_too_far = max(0, ids.count - agreed)
        if not step.is_open:
            step.roll_back(fed_too_far)
        elif step.can_reject(fed_too_far):
            step.commit(rejected=fed_too_far)
        elif may_be_lost(self.cache):  # it keeps the tokens that it cannot roll back
            step.commit()
            if ids.agreed(log) < ids.count:  # one of them is not in the text
                self.cache.log = None
                return
        else:
            step.abort()
            step.roll_back(max(0, ids.count - agreed))
        if without_ids > 0:
            self.cache.log = None
            return
        log = self._feeder.signed(log)
        if cached_columns == 0:
            self.cache.log = log
        elif self._log_before is not None:
            self.cache.log = self._log_before.first(cached_columns).then(log)

    def discard_cache(self) -> None:
        """Empty the cache, where its content is not known or memory is out."""
        self._feeder.discard_cache()
