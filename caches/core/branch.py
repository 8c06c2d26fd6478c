"""A cache that goes on from what another holds, without a copy of it."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Lock
from typing import Any

from caches.core.layer import Layer, TensorHolder
from caches.core.layer_stack import LayerStack
from caches.core.prefix_sharing import PrefixSharing
from caches.core.row_transfer import unshare
from caches.core.transfer import C, Share
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import StepError
from caches.protocol import check_has_layers_of_ours
from caches.stores.dense import GrowingStore
from caches.stores.recurrent_state import RecurrentState
from caches.stores.shared_prefix import ForkedStore
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline

_one_at_a_time = Lock()  # two branches must not get the same free slots of a cache


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
        total = cache.implicit_steps[0].stack.total_tokens
        if tokens is not None and not 0 <= tokens <= total:
            raise StepError(f"branch(cache, {tokens}): the cache holds {total} tokens, and a branch the first of them")
        stacks = [steps.stack for steps in cache.implicit_steps]
        if any(timeline.rows_per_prefix > 1 for stack in stacks for timeline in stack.shared_timelines):
            unshare(cache.implicit_steps)
        target = cache.empty_like(cache.max_rows)
        for taker, source in zip(target.implicit_steps, stacks, strict=True):
            if source.batch_size != -1:
                _follow(taker.stack, source, is_complete=tokens in (None, total))
    if tokens is not None:
        target.crop(tokens - total)
    return target


def _follow(stack: LayerStack, source: LayerStack, is_complete: bool) -> None:
    """Let the empty `stack` hold what `source`, of the same layout, does. is_complete: nothing of it is left out."""
    sharing = PrefixSharing(stack)
    goes_on = [is_complete and not giver.is_frozen for giver in source.timelines]
    sharing.share_groups(
        [
            isinstance(giver, ForkedTimeline) or (not on and sharing.can_share(taker) and _can_be_read(source, giver))
            for taker, giver, on in zip(stack.timelines, source.timelines, goes_on, strict=True)
        ]
    )
    stack.hook.load_state_dict(source.hook.state_dict(source.batch_size))
    stack.log = source.log
    takes_room: dict[Timeline, bool] = {}  # of those that read tensors of `source`: whether they go on behind its end
    for taker, giver, on in zip(stack.timelines, source.timelines, goes_on, strict=True):
        taker.load_state_dict(_as_prefix(taker, giver), source.batch_size)
        for reader, owner in _timelines(taker, giver):
            is_prefix = isinstance(taker, ForkedTimeline) and reader is taker.prefix
            if (is_prefix or on) and _can_be_read(source, owner):
                takes_room[reader] = not is_prefix
                reader.read_from(owner, takes_room[reader])
    for layer, source_layer in zip(stack.layers, source.layers, strict=True):
        for holder, owned in _holders(layer, source_layer):
            if isinstance(holder, GrowingStore) and isinstance(owned, GrowingStore) and holder.timeline in takes_room:
                holder.read_from(owned, takes_room[holder.timeline])
            else:
                Share([owned], [holder], as_encoded=True).apply()


def _timelines(taker: Timeline, giver: Timeline) -> list[tuple[Timeline, Timeline]]:
    """Those that count the same. Where `taker` has a prefix and `giver` none, all of it becomes the prefix."""
    if not isinstance(taker, ForkedTimeline):
        return [(taker, giver)]
    if not isinstance(giver, ForkedTimeline):
        return [(taker.prefix, giver)]
    return [(taker.prefix, giver.prefix), (taker.suffix, giver.suffix)]


def _holders(taker: Layer | WrappedLayer, giver: Layer | WrappedLayer) -> Iterator[tuple[TensorHolder, TensorHolder]]:
    """Those that hold the same, as `_timelines`."""
    if not isinstance(taker, Layer) or not isinstance(giver, Layer):
        yield from zip(taker.row_holders(), giver.row_holders(), strict=True)
        return
    for holder, owned in zip(taker.holders(), giver.holders(), strict=True):
        if isinstance(holder, ForkedStore):
            owners = owned.row_holders if isinstance(owned, ForkedStore) else (owned,)
            yield from zip(holder.row_holders, owners, strict=False)
        else:
            yield holder, owned


def _can_be_read(source: LayerStack, timeline: Timeline) -> bool:
    """Whether its stores are tensors in full precision that grow, and that lose no tokens in front."""
    holders = [holder for layer in source.layers for holder in layer.row_holders() if holder.timeline is timeline]
    stores = [holder for holder in holders if not isinstance(holder, RecurrentState)]
    return bool(stores) and timeline.retention.bound is None and all(type(store) is GrowingStore for store in stores)


def _as_prefix(taker: Timeline, giver: Timeline) -> dict[str, Any]:
    """The state of `taker`: what `giver` has counted is its prefix, unless that has one already."""
    if not isinstance(taker, ForkedTimeline) or isinstance(giver, ForkedTimeline):
        return giver.state_dict()
    return {"prefix": giver.state_dict(), "suffix": taker.suffix.state_dict(), "rows_per_prefix": 1}
