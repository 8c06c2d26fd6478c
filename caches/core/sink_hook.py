"""A window that begins with a row's first tokens, the sinks: what is done for its stores around every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from caches.core.layer import Layer, RowHolder
from caches.core.step_hook import Layers, StepHook
from caches.core.wrapped_layer import WrappedLayer
from caches.errors import StepError
from caches.layers.layer_spec import LayerSpec
from caches.layers.rope import UNROTATED, RopeRotation
from caches.platform.as_tensor import as_tensor
from caches.stores.sink import LeftPadding, Sinks, SinkStore
from caches.stores.slot import Slot
from caches.stores.store import Store
from caches.timeline.retention import KeepSinks

_PADDING = "left_padding"


class SinkHook(StepHook):
    """See `StepHook`.

    window: tokens that a token attends to, itself included. check: raises for layers that cannot have sinks.

    Rows may begin with padding once the cache knows how much: the engine says so, in other loops call `set_padding`. A
    reset discards it.
    """

    def __init__(self, window: int, check: Callable[[Sequence[LayerSpec]], None]):
        self.window, self._check = window, check
        self.padding = LeftPadding()

    def check_layers(self, specs: Sequence[LayerSpec]) -> None:
        self._check(specs)

    def overlaid(self, slot: Slot, store: Store) -> Store:
        if not isinstance(slot.timeline.retention, KeepSinks):  # the layer's own window is narrower: it needs no sinks
            return store
        rotation: RopeRotation | None = UNROTATED
        if slot.name == "keys":
            rotation = None if slot.spec.rotation is None else slot.spec.rotation()
        return SinkStore(store, Sinks(slot.timeline, self.padding, rotation))

    def before_begin(self, layers: Layers, tokens: int) -> Callable[[], None]:
        fronts = [(store, store.front()) for store in _sink_stores(layers)] if tokens == 1 else []

        def write() -> None:
            for store, front in fronts:
                if front is not None:
                    store.write_front(front)

        return write

    def before_commit(self, layers: Layers) -> None:
        for store in _sink_stores(layers):
            store.note_compiled()

    def set_padding(self, layers: Layers, padding: torch.Tensor | Sequence[int] | None, rows: int) -> None:
        """See `StepHook`. Raises `StepError` for another padding than before once tokens were evicted."""
        previous = self.padding.of(max(rows, 0), torch.device("cpu")).tolist()
        counts = [0] * len(previous) if padding is None else as_tensor(padding).tolist()
        stores = list(_sink_stores(layers))
        if previous != counts and any(store.timeline.evicted_tokens for store in stores):
            raise StepError(
                f"rows that begin with {previous} padding tokens have evicted tokens by now, so they cannot begin with "
                f"{counts}. Set the padding before the first step, or reset the cache"
            )
        self.padding.take(padding)
        for store in stores if previous != counts else ():
            store.note_again()

    def rotations(self, layers: Layers) -> dict[int, RopeRotation]:
        keys = {index: layer.stores.get("keys") for index, layer in enumerate(layers) if isinstance(layer, Layer)}
        sinks = {index: store.sinks for index, store in keys.items() if isinstance(store, SinkStore)}
        return {index: behind.rotation for index, behind in sinks.items() if behind.rotation is not None}

    def extra_slots(self, layer: Layer | WrappedLayer, tokens: int) -> int:
        store = next(_sink_stores([layer]), None)
        return store.sinks.count * tokens if store and tokens > 1 and store.sinks.are_left_behind(tokens) else 0

    def row_holders(self) -> Iterator[RowHolder]:
        yield self.padding

    def state_dict(self, rows: int) -> dict[str, Any]:
        return {_PADDING: self.padding.of(rows, torch.device("cpu"))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        padding = state.get(_PADDING)
        self.padding.take(padding if padding is not None and bool(padding.any()) else None)

    def reset(self) -> None:
        self.padding.take(None)


def _sink_stores(layers: Layers) -> Iterator[SinkStore]:
    for layer in layers:
        for store in layer.stores.values() if isinstance(layer, Layer) else ():
            if isinstance(store, SinkStore):
                yield store
