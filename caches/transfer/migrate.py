"""Moving what a cache holds to another backend, store by store: what has arrived is given up where it was.

So no more than about one layer is there twice. Rows that share columns go on sharing them, and codes are taken as they
are where both caches write alike.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from caches.attention.segmented_tensor import plain
from caches.core.row_copies import empty_for
from caches.core.row_selection import Choice
from caches.core.sink_hook import SinkCache
from caches.errors import StepError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.registry import recipe
from caches.stores.dense import chosen_rows
from caches.stores.shared_prefix import ForkedTimeline
from caches.timeline.timeline import Timeline
from configs import PlacedCacheConfig, QuantizedCacheConfig

C = TypeVar("C", Cache, EncoderDecoder)

_NOT_OF_A_CODEC = {*PlacedCacheConfig.option_names(), "residency", "folder", "residual_length"}
_OF_A_CODEC = set(QuantizedCacheConfig.option_names()) - _NOT_OF_A_CODEC


def migrate(cache: C, name: str, **options: Any) -> C:
    """A cache of the backend `name` with `options`, holding what `cache` held, which is empty afterwards.

    Rows that were only half chosen (see `EngineCache.unfinished`) are chosen on the way. Codes stay as they are, unless
    `options` say how to write. Raises as `convert` does, before anything has changed. Whatever fails later, such as
    memory or a disk that is full, `cache` gets back what was moved and holds the same as before. Only where that fails
    too is it left empty, and a `StepError` says so; what was encoded comes back as the codes say.
    """
    chosen = recipe(name).options
    if _OF_A_CODEC.isdisjoint(options):
        options = _codec_of(cache, chosen) | options
    new = empty_for(cache, chosen.from_dict(options))
    passages = [passage for parts in zip(cache.parts, new.parts, strict=True) for passage in _passages(*parts)]
    carry_out([cache], passages, "moving")
    return new


def carry_out(givers: Sequence[Any], passages: Sequence[TensorMigration], what: str) -> None:
    """All of them, in their order, or none: then the caches that had what they take have it still.

    what: is done with the caches, in words. Afterwards they are empty.
    """
    done: list[TensorMigration] = []
    failure: BaseException | None = None
    try:
        for passage in passages:
            passage.apply()
            done.append(passage)
    except BaseException as error:
        failure = error
    if failure is None:
        _release(givers)
        return
    try:
        traceback.clear_frames(failure.__traceback__)  # they still have what was being moved
        for half_done in passages[len(done) : len(done) + 1]:
            half_done.rejected()
        _bring_back(givers, done, failure, what)
        raise failure
    finally:
        del failure  # which has this frame in its traceback


def _codec_of(cache: C, options: type[Any]) -> dict[str, Any]:
    """How `cache` writes, for a backend that can be told."""
    own = getattr(next(iter(getattr(cache, "parts", ())), None), "options", None)
    if not isinstance(own, QuantizedCacheConfig) or not issubclass(options, QuantizedCacheConfig):
        return {}
    return {name: getattr(own, name) for name in (*_OF_A_CODEC, "residual_length")}


class TensorMigration(Protocol):
    """Something on its way from one place to another. old: what had it. gives_up: whether that has it no more."""

    @property
    def old(self) -> Any: ...

    @property
    def gives_up(self) -> bool: ...

    def apply(self) -> None:
        """There."""

    def undo(self) -> None:
        """After it went: as it was."""

    def rejected(self) -> None:
        """What of it has arrived, when not all of it could."""


@dataclass(eq=False)
class _TensorMigration:
    """One store, or the states of a layer, on its way. as_written: `new` writes down as `old` does.

    index: the rows that still have to be chosen of it.
    """

    old: Any
    new: Any
    as_written: bool
    index: torch.Tensor | None

    @property
    def gives_up(self) -> bool:
        """Codes that are decoded on the way would not be the same if they came back, and they are small."""
        return self.as_written or not self.old.is_quantized

    def apply(self) -> None:
        timeline = self.old.timeline
        # What was chosen already has the rows to come, although no clock has been told.
        with _rows_of(timeline, timeline.rows if self.index is not None else self.new.timeline.rows):
            _hand_over(self.old, self.new, self.as_written, self.index)
            if self.gives_up:
                self.old.release()

    def undo(self) -> None:
        if self.gives_up:
            with _rows_of(self.old.timeline, self.new.timeline.rows):
                _hand_over(self.new, self.old, self.as_written, None)
        self.new.release()

    def rejected(self) -> None:
        self.new.release()


@contextmanager
def _rows_of(timeline: Timeline, rows: int | None) -> Iterator[None]:
    before, timeline.rows = timeline.rows, rows
    try:
        yield
    finally:
        timeline.rows = before


def _hand_over(giver: Any, taker: Any, as_written: bool, index: torch.Tensor | None) -> None:
    held = giver.state_dict() if as_written else giver.committed()
    if held is None or (as_written and not held):
        return  # it had no part in any step
    held = held if as_written else plain(held)
    held = held if index is None else chosen_rows(held, index)
    if as_written:
        taker.load_state_dict(held)
    else:
        taker.load_dense(held)


def _release(caches: Sequence[Any]) -> None:
    for cache in caches:
        cache.release()


def _bring_back(givers: Sequence[Any], done: list[TensorMigration], failure: BaseException, what: str) -> None:
    back = {id(passage.old) for passage in done if passage.gives_up}
    try:
        while done:
            done[-1].undo()
            done.pop()
    except BaseException as error:
        _release(givers)
        raise StepError(
            f"{what} a {givers[0].name} cache failed ({type(failure).__name__}: {failure}), and so did bringing back "
            f"what had been moved ({type(error).__name__}: {error}): it is empty, all tokens have to be read again"
        ) from failure
    for part in (part for cache in givers for part in cache.parts):
        left = part.still_to_choose()
        left[:] = [(one, index) for one, index in left if id(one) not in back]


def _passages(old: Cache, new: Cache) -> list[_TensorMigration]:
    """What there is to move, to a cache that has been told of it. Raises before any change is visible."""
    if not old.is_choosing:
        old.crop(0)  # lets the step of a foreign loop be settled
    if old.batch_size == -1:
        return []
    old.still_to_choose()  # from here on it knows its forks, and the rows to come
    for timeline in new._timelines:
        timeline.bind_batch_size(old.rows_to_come)
    if not _can_share(old, new):
        old.finish()
        old.unshare()
        if not _can_share(old, new):
            raise StepError(
                f"the {old.name} cache encoded tokens after its rows were forked, and a {new.name} cache that forgets "
                "what is out of a window has no place for them: convert() it, which decodes everything first"
            )
    new.split_like(old)
    waiting = {id(part): index for part, index in old.still_to_choose()}
    if isinstance(old, SinkCache):
        told = old.pads.told
        new.set_padding(told if id(old.pads) not in waiting else chosen_rows(told, waiting[id(old.pads)]))
    leaves = [
        pair
        for one, other in zip(old.layers, new.layers, strict=True)
        for pair in zip(one.row_holders(), other.row_holders(), strict=True)
    ]
    alike = _alike(leaves)
    for one, other in _clocks(old, new):
        adopt(other, one, old.rows_to_come, alike)
    old.scratch.release()
    compact(old, new)
    new.log = old.log_to_come
    if any(forked.rows_per_prefix == 1 for forked in new._forks):
        new._choice = Choice(unasked=True)  # trunks and tails are put together before the next step
    return [
        _TensorMigration(
            one,
            other,
            as_written=one.storage_format == other.storage_format
            and (one.storage_format is None or alike[other.timeline]),
            index=waiting.get(id(one)),
        )
        for one, other in leaves
    ]


def _can_share(old: Cache, new: Cache) -> bool:
    """Whether rows can share columns wherever they do."""
    return all(new._can_fork(other) for one, other in _clocks(old, new) if isinstance(one, ForkedTimeline))


def _clocks(old: Cache, new: Cache) -> list[tuple[Timeline, Timeline]]:
    """Groups of layers are those of the same reach, whatever the backend."""
    return list(zip(old._timelines, new._timelines, strict=True))


def _alike(leaves: list[tuple[Any, Any]]) -> dict[Timeline, bool]:
    """Of the clocks to come, whether everything that follows them can be taken as it was written down."""
    alike: dict[Timeline, bool] = {}
    for old, new in leaves:
        same = old.storage_format == new.storage_format and type(old.timeline) is type(new.timeline)
        same &= old.timeline.retention == new.timeline.retention
        alike[new.timeline] = alike.get(new.timeline, True) and same
    return alike


def adopt(new: Timeline, old: Timeline, rows: int, alike: Mapping[Timeline, bool]) -> None:
    if isinstance(old, ForkedTimeline):
        assert isinstance(new, ForkedTimeline)
        prompts, rows_per_prefix = old.rows_to_come(rows)
        adopt(new.prefix, old.prefix, prompts, alike)
        adopt(new.suffix, old.suffix, rows, alike)
        new.adopt_parts(rows_per_prefix)
    elif alike.get(new):
        new.adopt_like(old, rows)
    else:
        new.adopt(old.total_tokens, old.kept_tokens, rows)


def compact(old: Cache, new: Cache) -> None:
    """What comes back is put at the front of a buffer, so all has to be there."""
    moved = [timeline for timeline in old._timelines if timeline.start]
    for layer in old.layers:
        if layer.timeline in moved:
            layer.compact()
    for timeline in (*moved, *(timeline for timeline in new._timelines if timeline.start)):
        timeline.compact()
