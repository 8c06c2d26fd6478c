"""Ways to break the bookkeeping of a step. `pytest --damage NAME` runs tests with one of them; some test must fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from caches.state import State
from caches.store import GrowingStore
from caches.timeline import Timeline
from engine.masks import Columns

Patch = pytest.MonkeyPatch


def shift_growing_write(patch: Patch) -> None:
    def write(self: Any, buffer: torch.Tensor, new: torch.Tensor) -> None:
        end = max(0, self.timeline.end - 1)
        buffer[:, :, end : end + new.shape[-2]] = new

    patch.setattr(GrowingStore, "_write", write)


def shift_write_index(patch: Patch) -> None:
    original = Timeline.write_index
    patch.setattr(Timeline, "write_index", lambda self, device: (original(self, device) - 1).clamp(min=0))


def shift_mask(patch: Patch) -> None:
    original = Columns.mask
    patch.setattr(Columns, "mask", lambda self, columns: original(self, columns).roll(1, dims=1))


def shift_step_mask(patch: Patch) -> None:
    original = Columns.step_mask
    patch.setattr(Columns, "step_mask", lambda self, *arguments: original(self, *arguments).roll(1, dims=3))


def shift_decode_positions(patch: Patch) -> None:
    original = Columns.positions
    # All positions shifted together change nothing under rotary embeddings; these drift from the prompt's.
    patch.setattr(Columns, "positions", lambda self, begin, end: original(self, begin, end) + (begin > 0))


def shift_mask_sizes(patch: Patch) -> None:
    original = Timeline.mask_sizes

    def sizes(self: Timeline, tokens: int, unsettled: int = 0) -> tuple[int, Any]:
        length, offset = original(self, tokens, unsettled)
        return length, offset + (1 if offset > 0 else 0)

    patch.setattr(Timeline, "mask_sizes", sizes)


def keep_one_column_less(patch: Patch) -> None:
    patch.setattr("caches.retention.KeepRecent.surviving", lambda self, held: min(held, self.columns - 1))


def compact_one_off(patch: Patch) -> None:
    original = GrowingStore.compact

    def compact(self: Any) -> None:
        original(self)
        self.buffer[:, :, : self.timeline.held] = self.buffer[:, :, : self.timeline.held].roll(1, dims=2)

    patch.setattr(GrowingStore, "compact", compact)


def shift_what_a_convolution_reads(patch: Patch) -> None:
    original = State.append_conv
    patch.setattr(State, "append_conv", lambda self, *arguments: original(self, *arguments).roll(1, dims=-1))


def keep_states_as_they_were(patch: Patch) -> None:
    """A step that writes its states in place writes into a copy."""
    patch.setattr(State, "get", lambda self, key: self._used(key).clone() if key in self._known else None)
    # What models of transformers 5.17 ask for.
    numbered = State.numbered
    patch.setattr(
        State, "numbered", lambda self, kind: {number: state.clone() for number, state in numbered(self, kind).items()}
    )


def forget_states(patch: Patch) -> None:
    original = State.set
    patch.setattr(State, "set", lambda self, key, value: original(self, key, torch.zeros_like(value)))


def read_pads_into_states(patch: Patch) -> None:
    patch.setattr(Columns, "mask", lambda self, columns: None)


def read_the_encoder_of_another_row(patch: Patch) -> None:
    committed = GrowingStore.committed

    def of_another_row(self: Any) -> torch.Tensor | None:
        held = committed(self)
        return None if held is None else held.roll(1, dims=0)

    patch.setattr(GrowingStore, "committed", of_another_row)


DAMAGES: dict[str, Callable[[Patch], None]] = {
    damage.__name__: damage
    for damage in (
        shift_growing_write,
        shift_write_index,
        shift_mask,
        shift_step_mask,
        shift_decode_positions,
        shift_mask_sizes,
        keep_one_column_less,
        compact_one_off,
        shift_what_a_convolution_reads,
        keep_states_as_they_were,
        forget_states,
        read_pads_into_states,
        read_the_encoder_of_another_row,
    )
}
