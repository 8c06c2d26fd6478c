"""The cache whose rows can be forked: which groups of layers share columns, from when on, and until when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from caches.core.layer import Layer, Slot
from caches.core.layer_stack import Steps
from caches.core.row_selection import Choice, Choosing, check_times, repeated
from caches.errors import CapacityError
from caches.memory.scratch import Scratch
from caches.out_of_memory import is_out_of_memory
from caches.spec.layer_spec import INDEX, KV
from caches.stores.shared_prefix import ForkedStore, ForkedTimeline
from caches.timeline.timeline import Timeline


class Forking(Choosing):
    """See `Steps`. A group of layers that keeps everything shares what is committed when rows are forked.

    Windows, indices, states and what only transformers' own layers know are copied, as `rows` does.
    """

    def fork(self, times: int) -> None:
        self.start_fork(times)
        self.finish()

    def start_fork(self, times: int) -> None:
        """`fork` up to its first change; `finish` does the rest."""
        self._between_steps()
        self.check_fork(times)
        if self.batch_size != -1 and times > 1:
            self._choice = Choice(times=times)

    def check_fork(self, times: int) -> None:
        """Raise `StepError` unless `fork(times)` can be done."""
        check_times(times)
        self._check_room(self.batch_size * times)

    def _can_fork(self, timeline: Timeline) -> bool:
        layers = [layer for layer in self.layers if layer.timeline is timeline and layer.spec.keeps_kv]
        plain = all(isinstance(layer, Layer) and layer.spec.components & {KV, INDEX} == {KV} for layer in layers)
        return bool(layers) and plain and timeline.retention.bound is None

    def _split(self, timeline: Timeline) -> None:
        """What the group holds becomes a prefix, with an empty suffix."""
        if self.scratch.suffix is None:
            self.scratch.suffix = Scratch(self.scratch.disk_file)
        # Nobody compiles a step of it: it need not have all its room at once.
        suffix = self._new_timeline(timeline.retention, None, timeline.max_rows, all_room=False)
        suffix.growth_granularity = 16  # there are many of them, and they are short
        forked = ForkedTimeline(timeline, suffix)
        for layer in self._following(timeline):
            slots = {name: Slot(layer.spec, name, suffix, self.scratch.suffix) for name in layer.stores}
            tails = {name: self._new_store(slot) for name, slot in slots.items()}
            layer.follow(forked, {name: ForkedStore(layer.stores[name], tails[name], forked) for name in tails})
        self._timelines[self._timelines.index(timeline)] = forked

    def _following(self, timeline: Timeline) -> list[Layer]:
        return [layer for layer in self.layers if layer.timeline is timeline]

    def _stores(self, forked: ForkedTimeline) -> Iterator[ForkedStore]:
        for layer in self._following(forked):
            yield from (store for store in layer.stores.values() if isinstance(store, ForkedStore))

    @property
    def _forks(self) -> list[ForkedTimeline]:
        return [timeline for timeline in self._timelines if isinstance(timeline, ForkedTimeline)]

    def _to_choose(self, choice: Choice) -> list[tuple[Any, torch.Tensor]]:
        """Of forked rows only what came since is copied, as long as all prompts have equally many rows together.

        What an index on an accelerator says is not known here: there every row gets a copy of all.
        """
        if choice.times is not None:
            for timeline in list(self._timelines):
                if not isinstance(timeline, ForkedTimeline) and self._can_fork(timeline):
                    self._split(timeline)
            choice.index = repeated(self.batch_size, choice.times)
        if choice.index is not None:
            for timeline in self._timelines:
                timeline.before_rows(choice.index)
        elif choice.apart:
            for forked in self._forks:
                forked.before_unshare()
        prompts = {forked.prefix: forked.prompts for forked in self._forks}
        leaves = [leaf for layer in self.layers for leaf in layer.row_holders()]
        chosen = [(leaf, prompts.get(leaf.timeline, choice.index)) for leaf in leaves]
        return [(leaf, index) for leaf, index in chosen if index is not None]

    def _tidy(self) -> None:
        """Where no rows share anything, there is a suffix only as long as its blocks cannot be put elsewhere."""
        for forked in self._forks:
            if forked.rows_per_prefix == 1 and forked.suffix.is_in_full:
                if forked.suffix.total_tokens:
                    self._add_tail(forked)
                self._restore(forked)

    def _add_tail(self, forked: ForkedTimeline) -> None:
        prefix, tokens = forked.prefix, forked.suffix.total_tokens
        placement = prefix.place(tokens)
        stores = list(self._stores(forked))
        for store in stores:
            store.prefix.reserve(placement.room)
        prefix.begin(tokens, placement, graph=False)
        try:
            for store in stores:
                store.merge()
        except BaseException:
            for store in stores:
                store.prefix.abort()
            prefix.close()
            raise
        for store in stores:
            store.prefix.commit(0)
        prefix.commit()

    def _restore(self, forked: ForkedTimeline) -> None:
        """The prefix is all there is."""
        for store in self._stores(forked):
            store.suffix.reset()
        for layer in self._following(forked):
            trunks = {name: getattr(store, "prefix", store) for name, store in layer.stores.items()}
            layer.follow(forked.prefix, trunks)
        self._timelines[self._timelines.index(forked)] = forked.prefix
        if not self._forks:
            self.scratch.release_suffix()

    @property
    def shares(self) -> bool:
        """Whether rows share columns at present."""
        return any(forked.rows_per_prefix > 1 for forked in self._forks)

    def unshare(self) -> None:
        """Every row has all its columns for itself again. What was encoded since a fork stays apart."""
        self.start_unshare()
        self.finish()

    def start_unshare(self) -> None:
        """`unshare` up to its first change; `finish` does the rest."""
        self._between_steps()
        if self._forks:
            self._choice = Choice(apart=True)

    def unshare_if_materialized(self) -> None:
        """After a step of one token: a model that needs the whole in such a step would pay for it in each.

        The step stands whatever comes of this: what fails is done before the next one.
        """
        if any(forked.should_unshare for forked in self._forks):
            self._choice = Choice(apart=True, unasked=True)
            try:
                self.finish()
            except Exception as error:
                if not (isinstance(error, CapacityError) or is_out_of_memory(error)):
                    raise

    def forget_reads(self) -> None:
        """What was read whole before the next step says nothing about the model."""
        for forked in self._forks:
            forked.was_read_whole = False

    # What `Steps` does, where rows may be forked.

    def commit(self, rejected: int = 0) -> None:
        tokens = self.pending
        super().commit(rejected)
        if tokens == 1:
            self.unshare_if_materialized()

    def _empty(self) -> None:
        self._forget_forks()
        super()._empty()

    def load_dense(self, seen: int, rows: int, contents: Sequence[dict[str, Any]]) -> None:
        self._forget_forks()
        super().load_dense(seen, rows, contents)

    def load_state_dict(self, like: Steps, rows: int, written: Iterable[dict[str, Any]]) -> None:
        self._forget_forks()
        self.split_like(like)
        super().load_state_dict(like, rows, written)

    def split_like(self, like: Steps) -> None:
        """Share columns in the groups of layers where `like` does. While it is empty."""
        for timeline, other in zip(list(self._timelines), like._timelines, strict=True):
            if isinstance(other, ForkedTimeline):
                self._split(timeline)

    def _forget_forks(self) -> None:
        self._choice = None
        for forked in self._forks:
            self._restore(forked)

    @property
    def why_not_compiled(self) -> str | None:
        if self._forks:
            return "a graph reads one tensor per layer, and here rows share the columns of their prompt"
        return super().why_not_compiled
