"""A quantized store that shows a row's first tokens, which are never encoded, where the row has evicted tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import torch

from caches.attention.kv_view import KeyValueView, rows_of
from caches.attention.segments import CacheRows, DenseSegment, Segment
from caches.memory.buffers import Buffer
from caches.quantization.codec import Codec
from caches.stores.quantized import QuantizedStore
from caches.stores.slot import Slot


class QuantizedSinkStore(QuantizedStore):
    """Keeps the sinks apart from the blocks, as they were fed, and puts them in front of what a step decodes."""

    def __init__(self, slot: Slot, codec: Codec, new_buffer: Callable[[], Buffer], lasting: bool):
        super().__init__(slot, codec, new_buffer, lasting)
        assert slot.sinks is not None
        self.sinks = slot.sinks

    def append(self, new: torch.Tensor) -> torch.Tensor:
        sinks, tokens = self.sinks, self.timeline.pending
        sinks.padding.check(new.shape[0])
        visible = super().append(new)
        if not sinks.count:
            return visible
        self._note_sinks(new, self.timeline.total_tokens)
        if not sinks.are_left_behind(tokens):
            return visible
        assert sinks.originals is not None
        rotated = sinks.rotated(sinks.originals, tokens)
        if tokens > 1:
            return torch.cat([rotated, visible], dim=-2)
        behind = sinks.delta(1, new.device)[:, :, None, None] > 0
        if not isinstance(visible, KeyValueView):
            visible[:, :, : sinks.count] = torch.where(behind, rotated, visible[:, :, : sinks.count])
            return visible
        rows = rows_of(visible)
        fronted = CacheRows(rows.shape, make_segments=lambda: _fronted(rows.segments(), rotated, behind))
        return KeyValueView([fronted], new)

    def _note_sinks(self, added: torch.Tensor, begin: int) -> None:
        """Keep the sinks among `added` [rows, heads, tokens, width], which come after `begin` tokens of a text."""
        self.sinks.make_room(added, len(added))
        originals = self.sinks.originals
        assert originals is not None
        if begin >= self.sinks.padding.most + self.sinks.count:
            return
        slots = self.sinks.padding.of(len(added), added.device)[:, None] - begin
        slots = slots + torch.arange(self.sinks.count, device=added.device)
        is_sink = ((slots >= 0) & (slots < added.shape[2]))[:, None, :, None]
        slots = slots.clamp(0, added.shape[2] - 1)[:, None, :, None].expand_as(originals)
        originals.copy_(torch.where(is_sink, added.gather(2, slots), originals))

    def committed(self) -> torch.Tensor | None:
        """As they were fed: copies are of use to one step only."""
        committed = super().committed()
        if committed is not None and self.timeline.evicted_tokens > self.sinks.padding.least and self.sinks.count:
            front = committed[:, :, : self.sinks.count]
            front.copy_(self.sinks.instead_of(front))
        return committed

    def load_dense(self, dense: torch.Tensor) -> None:
        super().load_dense(dense)
        evicted, count = self.timeline.evicted_tokens, self.sinks.count
        if count:
            self._note_sinks(dense, evicted)
        if count and evicted > self.sinks.padding.least:
            has_evicted = self.sinks.padding.of(len(dense), dense.device) < evicted
            assert self.sinks.originals is not None
            self.sinks.originals[has_evicted] = dense[has_evicted, :, :count]

    def state_dict(self) -> dict[str, torch.Tensor]:
        sinks = {} if self.sinks.originals is None else {"sinks": self.sinks.originals}
        return super().state_dict() | sinks

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        super().load_state_dict({name: tensor for name, tensor in state.items() if name != "sinks"})
        self.sinks.originals = state["sinks"].clone() if "sinks" in state else None

    def select_rows(self, index: torch.Tensor) -> None:
        originals = self.sinks.chosen(index)
        super().select_rows(index)
        self.sinks.originals = originals

    def release(self) -> None:
        super().release()
        self.sinks.originals = None

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain(super().tensors(), self.sinks.tensors())


def _fronted(segments: Iterable[Segment], front: torch.Tensor, behind: torch.Tensor) -> Iterator[Segment]:
    """The segments, with `front` first in the rows that are behind."""
    begin = 0
    for segment in segments:
        replaced = front[:, :, begin : begin + segment.slots]
        begin += segment.slots
        if replaced.shape[2]:
            values, count = segment.materialize(), replaced.shape[2]
            yield DenseSegment(torch.where(behind, replaced, values[:, :, :count]))
            segment = DenseSegment(values[:, :, count:])
        yield segment
