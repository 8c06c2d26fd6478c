"""Stores whose window begins with a row's first tokens, the sinks (StreamingLLM).

The window itself is that of `KeepRecent`. Once a row has evicted tokens, copies of its sinks take the first slots kept:
before a step of one token they are written there, in longer steps they are put in front. The keys of a copy are
rotated, from their originals, to where the window begins. Nothing else ever moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch

from caches.errors import StepError
from caches.layers.rope import RopeRotation
from caches.platform.as_tensor import as_tensor
from caches.platform.torch_api import always_writable
from caches.stores.dense import FixedStore
from caches.timeline.retention import KeepSinks
from caches.timeline.timeline import Timeline


class LeftPadding:
    """How many padding tokens every row begins with; none until they are set.

    least, most: bounds, which can be read without waiting for the device.
    """

    def __init__(self) -> None:
        self.least = self.most = 0
        self._counts: torch.Tensor | None = None

    def take(self, counts: torch.Tensor | Sequence[int] | None) -> None:
        """Set the padding of every row; None: there is none."""
        self._counts = None if counts is None else as_tensor(counts).long()
        values = [0] if self._counts is None else self._counts.tolist()
        self.least, self.most = min(values), max(values)

    def select_rows(self, index: torch.Tensor) -> None:
        self._counts = None if self._counts is None else self._counts[index.to(self._counts.device)]

    def check(self, rows: int) -> None:
        if self._counts is not None and len(self._counts) != rows:
            raise StepError(
                f"padding was set for {len(self._counts)} rows, but the step has {rows}: give one count for each row"
            )

    def of(self, rows: int, device: torch.device) -> torch.Tensor:
        """LongTensor [rows]."""
        if self._counts is None:
            return torch.zeros(rows, dtype=torch.long, device=device)
        self._counts = self._counts.to(device)
        return self._counts


class Sinks:
    """The first tokens of every row in one tensor of one layer, and how far they are from where they have to be.

    rotation: how their keys are rotated to get there; None where that is not known.
    """

    def __init__(self, timeline: Timeline, padding: LeftPadding, rotation: RopeRotation | None):
        assert isinstance(timeline.retention, KeepSinks)
        self.timeline, self.padding, self.rotation = timeline, padding, rotation
        self.count, self._window = timeline.retention.sinks, timeline.retention.size + 1
        self.originals: torch.Tensor | None = None  # [rows, heads, count, head_dim]; of rows that evicted tokens

    def are_left_behind(self, tokens: int) -> bool:
        """Whether one of the next `tokens` can no longer see all of its row."""
        return self.timeline.total_tokens + tokens - self._window > self.padding.least

    def delta(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Tokens of its row that each of the next `tokens` can no longer attend to: LongTensor [rows, tokens]."""
        assert self.timeline.rows is not None
        first_token = self.timeline.total_tokens + 1 - self._window
        evicted = torch.arange(first_token, first_token + tokens, device=device)
        return (evicted - self.padding.of(self.timeline.rows, device)[:, None]).clamp(min=0)

    def rotated(self, sinks: torch.Tensor, tokens: int) -> torch.Tensor:
        """`sinks` as each of the next `tokens` has to see them: [rows, heads, tokens * count, head_dim].

        sinks: as they were fed [rows, heads, count, head_dim].
        """
        if self.rotation is None:
            raise StepError(
                "the window is full, so the keys of the first tokens have to be rotated now, and this sink cache does "
                "not know how the model rotates keys: build it with config=model.config"
            )
        return self.rotation.rotated(sinks, self.delta(tokens, sinks.device))

    def found(self, stored: torch.Tensor) -> torch.Tensor:
        """The sinks as they were fed [rows, heads, count, head_dim]; of rows that have none yet, any values.

        stored: what the store keeps [rows, heads, tokens, head_dim], the open step included.
        """
        rows, heads, tokens, width = stored.shape
        first_slot = self.padding.of(rows, stored.device) - self.timeline.evicted_tokens
        slots = first_slot.clamp(min=0)[:, None] + torch.arange(self.count, device=stored.device)
        slots = slots.clamp(max=tokens - 1)[:, None, :, None].expand(-1, heads, -1, width)
        fed = stored.gather(2, slots)
        if self.originals is None:
            return fed
        return torch.where((first_slot < 0)[:, None, None, None], self.originals[:rows], fed)

    def instead_of(self, front: torch.Tensor) -> torch.Tensor:
        """The sinks of rows that evicted tokens, and what others have in `front`, their first slots kept."""
        assert self.originals is not None
        has_evicted = self.padding.of(len(front), front.device) < self.timeline.evicted_tokens
        return torch.where(has_evicted[:, None, None, None], self.originals[: len(front)], front)

    def take(self, stored: torch.Tensor, room_for_rows: int) -> None:
        """Keep the sinks among what a store keeps, before it evicts any."""
        sinks = self.found(stored)
        self.make_room(stored, room_for_rows)
        assert self.originals is not None
        self.originals[: len(sinks)] = sinks

    def make_room(self, like: torch.Tensor, rows: int) -> None:
        if self.originals is None or len(self.originals) < rows:
            with always_writable():
                self.originals = like.new_zeros((rows, like.shape[1], self.count, like.shape[3]))

    def tensors(self) -> list[torch.Tensor]:
        return [] if self.originals is None else [self.originals]

    def chosen(self, index: torch.Tensor) -> torch.Tensor | None:
        """The originals of these rows."""
        return None if self.originals is None else self.originals.index_select(0, index.to(self.originals.device))


