"""`PrefixStore`: the caches of earlier calls, found by the tokens that a prompt begins with.

A hit reads what a stored cache holds where it is: see `caches.branch`. Where tokens cannot be taken back from a cache
(it keeps states or windows), a call can only go on from all of it. Reading the second of two prompts then pauses behind
what they have in common, and that is stored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from transformers import PreTrainedModel

from caches import CacheError, EngineCache, branch, select_rows
from caches.layers.read_by import ReadBy
from caches.platform.accelerate_hooks import prompt_device
from caches.platform.out_of_memory import is_out_of_memory, recovering
from caches.platform.torch_api import storage_key
from caches.transfer.convert import can_migrate
from engine.decoding.chunking import Pause
from engine.model.model_lock import reader_now
from engine.model.model_runner import ModelRunner
from engine.request.request import Request
from engine.reuse.prefix_files import PrefixFiles, StoredFile, name_of
from engine.reuse.room import SIZES, with_room
from engine.reuse.token_index import TokenIndex

_logger = logging.getLogger("engine")
LEAST_TOKENS = 32  # a shorter beginning is read about as fast as it is found
_FILES_FACTOR = 8  # the files together have at most so many times the bytes of those in memory
_LEAST_FREED = 8  # a cache is shortened where that frees at least an eighth of it


@dataclass(frozen=True)
class Reused:
    """The cache that a call begins with. pauses: at which the call stores it. keep: does so at the end of the call."""

    cache: EngineCache
    pauses: tuple[Pause, ...] = ()
    keep: Callable[[EngineCache], None] = lambda cache: None


@dataclass(eq=False)
class StoredCache:
    """A cache that is not written any more.

    ids: of its tokens. prompt_tokens: the first of them that were read, not generated. common_tokens: the first of them
    that another prompt began with too. is_croppable: whether its last tokens can be taken back. cache: None while it is
    in a file only. used: a number that grows with every use.
    """

    kind: str
    ids: tuple[int, ...]
    prompt_tokens: int
    common_tokens: int
    is_croppable: bool
    cache: Any = None
    used: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Of those in memory the lowest goes first: what ends with an answer, then with a prompt, then what several
        prompts have in common; among these what was not used for the longest time."""
        tokens = len(self.ids)
        return (0 if tokens > self.prompt_tokens else 1 if tokens > self.common_tokens else 2), self.used

    @property
    def ends(self) -> list[int]:
        """Where it can be cut off: behind the prompt, and behind what is common to several prompts."""
        limit = len(self.ids) - len(self.ids) // _LEAST_FREED
        return [end for end in (self.prompt_tokens, self.common_tokens) if LEAST_TOKENS <= end < limit]

    @cached_property
    def name(self) -> str:
        """Of its file."""
        return name_of(self.kind, self.ids)

    @property
    def file(self) -> StoredFile:
        return StoredFile(self.kind, self.ids, self.prompt_tokens, self.common_tokens, self.is_croppable)


