"""Stores that keep one component of one layer as a tensor [rows, heads, slots, head_dim].

`GrowingStore` reallocates when it has to grow, `FixedStore` keeps its address. Both write in place and return views: no
step copies earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from caches.memory.buffers import Buffer
from caches.platform.torch_api import always_writable
from caches.stores.store import check_alike
from caches.timeline.timeline import Timeline


class GrowingStore:
    """A tensor that grows geometrically, as the timeline decides, and is written in place."""

    is_quantized: ClassVar[bool] = False
    storage_format: ClassVar[None] = None

    def __init__(self, timeline: Timeline):
        self.timeline = timeline
        self.buffer: torch.Tensor | None = None
        self.overflow: torch.Tensor | None = None

    def append(self, new: torch.Tensor) -> torch.Tensor:
        timeline = self.timeline
        if timeline.rows != new.shape[0]:
            timeline.bind_batch_size(new.shape[0])
        slots = self.slots()
        if slots is None:
            self.buffer = self._allocate(new, timeline.room)
            slots = self.slots()
            assert slots is not None
        if slots.dtype is not new.dtype or slots.shape[1::2] != new.shape[1::2]:
            check_alike((slots.shape[1], slots.shape[3]), slots.dtype, new)
        if timeline.overflow:
            self.overflow = torch.cat([slots[:, :, timeline.start : timeline.end], new], dim=-2)
            return self.overflow
        return self._write(slots, new)

    def add(self, new: torch.Tensor) -> None:
        self.append(new)

    def read(self) -> torch.Tensor | None:
        return self.committed()

    def _allocate(self, like: torch.Tensor, slots: int) -> torch.Tensor:
        with always_writable():  # or the cache could not be used outside of inference mode later
            return like.new_empty((*like.shape[:-2], slots, like.shape[-1]))

    def slots(self) -> torch.Tensor | None:
        """The rows of the buffer that are in use, with all their slots; None while there is none with enough rows."""
        return self.buffer

    def _write(self, slots: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        """Write the open step; returns what attention reads."""
        timeline = self.timeline
        start, end = timeline.start, timeline.end
        slots[:, :, end : end + added.shape[-2]] = added
        return slots.narrow(2, start, end + timeline.pending - start)

    def _visible(self, slots: torch.Tensor) -> torch.Tensor:
        timeline = self.timeline
        return slots.narrow(2, timeline.start, timeline.end + timeline.pending - timeline.start)

    def memory(self, begin: int, slots: int) -> torch.Tensor:
        """So many slots of the rows in use, from `begin` on: [rows, heads, slots, head_dim], to be written too."""
        buffer = self.slots()
        assert buffer is not None
        return buffer.narrow(2, begin, slots)

    def shown(self) -> torch.Tensor | None:
        """The kept tokens and those of the open step, once it has appended them."""
        slots = self.slots()
        return self.overflow if self.overflow is not None or slots is None else self._visible(slots)

    def read_from(self, source: GrowingStore, takes_room: bool) -> None:
        """Hold the kept tokens of `source` where they are: see `Timeline.read_from`."""
        self.buffer = source.buffer if takes_room else source.committed()

    def reserve(self, room: int) -> None:
        if self.buffer is None or (self.buffer.shape[-2] >= room and not self.timeline.is_frozen):
            return
        larger = self._allocate(self.buffer, room)
        larger[:, :, : self.timeline.end] = self.buffer[:, :, : self.timeline.end]
        self.buffer = larger

    def compact(self) -> None:
        if self.buffer is None:
            return
        start, end = self.timeline.start, self.timeline.end
        # In chunks no longer than the distance they move: source and target never overlap, nothing is allocated.
        for begin in range(start, end, start or 1):
            chunk = self.buffer[:, :, begin : min(begin + start, end)]
            self.buffer[:, :, begin - start : begin - start + chunk.shape[-2]] = chunk

    def commit(self, rejected: int) -> None:
        if self.overflow is None or (slots := self.slots()) is None:
            return
        committed, surviving = self.overflow.shape[-2] - rejected, self.timeline.surviving(rejected)
        slots[:, :, :surviving] = self.overflow[:, :, committed - surviving : committed]
        self.overflow = None

    def abort(self) -> None:
        self.overflow = None

    def select_rows(self, index: torch.Tensor) -> None:
        if self.buffer is None:
            return
        index, buffer, end = index.to(self.buffer.device), self.buffer, self.timeline.end
        with always_writable():
            if buffer.requires_grad:  # `index_select(out=...)` does not support it
                self.buffer = buffer.index_select(0, index)
                return
            chosen = buffer.new_empty((len(index), *buffer.shape[1:]))
            torch.index_select(buffer[:, :, :end], 0, index, out=chosen[:, :, :end])
            self.buffer = chosen

    def reset(self) -> None:
        self.release()

    def release(self) -> None:
        self.buffer = self.overflow = None

    def committed(self) -> torch.Tensor | None:
        timeline, slots = self.timeline, self.slots()
        return None if slots is None or timeline.rows is None else slots[:, :, timeline.start : timeline.end]

    def load_dense(self, dense: torch.Tensor) -> None:
        self.buffer = self._allocate(dense, self.timeline.room)
        slots = self.slots()
        assert slots is not None
        slots[:, :, : dense.shape[-2]] = dense

    def state_dict(self) -> dict[str, torch.Tensor]:
        committed = self.committed()
        return {} if committed is None else {"slots": committed}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.load_dense(state["slots"])

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (tensor for tensor in (self.buffer, self.overflow) if tensor is not None)

    def offloaded_buffers(self) -> Iterator[Buffer]:
        return iter(())


class FixedStore(GrowingStore):
    """A tensor that is allocated once and keeps its address, as compiled graphs and CUDA graphs need it.

    Unused slots are zeros: a compiled step reads masked slots too, and 0 * NaN is NaN. The tensor may have more rows
    than are in use.
    """

    def _allocate(self, like: torch.Tensor, slots: int) -> torch.Tensor:
        with always_writable():
            return like.new_zeros((self.timeline.max_rows or like.shape[0], like.shape[1], slots, like.shape[-1]))

    def slots(self) -> torch.Tensor | None:
        buffer, timeline = self.buffer, self.timeline
        # A reset keeps the buffer. `len` would be a constant in compiled code.
        if buffer is None or buffer.shape[0] < (timeline.max_rows or 0):
            return None
        return buffer if buffer.shape[0] == timeline.rows else buffer[: timeline.rows]

    def _write(self, slots: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
        slots.index_copy_(2, self.timeline.write_index(slots.device), added)
        return self._visible(slots)

    def _visible(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self.timeline.graph else super()._visible(slots)

    def committed(self) -> torch.Tensor | None:
        # Models that read `layer.keys` themselves get the whole buffer in compiled steps, always at one address.
        return self.slots() if self.timeline.graph else super().committed()

    def abort(self) -> None:
        super().abort()
        if self.buffer is not None:
            timeline = self.timeline
            self.buffer[:, :, timeline.end : timeline.end + timeline.pending] = 0

    def select_rows(self, index: torch.Tensor) -> None:
        if self.buffer is not None and (slots := self.slots()) is not None:
            chosen = slots[:, :, : self.timeline.end].index_select(0, index.to(self.buffer.device))
            self.buffer[: len(index), :, : self.timeline.end] = chosen

    def reset(self) -> None:
        self.overflow = None
        if self.buffer is not None:
            self.buffer.zero_()
