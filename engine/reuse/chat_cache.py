"""The cache of a conversation: in which backend it is, and where a turn goes on in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from caches import EngineCache, branch, convert, load, recipe
from caches.transfer.convert import can_migrate
from configs import CacheConfig
from configs.cache import DEFAULT_CACHE
from engine.decoding.chunking import Pause
from engine.errors import InputError, OptionError
from engine.model.model_lock import reader_now
from engine.prompt import EncodedPrompt
from engine.result import Generation
from engine.reuse.resume_points import ResumePoints
from engine.reuse.room import SIZES, HasModel, with_room_for

_LEAST_ROOM = 512  # tokens, of a cache of fixed size


class ChatCache:
    """The live cache of a conversation, and the backend of those that follow it.

    live: None before the first turn and for backends without one.
    """

    def __init__(self, generator: HasModel, cache: Any, options: Any):
        """cache: a backend, or a live cache to go on with. options: of the backend, None if it has them.

        Raises `OptionError` for a cache of transformers.
        """
        self._generator, self._resume_points = generator, ResumePoints(generator)
        self._cache, self._options = cache, options
        self._used: str | None = None  # by the last turn
        self.live: Any = None
        if isinstance(cache, (EngineCache, TransformersCache)):
            if not can_migrate(cache):
                raise OptionError("a chat keeps a cache of this package: give the name of one, such as cache='dynamic'")
            self.live = cache
            self._cache, self._options = cache.stacks[0].layout.config or cache.name, None

    @property
    def backend(self) -> str:
        """The name of the backend."""
        if self.live is not None:
            return str(self.live.name)
        named = (self._cache, self._used, self._generator.config.cache, DEFAULT_CACHE)
        chosen = next(choice for choice in named if choice is not None)
        return chosen if isinstance(chosen, str) else str(chosen.name)

    def go_back(self, ids: torch.Tensor, parameters: dict[str, Any]) -> None:
        """Go back to where the cache has what `ids` [1, tokens] begin with, with room for the call that reads them."""
        self.live = self._resume_points.go_back(self.live, ids[0])
        if self.live is not None:
            # Before the turn starts: one that fails ends the caller's streamer.
            self.live = with_room_for(self.live, self._generator, EncodedPrompt(ids, is_chat=True), parameters)

    def arguments(self, starts_anew: bool) -> dict[str, Any]:
        """The arguments of a call that goes on from it, or has a new cache, as large as the call needs."""
        if not starts_anew:
            first = {"cache": self._cache, "cache_config": self._options}
            return first if self.live is None else {"cache": self.live}
        config = self._cache if isinstance(self._cache, CacheConfig) else self._options
        options = config.to_dict() if isinstance(config, CacheConfig) else dict(config or {})
        name = options.pop("name", self._cache)
        options = {option: value for option, value in options.items() if option not in SIZES}
        return {"cache": name, "cache_config": options or None}

    def pauses(self, find_ends: Callable[[], set[int]], cache: Any) -> list[Pause]:
        """See `ResumePoints.pauses`."""
        return self._resume_points.pauses(find_ends, cache)

    def take(self, out: Generation) -> None:
        """Go on from the cache that a turn has left."""
        self.live = out.cache if isinstance(out.cache, EngineCache) else None
        self._used = out.stats.cache

    def use(self, cache: str, options: dict[str, Any]) -> None:
        """Convert it to another backend; one of fixed size gets room for as much again. Raises as `convert` does."""
        if recipe(cache).has_a_size and self.live is not None:
            options = {"max_cache_len": max(_LEAST_ROOM, 2 * self.live.total_tokens)} | options
        if self.live is not None:
            self.live = convert(self.live, cache, **options)
        else:
            recipe(cache).options.from_dict(options)
        self._cache, self._options = cache, options or None
        self._resume_points.clear()

    def branched(self) -> ChatCache:
        """A second one. Both read what there is now in one place."""
        other = ChatCache(self._generator, self._cache, self._options)
        other._used, other._resume_points = self._used, self._resume_points.copied()
        other.live = None if self.live is None else branch(self.live)
        return other

    def save(self, path: str | Path, notes: Mapping[str, Any]) -> None:
        """Write it to a file with these notes; without its tokens where the model as it is now has not read them.

        Raises `InputError` where there is none.
        """
        if self.live is None:
            raise InputError(
                "there is nothing to save before the first answer"
                if self._used is None
                else f"the backend {self.backend!r} keeps no cache that could be saved: use() another one"
            )
        model, log = self._generator.model, self.live.log
        is_right = log is not None and log.why_other(reader_now(model)) is None
        (self.live if is_right else self.live.empty_like()).save(path, model, notes=notes)

    def load(self, path: str | Path) -> None:
        """Go on from a file's cache."""
        self.live = load(path, self._generator.model)
        self._resume_points.clear()