class PrefixStore:
    """The caches of one model's calls: see `configs.EngineConfig.prefix_store_bytes`.

    bytes: of memory that they take. read_by: the model as it was when it filled them. failures: how often a cache could
    not be stored, written or read: the call goes on without. Raises `OSError` where there can be no folder.
    """

    def __init__(self, model: PreTrainedModel, most_bytes: int, folder: str | Path | None = None):
        self._model, self._most, self._folder = model, most_bytes, folder
        self._lock, self._clock = RLock(), count(1)
        self.failures, self._causes = 0, set[tuple[str, int | None]]()  # the second: those that were logged
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        self._begin(reader_now(model))

    def _begin(self, now: ReadBy) -> None:
        self._kinds: dict[str, TokenIndex[StoredCache]] = {}
        self._storages: dict[int, tuple[int, int]] = {}  # by storage: how many caches hold it, and its bytes
        self.bytes = 0
        self.read_by = now
        self._files = None
        if self._folder is not None:
            self._files = PrefixFiles(self._model, self._folder, _FILES_FACTOR * self._most)
            for file in self._files:
                entry = StoredCache(file.kind, file.ids, file.prompt_tokens, file.common_tokens, file.is_croppable)
                self._index(file.kind).add(entry)

    def _index(self, key: str) -> TokenIndex[StoredCache]:
        return self._kinds.setdefault(key, TokenIndex())

    def __len__(self) -> int:
        return sum(map(len, self._kinds.values()))

    def clear(self) -> None:
        """Forget what is in memory. Where there is a folder, it is written there before."""
        with self._lock:
            for entry in self._in_memory():
                self._evict(entry, shortens=False)

    # Finding.

    def find(self, empty: EngineCache, ids: torch.Tensor, branches: bool, now: ReadBy) -> Reused:
        """A cache like `empty` that holds a beginning of `ids` [tokens], not all of them; `empty` itself if nothing is
        stored.

        branches: the row will become several. The cache is stored before that. now: the model that goes on from it.
        """
        key = kind_of(empty)
        if key is None or len(ids) <= LEAST_TOKENS:
            return Reused(empty)
        with self._lock:
            if self.read_by != now:
                self._begin(now)
            reusable = tuple(ids[:-1].tolist())
            with recovering(Exception) as outcome:
                stored, end = self._found(key, reusable)
                live = empty if stored is None else _fitted(stored, empty)
            if outcome.failure is not None:
                self._go_on("a stored prefix cannot be used", outcome.failure)
                live, end = empty, 0
        end = len(reusable) if branches else end
        pauses: tuple[Pause, ...] = ()
        if end >= LEAST_TOKENS and end > live.total_tokens:
            pauses = (Pause(end, partial(self.keep, prompt_tokens=end)),)
        return Reused(live, pauses, partial(self.keep, prompt_tokens=len(ids)))

    def _found(self, key: str, ids: tuple[int, ...]) -> tuple[EngineCache | None, int]:
        """A branch of what is stored of `ids`; and where a cache that cannot be cropped should end, so that more calls
        can go on from it, or 0."""
        while True:
            entries = len(self._index(key))
            cache, end = self._nearest(key, ids)
            if cache is not None or len(self._index(key)) == entries:  # else a file was gone, and there may be others
                return cache, end

    def _nearest(self, key: str, ids: tuple[int, ...]) -> tuple[EngineCache | None, int]:
        """See `_found`. An entry whose file is gone is removed, and nothing found."""
        entry, tokens = self._index(key).nearest(ids)
        if entry is None or tokens < LEAST_TOKENS:
            return None, 0
        if tokens < len(entry.ids):
            entry.common_tokens = max(entry.common_tokens, tokens)
            if not entry.is_croppable:
                complete = next(self._index(key).beginnings(ids), None)
                return (None if complete is None else self._branch(complete, len(complete.ids))), tokens
        return self._branch(entry, tokens), 0

    def _branch(self, entry: StoredCache, tokens: int) -> EngineCache | None:
        entry.used = next(self._clock)
        if entry.cache is None:
            assert self._files is not None
            entry.cache = self._files.read(entry.file)
            if entry.cache is None:
                self._index(entry.kind).remove(entry)
                return None
            self._hold(entry.cache)
        try:
            live: EngineCache = branch(entry.cache, tokens)
        finally:
            self._make_fit()
        return live

    # Storing.

    def keep(self, cache: EngineCache, prompt_tokens: int) -> None:
        """Store a cache of one row, which can go on. prompt_tokens: the first of its tokens that were read."""
        key, log, total = kind_of(cache), cache.log, cache.total_tokens
        if key is None or log is None or log.positions is not None or cache.batch_size != 1 or total < LEAST_TOKENS:
            return
        if log.read_by != self.read_by:
            return
        with recovering(Exception) as outcome:
            if bool(log.mask[:, :total].all()):
                self._keep(key, tuple(log.ids[0, :total].tolist()), cache, prompt_tokens)
        if outcome.failure is not None:
            self._go_on("a prefix cannot be stored", outcome.failure)

    def _keep(self, key: str, ids: tuple[int, ...], cache: EngineCache, prompt_tokens: int) -> None:
        with self._lock:
            index, croppable = self._index(key), bool(cache.is_croppable)  # type: ignore[attr-defined]
            nearest, tokens = index.nearest(ids)
            if nearest is not None and tokens == len(ids) and (croppable or len(nearest.ids) == len(ids)):
                nearest.used = next(self._clock)
                return
            branched: Any = branch(cache)  # type: ignore[type-var]
            common_tokens = 0 if nearest is None or tokens == len(nearest.ids) else tokens
            entry = StoredCache(
                key, ids, min(prompt_tokens, len(ids)), common_tokens, croppable, branched, next(self._clock)
            )
            if croppable:  # it begins with what they hold
                for shorter in list(index.beginnings(ids)):
                    entry.common_tokens = max(entry.common_tokens, shorter.common_tokens)
                    self._discard(shorter)
            index.add(entry)
            self._hold(branched)
            self._make_fit()

    def _make_fit(self) -> None:
        while self.bytes > self._most:
            self._evict(min(self._in_memory(), key=lambda entry: entry.rank))

    def _in_memory(self) -> list[StoredCache]:
        return [entry for index in self._kinds.values() for entry in index if entry.cache is not None]

    def _evict(self, entry: StoredCache, shortens: bool = True) -> None:
        """Free memory of an entry: it goes to a file, or is cut off, or is forgotten."""
        cache = entry.cache
        if self._files is not None:
            with recovering(Exception) as outcome:
                removed = self._files.write(entry.file, cache)
            if outcome.failure is None:
                self._causes.clear()
                self._release(cache)
                entry.cache = None
                for index in self._kinds.values() if removed else ():
                    for stale in [stored for stored in index if stored.cache is None and stored.name in removed]:
                        index.remove(stale)
                return
            self._note("a stored prefix cannot be written", outcome.failure)
        self._discard(entry)
        if shortens and entry.is_croppable and entry.ends:
            with recovering(Exception) as outcome:
                self._add_beginning(entry, cache, max(entry.ends))
            if outcome.failure is not None:
                self._note("the beginning of a stored prefix cannot be kept", outcome.failure)

    def _go_on(self, message: str, error: BaseException) -> None:
        """An error costs what is stored, but no text."""
        self._note(message, error)
        if not _is_expected(error):  # what is in memory may be half changed
            with self._lock:
                self._kinds, self._storages, self.bytes = {}, {}, 0

    def _note(self, message: str, error: BaseException) -> None:
        """Count an error, and log it, unless its cause was logged since a file was written."""
        self.failures += 1
        cause = type(error).__name__, getattr(error, "errno", None)
        if cause not in self._causes:
            self._causes.add(cause)
            shown = error if _is_expected(error) else type(error).__name__  # others may have a text in their message
            _logger.warning("%s, and calls go on without: %s", message, shown)

    def _add_beginning(self, entry: StoredCache, cache: Any, tokens: int) -> None:
        """Store the first `tokens` of a cache that was forgotten, unless another one begins with them."""
        ids = entry.ids[:tokens]
        if self._index(entry.kind).nearest(ids)[1] == tokens:
            return
        beginning = branch(cache, tokens)
        if (_storages_of(beginning).keys() & _storages_of(cache).keys()) - self._storages.keys():
            # A copy: else all of it would stay in memory.
            beginning = select_rows(beginning, torch.arange(1, device="cpu"))
        shorter = replace(entry, ids=ids, cache=beginning)
        self._index(entry.kind).add(shorter)
        self._hold(beginning)

    def _discard(self, entry: StoredCache) -> None:
        self._index(entry.kind).remove(entry)
        if entry.cache is not None:
            self._release(entry.cache)
        if self._files is not None:
            self._files.remove(entry.file)

    def _hold(self, cache: Any) -> None:
        for storage, size in _storages_of(cache).items():
            holders, _ = self._storages.get(storage, (0, 0))
            self._storages[storage] = holders + 1, size
            self.bytes += 0 if holders else size

    def _release(self, cache: Any) -> None:
        for storage in _storages_of(cache):
            holders, size = self._storages.pop(storage)
            if holders > 1:
                self._storages[storage] = holders - 1, size
            else:
                self.bytes -= size


