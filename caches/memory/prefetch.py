"""Prefetching of offloaded keys and values: two scratch tensors on the device that all layers use in turn.

While one layer computes with one of them, the content of the next layer is copied into the other. The order of layers
is learned from the last forward. A wrong guess only costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch

from caches.memory.buffers import Buffer
from caches.platform.torch_api import always_writable


class PrefetchReader(Protocol):
    """A store that reads its slots through a `Prefetcher`.

    name: stores of one name ("keys", "values", "index") share a `DoubleBuffer`.
    """

    name: str
    buffer: Buffer

    def wanted(self) -> tuple[int, int, int]:
        """What its next step probably reads: (begin, end, room); slots [begin, end) in a tensor of `room` slots."""


class CopyStream:
    """Copies on a stream of their own, concurrent with the computation, if the device has streams."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = None if device.type in ("cpu", "mps", "meta") else torch.Stream(device)

    def start(self, copy: Callable[[], Any], memory: torch.Tensor) -> Any:
        """Run `copy`, which writes `memory`, after all work that is queued now. Returns the event for `wait`."""
        if self._stream is None:
            copy()
            return None
        self._stream.wait_event(torch.accelerator.current_stream(self._device).record_event())
        with self._stream:
            copy()
        memory.record_stream(self._stream)  # or it could be reused while it is written
        return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Work that is queued from now on waits for the copy `copied`."""
        if copied is not None:
            torch.accelerator.current_stream(self._device).wait_event(copied)


@dataclass(eq=False)
class _Half:
    """One of the two tensors. owner: the reader whose slots [begin, end) it has once the event `copied` has happened.

    owner is a weak reference: stores refer to the prefetcher, and a cycle would keep memory until a garbage collection.
    """

    memory: torch.Tensor | None = None
    owner: ref[PrefetchReader] | None = None
    begin: int = 0
    end: int = 0
    copied: Any = None


class DoubleBuffer:
    """The two tensors for all readers of one name on one device. used: the current reader's. free: the other."""

    def __init__(self, copy_stream: CopyStream):
        self.copy_stream = copy_stream
        self.used, self.free = _Half(), _Half()
        self.last: ref[PrefetchReader] | None = None
        self.following: WeakKeyDictionary[PrefetchReader, ref[PrefetchReader]] = (
            WeakKeyDictionary()
        )  # who read after whom, last time

    def claim(self, half: _Half, buffer: Buffer, slots: int) -> torch.Tensor:
        """The memory of `half`, [rows, heads, slots, width]; its content is discarded."""
        self.copy_stream.wait(half.copied)
        half.owner = half.copied = None
        count = buffer.numel(slots)
        if half.memory is None or half.memory.numel() < count:
            half.memory = None  # freed before the larger one is allocated
            with always_writable():
                half.memory = torch.empty(count, dtype=buffer.dtype, device=buffer.device)
        return buffer.space(half.memory, slots)

    def prefetch(self, reader: PrefetchReader) -> None:
        """Start to copy what `reader` wants into the free tensor."""
        begin, end, room = reader.wanted()
        if begin == end or reader.buffer.shape is None:
            return
        half, buffer = self.free, reader.buffer
        space = self.claim(half, buffer, room - begin)
        assert half.memory is not None
        half.copied = self.copy_stream.start(lambda: buffer.read(begin, end, space), half.memory)
        half.owner, half.begin, half.end = ref(reader), begin, end


class Prefetcher:
    """Prefetched slots of one cache. A copy of the cache gets an empty prefetcher."""

    def __init__(self, new_copy_stream: Callable[[torch.device], CopyStream] = CopyStream) -> None:
        self._new_copy_stream = new_copy_stream
        self._double_buffers: dict[tuple[str, torch.device, torch.dtype], DoubleBuffer] = {}

    def take(self, reader: PrefetchReader, begin: int, end: int, slots: int) -> torch.Tensor:
        """The reader's slots [begin, end) on the device, in a tensor [rows, heads, slots, width].

        It is valid until the next reader of the same name takes its slots.
        """
        buffer = reader.buffer
        key = (reader.name, buffer.device, buffer.dtype)
        if key not in self._double_buffers:
            self._double_buffers[key] = DoubleBuffer(self._new_copy_stream(buffer.device))
        double_buffer = self._double_buffers[key]
        half = double_buffer.free
        double_buffer.used, double_buffer.free = half, double_buffer.used
        room = slots + begin - half.begin
        if (
            _alive(half.owner) is reader
            and half.begin <= begin
            and end <= half.end
            and half.memory is not None
            and buffer.numel(room) <= half.memory.numel()
        ):
            double_buffer.copy_stream.wait(half.copied)
            fetched = buffer.space(half.memory, room)[:, :, begin - half.begin :]
            half.owner = half.copied = None
        else:
            fetched = double_buffer.claim(half, buffer, slots)
            buffer.read(begin, end, fetched)
        last_reader = _alive(double_buffer.last)
        if last_reader is not None:
            double_buffer.following[last_reader] = ref(reader)
        double_buffer.last = ref(reader)
        following = _alive(double_buffer.following.get(reader))
        if following is not None:
            double_buffer.prefetch(following)
        return fetched

    def discard(self, reader: PrefetchReader) -> None:
        """Discard what was prefetched for `reader`: its content was changed other than by appending."""
        for double_buffer in self._double_buffers.values():
            for half in (double_buffer.used, double_buffer.free):
                if _alive(half.owner) is reader:
                    half.owner = None

    def clear(self) -> None:
        """Free all tensors."""
        self._double_buffers.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._new_copy_stream,)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory of the prefetcher."""
        for double_buffer in self._double_buffers.values():
            for half in (double_buffer.used, double_buffer.free):
                if half.memory is not None:
                    yield half.memory


def _alive(reader: ref[PrefetchReader] | None) -> PrefetchReader | None:
    return None if reader is None else reader()
