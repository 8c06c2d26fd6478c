"""Stores whose window begins with a row's first tokens, the sinks (StreamingLLM).

The window itself is that of `KeepRecent`. Once a row has evicted tokens, copies of its sinks take the first slots kept:
before a step of one token they are written there, in longer steps they are put in front. The keys of a copy are
rotated, from their originals, to where the window begins. Nothing else ever moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from caches.errors import StepError
from caches.spec.rope import RopeRotation
from caches.stores.dense import FixedStore
from caches.timeline.retention import KeepSinks
from caches.timeline.timeline import Timeline


class LeftPadding:
    """How many pads every row begins with, as far as that was told.

    least, most: bounds that can be asked without waiting for the device.
    """

    def __init__(self) -> None:
        self.least = self.most = 0
        self._told: torch.Tensor | None = None

    def take(self, counts: torch.Tensor | Sequence[int] | None) -> None:
        """None: there are no pads."""
        self._told = None if counts is None else torch.as_tensor(counts, dtype=torch.long)
        known = [0] if self._told is None else self._told.tolist()
        self.least, self.most = min(known), max(known)

    @property
    def told(self) -> torch.Tensor | None:
        """LongTensor [rows]; None where there are none."""
        return self._told

    def select_rows(self, index: torch.Tensor) -> None:
        self._told = None if self._told is None else self._told[index.to(self._told.device)]

    def check(self, rows: int) -> None:
        if self._told is not None and len(self._told) != rows:
            raise StepError(
                f"pads were told for {len(self._told)} rows, but the step has {rows}: tell one number for each row"
            )

    def of(self, rows: int, device: torch.device) -> torch.Tensor:
        """LongTensor [rows]."""
        if self._told is None:
            return torch.zeros(rows, dtype=torch.long, device=device)
        self._told = self._told.to(device)
        return self._told


class Sinks:
    """The first tokens of every row in one stream of one layer, and how far they are from where they have to be.

    rotation: how they turn on the way; None where that is not known.
    """

    def __init__(self, timeline: Timeline, pads: LeftPadding, rotation: RopeRotation | None):
        assert isinstance(timeline.retention, KeepSinks)
        self.timeline, self.pads, self.rotation = timeline, pads, rotation
        self.count, self._window = timeline.retention.sinks, timeline.retention.size + 1
        self.originals: torch.Tensor | None = None  # [rows, heads, count, head_dim]; of rows that have forgotten tokens

    def are_left_behind(self, tokens: int) -> bool:
        """Whether one of the next `tokens` can no longer see all of its row."""
        return self.timeline.total_tokens + tokens - self._window > self.pads.least

    def delta(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Tokens of its row that each of the next `tokens` no longer sees: LongTensor [rows, tokens]."""
        assert self.timeline.rows is not None
        first = self.timeline.total_tokens + 1 - self._window
        gone = torch.arange(first, first + tokens, device=device)
        return (gone - self.pads.of(self.timeline.rows, device)[:, None]).clamp(min=0)

    def rotated(self, sinks: torch.Tensor, tokens: int) -> torch.Tensor:
        """`sinks` as each of the next `tokens` has to see them: [rows, heads, tokens * count, head_dim].

        sinks: as they were fed [rows, heads, count, head_dim].
        """
        if self.rotation is None:
            raise StepError(
                "the first tokens have to move with the window now, and this sink cache was not told how the model "
                "turns its keys: build it with config=model.config"
            )
        return self.rotation.rotated(sinks, self.delta(tokens, sinks.device))

    def found(self, columns: torch.Tensor) -> torch.Tensor:
        """The sinks as they were fed [rows, heads, count, head_dim], of rows that have none yet any numbers.

        columns: what the store holds, the columns of the open step included.
        """
        rows, heads, held, width = columns.shape
        first = self.pads.of(rows, columns.device) - self.timeline.evicted_tokens
        places = first.clamp(min=0)[:, None] + torch.arange(self.count, device=columns.device)
        places = places.clamp(max=held - 1)[:, None, :, None].expand(-1, heads, -1, width)
        found = columns.gather(2, places)
        if self.originals is None:
            return found
        return torch.where((first < 0)[:, None, None, None], self.originals[:rows], found)

    def instead_of(self, front: torch.Tensor) -> torch.Tensor:
        """The sinks of rows that have forgotten tokens, and what others have in `front`, their first columns held."""
        assert self.originals is not None
        forgot = self.pads.of(len(front), front.device) < self.timeline.evicted_tokens
        return torch.where(forgot[:, None, None, None], self.originals[: len(front)], front)

    def take(self, columns: torch.Tensor, room_for_rows: int) -> None:
        """Keep the sinks among what a store holds, before it forgets any."""
        found = self.found(columns)
        self.make_room(columns, room_for_rows)
        assert self.originals is not None
        self.originals[: len(found)] = found

    def make_room(self, like: torch.Tensor, rows: int) -> None:
        if self.originals is None or len(self.originals) < rows:
            with torch.inference_mode(False):
                self.originals = like.new_zeros((rows, like.shape[1], self.count, like.shape[3]))

    def chosen(self, index: torch.Tensor) -> torch.Tensor | None:
        """The originals of these rows."""
        return None if self.originals is None else self.originals.index_select(0, index.to(self.originals.device))


