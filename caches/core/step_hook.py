"""What may be done around every step of a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from caches.core.layer import Layer, RowHolder
from caches.core.wrapped_layer import WrappedLayer
from caches.layers.layer_spec import LayerSpec
from caches.layers.rope import RopeRotation
from caches.stores.slot import Slot
from caches.stores.store import Store

Layers = Sequence[Layer | WrappedLayer]


def _nothing() -> None:
    pass


class StepHook:
    """Called by `LayerStack` around every step. This one does nothing; `SinkHook` keeps a row's first tokens.

    window: tokens that a step may have at most, where it has a limit.
    """

    window: int | None = None

    def check_layers(self, specs: Sequence[LayerSpec]) -> None:
        """Raise `UnsupportedLayerError` for layers that it cannot work on."""

    def overlaid(self, slot: Slot, store: Store) -> Store:
        """The store that was made for the slot, with what the hook lays over it."""
        return store

    def before_begin(self, layers: Layers, tokens: int) -> Callable[[], None]:
        """Before a step of `tokens`: may fail, changes nothing. Returns what to do once the step is open."""
        return _nothing

    def before_commit(self, layers: Layers) -> None:
        """Before a commit: may fail, changes nothing that is visible."""

    def set_padding(self, layers: Layers, padding: torch.Tensor | Sequence[int] | None, rows: int) -> None:
        """Say how many padding tokens each of the `rows` begins with; None for none."""

    def rotations(self, layers: Layers) -> dict[int, RopeRotation]:
        """How it rotates keys, by layer."""
        return {}

    def extra_slots(self, layer: Layer | WrappedLayer, tokens: int) -> int:
        """Slots that attention over the next `tokens` finds before those that `get_mask_sizes` counts."""
        return 0

    def row_holders(self) -> Iterator[RowHolder]:
        """What of it follows rows."""
        return iter(())

    def state_dict(self, rows: int) -> dict[str, Any]:
        """Its state, tensors [rows, ...] by name."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of another cache's hook, also of one that is of another kind."""

    def reset(self) -> None:
        """Return to the state of an empty cache."""
