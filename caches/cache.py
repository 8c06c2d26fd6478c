"""A cache as transformers' models see it: the only file in which our caches speak transformers' protocol.

Our own loop drives it with `begin / settle / abort`. In a foreign loop (`model.generate`, or plain `model(...)`) nobody
calls those: there the first `update` of a step opens it and settles the one before, and what is asked in between is
answered as if that had already happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache as TransformersCache

from caches.driven import Log
from caches.errors import StepError, UnsupportedLayer
from caches.layer import Layer, StoreFactory
from caches.retention import KeepAll, KeepRecent, Retention
from caches.spec import EXOTIC, INDEX, KV, LayerSpec, read_specs
from caches.timeline import Timeline
from caches.wrapped import WrappedLayer


def what_reach_needs(spec: LayerSpec) -> Retention:
    """Keep exactly what the layer may still look at."""
    return KeepAll() if spec.reach.columns is None else KeepRecent(spec.reach.columns)


class Cache(TransformersCache):
    """Keys and values of a model's layers, kept as its recipe says. What the methods of a step do: see `Driven`.

    name: the recipe's name. specs: one per layer. new_store: makes the store of each stream. fixed: whether those
    stores never move. max_tokens: tokens it may hold per row, or None. retention: which columns a layer keeps.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[LayerSpec],
        new_store: StoreFactory,
        *,
        fixed: bool = False,
        max_tokens: int | None = None,
        retention: Callable[[LayerSpec], Retention] = what_reach_needs,
    ):
        self.name = name
        self.fixed = fixed
        self.specs = tuple(specs)
        self.log: Log | None = None
        kept = [(spec.reach, retention(spec)) for spec in specs]
        # Without any layer that keeps columns there is still a clock.
        used = [group for group, spec in zip(kept, specs, strict=True) if spec.keeps_kv] or kept[:1]
        timelines = {group: Timeline(group[1], max_tokens, all_room=fixed) for group in dict.fromkeys(used)}
        self._timelines = list(timelines.values())
        clock = self._timelines[0]
        super().__init__(
            layers=[
                _new_layer(spec, timelines.get(group, clock), new_store)
                for spec, group in zip(specs, kept, strict=True)
            ]
        )
        self._wrapped = [layer for layer in self.layers if isinstance(layer, WrappedLayer)]
        self._open = False  # a step was begun and neither settled nor aborted
        self._driven = False  # ... by our loop, which will also close it
        self._written: set[tuple[int, str]] = set()  # streams of layers that a foreign loop's open step has reached
        self._required = {(i, stream) for i, spec in enumerate(specs) for stream in spec.streams - {EXOTIC}}
        self._required |= {(i, KV) for i, spec in enumerate(specs) if EXOTIC in spec.streams}

    def check_fits(self, model_config: Any) -> None:
        specs = read_specs(model_config)
        if specs != self.specs:
            raise UnsupportedLayer(
                f"it was built for {_layers_in_words(self.specs)}, but the model has {_layers_in_words(specs)}; "
                "build one with the model's own configuration"
            )

    # One step is a transaction.

    def begin(self, tokens: int, graph: bool = False) -> None:
        self._finish_foreign_step()
        placements = {timeline: timeline.place(tokens) for timeline in self._timelines}
        # What may fail comes first and changes nothing that anybody can see.
        self._make_room({timeline: placement.room for timeline, placement in placements.items()})
        for layer in self.layers:
            if placements[layer.timeline].compact:
                layer.compact()
        for timeline, placement in placements.items():
            timeline.begin(tokens, placement, graph)
        for layer in self._wrapped:
            layer.begin()
        self._open = self._driven = True

    def _make_room(self, rooms: dict[Timeline, int]) -> None:
        if all(room == timeline.room for timeline, room in rooms.items()):
            return
        for layer in self.layers:
            layer.reserve(rooms[layer.timeline])
        for timeline, room in rooms.items():
            timeline.room = room

    def settle(self, drop: int = 0) -> None:
        if not self._open:
            raise StepError("settle() without begin()")
        pending = self._timelines[0].pending
        if not 0 <= drop <= pending:
            raise StepError(f"settle(drop={drop}), but the open step has {pending} tokens")
        first = self._timelines[0].seen == 0
        for layer in self._wrapped:
            layer.check_drop(drop)
        for layer in self.layers:
            layer.settle(drop)
        for timeline in self._timelines:
            timeline.settle(drop)
        if self._driven and first:  # the whole forward ran: layers it did not reach never take part
            self._required = {(i, stream) for i, stream in self._required if self.layers[i].is_initialized}
        self._close()

    def abort(self) -> None:
        if not self._open:
            return
        for layer in self.layers:
            layer.abort()
        for timeline in self._timelines:
            timeline.close()
        self._close()

    def _close(self) -> None:
        self._open = self._driven = False
        self._written.clear()

    def rows(self, index: torch.Tensor) -> None:
        self._finish_foreign_step()
        for layer in self.layers:
            layer.rows(index)
        self.log = None if self.log is None else self.log.rows(index)

    def reserve(self, tokens: int) -> None:
        self._make_room({timeline: timeline.room_for(tokens) for timeline in self._timelines})

    def reset(self) -> None:
        """Forget everything. Fixed buffers stay where they are."""
        self._close()
        self.log = None
        for timeline in self._timelines:
            timeline.reset()
        for layer in self.layers:
            layer.reset()

    @property
    def handle(self) -> TransformersCache:
        return self

    @property
    def seen(self) -> int:
        return self._timelines[0].seen + self._unsettled

    @property
    def max_tokens(self) -> int | None:
        """Tokens it can hold per row; None without limit, also when every layer forgets what is out of its reach."""
        return next((t.max_tokens for t in self._timelines if t.max_tokens is not None), None)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    # Foreign loops.

    @property
    def _unsettled(self) -> int:
        """Tokens of a foreign loop's step that is complete but not settled yet."""
        complete = self._open and not self._driven and self._written >= self._required
        return self._timelines[0].pending if complete else 0

    def _finish_foreign_step(self) -> None:
        if not self._open:
            return
        if self._driven:
            raise StepError("a step is open: settle() or abort() it first")
        # A forward that died half-way left some layers one step ahead: as if it had never been.
        self.settle() if self._written >= self._required else self.abort()

    def _open_foreign_step(self, layer_idx: int, stream: str, tokens: int) -> None:
        if (layer_idx, stream) in self._written:
            self._finish_foreign_step()
        if not self._open:
            self.begin(tokens)
            self._driven = False
            self.log = None  # what a foreign loop feeds is not known
        self._written.add((layer_idx, stream))

    # transformers' protocol.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads.

        Further arguments (`cache_kwargs` of older releases) are accepted: nothing in them is needed.
        """
        if not self._driven:
            self._open_foreign_step(layer_idx, KV, key_states.shape[-2])
        return self.layers[layer_idx].append(key_states, value_states)

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Append the keys [rows, tokens, index_dim] by which a sparse layer chooses what to attend to; returns all."""
        if not self._driven:
            self._open_foreign_step(layer_idx, INDEX, indexer_key_states.shape[1])
        return self.layers[layer_idx].append_index(indexer_key_states)

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Tokens committed; a tensor while a compiled step is open."""
        timeline = self._timelines[0]
        return timeline.clock if timeline.graph and timeline.clock is not None else self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.layers[layer_idx].mask_sizes(query_length, self._unsettled)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Tokens it can hold, -1 when it has no limit (transformers' convention)."""
        return -1 if self.max_tokens is None else self.max_tokens

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.batch_size > 0:
            self.rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.rows(indices)

    def crop(self, tokens: int) -> None:
        """Positive: the new size. Negative: how many of the last tokens to remove. 0 removes nothing."""
        self._finish_foreign_step()
        remove = max(0, self.seen - tokens) if tokens > 0 else -tokens
        if remove > self.seen:
            raise StepError(f"crop({tokens}): the cache holds {self.seen} tokens, {remove} cannot be removed from it")
        if remove and self._wrapped:
            kind = self._wrapped[0].spec.layer_type
            raise StepError(
                f"crop({tokens}) of {self.seen} tokens: a layer of {kind} cannot take tokens back. Reset the cache and "
                "feed the tokens to keep again."
            )
        for timeline in self._timelines:
            if not timeline.can_forget(remove):
                raise StepError(
                    f"crop({tokens}) of {self.seen} tokens: a sliding layer keeps {timeline.held} of them and the ones "
                    "before are gone. Reset the cache and feed the tokens to keep again."
                )
        for timeline in self._timelines:
            timeline.forget(remove)
        self.log = None if self.log is None else self.log.first(self.seen)

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first step."""
        tensors = (tensor for layer in self.layers for tensor in layer.tensors())
        first = next(tensors, None)
        return -1 if first is None else first.shape[0]

    @property
    def is_compileable(self) -> bool:
        # transformers would compile around our bookkeeping; only our loop knows how to keep that out of the graph.
        return self._driven and self._timelines[0].graph

    @property
    def is_initialized(self) -> bool:
        return self.batch_size > 0

    @property
    def is_croppable(self) -> bool:
        return all(isinstance(timeline.retention, KeepAll) for timeline in self._timelines)

    @property
    def is_sliding(self) -> list[bool]:
        return [layer.is_sliding for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        return [False] * len(self.layers)

    @property
    def is_dummy(self) -> list[bool]:
        return [not layer.spec.keeps_kv for layer in self.layers]

    def __repr__(self) -> str:
        return f"Cache({self.name!r}, layers={len(self.layers)}, seen={self.seen}, bytes={self.bytes})"


def _new_layer(spec: LayerSpec, timeline: Timeline, new_store: StoreFactory) -> Layer | WrappedLayer:
    return WrappedLayer(spec, timeline) if EXOTIC in spec.streams else Layer(spec, timeline, new_store)


def _layers_in_words(specs: Sequence[LayerSpec]) -> str:
    kinds = dict.fromkeys(
        f"{spec.layer_type}{'' if spec.reach.size is None else f' of {spec.reach.size}'}" for spec in specs
    )
    return f"{len(specs)} layers ({', '.join(kinds)})"
