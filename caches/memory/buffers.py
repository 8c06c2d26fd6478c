"""Storage for one tensor of a cache: on the compute device, in host memory or in a file.

A buffer is a tensor [rows, heads, slots, width] of any data type. In memory, slots are the outermost dimension: a range
of slots is contiguous, new slots are appended, and growing keeps the layout. A buffer knows neither time nor layers,
and never decides what is kept.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch

from caches.errors import CapacityError
from caches.memory.disk_file import DiskFile, Window
from caches.platform.torch_api import always_writable
from caches.platform.undo import on_failure

_CHUNK_BYTES = 2**24  # size of the temporary memory for rearranging in place
_WORTH_SHRINKING = 2  # times the memory that is needed; pinned memory has up to twice as much

B = TypeVar("B", bound="Buffer")


class Buffer(ABC):
    """Slots [rows, heads, slots, width] in one tier of memory. Call `open` first.

    tier: "device", "host" or "disk". device: the compute device, where written tensors come from and read ones go.
    """

    tier: ClassVar[str]

    @property
    def is_off_device(self) -> bool:
        """Whether it takes no memory of the compute device."""
        return self.tier == "disk" or (self.tier == "host" and self.device.type != "cpu")

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None  # flat, for at least `_room` slots
        self._shape: tuple[int, int, int] | None = None  # rows in use, heads, width
        self._room = 0  # slots that there is memory for
        self.device = torch.device("cpu")
        self.dtype = torch.float32

    # Room.

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """(rows in use, heads, width); None while the buffer is not open."""
        return self._shape

    def open(self, like: torch.Tensor, slots: int) -> None:
        """Become empty, with room for `slots` slots like those of `like` [rows, heads, any, width].

        Memory from an earlier `open` is reused if it is large enough. Raises without changing anything.
        """
        shape = (like.shape[0], like.shape[1], like.shape[3])
        fits = self._memory is not None and (self.device, self.dtype) == (like.device, like.dtype)
        count = slots * math.prod(shape)
        if self._memory is None or not fits or self._memory.numel() < count:
            self.wait()
            self._memory = self._allocate(count, like.dtype, like.device, None)
        self.device, self.dtype, self._shape = like.device, like.dtype, shape
        self._room = slots

    def reserve(self, slots: int, keep: int) -> None:
        """Grow to `slots` slots and keep the first `keep`. Raises without changing anything."""
        assert self._shape is not None
        self._have(slots, self._shape[0], keep)
        self._room = max(self._room, slots)

    def shrink(self, slots: int, keep: int) -> None:
        """Free the memory behind `slots` slots where it is most of it, and keep the first `keep` slots. Where there is
        no memory for the smaller copy, nothing changes."""
        assert self._shape is not None
        assert self._memory is not None
        count = self.numel(slots)
        if self._memory.numel() < _WORTH_SHRINKING * count:
            return
        self.wait()
        with suppress(RuntimeError, MemoryError, CapacityError):
            self._memory = self._copied(count, self._memory[: self.numel(keep)])
            self._room = slots

    def _copied(self, count: int, content: torch.Tensor) -> torch.Tensor:
        """New memory for at least `count` elements, which begins with a copy of `content`."""
        return self._allocate(count, self.dtype, self.device, content)

    def _have(self, slots: int, rows: int, keep: int) -> None:
        assert self._shape is not None
        assert self._memory is not None
        count = slots * rows * self._shape[1] * self._shape[2]
        if self._memory.numel() < count:
            self.wait()
            content = self._memory[: self.numel(keep)]
            self._memory = self._allocate(count, self.dtype, self.device, content)

    @abstractmethod
    def _allocate(
        self, count: int, dtype: torch.dtype, device: torch.device, content: torch.Tensor | None
    ) -> torch.Tensor:
        """Flat memory of at least `count` elements; it begins with `content`, the previous memory."""

    def space(self, memory: torch.Tensor, slots: int) -> torch.Tensor:
        """Flat `memory` as [rows, heads, slots, width], laid out like this buffer."""
        return _rows_first(self._laid_out(memory, slots))

    def numel(self, slots: int) -> int:
        """The number of elements in `slots` slots."""
        assert self._shape is not None
        return slots * math.prod(self._shape)

    def _laid_out(self, memory: torch.Tensor, slots: int) -> torch.Tensor:
        assert self._shape is not None
        return memory[: self.numel(slots)].view(slots, *self._shape)

    def _slots(self, begin: int, end: int) -> torch.Tensor:
        """[slots, rows, heads, width], a view of slots [begin, end)."""
        assert self._memory is not None
        return self._laid_out(self._memory, end)[begin:]

    # Content.

    def write(self, begin: int, content: torch.Tensor) -> None:
        """Write `content` [rows, heads, slots, width] to the slots from `begin` on, in order of the device's stream."""
        target = self._slots(begin, begin + content.shape[2])
        if content.device == target.device:
            target.copy_(_slots_first(content))
            return
        # Contiguous copies are fast; made in chunks, they need little memory.
        step = max(1, _CHUNK_BYTES // max(1, target[:1].nbytes))
        for source, chunk in zip(_slots_first(content).split(step), target.split(step), strict=True):
            chunk.copy_(source.contiguous(), non_blocking=True)

    def read(self, begin: int, end: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Slots [begin, end) on `device`, in the order of the device's stream.

        into: copy to the first slots of this tensor, which `space` made; None for a new tensor. A buffer on the device
        returns a view instead.
        """
        source = self._slots(begin, end)
        if into is None:
            return _rows_first(source.to(self.device, non_blocking=True, copy=True))
        target = _slots_first(into)[: end - begin]
        return _rows_first(target.copy_(source, non_blocking=True))

    def select_rows(self, index: torch.Tensor, end: int) -> None:
        """Row i becomes a copy of row `index[i]`, in the slots before `end`. Raises without changing anything."""
        self.prepare_select_rows(index, end)()

    def prepare_select_rows(self, index: torch.Tensor, end: int) -> Callable[[], None]:
        """Allocate what `select_rows` needs; returns the function that does it, which cannot fail."""
        assert self._shape is not None
        assert self._memory is not None
        index = index.to(self._memory.device)
        (rows, heads, width), count = self._shape, len(index)
        if self._memory.device.type == "cpu" and index.tolist() == list(range(rows)):
            return lambda: None
        self._have(self._room, count, end)
        step = min(end, max(1, _CHUNK_BYTES // (max(rows, count) * heads * width * self.dtype.itemsize)))
        chunk = _empty(step * count * heads * width, self.dtype, self._memory.device).view(step, count, heads, width)

        @torch.no_grad()  # also where the tokens were written outside of it
        def select() -> None:
            self.wait()
            previous = self._slots(0, end)
            self._shape = (count, heads, width)
            selected, begins = self._slots(0, end), range(0, end, max(1, step))
            # Both share memory: in this order no slot is overwritten before it was read.
            for begin in reversed(begins) if count > rows else begins:
                source = previous[begin : begin + step]
                selected[begin : begin + step] = torch.index_select(source, 1, index, out=chunk[: len(source)])

        return select

    def shift(self, begin: int, end: int) -> None:
        """Move slots [begin, end) to the front. Cannot fail: nothing is allocated."""
        if begin:
            self.wait()
            slots = self._slots(0, end)
            # In chunks no longer than the distance they move, so that source and target never overlap.
            for position in range(begin, end, begin):
                chunk = slots[position : position + begin]
                slots[position - begin : position - begin + len(chunk)] = chunk

    def close(self) -> None:
        """Become empty. The memory is kept for the next `open`."""
        self._shape = None

    def clear(self) -> None:
        """Become empty and free the memory."""
        self.wait()
        self._memory = self._shape = None

    @property
    def bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def tensors(self) -> Iterator[torch.Tensor]:
        """The buffer's memory, flat."""
        if self._memory is not None:
            yield self._memory

    def wait(self) -> None:
        """Wait for the device's pending copies, before the host touches the memory."""
        if self.device.type != "cpu" and self._memory is not None and self._memory.device != self.device:
            torch.accelerator.synchronize(self.device)

    def __deepcopy__(self: B, memo: dict[int, object]) -> B:
        constructor, (buffer_class, attributes, memory) = self.__reduce__()
        return constructor(buffer_class, copy.deepcopy(attributes, memo), memory)

    def __reduce__(self) -> tuple[Any, ...]:
        self.wait()
        content = None if self._memory is None else self._memory.view(torch.uint8)  # torch cannot unpickle float8
        return _with_memory, (type(self), self._without_memory(), content)

    def _without_memory(self) -> dict[str, object]:
        """The attributes of a copy that has no memory yet."""
        return vars(self) | {"_memory": None}


def _with_memory(buffer_class: type[B], attributes: Mapping[str, object], content: torch.Tensor | None) -> B:
    """A buffer with these attributes and a copy of `content`, the bytes of its memory."""
    buffer = object.__new__(buffer_class)
    vars(buffer).update(attributes)
    if content is not None:
        memory = content.view(buffer.dtype)
        buffer._memory = buffer._allocate(memory.numel(), buffer.dtype, buffer.device, None)
        buffer._memory.copy_(memory)
    return buffer


class DeviceBuffer(Buffer):
    """A buffer on the compute device. `read` returns a view."""

    tier: ClassVar[str] = "device"

    def _allocate(
        self, count: int, dtype: torch.dtype, device: torch.device, content: torch.Tensor | None
    ) -> torch.Tensor:
        return _with_start(content, _empty(count, dtype, device))

    def read(self, begin: int, end: int, into: torch.Tensor | None = None) -> torch.Tensor:
        assert self._shape is not None
        assert self._memory is not None
        (rows, heads, width), stride = self._shape, self.numel(1)
        # One operation in place of the four of `_rows_first(self._slots(begin, end))`: this runs per layer and step.
        return self._memory.as_strided(
            (rows, heads, end - begin, width), (heads * width, width, stride, 1), begin * stride
        )


class HostBuffer(Buffer):
    """A buffer in host memory, which is pinned if the compute device is an accelerator: copies are asynchronous."""

    tier: ClassVar[str] = "host"

    def _allocate(
        self, count: int, dtype: torch.dtype, device: torch.device, content: torch.Tensor | None
    ) -> torch.Tensor:
        if device.type == "meta":  # a dry run, which needs sizes only
            return _with_start(content, _empty(count, dtype, device))
        pinned = device.type != "cpu"
        if pinned:  # torch allocates a power of two of pinned bytes anyway
            count = (1 << (count * dtype.itemsize - 1).bit_length()) // dtype.itemsize
        return _with_start(content, _empty(count, dtype, torch.device("cpu"), pinned))


class DiskBuffer(Buffer):
    """A buffer in the cache's `DiskFile`, mapped into memory."""

    tier: ClassVar[str] = "disk"

    def __init__(self, disk_file: DiskFile) -> None:
        super().__init__()
        self.disk_file = disk_file
        self._window: Window | None = None

    def _allocate(
        self, count: int, dtype: torch.dtype, device: torch.device, content: torch.Tensor | None
    ) -> torch.Tensor:
        if device.type == "meta":
            return _with_start(content, _empty(count, dtype, device))
        count = max(1, count)
        if self._window is None or len(self._window) < count * dtype.itemsize:
            self._window = self.disk_file.window(count * dtype.itemsize, self._window)
        with always_writable():  # the window begins with the previous bytes: `content` needs no copy
            return torch.frombuffer(self._window, dtype=dtype, count=count)

    def _copied(self, count: int, content: torch.Tensor) -> torch.Tensor:
        window, self._window = self._window, None
        with on_failure(partial(setattr, self, "_window", window)):
            return _with_start(content, self._allocate(count, self.dtype, self.device, None))

    def clear(self) -> None:
        super().clear()
        self._window = None

    def _without_memory(self) -> dict[str, object]:
        return super()._without_memory() | {"_window": None}


def _empty(count: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> torch.Tensor:
    with always_writable():  # or the cache could not be used outside of inference mode later
        return torch.empty(count, dtype=dtype, device=device, pin_memory=pinned)


def _with_start(content: torch.Tensor | None, memory: torch.Tensor) -> torch.Tensor:
    if content is not None:
        memory[: len(content)] = content
    return memory


def _rows_first(slots: torch.Tensor) -> torch.Tensor:
    return slots.permute(1, 2, 0, 3)


def _slots_first(rows: torch.Tensor) -> torch.Tensor:
    return rows.permute(2, 0, 1, 3)
