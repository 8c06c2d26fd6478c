"""Where a conversation goes on: in its cache, as far back as that goes, or from a branch that was kept earlier."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from caches import EngineCache, StepError, UnsupportedLayerError, branch
from caches.layers.read_by import ReadBy
from caches.platform.out_of_memory import recovering
from caches.transfer.convert import can_migrate
from engine.decoding.chunking import Pause
from engine.model.model_lock import reader_now, turn_of
from engine.reuse.room import HasModel

_LATEST = 2  # resume points that are kept besides the first and the newest


class ResumePoints:
    """Branches of a cache of which tokens cannot be taken back, as it was earlier: the first and the latest.

    The cache of a chat is its own, of any backend, and is written in place: in `PrefixStore`, which never changes what
    it holds, each turn would copy caches of fixed size, codes and buffers in host memory.
    """

    def __init__(self, generator: HasModel, branches: Iterable[Any] = ()):
        self._generator, self._branches = generator, list(branches)

    def clear(self) -> None:
        self._branches = []

    def copied(self) -> ResumePoints:
        return ResumePoints(self._generator, self._branches)

    def go_back(self, cache: Any, ids: torch.Tensor) -> Any:
        """A cache that holds a beginning of `ids`, shorter than they are, as long as possible: `cache`, which is cut
        off, or a branch of a resume point; None where the model has other layers by now.
        """
        generator = self._generator
        try:
            if cache is not None and cache.total_tokens > 0:
                with turn_of(generator.model):
                    cache.check_fits(generator.model.config)
        except UnsupportedLayerError:
            cache = None
            self.clear()
        if cache is None:
            return None
        facts = generator.facts
        if facts.why_not_cut is not None:  # all of a turn is read at once
            self.clear()
            cache.reset()
            return cache
        now = reader_now(generator.model)
        common, plain = _common(cache, ids, now), facts.plain_tokens
        if common < cache.total_tokens:
            if plain is not None and cache.total_tokens > plain and not (facts.starts_again and common > plain):
                common = 0  # the keys are those of a longer text
            try:
                cache.crop(common) if common else cache.reset()
            except StepError:
                cache.reset()
        self._branches = [stored for stored in self._branches if _common(stored, ids, now) == stored.total_tokens]
        longest = max(self._branches, key=lambda stored: stored.total_tokens, default=cache)
        return branch(longest) if longest.total_tokens > cache.total_tokens else cache

    def pauses(self, find_ends: Callable[[], set[int]], cache: Any) -> list[Pause]:
        """Those at which resume points are kept, behind the tokens of `cache`, which is one too; none if tokens can be
        taken back from it.
        """
        if not can_migrate(cache) or cache.is_croppable:
            return []
        self._keep(cache)
        return [Pause(end, self._keep) for end in sorted(find_ends()) if end > cache.total_tokens]

    def _keep(self, cache: Any) -> None:
        """Keep a branch of the cache as it is, if none has its length. The first ends with the system message."""
        if cache.total_tokens == 0 or any(stored.total_tokens == cache.total_tokens for stored in self._branches):
            return
        with recovering():  # without memory for it a later turn reads more
            self._branches = [*self._branches[:1], *self._branches[1:][-_LATEST:], branch(cache)]


def _common(cache: EngineCache, ids: torch.Tensor, now: ReadBy) -> int:
    """How many of the cache's tokens begin `ids`, which go on behind them; 0 if they were not read by the model as it
    is now."""
    log = cache.log
    if log is None or log.why_other(now) is not None:
        return 0
    cached_ids = log.ids[0, : cache.total_tokens].to(ids.device)
    limit = min(len(cached_ids), len(ids) - 1)
    return int((cached_ids[:limit] == ids[:limit]).long().cumprod(dim=0).sum())
