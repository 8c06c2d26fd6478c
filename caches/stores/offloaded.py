"""Columns that live away from the device that computes: in host memory, or in a file.

What is there is the master. A step sends its new columns there and nothing else; what attention reads is fetched while
the layer before computes (see `Prefetcher`), so the device has two layers at a time, however long the context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from caches.memory.buffers import Buffer
from caches.stores.dense import check_alike
from caches.stores.slot import Slot


class OffloadedStore:
    """One stream of one layer in a `buffer`, with room made as columns come. See `Store`.

    lasting: what attention was handed stays as it is when later layers have theirs: layers that keep no keys read it.
    """

    fixed: ClassVar[bool] = False
    is_quantized: ClassVar[bool] = False
    storage_format: ClassVar[None] = None

    def __init__(self, slot: Slot, buffer: Buffer, lasting: bool):
        self.name, self.timeline, self.buffer = slot.name, slot.timeline, buffer
        self._scratch, self._lasting = slot.scratch, lasting
        self._has_pending = False  # the columns of the open step are in the buffer

    def append(self, new: torch.Tensor) -> torch.Tensor:
        self._prepare(new)
        read = self._with_held(new)
        self._write(new)
        return read

    def add(self, new: torch.Tensor) -> None:
        self._prepare(new)
        self._write(new)

    def _prepare(self, new: torch.Tensor) -> None:
        self.timeline.bind_batch_size(new.shape[0])
        if self.buffer.shape is None:
            self._open(new)
        assert self.buffer.shape is not None
        check_alike(self.buffer.shape[1:], self.buffer.dtype, new)

    def _write(self, new: torch.Tensor) -> None:
        timeline = self.timeline
        if timeline.overflow:  # behind the window there is no room for so many
            self.buffer.reserve(timeline.end + timeline.pending, keep=timeline.end)
        self.buffer.write(timeline.end, new)
        self._has_pending = True

    def read(self) -> torch.Tensor | None:
        if self.buffer.shape is None:
            return None
        timeline = self.timeline
        staged = self._scratch.prefetcher.take(self, timeline.start, timeline.end, timeline.kept_tokens)[
            :, :, : timeline.kept_tokens
        ]
        return staged.clone() if self._lasting else staged

    def _with_held(self, new: torch.Tensor) -> torch.Tensor:
        """The columns held and the new ones, on the device."""
        begin, held = self.timeline.start, self.timeline.kept_tokens
        if not held:
            return new
        room = held if self.timeline.overflow else self.timeline.room - begin
        staged = self._scratch.prefetcher.take(self, begin, self.timeline.end, room)
        if self.timeline.overflow:
            return torch.cat([staged, new], dim=-2)
        staged = staged[:, :, : held + new.shape[-2]]
        staged[:, :, held:] = new
        return staged.clone() if self._lasting else staged

    def wanted(self) -> tuple[int, int, int]:
        """What its next step reads: see `Reader`."""
        timeline = self.timeline
        if timeline.overflow:  # what it reads now is being laid out anew, or read already
            return timeline.start, timeline.start if self._has_pending else timeline.end, timeline.end
        return timeline.start, timeline.end + (timeline.pending if self._has_pending else 0), timeline.room

    def _open(self, like: torch.Tensor) -> None:
        self.buffer.open(like, self.timeline.room)

    def reserve(self, room: int) -> None:
        if self.buffer.shape is not None:
            self.buffer.reserve(room, keep=self.timeline.end)

    def compact(self) -> None:
        self._move_to_front(self.timeline.start, self.timeline.end)

    def _move_to_front(self, begin: int, end: int) -> None:
        if self.buffer.shape is not None:
            self.buffer.shift(begin, end)
            self._scratch.prefetcher.discard(self)

    def commit(self, rejected: int) -> None:
        timeline = self.timeline
        if timeline.overflow and self._has_pending:
            committed = timeline.end + timeline.pending - rejected
            self._move_to_front(committed - timeline.surviving(rejected), committed)
        self._has_pending = False

    def abort(self) -> None:
        self._has_pending = False

    def select_rows(self, index: torch.Tensor) -> None:
        if self.buffer.shape is not None:
            self.buffer.select_rows(index, self.timeline.end)
            self._scratch.prefetcher.discard(self)

    def reset(self) -> None:
        self.release()

    def release(self) -> None:
        self.buffer.clear()
        self._scratch.prefetcher.discard(self)
        self._has_pending = False

    def committed(self) -> torch.Tensor | None:
        """A copy of the columns held [rows, heads, held, head_dim], on the device; None before the first step."""
        if self.buffer.shape is None or self.timeline.rows is None:
            return None
        return self.buffer.read(self.timeline.start, self.timeline.end)

    def load_dense(self, columns: torch.Tensor) -> None:
        self._scratch.prefetcher.discard(self)
        self._open(columns)
        self.buffer.write(0, columns)

    def state_dict(self) -> dict[str, torch.Tensor]:
        columns = self.committed()
        return {} if columns is None else {"columns": columns}

    def load_state_dict(self, written: dict[str, torch.Tensor]) -> None:
        self.load_dense(written["columns"])

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.buffer.tensors()

    def offloaded_buffers(self) -> Iterator[Buffer]:
        yield self.buffer


class FixedOffloadedStore(OffloadedStore):
    """Room is made once, for as many rows as there can be."""

    fixed: ClassVar[bool] = True

    def _open(self, like: torch.Tensor) -> None:
        self.buffer.open(like, self.timeline.room, self.timeline.max_rows)

    def reset(self) -> None:
        self.buffer.close()
        self._scratch.prefetcher.discard(self)
        self._has_pending = False
