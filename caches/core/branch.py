"""A cache that goes on from what another holds, without a copy of it."""

from __future__ import annotations

from threading import Lock
from typing import Any, Protocol, TypeVar

from caches.core.implicit_steps import ImplicitSteps
from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.core.prefix_sharing import PrefixSharing
from caches.core.row_copies import Copyable
from caches.errors import StepError
from caches.protocol import check_has_layers_of_ours
from caches.stores.dense import GrowingStore
from caches.stores.store import Store
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline

_one_at_a_time = Lock()  # two branches must not get the same free slots of a cache


class Branchable(Copyable, Protocol):
    @property
    def implicit_steps(self) -> tuple[ImplicitSteps, ...]: ...

    @property
    def max_rows(self) -> int | None: ...

    def crop(self, tokens: int) -> None: ...


C = TypeVar("C", bound=Branchable)


def branch(cache: C, tokens: int | None = None) -> C:
    """A cache of the same backend that holds the first `tokens` of `cache`; None for all. Both can go on.

    Layers of full attention share their tensors: the first branch from the end writes into the free slots behind it,
    later ones write into tensors of their own, and what would be overwritten is copied first. Windows, states, codes
    and buffers in host memory are copied, as is what came after an earlier branch, but for the first cache that goes on
    from there. Raises `StepError` while an announced step is open, where
    `cache` does not hold so many tokens, and where they are fewer than there are and the others cannot be taken back.
    """
    check_has_layers_of_ours(cache)
    with _one_at_a_time:
        for steps in cache.implicit_steps:
            steps.end()
        total = cache.stacks[0].total_tokens
        if tokens is not None and not 0 <= tokens <= total:
            raise StepError(f"branch(cache, {tokens}): the cache holds {total} tokens, and a branch the first of them")
        if any(timeline.rows_per_prefix > 1 for stack in cache.stacks for timeline in stack.shared_timelines):
            cache.unshare()
        target = cache.empty_like(cache.max_rows)
        for stack, source in zip(target.stacks, cache.stacks, strict=True):
            if source.batch_size != -1:
                _follow(stack, source, is_complete=tokens in (None, total))
    if tokens is not None:
        target.crop(tokens - total)
    return target


def _follow(stack: LayerStack, source: LayerStack, is_complete: bool) -> None:
    """Let the empty `stack` hold what `source`, of the same layout, does. is_complete: nothing of it is left out."""
    sharing = PrefixSharing(stack)
    goes_on = [is_complete and not giver.is_frozen for giver in source.timelines]
    splits = []
    for taker, giver, on in zip(stack.timelines, source.timelines, goes_on, strict=True):
        can_split = not on and sharing.can_share(taker) and _can_be_read(giver, _stores(source, giver))
        splits.append(isinstance(giver, ForkedTimeline) or can_split)
    sharing.share_groups(splits)
    stack.hook.load_state_dict(source.hook.state_dict(source.batch_size))
    for taker, giver, on in zip(stack.timelines, source.timelines, goes_on, strict=True):
        taker.load_state_dict(_as_prefix(taker, giver), source.batch_size)
        stores, givers = _stores(stack, taker), _stores(source, giver)
        if not isinstance(taker, ForkedTimeline):
            _fill(taker, stores, giver, givers, reads=on, takes_room=True)
            continue
        prefixes, suffixes = [store.prefix for store in stores], [store.suffix for store in stores]
        if isinstance(giver, ForkedTimeline):
            _fill(taker.suffix, suffixes, giver.suffix, [store.suffix for store in givers], reads=on, takes_room=True)
            giver, givers = giver.prefix, [store.prefix for store in givers]
        _fill(taker.prefix, prefixes, giver, givers, reads=True, takes_room=False)
    for layer, source_layer in zip(stack.layers, source.layers, strict=True):
        if not isinstance(layer, Layer) or not isinstance(source_layer, Layer):
            layer.load_state_dict(source_layer.state_dict())
        elif layer.state is not None and source_layer.state is not None:
            layer.state.load_dense(source_layer.state.dense_state())
    stack.log = source.log


def _stores(stack: LayerStack, timeline: Timeline) -> list[Any]:
    layers = [layer for layer in stack.layers_of(timeline) if isinstance(layer, Layer)]
    return [store for layer in layers for store in layer.stores.values()]


def _can_be_read(timeline: Timeline, stores: list[Store]) -> bool:
    """Whether these are tensors in full precision that grow, and that lose no tokens in front."""
    return bool(stores) and timeline.retention.bound is None and all(type(store) is GrowingStore for store in stores)


def _as_prefix(taker: Timeline, giver: Timeline) -> dict[str, Any]:
    """The state of `taker`: what `giver` has counted is its prefix, unless that has one already."""
    if not isinstance(taker, ForkedTimeline) or isinstance(giver, ForkedTimeline):
        return giver.state_dict()
    return {"prefix": giver.state_dict(), "suffix": taker.suffix.state_dict(), "rows_per_prefix": 1}


def _fill(
    taker: Timeline, stores: list[Any], giver: Timeline, giver_stores: list[Any], reads: bool, takes_room: bool
) -> None:
    """Let the stores of `taker` hold what those of `giver` do: where it is if `reads` and they can, or a copy."""
    if reads and _can_be_read(giver, giver_stores):
        taker.read_from(giver, takes_room)
        for store, giver_store in zip(stores, giver_stores, strict=True):
            store.read_from(giver_store, takes_room)
        return
    for store, giver_store in zip(stores, giver_stores, strict=True):
        if state := giver_store.state_dict():
            store.load_state_dict(state)
