"""The layers of a cache and the transaction that a step is on them, as our own loop drives it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from caches.core.layer import Layer, StoreFactory
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import StepError, UnsupportedLayerError
from caches.hf.legacy_names import LegacyNames
from caches.memory.expected_device import ExpectedDevice
from caches.memory.scratch import Scratch
from caches.protocol import TokenLog
from caches.spec.layer_spec import MODEL_SPECIFIC, PLAIN, AttentionSpan, LayerSpec, read_specs
from caches.spec.rope import RopeRotation
from caches.timeline.retention import KeepAll, KeepRecent, Retention
from caches.timeline.timeline import Timeline
from configs import CacheConfig

S = TypeVar("S", bound="Steps")


def needed_by_attention(spec: LayerSpec) -> Retention:
    """Keep exactly what the layer may still look at."""
    return KeepAll() if spec.attention_span.past_tokens is None else KeepRecent(spec.attention_span.past_tokens)


class Steps(LegacyNames):
    """Keys, values and states of a model's layers, kept as its recipe says. For the methods of a step see
    `EngineCache`.

    name: the recipe's name. specs: one per layer; None makes a layer of full attention whenever one is first used.
    new_store: makes the store of each stream. fixed: whether its tensors never move. max_rows, max_tokens: what it has
    room for, None without limit (a fixed one: the rows of the first step). fetched: what attention reads lives
    elsewhere before. retention: which columns a layer keeps. new_timeline: makes the timeline of a group of layers.
    place: where the keys of a step have to come from.
    """

    def __init__(
        self,
        name: str,
        specs: Sequence[LayerSpec] | None,
        new_store: StoreFactory,
        *,
        fixed: bool = False,
        fetched: bool = False,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        retention: Callable[[LayerSpec], Retention] = needed_by_attention,
        new_timeline: Callable[..., Timeline] = Timeline,
        place: ExpectedDevice | None = None,
    ):
        super().__init__(layers=[])
        self.name, self.fixed, self._fetched, self._place = name, fixed, fetched, place
        self.log: TokenLog | None = None
        self.options: CacheConfig | None = None  # that its recipe was given
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._new_store, self._retention, self._new_timeline = new_store, retention, new_timeline
        self.is_open = False  # a step was begun and neither settled nor aborted
        self._timelines: list[Timeline] = []
        self.finds_layers = specs is None
        self._make_layers(specs or ())

    def _make_layers(self, specs: Sequence[LayerSpec]) -> None:
        self.specs = tuple(specs)
        self.scratch = Scratch()
        kept = [(spec.attention_span, self._retention(spec)) for spec in specs]
        # Without any layer that keeps columns there is still a clock.
        used = [group for group, spec in zip(kept, specs, strict=True) if spec.keeps_kv]
        used = used or kept[:1] or [(AttentionSpan(), self._retention(PLAIN))]
        timelines = {
            group: self._new_timeline(group[1], self._max_tokens, self._max_rows, all_room=self.fixed)
            for group in dict.fromkeys(used)
        }
        self._timelines = list(timelines.values())
        clock = self._timelines[0]
        self.layers = [
            self._new_layer(spec, timelines.get(group, clock)) for spec, group in zip(specs, kept, strict=True)
        ]

    def _new_layer(self, spec: LayerSpec, timeline: Timeline) -> Layer | WrappedLayer:
        if MODEL_SPECIFIC in spec.components:
            return WrappedLayer(spec, timeline)
        return Layer(spec, timeline, self.scratch, self._new_store, self.fixed)

    def check_fits(self, model_config: Any) -> None:
        specs = read_specs(model_config)
        if self.finds_layers and self.total_tokens == 0:
            self.bind_layers(specs)
        if specs != self.specs:
            raise UnsupportedLayerError(
                f"it was built for {_layers_in_words(self.specs)}, but the model has {_layers_in_words(specs)}; "
                "build one with the model's own configuration"
            )

    def bind_layers(self, specs: Sequence[LayerSpec]) -> None:
        """Be for these layers, instead of finding them as they are used. Only while it is empty."""
        self.finds_layers = False
        self._make_layers(specs)

    # One step is a transaction.

    def begin(self, tokens: int, graph: bool = False) -> None:
        if graph and self.why_not_compiled is not None:
            raise StepError(f"cache={self.name!r} cannot be in a compiled step: {self.why_not_compiled}")
        self._between_steps()
        self._begin_columns(tokens, graph)
        self.is_open = True

    def _between_steps(self) -> None:
        """Raise `StepError` while a step is open."""
        if self.is_open:
            raise StepError("a step is open: settle() or abort() it first")

    def _begin_columns(self, tokens: int, graph: bool = False) -> None:
        placements = {timeline: timeline.place(tokens) for timeline in self._timelines}
        # What may fail comes first, and changes nothing that can be seen.
        if not self.is_open:
            self._prepare_layers()
        self._make_room({timeline: placement.room for timeline, placement in placements.items()})
        if not self.is_open:
            self._begin_layers()
        for layer in self.layers:
            if placements[layer.timeline].compact:
                layer.compact()
        for timeline, placement in placements.items():
            timeline.begin(tokens, placement, graph)

    def _prepare_layers(self) -> None:
        for layer in self.layers:
            layer.prepare()

    def _begin_layers(self) -> None:
        """What cannot fail once the layers are prepared."""
        for layer in self.layers:
            layer.begin()

    def _make_room(self, rooms: dict[Timeline, int]) -> None:
        if all(room == timeline.room for timeline, room in rooms.items()):
            return
        for layer in self.layers:
            layer.reserve(rooms[layer.timeline])
        for timeline, room in rooms.items():
            timeline.take_room(room)

    def can_reject(self, rejected: int) -> bool:
        return all(layer.can_reject(rejected) for layer in self.layers)

    def commit(self, rejected: int = 0) -> None:
        if not self.is_open:
            raise StepError("settle() without begin()")
        pending = self._timelines[0].pending
        if not 0 <= rejected <= pending:
            raise StepError(f"settle(rejected={rejected}), but the open step has {pending} tokens")
        if not self.can_reject(rejected):
            kind = next(layer.spec.layer_type for layer in self.layers if not layer.can_reject(rejected))
            raise StepError(
                f"a {kind} layer takes back whole steps only, not {rejected} of {pending} tokens: abort() the step and "
                "feed the tokens to keep again"
            )
        self._prepare_to_settle(rejected)
        for layer in self.layers:
            layer.commit(rejected)
        for timeline in self._timelines:
            timeline.commit(rejected)
        self._close()
        self._empty_if_nothing_is_held()

    def _prepare_to_settle(self, rejected: int) -> None:
        """What settling needs memory for: it may fail, and changes nothing that is visible."""

    def abort(self) -> None:
        if not self.is_open:
            return
        for layer in self.layers:
            layer.abort()
        for timeline in self._timelines:
            timeline.close()
        self._close()
        self._empty_if_nothing_is_held()

    def _empty_if_nothing_is_held(self) -> None:
        if self._timelines[0].total_tokens == 0:  # not even the number of rows is settled
            self._empty()

    def _close(self) -> None:
        self.is_open = False

    def reserve(self, tokens: int) -> None:
        self._make_room({timeline: timeline.room_for(tokens) for timeline in self._timelines})

    def growth(self, tokens: int) -> float:
        """How many times as large buffers will be when there is room for `tokens` more."""
        rooms = [(timeline.place(tokens).room, timeline.room) for timeline in self._timelines if timeline.room]
        return max((after / before for after, before in rooms), default=1.0)

    def load_dense(self, seen: int, rows: int, contents: Sequence[dict[str, Any]]) -> None:
        """Hold exactly this content of every layer (see `Layer.content`) after `total_tokens` tokens."""
        held = {
            layer.timeline: content["keys"].shape[-2]
            for layer, content in zip(self.layers, contents, strict=True)
            if isinstance(layer, Layer) and "keys" in content
        }
        for timeline in self._timelines:
            timeline.adopt(seen, held.get(timeline), rows)
        for layer, content in zip(self.layers, contents, strict=True):
            layer.load_dense(content)

    def load_state_dict(self, like: Steps, rows: int, written: Iterable[dict[str, Any]]) -> None:
        """Hold exactly this of every layer (see `Layer.written`) where `like`, of the same recipe, holds it."""
        for timeline, other in zip(self._timelines, like._timelines, strict=True):
            timeline.adopt_like(other, rows)
        for layer, held in zip(self.layers, written, strict=True):
            layer.load_state_dict(held)

    @property
    def layout(self) -> list[tuple[Any, ...]]:
        """What has to be the same in caches whose rows are put together."""
        return [timeline.layout for timeline in self._timelines]

    def load_columns(self, columns: Sequence[Sequence[torch.Tensor]]) -> None:
        """Hold these keys and values [rows, kv_heads, tokens, head_dim] of all tokens seen, one pair per layer."""
        seen, rows = columns[0][0].shape[-2], columns[0][0].shape[0]
        if self.finds_layers:
            self._make_layers([PLAIN] * len(columns))
        contents = []
        for layer, (keys, values) in zip(self.layers, columns, strict=True):
            kept = layer.timeline.retention.surviving(seen)
            contents.append({"keys": keys[:, :, seen - kept :], "values": values[:, :, seen - kept :]})
        self.load_dense(seen, rows, contents)

    def empty_like(self: S, max_rows: int | None = None) -> S:
        """An empty cache of the same recipe and layers; a fixed one with room for the rows that it is given first."""
        empty = type(self)(
            self.name,
            None if self.finds_layers and not self.layers else self.specs,
            self._new_store,
            fixed=self.fixed,
            fetched=self._fetched,
            max_rows=max_rows,
            max_tokens=self._max_tokens,
            retention=self._retention,
            new_timeline=self._new_timeline,
            place=self._place,
        )
        empty.options = self.options
        return empty

    def crop(self, tokens: int) -> None:
        """Positive: the new size. Negative: how many of the last tokens to remove. 0 removes nothing."""
        self._between_steps()
        remove = max(0, self.total_tokens - tokens) if tokens > 0 else -tokens
        if remove > self.total_tokens:
            raise StepError(
                f"crop({tokens}): the cache holds {self.total_tokens} tokens, {remove} cannot be removed from it"
            )
        if remove and remove == self.total_tokens:
            self.log = None
            self._empty()
            return
        again = "Reset the cache and feed the tokens to keep again."
        for layer in self.layers:
            if not layer.can_roll_back(remove):
                raise StepError(
                    f"crop({tokens}) of {self.total_tokens} tokens: a {layer.spec.layer_type} layer keeps a state, of "
                    f"which only the last step can be taken back. {again}"
                )
            if not layer.timeline.can_roll_back(remove):
                raise StepError(
                    f"crop({tokens}) of {self.total_tokens} tokens: a {layer.spec.layer_type} layer keeps "
                    f"{layer.timeline.kept_tokens} of them and the ones before are gone. {again}"
                )
        for layer in self.layers:
            layer.roll_back(remove)
        for timeline in self._timelines:
            timeline.roll_back(remove)
        self.log = None if self.log is None else self.log.first(self.total_tokens)

    def reset(self) -> None:
        """Forget everything. Fixed buffers stay where they are."""
        self._close()
        self.log = None
        self._empty()

    def release(self) -> None:
        """Forget everything and keep no memory, so that the next step makes fixed buffers anew."""
        for layer in self.layers:
            layer.release()
        self.scratch.release()
        self.reset()
        for timeline in self._timelines:
            timeline.release()

    def _empty(self) -> None:
        for timeline in self._timelines:
            timeline.reset()
        for layer in self.layers:
            layer.reset()

    @property
    def why_not_compiled(self) -> str | None:
        if self._fetched:
            return "a graph knows where all tensors are before it begins, and here they are fetched layer by layer"
        if self.is_quantized:
            return "how many blocks are encoded, and when, is decided from step to step, and a graph has one way to go"
        return None if self.fixed else "a graph needs tensors that never move, and here they move as room is made"

    @property
    def total_tokens(self) -> int:
        return self._timelines[0].total_tokens

    @property
    def pending(self) -> int:
        """Tokens of the open step."""
        return self._timelines[0].pending

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

    @property
    def is_quantized(self) -> bool:
        """Whether some of it is kept in fewer bits than it came in."""
        return any(layer.is_quantized for layer in self.layers)

    @property
    def rotations(self) -> dict[int, RopeRotation]:
        """How it turns the keys of which layers, where it does."""
        return {}

    def positions_needed(self, tokens: int) -> int:
        """Positions that a model has to tell apart in a text of `tokens`."""
        return tokens

    @property
    def step_tokens(self) -> int | None:
        """Tokens that a step should have at most; None for any number."""
        return None

    def set_padding(self, pads: torch.Tensor | Sequence[int] | None) -> None:
        """Say how many pads each row begins with. Only masks need to know, unless places depend on them."""

    def copied(self, layer_idx: int, tokens: int) -> int:
        """Columns of copies that attention over the next `tokens` finds before those that `get_mask_sizes` counts."""
        return 0

    @property
    def imposes_windows(self) -> bool:
        return any(self.imposed_window(index) is not None for index in range(len(self.layers)))

    def imposed_window(self, layer_idx: int) -> int | None:
        """Columns that a token can look at, itself included, where that is fewer than the layer's own reach."""
        spec, bound = self.specs[layer_idx], self.layers[layer_idx].timeline.retention.bound
        if (
            bound is None
            or not spec.keeps_kv
            or (spec.attention_span.size is not None and spec.attention_span.size <= bound + 1)
        ):
            return None
        return bound + 1


def _layers_in_words(specs: Sequence[LayerSpec]) -> str:
    kinds = dict.fromkeys(
        f"{spec.layer_type}{'' if spec.attention_span.size is None else f' of {spec.attention_span.size}'}"
        for spec in specs
    )
    return f"{len(specs)} layers ({', '.join(kinds)})"
