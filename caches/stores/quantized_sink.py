"""A quantized store that shows a row's first tokens, which are never encoded, where it has forgotten tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from caches.attention.segmented_tensor import SegmentedTensor
from caches.attention.segments import DenseSegment, Segment
from caches.memory.buffers import Buffer
from caches.quantization.codec import Codec
from caches.stores.quantized import QuantizedStore
from caches.stores.slot import Slot


class QuantizedSinkStore(QuantizedStore):
    """Keeps the sinks beside the blocks, as they were fed, and puts them in front of what was decoded for a step."""

    def __init__(self, slot: Slot, codec: Codec, new_buffer: Callable[[], Buffer], lasting: bool):
        super().__init__(slot, codec, new_buffer, lasting)
        assert slot.sinks is not None
        self.sinks = slot.sinks

    def append(self, new: torch.Tensor) -> torch.Tensor:
        sinks, tokens = self.sinks, self.timeline.pending
        sinks.pads.check(new.shape[0])
        columns = super().append(new)
        if not sinks.count:
            return columns
        self._note(new, self.timeline.total_tokens)
        if not sinks.are_left_behind(tokens):
            return columns
        assert sinks.originals is not None
        rotated = sinks.rotated(sinks.originals, tokens)
        if tokens > 1:
            return torch.cat([rotated, columns], dim=-2)
        behind = sinks.delta(1, new.device)[:, :, None, None] > 0
        if not isinstance(columns, SegmentedTensor):
            columns[:, :, : sinks.count] = torch.where(behind, rotated, columns[:, :, : sinks.count])
            return columns
        segments = columns.segments
        return SegmentedTensor(lambda: _fronted(segments(), rotated, behind), columns.base, new)

    def _note(self, columns: torch.Tensor, begin: int) -> None:
        """Keep what is a sink of the columns that come after `begin` of a text."""
        self.sinks.make_room(columns, len(columns))
        originals = self.sinks.originals
        assert originals is not None
        if begin >= self.sinks.pads.most + self.sinks.count:
            return
        places = self.sinks.pads.of(len(columns), columns.device)[:, None] - begin
        places = places + torch.arange(self.sinks.count, device=columns.device)
        known = ((places >= 0) & (places < columns.shape[2]))[:, None, :, None]
        places = places.clamp(0, columns.shape[2] - 1)[:, None, :, None].expand_as(originals)
        originals.copy_(torch.where(known, columns.gather(2, places), originals))

    def committed(self) -> torch.Tensor | None:
        """As they were fed: copies are of use to one step only."""
        held = super().committed()
        if held is not None and self.timeline.evicted_tokens > self.sinks.pads.least and self.sinks.count:
            front = held[:, :, : self.sinks.count]
            front.copy_(self.sinks.instead_of(front))
        return held

    def load_dense(self, columns: torch.Tensor) -> None:
        super().load_dense(columns)
        gone, count = self.timeline.evicted_tokens, self.sinks.count
        if count:
            self._note(columns, gone)
        if count and gone > self.sinks.pads.least:
            forgot = self.sinks.pads.of(len(columns), columns.device) < gone
            assert self.sinks.originals is not None
            self.sinks.originals[forgot] = columns[forgot, :, :count]

    def state_dict(self) -> dict[str, torch.Tensor]:
        kept = {} if self.sinks.originals is None else {"sinks": self.sinks.originals}
        return super().state_dict() | kept

    def load_state_dict(self, written: dict[str, torch.Tensor]) -> None:
        super().load_state_dict({name: part for name, part in written.items() if name != "sinks"})
        self.sinks.originals = written["sinks"].clone() if "sinks" in written else None

    def select_rows(self, index: torch.Tensor) -> None:
        originals = self.sinks.chosen(index)
        super().select_rows(index)
        self.sinks.originals = originals

    def release(self) -> None:
        super().release()
        self.sinks.originals = None

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        if self.sinks.originals is not None:
            yield self.sinks.originals


def _fronted(segments: Iterable[Segment], front: torch.Tensor, behind: torch.Tensor) -> Iterator[Segment]:
    """The segments, begun with `front` in the rows that are behind. What is in full is never so far in front."""
    begin = 0
    for segment in segments:
        replaced = front[:, :, begin : begin + segment.slots]
        begin += segment.slots
        if replaced.shape[2]:
            numbers = segment.materialize()
            here = numbers[:, :, : replaced.shape[2]]
            here.copy_(torch.where(behind, replaced, here))
            segment = DenseSegment(numbers)
        yield segment
