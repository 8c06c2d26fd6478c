"""`OpenStep`: the last step of a session: committed, made again, or taken back with what was fed before it."""

from __future__ import annotations

from contextlib import suppress

from caches import CacheError
from engine.decoding.feeder import Feeder
from engine.decoding.forward_executor import CollectedOutputs
from engine.errors import EngineError


class OpenStep:
    """rolls_back: whether the flow rolls back tokens. is_open: whether the feeder's cache has a step of this run."""

    def __init__(self, feeder: Feeder, rolls_back: bool):
        self._feeder, self._rolls_back = feeder, rolls_back
        self.is_open = self._was_prefill = False
        self._tokens = 0  # of the step

    def begin(self, end: int, tokens: int, was_prefill: bool) -> None:
        """The last `tokens` tokens before column `end` were fed, and the cache's step is open."""
        self._feeder.ids.count, self._tokens, self._was_prefill, self.is_open = end, tokens, was_prefill, True

    def commit(self, rejected: int = 0) -> None:
        """Commit the step, if it is open, without its last `rejected` tokens."""
        if not self.is_open:
            if rejected:
                raise EngineError(f"Crop({rejected}) has to follow a Forward")
            return
        feeder = self._feeder
        fed, cache = feeder.ids.count - rejected, feeder.executor.cache
        if not rejected or (rejected <= self._pending and cache.can_reject(rejected)):
            cache.commit(rejected)
        else:
            self._read_again(fed)
        self.is_open, feeder.ids.count = False, fed

    def go_back(self, fed: int) -> None:
        """Discard all columns after the first `fed`, but those that the cache held before the run."""
        feeder = self._feeder
        if self.is_open:
            self.abort()
        self.roll_back(max(0, feeder.ids.count - max(fed, feeder.total_before - feeder.prefix.columns)))

    def crop(self, tokens: int) -> None:
        """Roll back the last `tokens` tokens, which any number of steps may have fed."""
        if self.is_open and tokens <= self._tokens:
            self.commit(rejected=tokens)
        else:
            self.commit()
            self.roll_back(tokens)

    def can_reject(self, tokens: int) -> bool:
        """Whether they are of this step alone, and the cache can commit it without them."""
        return tokens <= self._tokens and self._feeder.cache.can_reject(tokens)

    def abort(self) -> None:
        self._feeder.ids.count -= self._pending
        self._feeder.cache.abort()
        self.is_open = False

    def roll_back(self, tokens: int) -> None:
        """Discard the last `tokens` committed tokens, or all where the cache can do no less: they are read again."""
        if tokens == 0:
            return
        ids, cache = self._feeder.ids, self._feeder.cache
        try:
            cache.crop(-tokens)
        except CacheError:
            cache.reset()
        ids.count = max(0, ids.count - tokens)

    def recover(self, failure: BaseException) -> None:
        """Recover between the forwards. The step is open afterwards where a part of it may be rolled back."""
        feeder, fed = self._feeder, self._feeder.ids.count
        makes_again = self.is_open and self._rolls_back and feeder.cache.handle is not None
        if makes_again:
            self._undo()
        elif not self._rolls_back:
            self.commit()
        feeder.recover(failure)
        if makes_again:
            feeder.feed(fed, self._was_prefill, CollectedOutputs())
            feeder.ids.count, self.is_open = fed, True

    @property
    def _pending(self) -> int:
        """Tokens of the cache's open step: those of the last forward, if the feed took several."""
        feeder = self._feeder
        total = max(cache.total_tokens for _, cache in feeder.executor.parts)
        return feeder.prefix.columns + feeder.ids.count - total

    def _undo(self) -> None:
        """Abort it and count what the cache holds: its first forwards, if it took several."""
        self.is_open = False
        self._feeder.cache.abort()
        self._feeder.count_again()

    def _read_again(self, fed: int) -> None:
        """Bring a cache that can only roll back whole steps to the first `fed` columns."""
        feeder, prefill, cached_columns = self._feeder, self._was_prefill, self._feeder.prefix.columns
        self._undo()
        cache = feeder.cache
        if cache.total_tokens > cached_columns + fed:  # several steps fed them
            with suppress(CacheError):
                cache.crop(cached_columns + fed)
        if cache.total_tokens > cached_columns + fed:
            if cached_columns > 0:
                raise EngineError(
                    f"the {cache.name} cache cannot go back to {cached_columns + fed} tokens, and the first "
                    f"{cached_columns} of them were not given to be read again: give the whole conversation"
                )
            cache.reset()
            prefill = True
        if cached_columns + fed > cache.total_tokens or cache.handle is None:
            feeder.feed(fed, prefill, CollectedOutputs())
            feeder.cache.commit()
