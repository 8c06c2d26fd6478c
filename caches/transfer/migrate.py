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

from caches.attention.kv_view import plain
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
    target = empty_for(cache, chosen.from_dict(options))
    steps = [step for pair in zip(cache.parts, target.parts, strict=True) for step in _steps(*pair)]
    carry_out([cache], steps, "moving")
    return target


def carry_out(givers: Sequence[Any], steps: Sequence[TensorMigration], verb: str) -> None:
    """Apply all of them, in their order, and leave `givers` empty; or none, then `givers` hold what they held.

    verb: what is done with the caches, in words.
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
        _bring_back(givers, done, failure, verb)
        raise failure
    finally:
        del failure  # which has this frame in its traceback


def _codec_of(cache: C, options: type[Any]) -> dict[str, Any]:
    """The options by which `cache` quantizes, for a backend that has such options."""
    config = cache.stacks[0].layout.config if can_migrate(cache) else None
    if not isinstance(config, QuantizedCacheConfig) or not issubclass(options, QuantizedCacheConfig):
        return {}
    return {name: getattr(config, name) for name in (*_OF_A_CODEC, "residual_length")}


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
    previous, timeline.rows = timeline.rows, rows
    try:
        yield
    finally:
        timeline.rows = previous


def _hand_over(giver: TensorHolder, taker: TensorHolder, as_encoded: bool, index: torch.Tensor | None) -> None:
    if as_encoded:
        state = giver.state_dict()
        if state:  # else no step used it
            taker.load_state_dict(state if index is None else chosen_rows(state, index))
        return
    content = cast(Store, giver).committed()  # states and transformers' layers are taken as they are
    if content is not None:
        content = plain(content)
        cast(Store, taker).load_dense(content if index is None else chosen_rows(content, index))


def _bring_back(givers: Sequence[Any], done: list[TensorMigration], failure: BaseException, verb: str) -> None:
    back = {id(step.old) for step in done if step.gives_up}
    try:
        while done:
            done[-1].undo()
            done.pop()
    except BaseException as error:
        for cache in givers:
            cache.release()
        raise StepError(
            f"{verb} the {givers[0].name} cache failed ({type(failure).__name__}: {failure}), and so did bringing back "
            f"what had been moved ({type(error).__name__}: {error}): it is empty, all tokens have to be read again"
        ) from failure
    for section in (section for cache in givers for section in cache.parts):
        waiting = section.selection.rows_left()
        waiting[:] = [(holder, index) for holder, index in waiting if id(holder) not in back]


def _steps(source: Cache, target: Cache) -> list[TensorMigration]:
    """What there is to move to `target`, which is set to hold it. Raises before any change is visible."""
    selection = source.selection
    if not selection.is_pending:
        source.crop(0)  # commits the step of another loop
    if source.batch_size == -1:
        return []
    waiting = {id(holder): index for holder, index in selection.rows_left()}  # from here on shared prefixes are known
    for timeline in target.stack.timelines:
        timeline.bind_batch_size(selection.rows_to_come)
    if not _can_share(source, target):
        source.finish()
        source.unshare()
        waiting = {}
        if not _can_share(source, target):
            raise StepError(
                f"the {source.name} cache encoded tokens after its rows were forked, and a {target.name} cache that "
                "evicts what is out of a window has no place for them: convert() it, which decodes everything first"
            )
    for giver, taker in _groups(source, target):
        check_sinks(giver, taker)
    target.sharing.share_like(source.stack.timelines)
    hook_state = source.stack.hook.state_dict(source.batch_size)
    for holder in source.stack.hook.row_holders():
        hook_state = chosen_rows(hook_state, waiting[id(holder)]) if id(holder) in waiting else hook_state
    target.stack.hook.load_state_dict(hook_state)
    holders = [
        pair
        for giver, taker in zip(source.layers, target.layers, strict=True)
        for pair in zip(giver.row_holders(), taker.row_holders(), strict=True)
    ]
    alike = _alike(holders)
    for giver, taker in _groups(source, target):
        adopt(taker, giver, selection.rows_to_come, alike)
    source.scratch.release()
    compact(source.stack, target.stack)
    target.log = selection.log_to_come
    target.selection.defer_merge()
    return [
        _HolderPair(
            giver,
            taker,
            giver.storage_format == taker.storage_format and (giver.storage_format is None or alike[taker.timeline]),
            waiting.get(id(giver)),
        ).step()
        for giver, taker in holders
    ]


def _can_share(source: Cache, target: Cache) -> bool:
    """Whether rows can share prefixes wherever they do."""
    return all(
        target.sharing.can_share(taker) for giver, taker in _groups(source, target) if isinstance(giver, ForkedTimeline)
    )


def _groups(source: Cache, target: Cache) -> list[tuple[Timeline, Timeline]]:
    """The timelines of the same group of layers, which has the same attention span, whatever the backend."""
    return list(zip(source.stack.timelines, target.stack.timelines, strict=True))


def _alike(holders: list[tuple[TensorHolder, TensorHolder]]) -> dict[Timeline, bool]:
    """Of the new timelines, whether all that follows them can be taken as it is encoded."""
    alike: dict[Timeline, bool] = {}
    for giver, taker in holders:
        is_alike = giver.storage_format == taker.storage_format and type(giver.timeline) is type(taker.timeline)
        is_alike &= giver.timeline.retention == taker.timeline.retention
        alike[taker.timeline] = alike.get(taker.timeline, True) and is_alike
    return alike


def adopt(target: Timeline, source: Timeline, rows: int, alike: Mapping[Timeline, bool] | None = None) -> None:
    """Let `target` count what `source` does, for `rows`. alike: see `_alike`; None where all is taken as encoded."""
    if isinstance(source, ForkedTimeline):
        assert isinstance(target, ForkedTimeline)
        prompts, rows_per_prefix = source.rows_to_come(rows)
        adopt(target.prefix, source.prefix, prompts, alike)
        adopt(target.suffix, source.suffix, rows, alike)
        target.adopt_parts(rows_per_prefix)
    elif alike is None or alike.get(target):
        target.load_state_dict(source.state_dict(), rows)
    else:
        target.adopt(source.total_tokens, source.kept_tokens, rows)


def compact(source: LayerStack, target: LayerStack) -> None:
    """Move what is kept to the front of the buffers: what comes back after a failure is put there."""
    moved = [timeline for timeline in source.timelines if timeline.start]
    for layer in source.layers:
        if layer.timeline in moved:
            layer.compact()
    for timeline in (*moved, *(timeline for timeline in target.timelines if timeline.start)):
        timeline.compact()
