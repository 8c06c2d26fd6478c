"""A cache of layers, each step a transaction, and what transformers' models call in a forward.

Our own loop drives it with `begin / settle / abort`. In a foreign loop (`model.generate`, or plain `model(...)`) nobody
calls those: there the first use of a layer opens a step and settles the one before, and what is asked in between is
answered as if that had already happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from caches.driven import Log
from caches.errors import StepError, UnsupportedLayer
from caches.face import Face
from caches.layer import Layer, StoreFactory
from caches.place import Place
from caches.retention import KeepAll, KeepRecent, Retention
from caches.spec import EXOTIC, INDEX, KV, PLAIN, STATE, LayerSpec, Reach, read_specs
from caches.state import CONV, RECURRENT, State
from caches.timeline import Timeline
from caches.wrapped import WrappedLayer


def what_reach_needs(spec: LayerSpec) -> Retention:
    """Keep exactly what the layer may still look at."""
    return KeepAll() if spec.reach.columns is None else KeepRecent(spec.reach.columns)


_IN_WORDS = {KV: "keys and values", INDEX: "index", STATE: "state"}


class Cache(Face):
    """Keys, values and states of a model's layers, kept as its recipe says. For the methods of a step see `Driven`.

    name: the recipe's name. specs: one per layer; None makes a layer of full attention whenever one is first used.
    new_store: makes the store of each stream. fixed: whether its tensors never move. max_rows, max_tokens: what it has
    room for, None without limit (a fixed one: the rows of the first step). retention: which columns a layer
    keeps. place: where the keys of a step have to come from.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[LayerSpec] | None,
        new_store: StoreFactory,
        *,
        fixed: bool = False,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        retention: Callable[[LayerSpec], Retention] = what_reach_needs,
        place: Place | None = None,
    ):
        super().__init__(layers=[])
        self.name, self.fixed, self._place = name, fixed, place
        self.log: Log | None = None
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._new_store, self._retention = new_store, retention
        self._open = False  # a step was begun and neither settled nor aborted
        self._driven = False  # ... by our loop, which will also close it
        # Of a foreign loop's open step: the calls there were, and the streams of layers that they reached.
        self._calls: set[tuple[int, str]] = set()
        self._reached: set[tuple[int, str]] = set()
        self._required: set[tuple[int, str]] = set()
        self._timelines: list[Timeline] = []
        self.finds_layers = specs is None
        self._make_layers(specs or ())

    def _make_layers(self, specs: Sequence[LayerSpec]) -> None:
        self.specs = tuple(specs)
        kept = [(spec.reach, self._retention(spec)) for spec in specs]
        # Without any layer that keeps columns there is still a clock.
        used = [group for group, spec in zip(kept, specs, strict=True) if spec.keeps_kv]
        used = used or kept[:1] or [(Reach(), KeepAll())]
        timelines = {
            group: Timeline(group[1], self._max_tokens, self._max_rows, all_room=self.fixed)
            for group in dict.fromkeys(used)
        }
        self._timelines = list(timelines.values())
        clock = self._timelines[0]
        self.layers = [
            self._new_layer(spec, timelines.get(group, clock)) for spec, group in zip(specs, kept, strict=True)
        ]
        self._required = {use for index, spec in enumerate(specs) for use in _uses(index, spec)}

    def _new_layer(self, spec: LayerSpec, timeline: Timeline) -> Layer | WrappedLayer:
        if EXOTIC in spec.streams:
            return WrappedLayer(spec, timeline)
        return Layer(spec, timeline, self._new_store, self.fixed)

    def check_fits(self, model_config: Any) -> None:
        specs = read_specs(model_config)
        if self.finds_layers and self.seen == 0:
            self.take_layers(specs)
        if specs != self.specs:
            raise UnsupportedLayer(
                f"it was built for {_layers_in_words(self.specs)}, but the model has {_layers_in_words(specs)}; "
                "build one with the model's own configuration"
            )

    def take_layers(self, specs: Sequence[LayerSpec]) -> None:
        """Be for these layers, instead of finding them as they are used. Only while it is empty."""
        self.finds_layers = False
        self._make_layers(specs)

    # One step is a transaction.

    def begin(self, tokens: int, graph: bool = False) -> None:
        if graph and not self.fixed:
            raise StepError(f"a compiled step needs tensors that never move, and cache={self.name!r} moves them")
        self._finish_foreign_step()
        self._begin_columns(tokens, graph)
        self._open = self._driven = True

    def _begin_columns(self, tokens: int, graph: bool = False) -> None:
        placements = {timeline: timeline.place(tokens) for timeline in self._timelines}
        # What may fail comes first and changes nothing that anybody can see.
        if not self._open:
            self._begin_layers()
        self._make_room({timeline: placement.room for timeline, placement in placements.items()})
        for layer in self.layers:
            if placements[layer.timeline].compact:
                layer.compact()
        for timeline, placement in placements.items():
            timeline.begin(tokens, placement, graph)

    def _begin_layers(self) -> None:
        for layer in self.layers:
            layer.begin()

    def _make_room(self, rooms: dict[Timeline, int]) -> None:
        if all(room == timeline.room for timeline, room in rooms.items()):
            return
        for layer in self.layers:
            layer.reserve(rooms[layer.timeline])
        for timeline, room in rooms.items():
            timeline.room = room

    def can_drop(self, drop: int) -> bool:
        return all(layer.can_drop(drop) for layer in self.layers)

    def settle(self, drop: int = 0) -> None:
        if not self._open:
            raise StepError("settle() without begin()")
        pending = self._timelines[0].pending
        if not 0 <= drop <= pending:
            raise StepError(f"settle(drop={drop}), but the open step has {pending} tokens")
        if not self.can_drop(drop):
            kind = next(layer.spec.layer_type for layer in self.layers if not layer.can_drop(drop))
            raise StepError(
                f"a {kind} layer takes back whole steps only, not {drop} of {pending} tokens: abort() the step and "
                "feed the tokens to keep again"
            )
        first = self._timelines[0].seen == 0
        for layer in self.layers:
            layer.settle(drop)
        for timeline in self._timelines:
            timeline.settle(drop)
        if self._driven and first:  # the whole forward ran: layers it did not reach never take part
            self._required = {(index, stream) for index, stream in self._required if self.layers[index].is_initialized}
        self._close()
        self._empty_if_nothing_is_held()

    def abort(self) -> None:
        if not self._open:
            return
        for layer in self.layers:
            layer.abort()
        for timeline in self._timelines:
            timeline.close()
        self._close()
        self._empty_if_nothing_is_held()

    def _empty_if_nothing_is_held(self) -> None:
        if self._timelines[0].seen == 0:  # not even the number of rows is settled
            self._empty()

    def _close(self) -> None:
        self._open = self._driven = False
        self._calls.clear()
        self._reached.clear()

    def rows(self, index: torch.Tensor) -> None:
        self._finish_foreign_step()
        rows = self.batch_size
        if rows == -1:
            return
        # On an accelerator, looking at the index would wait for the device.
        known = index.tolist() if index.device.type == "cpu" else [0] * len(index)
        if not known or min(known) < 0 or max(known) >= rows:
            raise StepError(f"rows({index.tolist()}), but the cache holds rows 0 to {rows - 1}")
        if self.max_rows is not None and len(index) > self.max_rows:
            raise StepError(
                f"a cache with room for {self.max_rows} rows cannot hold {len(index)}: build it with a larger "
                "max_batch_size, or use cache='dynamic'"
            )
        for layer in self.layers:
            layer.rows(index)
        for timeline in self._timelines:
            timeline.rows = len(index)
        self.log = None if self.log is None else self.log.rows(index)

    def reserve(self, tokens: int) -> None:
        self._make_room({timeline: timeline.room_for(tokens) for timeline in self._timelines})

    def load(self, seen: int, rows: int, contents: Sequence[dict[str, Any]]) -> None:
        """Hold exactly this content of every layer (see `Layer.content`) after `seen` tokens."""
        held = {
            layer.timeline: content["keys"].shape[-2]
            for layer, content in zip(self.layers, contents, strict=True)
            if isinstance(layer, Layer) and "keys" in content
        }
        for timeline in self._timelines:
            timeline.adopt(seen, held.get(timeline), rows)
        for layer, content in zip(self.layers, contents, strict=True):
            layer.load(content)

    def load_columns(self, columns: Sequence[Sequence[torch.Tensor]]) -> None:
        """Hold these keys and values [rows, kv_heads, tokens, head_dim] of all tokens seen, one pair per layer."""
        seen, rows = columns[0][0].shape[-2], columns[0][0].shape[0]
        if self.finds_layers:
            self._make_layers([PLAIN] * len(columns))
        contents = []
        for layer, (keys, values) in zip(self.layers, columns, strict=True):
            kept = layer.timeline.retention.surviving(seen)
            contents.append({"keys": keys[:, :, seen - kept :], "values": values[:, :, seen - kept :]})
        self.load(seen, rows, contents)

    def empty_like(self) -> Cache:
        """An empty cache of the same recipe and layers, with room for as many rows as it is given first."""
        return Cache(
            self.name,
            self.specs,
            self._new_store,
            fixed=self.fixed,
            max_tokens=self._max_tokens,
            retention=self._retention,
        )

    def crop(self, tokens: int) -> None:
        """Positive: the new size. Negative: how many of the last tokens to remove. 0 removes nothing."""
        self._finish_foreign_step()
        remove = max(0, self.seen - tokens) if tokens > 0 else -tokens
        if remove > self.seen:
            raise StepError(f"crop({tokens}): the cache holds {self.seen} tokens, {remove} cannot be removed from it")
        if remove and remove == self.seen:
            self.reset()
            return
        again = "Reset the cache and feed the tokens to keep again."
        for layer in self.layers:
            if not layer.can_forget(remove):
                raise StepError(
                    f"crop({tokens}) of {self.seen} tokens: a {layer.spec.layer_type} layer keeps a state, of which "
                    f"only the last step can be taken back. {again}"
                )
            if not layer.timeline.can_forget(remove):
                raise StepError(
                    f"crop({tokens}) of {self.seen} tokens: a {layer.spec.layer_type} layer keeps "
                    f"{layer.timeline.held} of them and the ones before are gone. {again}"
                )
        for layer in self.layers:
            layer.forget(remove)
        for timeline in self._timelines:
            timeline.forget(remove)
        self.log = None if self.log is None else self.log.first(self.seen)

    def reset(self) -> None:
        """Forget everything. Fixed buffers stay where they are."""
        self._close()
        self.log = None
        self._empty()

    def _empty(self) -> None:
        for timeline in self._timelines:
            timeline.reset()
        for layer in self.layers:
            layer.reset()

    @property
    def seen(self) -> int:
        return self._timelines[0].seen + self._unsettled

    @property
    def max_tokens(self) -> int | None:
        """Tokens it can hold per row; None without limit, also when every layer forgets what is out of its reach."""
        return next((t.max_tokens for t in self._timelines if t.max_tokens is not None), None)

    @property
    def max_rows(self) -> int | None:
        """Rows it has room for; None without limit."""
        return self._timelines[0].max_rows

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first step."""
        return next((t.rows for t in self._timelines if t.rows is not None), -1)

    # Foreign loops.

    @property
    def _is_complete(self) -> bool:
        """Whether a foreign loop's open step has reached every layer."""
        return self._open and not self._driven and self._reached >= self._required

    @property
    def _unsettled(self) -> int:
        """Tokens of a foreign loop's step that is complete but not settled yet."""
        # A step of one token may pass a model without columns in silence: it writes its states in place.
        return (self._timelines[0].pending or 1) if self._is_complete else 0

    def _finish_foreign_step(self) -> None:
        if not self._open:
            return
        if self._driven:
            raise StepError("a step is open: settle() or abort() it first")
        if not self._is_complete:  # a forward that died half-way: as if it had never been
            self.abort()
            return
        if self._timelines[0].pending == 0:
            self._begin_columns(1)
        self.settle()

    @property
    def is_open(self) -> bool:
        """Whether a step was begun and neither settled nor aborted."""
        return self._open

    def has_reached(self, layer_idx: int) -> bool:
        """Whether a foreign loop's open step has reached this layer."""
        return any(index == layer_idx for index, _ in self._reached)

    def finish(self, whole: bool = False) -> None:
        """Settle a foreign loop's step once it has reached every layer.

        whole: the forward is known to have come to its end, so what it did not reach never takes part.
        """
        if whole and self._open:
            self._required &= self._reached
        if self._is_complete:
            self._finish_foreign_step()

    def _touch(self, layer_idx: int, stream: str, call: str, tokens: int | None = None) -> Any:
        """A model uses a layer: that may open a foreign loop's step, and finish the one before. Returns the layer."""
        if self.finds_layers and not self._driven and layer_idx is not None and layer_idx >= len(self.layers):
            self._find_layer(layer_idx, stream)
        if layer_idx is None or not 0 <= layer_idx < len(self.layers):
            raise UnsupportedLayer(
                f"the cache has {len(self.layers)} layers, but layer {layer_idx} was asked for: the model's layers "
                "have to be numbered from 0 (`layer_idx`), and the cache built with its configuration"
            )
        spec = self.specs[layer_idx]
        if stream not in spec.streams and not (stream == KV and EXOTIC in spec.streams):
            raise UnsupportedLayer(
                f"layer {layer_idx} ({spec.layer_type}) keeps no {_IN_WORDS[stream]}: build the cache with the "
                "configuration of the model that uses it"
            )
        if not self._driven:
            if (layer_idx, call) in self._calls:
                self._finish_foreign_step()
            if not self._open:
                self._begin_layers()
                self._open, self.log = True, None  # what a foreign loop feeds is not known
            if tokens is not None and self._timelines[0].pending == 0:
                self._check_windows(tokens)
                self._begin_columns(tokens)
            self._calls.add((layer_idx, call))
        return self.layers[layer_idx]

    def _reach(self, layer_idx: int, stream: str) -> None:
        """A foreign loop's step has come so far: what a layer was given is there."""
        if not self._driven:
            self._reached.add((layer_idx, stream))

    def _check_windows(self, tokens: int) -> None:
        """Only our own loop hides from a token what is further back than a window that the cache imposes."""
        windows = [self.imposed_window(index) for index in range(len(self.layers))]
        narrow = min((window for window in windows if window is not None), default=None)
        if narrow is not None and tokens > 1 and self.seen + tokens > narrow:
            raise StepError(
                f"a step of {tokens} tokens after {self.seen} would look further back than the window of {narrow} that "
                f"the {self.name} cache imposes: generate with our engine, or feed the tokens after the first {narrow} "
                "one by one"
            )

    @property
    def imposes_windows(self) -> bool:
        return any(self.imposed_window(index) is not None for index in range(len(self.layers)))

    def imposed_window(self, layer_idx: int) -> int | None:
        """Columns that a token can look at, itself included, where that is fewer than the layer's own reach."""
        spec, bound = self.specs[layer_idx], self.layers[layer_idx].timeline.retention.bound
        if bound is None or not spec.keeps_kv or (spec.reach.size is not None and spec.reach.size <= bound + 1):
            return None
        return bound + 1

    def _find_layer(self, layer_idx: int, stream: str) -> None:
        if stream != KV or self._timelines[0].seen > 0:
            raise StepError(
                f"layer {layer_idx} appears in a cache that was built without a configuration"
                + (" and keeps a state" if stream != KV else " after the first step, so that step died half-way")
                + ": build it with config=model.config"
            )
        while len(self.layers) <= layer_idx:
            self.specs += (PLAIN,)
            self._required |= set(_uses(len(self.layers), PLAIN))
            self.layers.append(self._new_layer(PLAIN, self._timelines[0]))

    # What models call.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one layer's keys and values [rows, kv_heads, tokens, head_dim]; returns what attention reads.

        Further arguments (`cache_kwargs` of older releases) are accepted: nothing in them is needed.
        """
        if self._place is not None:
            self._place.check(layer_idx, key_states)
        both = self._touch(layer_idx, KV, "update", key_states.shape[-2]).append(key_states, value_states)
        self._reach(layer_idx, KV)
        return both

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Append the keys [rows, tokens, index_dim] by which a sparse layer chooses what to attend to; returns all."""
        layer = self._touch(layer_idx, INDEX, "index", indexer_key_states.shape[1])
        keys = layer.append_index(indexer_key_states)
        self._reach(layer_idx, INDEX)
        return keys

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Conv state `state_idx` [rows, channels, kernel], to be written in place; None before the first step."""
        state = self._state(layer_idx, f"get conv {state_idx}").get((CONV, state_idx))
        self._reach(layer_idx, STATE)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Recurrent state `state_idx` [rows, ...], to be written in place; None before the first step."""
        state = self._state(layer_idx, f"get recurrent {state_idx}").get((RECURRENT, state_idx))
        self._reach(layer_idx, STATE)
        return state

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Add what a convolution reads [rows, channels, tokens]; returns it with the columns before."""
        if self._place is not None:
            self._place.check(layer_idx, conv_states)
        tokens = None if conv_kernel_size is None else conv_states.shape[-1]
        state = self._state(layer_idx, f"conv {state_idx}", tokens)
        read = state.append_conv(conv_states, state_idx, conv_kernel_size)
        self._reach(layer_idx, STATE)
        return read

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Set recurrent state `state_idx` [rows, ...]; returns it."""
        state = self._state(layer_idx, f"recurrent {state_idx}").set((RECURRENT, state_idx), recurrent_states)
        self._reach(layer_idx, STATE)
        return state

    def _state(self, layer_idx: int, call: str, tokens: int | None = None) -> State:
        return self._touch(layer_idx, STATE, call, tokens).state

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Tokens committed; a tensor while a compiled step is open."""
        timeline = self._timelines[0]
        return timeline.clock if timeline.graph and timeline.clock is not None else self.seen

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if layer_idx >= len(self.layers):  # not found yet
            return query_length, 0
        return self.layers[layer_idx].mask_sizes(query_length, self._unsettled)

    @property
    def is_compileable(self) -> bool:
        # transformers would compile around our bookkeeping; only our loop knows how to keep that out of the graph.
        return self._driven and self._timelines[0].graph

    @property
    def is_croppable(self) -> bool:
        return all(isinstance(timeline.retention, KeepAll) for timeline in self._timelines) and not any(
            spec.streams & {STATE, EXOTIC} for spec in self.specs
        )


def _uses(index: int, spec: LayerSpec) -> list[tuple[int, str]]:
    """The streams that every whole forward reaches in a layer."""
    return [(index, KV if stream == EXOTIC else stream) for stream in spec.streams]


def _layers_in_words(specs: Sequence[LayerSpec]) -> str:
    kinds = dict.fromkeys(
        f"{spec.layer_type}{'' if spec.reach.size is None else f' of {spec.reach.size}'}" for spec in specs
    )
    return f"{len(specs)} layers ({', '.join(kinds)})"