class SinkStore(FixedStore):
    """A fixed store that shows copies of the sinks where a row has evicted tokens."""

    def __init__(self, sinks: Sinks):
        super().__init__(sinks.timeline)
        self.sinks = sinks

    def front(self) -> torch.Tensor:
        """The first slots kept, as the next token has to read them. Changes nothing."""
        slots = self._slots()
        assert slots is not None
        stored = super()._visible(slots)
        behind = self.sinks.delta(1, stored.device)[:, :, None, None] > 0
        return torch.where(behind, self.sinks.rotated(self.sinks.found(stored), 1), stored[:, :, : self.sinks.count])

    def write_front(self, front: torch.Tensor) -> None:
        slots, start = self._slots(), self.timeline.start
        assert slots is not None
        slots[:, :, start : start + self.sinks.count] = front

    def append(self, new: torch.Tensor) -> torch.Tensor:
        self.sinks.padding.check(new.shape[0])
        visible = super().append(new)
        if self.buffer is not None:
            self.sinks.make_room(self.buffer, len(self.buffer))
        tokens = self.timeline.pending
        if tokens == 1 or not self.sinks.count or not self.sinks.are_left_behind(tokens):
            return visible
        return torch.cat([self.sinks.rotated(self.sinks.found(visible), tokens), visible], dim=-2)

    def keep_sinks(self, rejected: int) -> None:
        """Before `commit` evicts them. They are not read until it has, so it may still fail."""
        timeline = self.timeline
        evicted = timeline.total_tokens + timeline.pending - rejected - timeline.surviving(rejected)
        if (
            evicted > self.sinks.padding.least
            and timeline.evicted_tokens <= self.sinks.padding.most
            and self.buffer is not None
            and (slots := self._slots()) is not None
        ):
            stored = slots[:, :, timeline.start : timeline.end + timeline.pending]
            self.sinks.take(stored if self.overflow is None else self.overflow, len(self.buffer))

    def select_rows(self, index: torch.Tensor) -> None:
        originals = self.sinks.chosen(index)
        super().select_rows(index)
        if originals is not None and self.sinks.originals is not None:
            self.sinks.originals[: len(index)] = originals

    def release(self) -> None:
        super().release()
        self.sinks.originals = None

    def committed(self) -> torch.Tensor | None:
        """As they were fed: copies are of use to one step only."""
        committed = super().committed()
        if committed is None or self.timeline.graph or self.timeline.evicted_tokens <= self.sinks.padding.least:
            return committed
        front, later = committed[:, :, : self.sinks.count], committed[:, :, self.sinks.count :]
        return torch.cat([self.sinks.instead_of(front), later], dim=-2)

    def load_dense(self, dense: torch.Tensor) -> None:
        super().load_dense(dense)
        assert self.buffer is not None
        self.sinks.make_room(self.buffer, len(self.buffer))
        if self.timeline.evicted_tokens > self.sinks.padding.least:
            assert self.sinks.originals is not None
            self.sinks.originals[: len(dense)] = dense[:, :, : self.sinks.count]

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain(super().tensors(), self.sinks.tensors())