def can_reuse(runner: ModelRunner, request: Request) -> bool:
    """Whether the prompt is one row of tokens, the call asks for nothing that is known of tokens read in it alone, and
    what the model keeps of them does not depend on what comes later.
    """
    prompt = request.prompt
    is_plain = len(prompt.ids) == 1 and prompt.embeds is None and not prompt.model_kwargs and bool(request.mask.all())
    is_one_text = request.source is None and request.guidance is None
    is_enough = not request.output_flags and not request.needs.hidden_states
    facts = runner.facts
    is_short = facts.plain_tokens is None or request.columns <= facts.plain_tokens
    has_its_type = not torch.is_autocast_enabled(prompt_device(runner.model).type)  # else keys have that of autocast
    if not (is_plain and is_one_text and is_enough and is_short and has_its_type and runner.takes_cache):
        return False
    return facts.why_not_several is None and facts.why_not_cut is None and facts.why_not_in_cache is None


def _is_expected(error: BaseException) -> bool:
    return isinstance(error, (CacheError, OSError)) or is_out_of_memory(error)


def kind_of(cache: EngineCache) -> str | None:
    """The backend and its options; None for caches that are not stored. Those of one kind may have other sizes."""
    if not can_migrate(cache) or len(cache.stacks) != 1 or cache.stacks[0].layout.config is None:
        return None
    options = cache.stacks[0].layout.config.to_dict()
    options = {name: value for name, value in options.items() if name not in SIZES}
    return json.dumps(options, sort_keys=True, default=str)


def _fitted(cache: Any, empty: EngineCache) -> EngineCache:
    """The cache with room for as many tokens and rows as `empty`."""
    room, needed = (cache.max_tokens, cache.max_rows), (empty.max_tokens, empty.max_rows)
    if all(size is None or size <= (capacity or size) for capacity, size in zip(room, needed, strict=True)):
        return cache
    return with_room(cache, empty.max_tokens, empty.max_rows)


def _storages_of(cache: Any) -> dict[int, int]:
    """The bytes of each piece of memory of a cache."""
    tensors = [tensor for stack in cache.stacks for layer in stack.layers for tensor in layer.tensors()]
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
