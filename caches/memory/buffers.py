"""Where the columns of a tensor live between uses: on the device that computes, in host memory, in a file.

A buffer is a tensor [rows, heads, columns, width] of any data type. In memory its columns lie outermost, whatever the
shape says: then any run of columns is one piece, new columns go behind the others, and more room is more of the same.
It knows nothing of time, layers or models, and never decides what is kept.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar

import torch

from caches.memory.disk_file import DiskFile, Window

_PIECE_BYTES = 2**24  # what is rearranged in place goes through a copy of about this size

B = TypeVar("B", bound="Buffer")


class Buffer(ABC):
    """Columns somewhere. `open` it before anything else.

    tier: "device", "host" or "disk". device: where what is written comes from and what is read is put.
    """

    tier: ClassVar[str]

    @property
    def is_off_device(self) -> bool:
        """Whether it takes no memory of the device that computes."""
        return self.tier == "disk" or (self.tier == "host" and self.device.type != "cpu")

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None  # flat, of at least `_room` columns
        self._shape: tuple[int, int, int] | None = None  # rows in use, heads, width
        self._room = 0  # columns that there is memory for, of so many rows where that is more than are in use:
        self._rows_room: int | None = None
        self.device = torch.device("cpu")
        self.dtype = torch.float32

    # Room.

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Rows in use, heads and width; None while it is not open."""
        return self._shape

    def open(self, like: torch.Tensor, columns: int, rows: int | None = None) -> None:
        """Hold nothing yet, with room for `columns` like those of `like` [rows, heads, any, width].

        rows: room for so many at any time, where that is more than `like` has. A buffer that was open keeps its memory
        if that is enough. When this raises, nothing has changed.
        """
        shape = (like.shape[0], like.shape[1], like.shape[3])
        fits = self._memory is not None and (self.device, self.dtype) == (like.device, like.dtype)
        numbers = columns * (rows or shape[0]) * shape[1] * shape[2]
        if self._memory is None or not fits or self._memory.numel() < numbers:
            self.wait()
            self._memory = self._allocate(numbers, like.dtype, like.device, None)
        self.device, self.dtype, self._shape = like.device, like.dtype, shape
        self._rows_room, self._room = rows, columns

    def reserve(self, columns: int, keep: int) -> None:
        """Have room for `columns`; the first `keep` stay. When this raises, nothing has changed."""
        assert self._shape is not None
        self._have(columns, self._shape[0], keep)
        self._room = max(self._room, columns)

    def _have(self, columns: int, rows: int, keep: int) -> None:
        assert self._shape is not None
        assert self._memory is not None
        numbers = columns * (self._rows_room or rows) * self._shape[1] * self._shape[2]
        if self._memory.numel() < numbers:
            self.wait()
            kept = self._memory[: self.materialize(keep)]
            self._memory = self._allocate(numbers, self.dtype, self.device, kept)

    @abstractmethod
    def _allocate(
        self, numbers: int, dtype: torch.dtype, device: torch.device, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Flat memory of at least so many numbers that begins with `kept`, which is the memory of before."""

    def space(self, memory: torch.Tensor, columns: int) -> torch.Tensor:
        """Flat `memory` as so many columns of this buffer, laid out as it keeps them."""
        return _rows_first(self._laid_out(memory, columns))

    def materialize(self, columns: int) -> int:
        """How many numbers so many columns are."""
        assert self._shape is not None
        return columns * math.prod(self._shape)

    def _laid_out(self, memory: torch.Tensor, columns: int) -> torch.Tensor:
        assert self._shape is not None
        return memory[: self.materialize(columns)].view(columns, *self._shape)

    def _columns(self, begin: int, end: int) -> torch.Tensor:
        """[columns, rows, heads, width]"""
        assert self._memory is not None
        return self._laid_out(self._memory, end)[begin:]

    # Columns.

    def write(self, begin: int, new: torch.Tensor) -> None:
        """Columns from `begin` on become `new` [rows, heads, columns, width], in order with what `device` does."""
        columns = self._columns(begin, begin + new.shape[2])
        if new.device == columns.device:
            columns.copy_(_columns_first(new))
            return
        # What lies in one piece is copied at once; it is made to in parts, for which there is room when memory is out.
        step = max(1, _PIECE_BYTES // max(1, columns[:1].nbytes))
        for part, own in zip(_columns_first(new).split(step), columns.split(step), strict=True):
            own.copy_(part.contiguous(), non_blocking=True)

    def read(self, begin: int, end: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Columns [begin, end) on `device`, in order with what that does next.

        Where they have to be copied it is into the first columns of `into` (see `space`), or into a new tensor.
        """
        columns = self._columns(begin, end)
        if into is None:
            return _rows_first(columns.to(self.device, non_blocking=True, copy=True))
        target = _columns_first(into)[: end - begin]
        return _rows_first(target.copy_(columns, non_blocking=True))

    def select_rows(self, index: torch.Tensor, end: int) -> None:
        """Row i becomes a copy of row `index[i]`, in the columns before `end`, or nothing has changed."""
        self.choosing(index, end)()

    def choosing(self, index: torch.Tensor, end: int) -> Callable[[], None]:
        """`rows`, as something still to be called that cannot fail: the memory it takes is there."""
        assert self._shape is not None
        assert self._memory is not None
        index = index.to(self._memory.device)
        (rows, heads, width), count = self._shape, len(index)
        if self._memory.device.type == "cpu" and index.tolist() == list(range(rows)):
            return lambda: None
        self._have(self._room, count, end)
        step = min(end, max(1, _PIECE_BYTES // (max(rows, count) * heads * width * self.dtype.itemsize)))
        numbers = step * count * heads * width
        pieces = _empty(numbers, self.dtype, self._memory.device).view(step, count, heads, width)

        def choose() -> None:
            self.wait()
            old = self._columns(0, end)
            self._shape = (count, heads, width)
            new, begins = self._columns(0, end), range(0, end, max(1, step))
            # In this order no column is overwritten before it was read, although both lie in the same memory.
            for begin in reversed(begins) if count > rows else begins:
                read = old[begin : begin + step]
                new[begin : begin + step] = torch.index_select(read, 1, index, out=pieces[: len(read)])

        return choose

    def shift(self, begin: int, end: int) -> None:
        """Move columns [begin, end) to the front. Must not fail."""
        if begin:
            self.wait()
            columns = self._columns(0, end)
            # In pieces no longer than the distance they move: source and target never overlap, nothing is allocated.
            for first in range(begin, end, begin):
                piece = columns[first : first + begin]
                columns[first - begin : first - begin + len(piece)] = piece

    def close(self) -> None:
        """Hold nothing. The memory stays for when it is opened again."""
        self._shape = None

    def clear(self) -> None:
        """Hold nothing and keep no memory."""
        self.wait()
        self._memory = self._shape = None

    @property
    def bytes(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory that it keeps, flat."""
        if self._memory is not None:
            yield self._memory

    def wait(self) -> None:
        """Until the device has done what it was told about memory that the host is going to touch."""
        if self.device.type != "cpu" and self._memory is not None and self._memory.device != self.device:
            torch.accelerator.synchronize(self.device)

    def __deepcopy__(self: B, memo: dict[int, Any]) -> B:
        new, (kind, attributes, memory) = self.__reduce__()
        return new(kind, copy.deepcopy(attributes, memo), memory)

    def __reduce__(self) -> tuple[Any, ...]:
        self.wait()
        return _with_memory, (type(self), self._without_memory(), self._memory)

    def _without_memory(self) -> dict[str, Any]:
        """The attributes of a buffer like this one that has no memory yet."""
        return vars(self) | {"_memory": None}


def _with_memory(kind: type[B], attributes: dict[str, Any], memory: torch.Tensor | None) -> B:
    """A buffer with memory of its own that holds the same as `memory`."""
    buffer = object.__new__(kind)
    vars(buffer).update(attributes)
    if memory is not None:
        buffer._memory = buffer._allocate(memory.numel(), buffer.dtype, buffer.device, None)
        buffer._memory.copy_(memory)
    return buffer


class DeviceBuffer(Buffer):
    """Columns where the model computes: what is read are they themselves."""

    tier: ClassVar[str] = "device"

    def _allocate(
        self, numbers: int, dtype: torch.dtype, device: torch.device, kept: torch.Tensor | None
    ) -> torch.Tensor:
        return _begun_with(kept, _empty(numbers, dtype, device))

    def read(self, begin: int, end: int, into: torch.Tensor | None = None) -> torch.Tensor:
        assert self._shape is not None
        assert self._memory is not None
        (rows, heads, width), column = self._shape, self.materialize(1)
        # `_rows_first(self._columns(begin, end))` takes four operations, and every layer does this in every step.
        return self._memory.as_strided(
            (rows, heads, end - begin, width), (heads * width, width, column, 1), begin * column
        )


class HostBuffer(Buffer):
    """Columns in host memory, pinned where an accelerator computes: then copies need not wait for each other."""

    tier: ClassVar[str] = "host"

    def _allocate(
        self, numbers: int, dtype: torch.dtype, device: torch.device, kept: torch.Tensor | None
    ) -> torch.Tensor:
        if device.type == "meta":  # a model without weights, of which only sizes are asked
            return _begun_with(kept, _empty(numbers, dtype, device))
        pinned = device.type != "cpu"
        if pinned:  # torch takes a power of two of pinned bytes in any case
            numbers = (1 << (numbers * dtype.itemsize - 1).bit_length()) // dtype.itemsize
        return _begun_with(kept, _empty(numbers, dtype, torch.device("cpu"), pinned))


class DiskBuffer(Buffer):
    """Columns in a part of a `DiskFile`, the cache's file."""

    tier: ClassVar[str] = "disk"

    def __init__(self, disk_file: DiskFile) -> None:
        super().__init__()
        self.disk_file = disk_file
        self._window: Window | None = None

    def _allocate(
        self, numbers: int, dtype: torch.dtype, device: torch.device, kept: torch.Tensor | None
    ) -> torch.Tensor:
        if device.type == "meta":
            return _begun_with(kept, _empty(numbers, dtype, device))
        numbers = max(1, numbers)
        if self._window is None or len(self._window) < numbers * dtype.itemsize:
            self._window = self.disk_file.window(numbers * dtype.itemsize, self._window)
        with torch.inference_mode(False):  # it begins with the bytes of before, so what was kept is there
            return torch.frombuffer(self._window, dtype=dtype, count=numbers)

    def clear(self) -> None:
        super().clear()
        self._window = None

    def _without_memory(self) -> dict[str, Any]:
        return super()._without_memory() | {"_window": None}


def _empty(numbers: int, dtype: torch.dtype, device: torch.device, pinned: bool = False) -> torch.Tensor:
    with torch.inference_mode(False):  # else this cache could not be continued outside of inference mode
        return torch.empty(numbers, dtype=dtype, device=device, pin_memory=pinned)


def _begun_with(kept: torch.Tensor | None, memory: torch.Tensor) -> torch.Tensor:
    if kept is not None:
        memory[: len(kept)] = kept
    return memory


def _rows_first(columns: torch.Tensor) -> torch.Tensor:
    return columns.permute(1, 2, 0, 3)


def _columns_first(columns: torch.Tensor) -> torch.Tensor:
    return columns.permute(2, 0, 1, 3)
