"""A quantized store that shows a row's first tokens, which are never encoded, where it has forgotten tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from caches.attention.segmented_tensor import Pieced
from caches.attention.segments import Exact, Piece
from caches.core.layer import Slot
from caches.memory.buffers import Buffer
from caches.quantization.codec import Codec
from caches.stores.quantized import QuantizedStore


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
        self._note(new, self.timeline.seen)
        if not sinks.are_left_behind(tokens):
            return columns
        assert sinks.originals is not None
        turned = sinks.turned(sinks.originals, tokens)
        if tokens > 1:
            return torch.cat([turned, columns], dim=-2)
        behind = sinks.delta(1, new.device)[:, :, None, None] > 0
        if not isinstance(columns, Pieced):
            columns[:, :, : sinks.count] = torch.where(behind, turned, columns[:, :, : sinks.count])
            return columns
        pieces = columns.pieces
        return Pieced(lambda: _fronted(pieces(), turned, behind), columns.base, new)

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
        if held is not None and self.timeline.gone > self.sinks.pads.least and self.sinks.count:
            front = held[:, :, : self.sinks.count]
            front.copy_(self.sinks.instead_of(front))
        return held

    def load(self, columns: torch.Tensor) -> None:
        super().load(columns)
        gone, count = self.timeline.gone, self.sinks.count
        if count:
            self._note(columns, gone)
        if count and gone > self.sinks.pads.least:
            forgot = self.sinks.pads.of(len(columns), columns.device) < gone
            assert self.sinks.originals is not None
            self.sinks.originals[forgot] = columns[forgot, :, :count]

    def written(self) -> dict[str, torch.Tensor]:
        kept = {} if self.sinks.originals is None else {"sinks": self.sinks.originals}
        return super().written() | kept

    def load_written(self, written: dict[str, torch.Tensor]) -> None:
        super().load_written({name: part for name, part in written.items() if name != "sinks"})
        self.sinks.originals = written["sinks"].clone() if "sinks" in written else None

    def rows(self, index: torch.Tensor) -> None:
        originals = self.sinks.chosen(index)
        super().rows(index)
        self.sinks.originals = originals

    def release(self) -> None:
        super().release()
        self.sinks.originals = None

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        if self.sinks.originals is not None:
            yield self.sinks.originals


def _fronted(pieces: Iterable[Piece], front: torch.Tensor, behind: torch.Tensor) -> Iterator[Piece]:
    """The pieces, begun with `front` in the rows that are behind. What is in full is never so far in front."""
    begin = 0
    for piece in pieces:
        replaced = front[:, :, begin : begin + piece.columns]
        begin += piece.columns
        if replaced.shape[2]:
            numbers = piece.numbers()
            here = numbers[:, :, : replaced.shape[2]]
            here.copy_(torch.where(behind, replaced, here))
            piece = Exact(numbers)
        yield piece
