"""Where columns that live elsewhere are while a layer computes: two places on the device that all layers take turns in.

While one layer computes on what is in one place, the columns of the layer that comes after it are copied into the
other. Which one comes after is learned from the last forward. A wrong guess costs time, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch

from caches.memory.buffers import Buffer


class Reader(Protocol):
    """A store that reads its columns here. name: those of one name take turns ("keys", "values", "index")."""

    name: str
    buffer: Buffer

    def wanted(self) -> tuple[int, int, int]:
        """What its next step reads, as far as is known: columns [begin, end), and columns there must be room for."""


class CopyStream:
    """Copies beside the computation of a device: on a stream of their own where there are streams."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = None if device.type in ("cpu", "mps", "meta") else torch.Stream(device)

    def start(self, copy: Callable[[], Any], memory: torch.Tensor) -> Any:
        """Do `copy`, which writes `memory`, once all is done that was queued so far. Returns what to wait for."""
        if self._stream is None:
            copy()
            return None
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with self._stream:
            copy()
        memory.record_stream(self._stream)  # or it could be given to others while it is written
        return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """What is queued from here on comes after that copy."""
        if copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied)


@dataclass(eq=False)
class _Place:
    """owner: whose columns [begin, end) are in it, or will be once `copied` has come.

    Stores know the staging, so it does not own them: their memory would wait for a garbage collection.
    """

    memory: torch.Tensor | None = None
    owner: ref[Reader] | None = None
    begin: int = 0
    end: int = 0
    copied: Any = None


class DoubleBuffer:
    """The two places of all readers of one name on one device."""

    def __init__(self, beside: CopyStream):
        self.beside = beside
        self.used, self.free = _Place(), _Place()
        self.last: ref[Reader] | None = None
        self.after: WeakKeyDictionary[Reader, ref[Reader]] = WeakKeyDictionary()

    def claim(self, place: _Place, buffer: Buffer, columns: int) -> torch.Tensor:
        """The place's memory, with room for so many columns; nothing is in it any more."""
        self.beside.wait(place.copied)
        place.owner = place.copied = None
        numbers = buffer.materialize(columns)
        if place.memory is None or place.memory.numel() < numbers:
            place.memory = None  # before there is another
            with torch.inference_mode(False):
                place.memory = torch.empty(numbers, dtype=buffer.dtype, device=buffer.device)
        return buffer.space(place.memory, columns)

    def prefetch(self, reader: Reader) -> None:
        """Start to copy what `reader` wants into the place that is free."""
        begin, end, room = reader.wanted()
        if begin == end or reader.buffer.shape is None:
            return
        place, buffer = self.free, reader.buffer
        space = self.claim(place, buffer, room - begin)
        assert place.memory is not None
        place.copied = self.beside.start(lambda: buffer.read(begin, end, space), place.memory)
        place.owner, place.begin, place.end = ref(reader), begin, end


class Prefetcher:
    """The staged columns of one cache. A copy of the cache gets an empty one of its own."""

    def __init__(self, beside: Callable[[torch.device], CopyStream] = CopyStream) -> None:
        self._beside = beside
        self._turns: dict[tuple[str, torch.device, torch.dtype], DoubleBuffer] = {}

    def take(self, reader: Reader, begin: int, end: int, columns: int) -> torch.Tensor:
        """The reader's columns [begin, end) on the device, with room behind them for `columns` in all.

        [rows, heads, columns, width]; they last until the next reader of that name takes its own.
        """
        buffer = reader.buffer
        key = (reader.name, buffer.device, buffer.dtype)
        if key not in self._turns:
            self._turns[key] = DoubleBuffer(self._beside(buffer.device))
        turns = self._turns[key]
        place = turns.free
        turns.used, turns.free = place, turns.used
        room = columns + begin - place.begin
        if (
            _alive(place.owner) is reader
            and place.begin <= begin
            and end <= place.end
            and place.memory is not None
            and buffer.materialize(room) <= place.memory.numel()
        ):
            turns.beside.wait(place.copied)
            staged = buffer.space(place.memory, room)[:, :, begin - place.begin :]
            place.owner = place.copied = None
        else:
            staged = turns.claim(place, buffer, columns)
            buffer.read(begin, end, staged)
        last = _alive(turns.last)
        if last is not None:
            turns.after[last] = ref(reader)
        turns.last = ref(reader)
        following = _alive(turns.after.get(reader))
        if following is not None:
            turns.prefetch(following)
        return staged

    def discard(self, reader: Reader) -> None:
        """What the reader has was changed in other ways than behind its end: what is staged of it is not it."""
        for turns in self._turns.values():
            for place in (turns.used, turns.free):
                if _alive(place.owner) is reader:
                    place.owner = None

    def clear(self) -> None:
        """Let go of all tensors and of all that refers to this."""
        self._turns.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._beside,)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory that it keeps."""
        for turns in self._turns.values():
            for place in (turns.used, turns.free):
                if place.memory is not None:
                    yield place.memory


def _alive(reader: ref[Reader] | None) -> Reader | None:
    return None if reader is None else reader()
