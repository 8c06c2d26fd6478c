"""Which groups of layers share prefixes between rows, from when on, and until when.

A group that keeps all tokens shares what is committed when rows are forked. Windows, indices, states and layers of
transformers' are copied instead, as `select_rows` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from caches.core.layer import Layer
from caches.core.layer_stack import LayerStack
from caches.layers.layer_spec import INDEX, KV
from caches.memory.scratch import Scratch
from caches.platform.undo import on_failure
from caches.stores.shared_prefix import ForkedStore
from caches.stores.slot import Slot
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline


class PrefixSharing:
    """The groups of `stack` of which rows share prefixes."""

    def __init__(self, stack: LayerStack):
        self.stack = stack

    def can_share(self, timeline: Timeline) -> bool:
        """Whether the rows of this group can share a prefix."""
        layers = [layer for layer in self.stack.layers_of(timeline) if layer.spec.keeps_kv]
        plain = all(isinstance(layer, Layer) and layer.spec.components & {KV, INDEX} == {KV} for layer in layers)
        return bool(layers) and plain and timeline.retention.bound is None

    def share(self) -> None:
        """What is committed becomes a prefix, with an empty suffix, in every group that can share."""
        for timeline in list(self.stack.timelines):
            if not isinstance(timeline, ForkedTimeline) and self.can_share(timeline):
                self._split(timeline)

    def share_like(self, timelines: Sequence[Timeline]) -> None:
        """Share prefixes in the groups where these timelines do. Only while the cache is empty."""
        self.share_groups([isinstance(timeline, ForkedTimeline) for timeline in timelines])

    def share_groups(self, shared: Sequence[bool]) -> None:
        """Share prefixes in these groups. Only while the cache is empty."""
        for timeline, is_shared in zip(list(self.stack.timelines), shared, strict=True):
            if is_shared:
                self._split(timeline)

    def _split(self, timeline: Timeline) -> None:
        stack, layout = self.stack, self.stack.layout
        if stack.scratch.suffix is None:
            stack.scratch.suffix = Scratch(stack.scratch.disk_file)
        # No compiled step reads it, so it need not have all its room at once.
        suffix = layout.make_timeline(timeline.retention, None, timeline.max_rows, all_room=False)
        suffix.growth_granularity = 16  # there are many suffixes, and they are short
        forked = ForkedTimeline(timeline, suffix)
        for layer in self._layers_of(timeline):
            stores = {}
            for name, prefix in layer.stores.items():
                store = stack.new_store(Slot(layer.spec, name, suffix, stack.scratch.suffix))
                stores[name] = ForkedStore(prefix, store, forked)
            layer.follow(forked, dict(stores))
        stack.timelines[stack.timelines.index(timeline)] = forked

    def _layers_of(self, timeline: Timeline) -> Iterator[Layer]:
        return (layer for layer in self.stack.layers_of(timeline) if isinstance(layer, Layer))

    def _stores_of(self, forked: ForkedTimeline) -> Iterator[ForkedStore]:
        for layer in self._layers_of(forked):
            yield from (store for store in layer.stores.values() if isinstance(store, ForkedStore))

    def merge_suffixes(self) -> None:
        """Merge the suffix into the prefix once no rows share it, unless it holds quantized blocks."""
        for forked in self.stack.shared_timelines:
            if forked.rows_per_prefix == 1 and forked.suffix.is_in_full:
                if forked.suffix.total_tokens:
                    self._merge(forked)
                self.stack.remove_suffixes([forked])

    def _merge(self, forked: ForkedTimeline) -> None:
        prefix, tokens = forked.prefix, forked.suffix.total_tokens
        placement = prefix.place(tokens)
        stores = list(self._stores_of(forked))
        for store in stores:
            store.prefix.reserve(placement.room)
        prefix.take_room(placement.room)
        prefix.begin(tokens, placement, graph=False)

        def abort() -> None:
            for store in stores:
                store.prefix.abort()
            prefix.close()

        with on_failure(abort):
            for store in stores:
                store.merge()
        for store in stores:
            store.prefix.commit(0)
        prefix.commit()

    @property
    def is_shared(self) -> bool:
        """Whether rows share a prefix at present."""
        return any(forked.rows_per_prefix > 1 for forked in self.stack.shared_timelines)

    @property
    def should_stop(self) -> bool:
        """Whether the model materialized a shared prefix in the last step: it would do so in each."""
        return any(forked.should_unshare for forked in self.stack.shared_timelines)

    def discard_reads(self) -> None:
        """Do not count what was materialized between two steps: the model did not need it."""
        for forked in self.stack.shared_timelines:
            forked.was_materialized = False