class SinkStore(FixedStore):
    """A fixed store that shows copies of the sinks where a row has forgotten tokens."""

    def __init__(self, sinks: Sinks):
        super().__init__(sinks.timeline)
        self.sinks = sinks

    def front(self) -> torch.Tensor:
        """The first columns held, as the next token has to see them. Changes nothing."""
        assert self.buffer is not None
        held = super()._visible(self._used(self.buffer))
        behind = self.sinks.delta(1, held.device)[:, :, None, None] > 0
        return torch.where(behind, self.sinks.rotated(self.sinks.found(held), 1), held[:, :, : self.sinks.count])

    def write_front(self, front: torch.Tensor) -> None:
        assert self.buffer is not None
        start = self.timeline.start
        self._used(self.buffer)[:, :, start : start + self.sinks.count] = front

    def append(self, new: torch.Tensor) -> torch.Tensor:
        self.sinks.pads.check(new.shape[0])
        columns = super().append(new)
        if self.buffer is not None:
            self.sinks.make_room(self.buffer, len(self.buffer))
        tokens = self.timeline.pending
        if tokens == 1 or not self.sinks.count or not self.sinks.are_left_behind(tokens):
            return columns
        return torch.cat([self.sinks.rotated(self.sinks.found(columns), tokens), columns], dim=-2)

    def keep_sinks(self, rejected: int) -> None:
        """Before `commit` forgets them. Until it has, they are not read, so this may be done in vain."""
        timeline = self.timeline
        gone = timeline.total_tokens + timeline.pending - rejected - timeline.surviving(rejected)
        if gone > self.sinks.pads.least and timeline.evicted_tokens <= self.sinks.pads.most and self.buffer is not None:
            held = self._used(self.buffer)[:, :, timeline.start : timeline.end + timeline.pending]
            self.sinks.take(held if self.overflow is None else self.overflow, len(self.buffer))

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
        held = super().committed()
        if held is None or self.timeline.graph or self.timeline.evicted_tokens <= self.sinks.pads.least:
            return held
        front, others = held[:, :, : self.sinks.count], held[:, :, self.sinks.count :]
        return torch.cat([self.sinks.instead_of(front), others], dim=-2)

    def load_dense(self, columns: torch.Tensor) -> None:
        super().load_dense(columns)
        assert self.buffer is not None
        self.sinks.make_room(self.buffer, len(self.buffer))
        if self.timeline.evicted_tokens > self.sinks.pads.least:
            assert self.sinks.originals is not None
            self.sinks.originals[: len(columns)] = columns[:, :, : self.sinks.count]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        if self.sinks.originals is not None:
            yield self.sinks.originals
