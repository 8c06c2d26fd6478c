"""A cache that goes on from what another holds, without a copy of it."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.core.prefix_sharing import PrefixSharing
from caches.core.row_copies import Copyable
from caches.stores.dense import GrowingStore, Store
from caches.stores.shared_prefix import ForkedStore
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline


class Branchable(Copyable, Protocol):
    def finish_step(self, is_over: bool = False) -> None: ...

    def check_finished(self) -> None: ...

    def crop(self, tokens: int) -> None: ...


C = TypeVar("C", bound=Branchable)


def branch(cache: C, tokens: int | None = None) -> C:
    """A cache of the same backend that holds the first `tokens` of `cache`; None for all.

    Layers of full attention read the tokens where they are: their tensors are shared, and what comes later is in
    tensors of their own. So `cache` must not change from now on: branch it again in place of going on with it. What
    cannot be shared is copied: windows, states, codes, buffers in host memory, and what came after an earlier branch.
    Raises `StepError` where `tokens` are fewer than there are and the others cannot be taken back.
    """
    cache.check_finished()
    cache.finish_step()
    if any(one.rows_per_prefix > 1 for stack in cache.stacks for one in stack.shared_timelines):
        cache.unshare()
    new = cache.empty_like()
    for stack, source in zip(new.stacks, cache.stacks, strict=True):
        if source.batch_size != -1:
            _follow(stack, source)
    if tokens is not None:
        new.crop(tokens)
    return new


def _follow(stack: LayerStack, source: LayerStack) -> None:
    """Let the empty `stack` hold what `source`, of the same layout, holds."""
    sharing = PrefixSharing(stack)
    sharing.share_groups(
        [isinstance(old, ForkedTimeline) or (_is_growing(source, old) and sharing.can_share(new))
         for new, old in zip(stack.timelines, source.timelines, strict=True)]
    )  # fmt: skip
    stack.hook.load_state_dict(source.hook.state_dict(source.batch_size))
    for new, old in zip(stack.timelines, source.timelines, strict=True):
        new.load_state_dict(_as_prefix(new, old), source.batch_size)
    for layer, old_layer in zip(stack.layers, source.layers, strict=True):
        if isinstance(layer, Layer) and isinstance(layer.timeline, ForkedTimeline):
            assert isinstance(old_layer, Layer)
            for name, store in layer.stores.items():
                assert isinstance(store, ForkedStore)
                _share(store, old_layer.stores[name])
            if layer.state is not None and old_layer.state is not None:
                layer.state.load_dense(old_layer.state.dense_state())
        else:
            layer.load_state_dict(old_layer.state_dict())
    stack.log = source.log


def _is_growing(stack: LayerStack, timeline: Timeline) -> bool:
    """Whether all stores of a group are tensors in full precision that grow."""
    layers = [layer for layer in stack.layers_of(timeline) if layer.spec.keeps_kv]
    stores = [store for layer in layers if isinstance(layer, Layer) for store in layer.stores.values()]
    return bool(stores) and all(type(store) is GrowingStore for store in stores)


def _as_prefix(new: Timeline, old: Timeline) -> dict[str, Any]:
    """The state of `new`: what `old` has counted is its prefix, unless that has one already."""
    if not isinstance(new, ForkedTimeline) or isinstance(old, ForkedTimeline):
        return old.state_dict()
    return {"prefix": old.state_dict(), "suffix": new.suffix.state_dict(), "rows_per_prefix": 1}


def _share(new: ForkedStore, old: Store) -> None:
    """Let `new` read the prefix of `old`, or all of it, where it is."""
    if isinstance(old, ForkedStore):
        if state := old.suffix.state_dict():
            new.suffix.load_state_dict(state)
        old = old.prefix
    if type(old) is GrowingStore and isinstance(new.prefix, GrowingStore):
        new.prefix.read_from(old)
    elif state := old.state_dict():
        new.prefix.load_state_dict(state)
