"""Stores whose data is offloaded: in host memory, or in a file.

The offloaded buffer is the only copy. A step appends its new tokens to it; what attention reads is prefetched while the
previous layer computes (see `Prefetcher`), so the device has two layers at a time for any length of context.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from caches.memory.buffers import Buffer
from caches.stores.slot import Slot
from caches.stores.store import check_alike


class OffloadedStore:
    """A `Store` whose data is in `buffer`, which grows.

    lasting: results stay valid when later layers read: needed if layers share the keys of an earlier one.
    """

    is_quantized: ClassVar[bool] = False
    storage_format: ClassVar[None] = None

    def __init__(self, slot: Slot, buffer: Buffer, lasting: bool):
        self.name, self.timeline, self.buffer = slot.name, slot.timeline, buffer
        self._scratch, self._lasting = slot.scratch, lasting
        self._has_pending = False  # the tokens of the open step are in the buffer

    def append(self, new: torch.Tensor) -> torch.Tensor:
        self._prepare(new)
        visible = self._with_kept(new)
        self._write(new)
        return visible

    def add(self, new: torch.Tensor) -> None:
        self._prepare(new)
        self._write(new)

    def _prepare(self, added: torch.Tensor) -> None:
        self.timeline.bind_batch_size(added.shape[0])
        if self.buffer.shape is None:
            self._open(added)
        assert self.buffer.shape is not None
        check_alike(self.buffer.shape[1:], self.buffer.dtype, added)

    def _write(self, added: torch.Tensor) -> None:
        timeline = self.timeline
        if not timeline.kept_tokens:  # nothing was read: a prefetch would be of tokens that were cropped since
            self._scratch.prefetcher.discard(self)
        if timeline.overflow:  # more tokens than the room of a window
            self.buffer.reserve(timeline.end + timeline.pending, keep=timeline.end)
        self.buffer.write(timeline.end, added)
        self._has_pending = True

    def read(self) -> torch.Tensor | None:
        if self.buffer.shape is None:
            return None
        timeline = self.timeline
        kept_tokens = timeline.kept_tokens
        fetched = self._scratch.prefetcher.take(self, timeline.start, timeline.end, kept_tokens)[:, :, :kept_tokens]
        return fetched.clone() if self._lasting else fetched

    def _with_kept(self, added: torch.Tensor) -> torch.Tensor:
        """The kept tokens and the new ones, on the device."""
        begin, kept_tokens = self.timeline.start, self.timeline.kept_tokens
        if not kept_tokens:
            # Kernels are chosen by the last axis, and their 16 bits differ: there is to be one text with any cache.
            return added if added.stride(-1) == 1 else added.contiguous()
        room = kept_tokens if self.timeline.overflow else self.timeline.room - begin
        fetched = self._scratch.prefetcher.take(self, begin, self.timeline.end, room)
        if self.timeline.overflow:
            return torch.cat([fetched, added], dim=-2)
        fetched = fetched[:, :, : kept_tokens + added.shape[-2]]
        fetched[:, :, kept_tokens:] = added
        return fetched.clone() if self._lasting else fetched

    def wanted(self) -> tuple[int, int, int]:
        """See `PrefetchReader`."""
        timeline = self.timeline
        if timeline.overflow:  # after this step the slots are rewritten
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
            surviving = timeline.surviving(rejected)
            self._move_to_front(committed - surviving, committed)
            self.buffer.shrink(timeline.room, keep=surviving)  # the step may have been a long prompt
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
        """A copy of the kept tokens on the device, [rows, heads, kept_tokens, head_dim]; None before the first step."""
        if self.buffer.shape is None or self.timeline.rows is None:
            return None
        return self.buffer.read(self.timeline.start, self.timeline.end)

    def load_dense(self, dense: torch.Tensor) -> None:
        self._scratch.prefetcher.discard(self)
        self._open(dense)
        self.buffer.write(0, dense)

    def state_dict(self) -> dict[str, torch.Tensor]:
        committed = self.committed()
        return {} if committed is None else {"slots": committed}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.load_dense(state["slots"])

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.buffer.tensors()

    def offloaded_buffers(self) -> Iterator[Buffer]:
        yield self.buffer


class FixedOffloadedStore(OffloadedStore):
    """An offloaded store of fixed size. It has room for more rows once there are more: those that share a prefix need
    none of their own."""

    def reset(self) -> None:
        self.buffer.close()
        self._scratch.prefetcher.discard(self)
        self._has_pending = False
