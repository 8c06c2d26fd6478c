"""`LayerGroups`: the layers of a cache, in groups with the same attention span, which share a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from caches.core.cache_layout import CacheLayout
from caches.core.layer import Layer
from caches.core.step_hook import StepHook
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import UnsupportedLayerError
from caches.layers.layer_spec import INDEX, KV, MODEL_SPECIFIC, PLAIN, STATE, AttentionSpan, LayerSpec
from caches.memory.scratch import Scratch
from caches.stores.recurrent_state import RecurrentState
from caches.stores.slot import Slot
from caches.stores.store import Store
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline

_IN_WORDS = {KV: "keys and values", INDEX: "index", STATE: "state"}
State: TypeAlias = RecurrentState | WrappedLayer
"""What a step writes over: prepared before it, and able to take back the last step alone."""


class LayerGroups:
    """timelines: one per group. layout: what the layers are made by. scratch: memory that they share."""

    layout: CacheLayout
    hook: StepHook
    layers: list[Layer | WrappedLayer]
    timelines: list[Timeline]
    specs: tuple[LayerSpec, ...]
    scratch: Scratch
    _states: list[tuple[str, State]]  # with the types of their layers

    def _make_layers(self, specs: Sequence[LayerSpec]) -> None:
        self.specs, self.scratch, layout = tuple(specs), Scratch(), self.layout
        groups = [(spec.attention_span, layout.retention(spec)) for spec in specs]
        # Without any layer that keeps tokens there is still a timeline, which counts them.
        used = [group for group, spec in zip(groups, specs, strict=True) if spec.keeps_kv]
        used = used or groups[:1] or [(AttentionSpan(), layout.retention(PLAIN))]
        timelines = {
            group: layout.make_timeline(group[1], layout.max_tokens, layout.max_rows, all_room=layout.preallocated)
            for group in dict.fromkeys(used)
        }
        self.timelines = list(timelines.values())
        clock = self.timelines[0]
        self.layers = [
            self._new_layer(spec, timelines.get(group, clock)) for spec, group in zip(specs, groups, strict=True)
        ]
        self._states = [(layer.spec.layer_type, state) for layer in self.layers for state in _states_of(layer)]

    def _new_layer(self, spec: LayerSpec, timeline: Timeline) -> Layer | WrappedLayer:
        if MODEL_SPECIFIC in spec.components:
            return WrappedLayer(spec, timeline)
        return Layer(spec, timeline, self.scratch, self.new_store, self.layout.preallocated)

    def new_store(self, slot: Slot) -> Store:
        return self.hook.overlaid(slot, self.layout.make_store(slot))

    def layer(self, layer_idx: int | None, component: str) -> Layer | WrappedLayer:
        """The layer that a model uses. Raises `UnsupportedLayerError` where it keeps no such component."""
        if layer_idx is None or not 0 <= layer_idx < len(self.layers):
            raise UnsupportedLayerError(
                f"the cache has {len(self.layers)} layers, but layer {layer_idx} was asked for: the model's layers "
                "have to be numbered from 0 (`layer_idx`), and the cache built with its configuration"
            )
        layer = self.layers[layer_idx]
        components = layer.spec.components
        if component not in components and not (component in (KV, INDEX) and MODEL_SPECIFIC in components):
            raise UnsupportedLayerError(
                f"layer {layer_idx} ({layer.spec.layer_type}) keeps no {_IN_WORDS[component]}: build the cache with "
                "the configuration of the model that uses it"
            )
        return layer

    def add_layer(self, spec: LayerSpec) -> None:
        self.specs += (spec,)
        layer = self._new_layer(spec, self.timelines[0])
        self.layers.append(layer)
        self._states += [(spec.layer_type, state) for state in _states_of(layer)]

    def check_specs(self, specs: Sequence[LayerSpec]) -> None:
        """Raise `UnsupportedLayerError` unless a model has these layers."""
        if tuple(specs) != self.specs:
            raise UnsupportedLayerError(
                f"it was built for {_layers_in_words(self.specs)}, but the model has {_layers_in_words(specs)}; "
                "build one with the model's own configuration"
            )

    @property
    def shared_timelines(self) -> list[ForkedTimeline]:
        """Those of groups whose rows share prefixes."""
        return [timeline for timeline in self.timelines if isinstance(timeline, ForkedTimeline)]

    def layers_of(self, timeline: Timeline) -> list[Layer | WrappedLayer]:
        """The layers of a group."""
        return [layer for layer in self.layers if layer.timeline is timeline]

    def remove_suffixes(self, shared: Iterable[ForkedTimeline] | None = None) -> None:
        """Groups whose rows share prefixes, by default all, keep what is in the prefixes alone."""
        for timeline in self.shared_timelines if shared is None else shared:
            for layer in self.layers_of(timeline):
                if isinstance(layer, Layer):
                    layer.remove_suffix(timeline.prefix)
            self.timelines[self.timelines.index(timeline)] = timeline.prefix
        if not self.shared_timelines:
            self.scratch.release_suffix()

    def _make_room(self, rooms: dict[Timeline, int]) -> None:
        if all(room == timeline.room and not timeline.is_frozen for timeline, room in rooms.items()):
            return
        for layer in self.layers:
            layer.reserve(rooms[layer.timeline])
        for timeline, room in rooms.items():
            timeline.take_room(room)

    def growth(self, tokens: int) -> int:
        """How many bytes more buffers will take of the device when there is room for `tokens` more."""
        times = {timeline: timeline.place(tokens).room / timeline.room for timeline in self.timelines if timeline.room}
        of_layers = sum(layer.growing_bytes * (times.get(layer.timeline, 1) - 1) for layer in self.layers)
        staging = sum(tensor.nbytes for tensor in self.scratch.tensors())
        return int(of_layers + staging * (max(times.values(), default=1) - 1))

    @property
    def placements(self) -> list[tuple[object, ...]]:
        """What has to be the same in caches whose rows are put together."""
        return [timeline.layout for timeline in self.timelines]

    @property
    def total_tokens(self) -> int:
        """Tokens committed per row."""
        return self.timelines[0].total_tokens

    @property
    def pending(self) -> int:
        """Tokens of the open step."""
        return self.timelines[0].pending

    @property
    def max_tokens(self) -> int | None:
        """Tokens it can hold per row; None without limit, also when every layer evicts what is out of its span."""
        return next((t.max_tokens for t in self.timelines if t.max_tokens is not None), None)

    @property
    def max_rows(self) -> int | None:
        """Rows it has room for; None without limit."""
        return self.timelines[0].max_rows

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first step."""
        return next((t.rows for t in self.timelines if t.rows is not None), -1)

    @property
    def is_quantized(self) -> bool:
        """Whether some of it is kept in fewer bits than it came in."""
        return any(layer.is_quantized for layer in self.layers)

    def imposed_window(self, layer_idx: int) -> int | None:
        """Tokens that a token can attend to, itself included, where that is fewer than the layer's attention span."""
        if layer_idx >= len(self.layers):  # not added yet
            return None
        spec, bound = self.specs[layer_idx], self.layers[layer_idx].timeline.retention.bound
        if bound is None or not spec.keeps_kv:
            return None
        size = spec.attention_span.size
        return bound + 1 if size is None or size > bound + 1 else None


def _states_of(layer: Layer | WrappedLayer) -> list[State]:
    if isinstance(layer, WrappedLayer):
        return [layer]
    return [] if layer.state is None else [layer.state]


def _layers_in_words(specs: Sequence[LayerSpec]) -> str:
    layer_types = dict.fromkeys(
        f"{spec.layer_type}{'' if spec.attention_span.size is None else f' of {spec.attention_span.size}'}"
        for spec in specs
    )
    return f"{len(specs)} layers ({', '.join(layer_types)})"
