"""The clock and the columns of a group of layers, without any keys or values.

All layers of a group have the same reach, so they keep the same columns at the same places and this is decided once for
all of them. Their buffers hold `room` columns; the committed ones are `[start, end)`:

    |  evicted  |  held, committed  |  pending  |  free  |
    0         start                end                  room

A step appends behind `end`. Eviction only moves `start`. When `end` reaches the last column, what is held moves to the
front, so a window costs one small copy every `slack` tokens instead of one copy of the window per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from caches.errors import CapacityError
from caches.retention import Retention

_ROUND = 64  # rooms are multiples of this many columns
_GROWTH = 1.5  # every column is copied at most twice on average while a buffer grows


@dataclass(frozen=True)
class Placement:
    """Where the columns of one step go, decided before anything is changed."""

    room: int  # columns every buffer of the group must have
    compact: bool = False  # move the held columns to the front first
    overflow: bool = False  # too many for the buffer of a window: attention reads a concatenation made for this step


class Timeline:
    """seen: tokens ever committed. held: columns committed and kept. pending: columns of the open step.

    max_columns: tokens a fixed cache may hold; None for a growing one. Only groups that keep everything run out of it.
    """

    def __init__(self, retention: Retention, max_columns: int | None = None):
        self.retention = retention
        self.max_columns = max_columns
        self.seen = self.start = self.end = self.pending = self.room = 0
        self.overflow = False
        self.graph = False
        self._step_index: dict[torch.device, torch.Tensor] = {}
        self._decode_index: dict[torch.device, torch.Tensor] = {}
        self.clock: torch.Tensor | None = None  # `seen` for compiled steps, where a number would be compiled in
        if max_columns is not None:
            self.room = self._limit if self._limit is not None else max_columns

    @property
    def held(self) -> int:
        return self.end - self.start

    @property
    def _limit(self) -> int | None:
        """Columns a buffer never exceeds: a window and some slack, at least 16 columns, so that moves stay rare."""
        bound = self.retention.bound
        if bound is None:
            return self.max_columns
        return bound + max(16, bound // 8)

    def place(self, tokens: int) -> Placement:
        """Where the next `tokens` columns go. Raises `CapacityError`; changes nothing."""
        needed, limit = self.end + tokens, self._limit
        if limit is None or needed <= limit:
            return Placement(self._grown(needed))
        if self.retention.bound is None:
            raise CapacityError(
                f"the cache holds {self.held} of at most {limit} tokens and cannot take {tokens} more: "
                f"{self.held + tokens - limit} too many. Build it with max_cache_len={self.held + tokens} or more, "
                "or use cache='dynamic', which grows."
            )
        if self.held + tokens <= limit:
            return Placement(limit, compact=True)
        return Placement(limit, overflow=True)

    def _grown(self, needed: int) -> int:
        if needed <= self.room:
            return self.room
        room = max(needed, int(self.room * _GROWTH))
        room = -(-room // _ROUND) * _ROUND
        return room if self._limit is None else min(room, self._limit)

    def reserve(self, tokens: int) -> None:
        """Buffers made from now on have room for `tokens` columns at once (as far as the retention needs them)."""
        if self.max_columns is None:
            self.room = self._grown(tokens if self._limit is None else min(tokens, self._limit))

    def begin(self, tokens: int, placement: Placement, graph: bool) -> None:
        """Open a step. With `graph`, attention gets the whole room and the place to write is a tensor, not a number."""
        if placement.compact:
            self.start, self.end = 0, self.held
        self.room, self.overflow, self.pending, self.graph = placement.room, placement.overflow, tokens, graph
        # Decode steps share one tensor per device: a compiled step finds it at the same address every time.
        self._step_index = self._decode_index if tokens == 1 else {}
        if tokens == 1:
            for index in self._decode_index.values():
                index.fill_(self.end)
        if graph and self.clock is not None:
            self.clock.fill_(self.seen)

    def write_index(self, device: torch.device) -> torch.Tensor:
        """The columns that the open step writes, LongTensor [pending] on `device`."""
        if device not in self._step_index:
            # The tensors for decode steps are made along with the first one, so that no graph sees them appear.
            self.clock = torch.tensor(self.seen, device=device) if self.clock is None else self.clock
            self._decode_index.setdefault(device, torch.full((1,), self.end, device=device))
            self._step_index.setdefault(device, torch.arange(self.end, self.end + self.pending, device=device))
        return self._step_index[device]

    def settle(self, drop: int = 0) -> None:
        """Commit all pending tokens but the last `drop`, then forget what the retention does not keep."""
        committed = self.pending - drop
        surviving = self.retention.surviving(self.held + committed)
        # An overflowing step is laid out anew from the front of the buffers.
        self.end = surviving if self.overflow else self.end + committed
        self.start = self.end - surviving
        self.seen += committed
        self._close()

    def abort(self) -> None:
        self._close()

    def _close(self) -> None:
        self.pending, self.overflow, self.graph = 0, False, False

    def can_forget(self, tokens: int) -> bool:
        """Whether the last `tokens` committed ones can still be taken back: nothing it would need was overwritten."""
        remaining = self.seen - tokens
        return remaining >= 0 and self.end - tokens >= self.retention.surviving(remaining)

    def forget(self, tokens: int) -> None:
        """Take back the last `tokens` committed ones; columns evicted since come back: nothing overwrote them yet."""
        self.seen -= tokens
        self.end -= tokens
        self.start = self.end - self.retention.surviving(self.seen)

    def reset(self) -> None:
        self._close()
        self.seen = self.start = self.end = 0

    def mask_sizes(self, tokens: int, unsettled: int = 0) -> tuple[int, int]:
        """(kv_length, kv_offset) in logical positions of what attention over the next `tokens` will see.

        unsettled: tokens of a finished step that are not committed yet and have to be counted as if they were.
        """
        if self.graph:
            return self.room, self.seen - self.end
        held = self.retention.surviving(self.held + unsettled)
        return held + tokens, self.seen + unsettled - held
