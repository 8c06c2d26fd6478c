"""The layers of a cache, and the transaction that a step is on them.

`begin` makes room and decides where new tokens go, the forward appends, `commit` keeps them and evicts what no later
token attends to, `abort` undoes everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from caches.core.cache_layout import MOVES, QUANTIZES, CacheLayout
from caches.core.layer import Layer
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import StepError, UnsupportedLayerError
from caches.layers.layer_spec import INDEX, KV, MODEL_SPECIFIC, PLAIN, STATE, AttentionSpan, LayerSpec
from caches.memory.scratch import Scratch
from caches.protocol import TokenLog
from caches.stores.slot import Slot
from caches.stores.store import Store
from caches.timeline.shared_timeline import ForkedTimeline
from caches.timeline.timeline import Timeline

_IN_WORDS = {KV: "keys and values", INDEX: "index", STATE: "state"}


class LayerStack:
    """Keys, values and states of a model's layers, kept as `layout` says.

    log: the tokens it holds, where they are known. timelines: one per group of layers with the same attention span.
    is_open: a step was begun and neither committed nor aborted. is_announced: by `begin`, whose caller also ends it.
    finds_layers: layers are added as they are used.
    """

    layers: list[Layer | WrappedLayer]
    timelines: list[Timeline]
    specs: tuple[LayerSpec, ...]
    _stateful: list[Layer | WrappedLayer]  # only these have to be prepared for a step, and may refuse to reject tokens

    def __init__(self, layout: CacheLayout):
        self.restart(layout)

    def restart(self, layout: CacheLayout) -> None:
        """Become an empty stack of this layout."""
        self.layout = layout
        self.hook = layout.make_hook()
        self.log: TokenLog | None = None
        self.is_open = self.is_announced = False
        self.finds_layers = layout.specs is None
        self._make_layers(layout.specs or ())

    def _make_layers(self, specs: Sequence[LayerSpec]) -> None:
        layout, self.specs, self.scratch = self.layout, tuple(specs), Scratch()
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
        self._stateful = [layer for layer in self.layers if layer.is_stateful]

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
        if layer.is_stateful:
            self._stateful.append(layer)

    def bind_layers(self, specs: Sequence[LayerSpec]) -> None:
        """Have these layers, in place of adding them as they are used. Only while it is empty."""
        self.hook.check_layers(specs)
        self.finds_layers = False
        self._make_layers(specs)

    def check_specs(self, specs: Sequence[LayerSpec]) -> None:
        """Raise `UnsupportedLayerError` unless a model has these layers."""
        if tuple(specs) != self.specs:
            raise UnsupportedLayerError(
                f"it was built for {_layers_in_words(self.specs)}, but the model has {_layers_in_words(specs)}; "
                "build one with the model's own configuration"
            )

    def empty_layout(self, max_rows: int | None) -> CacheLayout:
        """For an empty cache with the same layers; a preallocated one with room for the rows of its first step."""
        specs = None if self.finds_layers and not self.layers else self.specs
        config = self.layout.config  # a file builds the cache from it
        config = None if config is None else config.update(max_batch_size=max_rows)[0]
        return replace(self.layout, specs=specs, config=config, max_rows=max_rows)

    # One step is a transaction.

    def begin(self, tokens: int, graph: bool = False) -> None:
        """See `EngineCache.begin`."""
        if graph:
            self.check_compiles()
        self.check_closed()
        self.place(tokens, graph)
        self.is_open = self.is_announced = True

    def check_compiles(self) -> None:
        """Raise `StepError` where a compiled step cannot use it."""
        if self.why_not_compiled is not None:
            raise StepError(f"cache={self.layout.name!r} cannot be in a compiled step: {self.why_not_compiled}")

    def check_closed(self) -> None:
        """Raise `StepError` while a step is open."""
        if self.is_open:
            raise StepError("a step is open: commit() or abort() it first")

    def place(self, tokens: int, graph: bool = False) -> None:
        """Make room for a step of `tokens` and decide where they go. When this raises, nothing has changed."""
        placements = {timeline: timeline.place(tokens) for timeline in self.timelines}
        finish = self.hook.before_begin(self.layers, tokens)
        if not self.is_open:
            for layer in self._stateful:
                layer.prepare()
        self._make_room({timeline: placement.room for timeline, placement in placements.items()})
        # Nothing below can fail.
        if not self.is_open:
            for layer in self._stateful:
                layer.begin()
        for timeline, placement in placements.items():
            if placement.compact:
                for layer in self.layers_of(timeline):
                    layer.compact()
            timeline.begin(tokens, placement, graph)
        finish()

    def open_states(self) -> None:
        """Begin a step of which the number of tokens is not known yet: states can be written."""
        for layer in self._stateful:
            layer.prepare()
        for layer in self._stateful:
            layer.begin()

    def _make_room(self, rooms: dict[Timeline, int]) -> None:
        if all(room == timeline.room and not timeline.is_frozen for timeline, room in rooms.items()):
            return
        for layer in self.layers:
            layer.reserve(rooms[layer.timeline])
        for timeline, room in rooms.items():
            timeline.take_room(room)

    def can_reject(self, rejected: int) -> bool:
        return all(layer.can_reject(rejected) for layer in self._stateful)

    def commit(self, rejected: int = 0) -> None:
        """See `EngineCache.commit`."""
        if not self.is_open:
            raise StepError("commit() without begin()")
        if not 0 <= rejected <= self.pending:
            raise StepError(f"commit(rejected={rejected}), but the open step has {self.pending} tokens")
        if not self.can_reject(rejected):
            stateful = next(layer.spec.layer_type for layer in self._stateful if not layer.can_reject(rejected))
            raise StepError(
                f"a {stateful} layer takes back whole steps only, not {rejected} of {self.pending} tokens: abort() the "
                "step and feed the tokens to keep again"
            )
        self.hook.before_commit(self.layers)
        for layer in self.layers:
            layer.commit(rejected)
        for timeline in self.timelines:
            timeline.commit(rejected)
        self._close()

    def abort(self) -> None:
        """See `EngineCache.abort`."""
        if not self.is_open:
            return
        for layer in self.layers:
            layer.abort()
        for timeline in self.timelines:
            timeline.close()
        self._close()

    def _close(self) -> None:
        self.is_open = self.is_announced = False
        if self.total_tokens == 0:  # not even the number of rows is committed
            self._empty()

    def crop(self, tokens: int) -> None:
        """See `EngineCache.crop`. 0 removes nothing."""
        self.check_closed()
        remove = max(0, self.total_tokens - tokens) if tokens > 0 else min(-tokens, self.total_tokens)
        if remove and remove == self.total_tokens:
            self.log = None
            self._empty()
            return
        self._check_rolls_back(remove, tokens)
        for layer in self.layers:
            layer.roll_back(remove)
        for timeline in self.timelines:
            timeline.roll_back(remove)
        self.log = None if self.log is None else self.log.first(self.total_tokens)

    def _check_rolls_back(self, remove: int, tokens: int) -> None:
        remedy = "Reset the cache and feed the tokens to keep again."
        for layer in self.layers:
            if not layer.can_roll_back(remove):
                raise StepError(
                    f"crop({tokens}) of {self.total_tokens} tokens: a {layer.spec.layer_type} layer keeps a state, of "
                    f"which only the last step can be taken back. {remedy}"
                )
            if not layer.timeline.can_roll_back(remove):
                raise StepError(
                    f"crop({tokens}) of {self.total_tokens} tokens: a {layer.spec.layer_type} layer keeps "
                    f"{layer.timeline.kept_tokens} of them and the ones before are gone. {remedy}"
                )

    def reset(self) -> None:
        """Evict everything. Preallocated buffers stay where they are."""
        self.is_open = self.is_announced = False
        self.log = None
        self._empty()
        self.hook.reset()

    def release(self) -> None:
        """Reset, and free all memory: the next step allocates it anew."""
        for layer in self.layers:
            layer.release()
        self.scratch.release()
        self.reset()
        for timeline in self.timelines:
            timeline.release()

    def _empty(self) -> None:
        self.remove_suffixes()
        for timeline in self.timelines:
            timeline.reset()
        for layer in self.layers:
            layer.reset()

    def reserve(self, tokens: int) -> None:
        """See `EngineCache.reserve`."""
        self._make_room({timeline: timeline.room_for(tokens) for timeline in self.timelines})

    def growth(self, tokens: int) -> int:
        """How many bytes more buffers will take of the device when there is room for `tokens` more."""
        times = {timeline: timeline.place(tokens).room / timeline.room for timeline in self.timelines if timeline.room}
        of_layers = sum(layer.growing_bytes * (times.get(layer.timeline, 1) - 1) for layer in self.layers)
        staging = sum(tensor.nbytes for tensor in self.scratch.tensors())
        return int(of_layers + staging * (max(times.values(), default=1) - 1))

    # Groups of layers, which share a timeline.

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

    # Content, from another cache or from tensors.

    def load_state_dict(
        self,
        timelines: Sequence[dict[str, Any]],
        rows: int,
        states: Iterable[dict[str, Any]],
        hook_state: dict[str, Any],
    ) -> None:
        """Hold exactly this of every timeline and layer of a stack of the same layout: see their `state_dict`.

        Groups share prefixes already where those of the other stack do.
        """
        self.hook.load_state_dict(hook_state)
        for timeline, state in zip(self.timelines, timelines, strict=True):
            timeline.load_state_dict(state, rows)
        for layer, state in zip(self.layers, states, strict=True):
            layer.load_state_dict(state)

    def load_keys_and_values(self, pairs: Sequence[Sequence[torch.Tensor]]) -> None:
        """Hold these keys and values [rows, kv_heads, tokens, head_dim] of all tokens, one pair per layer."""
        rows, _, total_tokens, _ = pairs[0][0].shape
        if self.finds_layers:
            self._make_layers([PLAIN] * len(pairs))
        self.hook.load_state_dict({})
        self.remove_suffixes()
        for timeline in self.timelines:
            timeline.adopt(total_tokens, None, rows)
        for layer, pair in zip(self.layers, pairs, strict=True):
            evicted = layer.timeline.evicted_tokens
            content = zip(("keys", "values"), pair, strict=True)
            layer.load_dense({name: tensor[:, :, evicted:] for name, tensor in content})
        self.log = None

    @property
    def placements(self) -> list[tuple[object, ...]]:
        """What has to be the same in caches whose rows are put together."""
        return [timeline.layout for timeline in self.timelines]

    # What it holds, and can hold.

    @property
    def why_not_compiled(self) -> str | None:
        """See `EngineCache.why_not_compiled`."""
        if self.shared_timelines:
            return "a graph reads one tensor per layer, and here rows share the prefix of their prompt"
        blocker = self.layout.compile_blocker
        return QUANTIZES if self.is_quantized and blocker in (None, MOVES) else blocker

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


def _layers_in_words(specs: Sequence[LayerSpec]) -> str:
    layer_types = dict.fromkeys(
        f"{spec.layer_type}{'' if spec.attention_span.size is None else f' of {spec.attention_span.size}'}"
        for spec in specs
    )
    return f"{len(specs)} layers ({', '.join(layer_types)})"
