"""Migration of a live cache to another backend, store by store: what has arrived is freed where it was.

So no more than about one layer is there twice. Rows go on sharing prefixes, and codes stay as they are where both
caches have the same storage format.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from caches.attention.segmented_tensor import plain
from caches.core.layer import TensorHolder
from caches.core.layer_stack import LayerStack
from caches.errors import StepError
from caches.hf.cache import Cache
from caches.hf.encoder_decoder import EncoderDecoder
from caches.registry import recipe
from caches.stores.store import Store, chosen_rows
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline
from caches.transfer.convert import can_migrate, check_sinks, empty_for
from configs import PlacedCacheConfig, QuantizedCacheConfig

C = TypeVar("C", Cache, EncoderDecoder)

_NOT_OF_A_CODEC = {*PlacedCacheConfig.option_names(), "residency", "folder", "residual_length"}
_OF_A_CODEC = set(QuantizedCacheConfig.option_names()) - _NOT_OF_A_CODEC


def migrate(cache: C, name: str, **options: Any) -> C:
    """A cache of the backend `name` with `options`, holding what `cache` held, which is empty afterwards.

    Rows that were only half selected (see `EngineCache.unfinished`) are selected on the way. Codes stay as they are,
    unless `options` say how to encode. Raises as `convert` does, before anything has changed. When memory or a disk is
    full later, `cache` gets back what was moved and holds the same as before; what was encoded comes back as the codes
    say. Only where that fails too is it left empty, with a `StepError`.
    """
    chosen = recipe(name).options
    if _OF_A_CODEC.isdisjoint(options):
        options = _codec_of(cache, chosen) | options
    new = empty_for(cache, chosen.from_dict(options))
    steps = [step for parts in zip(cache.parts, new.parts, strict=True) for step in _steps(*parts)]
    carry_out([cache], steps, "moving")
    return new


def carry_out(givers: Sequence[Any], steps: Sequence[TensorMigration], what: str) -> None:
    """Apply all of them, in their order, and leave `givers` empty; or none, then `givers` hold what they held.

    what: is done with the caches, in words.
    """
    done: list[TensorMigration] = []
    failure: BaseException | None = None
    try:
        for step in steps:
            step.apply()
            done.append(step)
    except BaseException as error:
        failure = error
    if failure is None:
        for cache in givers:
            cache.release()
        return
    try:
        traceback.clear_frames(failure.__traceback__)  # they refer to what was being moved
        for half_done in steps[len(done) : len(done) + 1]:
            half_done.release()
        _bring_back(givers, done, failure, what)
        raise failure
    finally:
        del failure  # which has this frame in its traceback


def _codec_of(cache: C, options: type[Any]) -> dict[str, Any]:
    """The options by which `cache` quantizes, for a backend that has such options."""
    own = cache.stacks[0].layout.config if can_migrate(cache) else None
    if not isinstance(own, QuantizedCacheConfig) or not issubclass(options, QuantizedCacheConfig):
        return {}
    return {name: getattr(own, name) for name in (*_OF_A_CODEC, "residual_length")}


@dataclass(frozen=True, eq=False)
class TensorMigration:
    """One step of a migration.

    old: what had the tensors. gives_up: whether `apply`, which moves them, frees them there. undo: after `apply`,
    restores what was before. release: after `apply` failed, frees what has arrived.
    """

    old: TensorHolder
    gives_up: bool
    apply: Callable[[], None]
    undo: Callable[[], None]
    release: Callable[[], None]


@dataclass(eq=False)
class _HolderPair:
    """One store, or the states of a layer, in both caches. as_encoded: they have the same storage format.

    index: the rows that still have to be selected of it.
    """

    old: TensorHolder
    new: TensorHolder
    as_encoded: bool
    index: torch.Tensor | None

    @property
    def gives_up(self) -> bool:
        """Codes that are decoded on the way would not be the same if they came back, and they are small."""
        return self.as_encoded or not self.old.is_quantized

    def apply(self) -> None:
        timeline = self.old.timeline
        # These tensors already have the new row count; timelines not yet.
        with _rows_of(timeline, timeline.rows if self.index is not None else self.new.timeline.rows):
            _hand_over(self.old, self.new, self.as_encoded, self.index)
            if self.gives_up:
                self.old.release()

    def undo(self) -> None:
        if self.gives_up:
            with _rows_of(self.old.timeline, self.new.timeline.rows):
                _hand_over(self.new, self.old, self.as_encoded, None)
        self.new.release()

    def step(self) -> TensorMigration:
        return TensorMigration(self.old, self.gives_up, self.apply, self.undo, self.new.release)


@contextmanager
def _rows_of(timeline: Timeline, rows: int | None) -> Iterator[None]:
    before, timeline.rows = timeline.rows, rows
    try:
        yield
    finally:
        timeline.rows = before


def _hand_over(giver: TensorHolder, taker: TensorHolder, as_encoded: bool, index: torch.Tensor | None) -> None:
    if as_encoded:
        state = giver.state_dict()
        if state:  # else no step used it
            taker.load_state_dict(state if index is None else chosen_rows(state, index))
        return
    kept = cast(Store, giver).committed()  # states and transformers' layers are taken as they are
    if kept is not None:
        kept = plain(kept)
        cast(Store, taker).load_dense(kept if index is None else chosen_rows(kept, index))


def _bring_back(givers: Sequence[Any], done: list[TensorMigration], failure: BaseException, what: str) -> None:
    back = {id(step.old) for step in done if step.gives_up}
    try:
        while done:
            done[-1].undo()
            done.pop()
    except BaseException as error:
        for cache in givers:
            cache.release()
        raise StepError(
            f"{what} the {givers[0].name} cache failed ({type(failure).__name__}: {failure}), and so did bringing back "
            f"what had been moved ({type(error).__name__}: {error}): it is empty, all tokens have to be read again"
        ) from failure
    for part in (part for cache in givers for part in cache.parts):
        left = part.selection.rows_left()
        left[:] = [(one, index) for one, index in left if id(one) not in back]


def _steps(old: Cache, new: Cache) -> list[TensorMigration]:
    """What there is to move to `new`, which is set to hold it. Raises before any change is visible."""
    selection = old.selection
    if not selection.is_pending:
        old.crop(0)  # commits the step of another loop
    if old.batch_size == -1:
        return []
    waiting = {id(holder): index for holder, index in selection.rows_left()}  # from here on shared prefixes are known
    for timeline in new.stack.timelines:
        timeline.bind_batch_size(selection.rows_to_come)
    if not _can_share(old, new):
        old.finish()
        old.unshare()
        waiting = {}
        if not _can_share(old, new):
            raise StepError(
                f"the {old.name} cache encoded tokens after its rows were forked, and a {new.name} cache that evicts "
                "what is out of a window has no place for them: convert() it, which decodes everything first"
            )
    for one, other in _groups(old, new):
        check_sinks(one, other)
    new.sharing.share_like(old.stack.timelines)
    hook_state = old.stack.hook.state_dict(old.batch_size)
    for holder in old.stack.hook.row_holders():
        hook_state = chosen_rows(hook_state, waiting[id(holder)]) if id(holder) in waiting else hook_state
    new.stack.hook.load_state_dict(hook_state)
    holders = [
        pair
        for one, other in zip(old.layers, new.layers, strict=True)
        for pair in zip(one.row_holders(), other.row_holders(), strict=True)
    ]
    alike = _alike(holders)
    for one, other in _groups(old, new):
        adopt(other, one, selection.rows_to_come, alike)
    old.scratch.release()
    compact(old.stack, new.stack)
    new.log = selection.log_to_come
    new.selection.defer_merge()
    return [
        _HolderPair(
            one,
            other,
            one.storage_format == other.storage_format and (one.storage_format is None or alike[other.timeline]),
            waiting.get(id(one)),
        ).step()
        for one, other in holders
    ]


def _can_share(old: Cache, new: Cache) -> bool:
    """Whether rows can share prefixes wherever they do."""
    return all(new.sharing.can_share(other) for one, other in _groups(old, new) if isinstance(one, ForkedTimeline))


def _groups(old: Cache, new: Cache) -> list[tuple[Timeline, Timeline]]:
    """The timelines of the same group of layers, which has the same attention span, whatever the backend."""
    return list(zip(old.stack.timelines, new.stack.timelines, strict=True))


def _alike(holders: list[tuple[TensorHolder, TensorHolder]]) -> dict[Timeline, bool]:
    """Of the new timelines, whether all that follows them can be taken as it is encoded."""
    alike: dict[Timeline, bool] = {}
    for old, new in holders:
        same = old.storage_format == new.storage_format and type(old.timeline) is type(new.timeline)
        same &= old.timeline.retention == new.timeline.retention
        alike[new.timeline] = alike.get(new.timeline, True) and same
    return alike


def adopt(new: Timeline, old: Timeline, rows: int, alike: Mapping[Timeline, bool] | None = None) -> None:
    """Let `new` count what `old` does, for `rows`. alike: see `_alike`; None where all is taken as it is encoded."""
    if isinstance(old, ForkedTimeline):
        assert isinstance(new, ForkedTimeline)
        prompts, rows_per_prefix = old.rows_to_come(rows)
        adopt(new.prefix, old.prefix, prompts, alike)
        adopt(new.suffix, old.suffix, rows, alike)
        new.adopt_parts(rows_per_prefix)
    elif alike is None or alike.get(new):
        new.load_state_dict(old.state_dict(), rows)
    else:
        new.adopt(old.total_tokens, old.kept_tokens, rows)


def compact(old: LayerStack, new: LayerStack) -> None:
    """Move what is kept to the front of the buffers: what comes back after a failure is put there."""
    moved = [timeline for timeline in old.timelines if timeline.start]
    for layer in old.layers:
        if layer.timeline in moved:
            layer.compact()
    for timeline in (*moved, *(timeline for timeline in new.timelines if timeline.start)):
        timeline.compact()
