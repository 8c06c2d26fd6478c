"""The clock, the rows and the columns of a group of layers, without any keys or values.

All layers of a group keep the same columns at the same places, so this is decided once for all of them. Their buffers
hold `room` columns; the committed ones are `[start, end)`:

    |  evicted  |  held, committed  |  pending  |  free  |
    0         start                end                  room

A step appends behind `end`. Eviction only moves `start`. When `end` reaches the last column, what is held moves to the
front, so a window costs one small copy every `slack` tokens instead of one copy of the window per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from caches.errors import CapacityError, StepError
from caches.timeline.retention import Retention


@dataclass(frozen=True)
class Placement:
    """Where the columns of one step go, decided before anything is changed."""

    room: int  # columns every buffer of the group must have
    compact: bool = False  # move the held columns to the front first
    overflow: bool = False  # too many for the buffer of a window: attention reads a concatenation made for this step


class Timeline:
    """seen: tokens ever committed. held: columns committed and kept. pending: columns of the open step. rows: those of
    all steps; None before the first.

    max_tokens, max_rows: what the cache may hold, or None. all_room: buffers get all the room they may have at
    once and keep it.
    """

    growth: ClassVar[float] = 1.5  # every column is copied at most twice on average while a buffer grows
    slack: ClassVar[int] = 16  # the least number of columns that a window's buffer has beyond the window

    def __init__(
        self,
        retention: Retention,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        all_room: bool = False,
    ):
        self.retention, self.max_rows, self._fixed = retention, max_rows, all_room
        self._told_rows, self._made_rows = max_rows, 0  # what the caller said, and what fixed tensors were made for
        self.total_tokens = self.start = self.end = self.pending = self.room = 0
        self.rows: int | None = None
        self.overflow = False
        self.growth_granularity = 64  # rooms are multiples of this many columns
        self.rewritten = 0  # columns that were gone when the first of those held were last written over
        self.graph = False
        self.clock: torch.Tensor | None = None  # `total_tokens` for compiled steps, where a number would be compiled in
        self._step_index: dict[torch.device, torch.Tensor] = {}
        self._decode_index: dict[torch.device, torch.Tensor] = {}
        bound = retention.bound
        # A window that is wider than the whole cache forgets nothing: then it is the cache that is full one day.
        can_be_full = bound is None or (max_tokens is not None and max_tokens <= bound)
        self.max_tokens = max_tokens if can_be_full else None
        self._limit = self.max_tokens
        if self._limit is None and bound is not None:
            self._limit = bound + max(self.slack, bound // 8)  # so that moves stay rare
        if all_room and self._limit is not None:
            self.room = self._limit

    @property
    def kept_tokens(self) -> int:
        return self.end - self.start

    @property
    def evicted_tokens(self) -> int:
        """Columns seen and no longer held."""
        return self.total_tokens - self.kept_tokens

    def bind_batch_size(self, rows: int) -> None:
        """Inside the forward: a step has so many rows. Raises `StepError` when the steps before had others."""
        if self.rows is None and (self.max_rows is None or rows <= self.max_rows):
            self.rows = rows
            if self._fixed and self.max_rows is None:  # tensors are made now and stay, until a reset needs larger ones
                self.max_rows = self._made_rows = max(rows, self._made_rows)
        if self.rows is None:
            raise CapacityError(
                f"the cache has room for {self.max_rows} rows, but the step has {rows}: build one with max_batch_size"
            )
        if self.rows != rows:
            raise StepError(
                f"the cache holds {self.rows} rows, but the step has {rows}: bring them together with rows() or begin "
                "with an empty cache"
            )

    def place(self, tokens: int) -> Placement:
        """Where the next `tokens` columns go. Raises `CapacityError`; changes nothing."""
        needed, limit = self.end + tokens, self._limit
        if limit is None or needed <= limit:
            return Placement(self._grown(needed))
        if self.max_tokens is not None:
            raise CapacityError(
                f"the cache holds {self.kept_tokens} of at most {limit} tokens and cannot take {tokens} more: "
                f"{self.kept_tokens + tokens - limit} too many. Build it with "
                f"max_cache_len={self.kept_tokens + tokens} or more, "
                "or use cache='dynamic', which grows."
            )
        if self.kept_tokens + tokens <= limit:
            return Placement(limit, compact=True)
        return Placement(limit, overflow=True)

    def _grown(self, needed: int) -> int:
        if needed <= self.room:
            return self.room
        room = max(needed, int(self.room * self.growth))
        room = -(-room // self.growth_granularity) * self.growth_granularity
        return room if self._limit is None else min(room, self._limit)

    def compact(self) -> None:
        """What is held was moved to the front of the buffers."""
        self.start, self.end = 0, self.kept_tokens

    def take_room(self, room: int) -> None:
        """Every buffer of the group has so much room."""
        self.room = room

    def before_rows(self, index: torch.Tensor) -> None:
        """Rows are about to be chosen (see `Steps.rows`)."""

    def after_rows(self, rows: int) -> None:
        """They were: there are so many."""
        self.rows = rows

    @property
    def is_in_full(self) -> bool:
        """Whether the columns are as they came, so that other stores can have them instead."""
        return True

    def room_for(self, tokens: int) -> int:
        """The room that holding `tokens` tokens takes."""
        return self._grown(tokens if self._limit is None else min(tokens, self._limit))

    def begin(self, tokens: int, placement: Placement, graph: bool) -> None:
        """Open a step. With `graph`, attention gets the whole room and the place to write is a tensor, not a number."""
        if placement.compact:
            self.compact()
        self.room, self.overflow, self.pending, self.graph = placement.room, placement.overflow, tokens, graph
        # Decode steps share one tensor per device: a compiled step finds it at the same address every time.
        self._step_index = self._decode_index if tokens == 1 else {}
        if tokens == 1:
            for index in self._decode_index.values():
                index.fill_(self.end)
        if graph and self.clock is not None:
            self.clock.fill_(self.total_tokens)

    def write_index(self, device: torch.device) -> torch.Tensor:
        """The columns that the open step writes, LongTensor [pending] on `device`."""
        if device not in self._step_index:
            # The tensors for decode steps are made along with the first one, so that no graph sees them appear, and
            # outside of inference mode, so that a later step may write them wherever it runs.
            with torch.inference_mode(False):
                self.clock = torch.tensor(self.total_tokens, device=device) if self.clock is None else self.clock
                self._decode_index.setdefault(device, torch.full((1,), self.end, device=device))
                self._step_index.setdefault(device, torch.arange(self.end, self.end + self.pending, device=device))
        return self._step_index[device]

    def surviving(self, rejected: int) -> int:
        """Columns that stay when the open step is settled without its last `rejected` tokens."""
        return self.retention.surviving(self.kept_tokens + self.pending - rejected)

    def commit(self, rejected: int = 0) -> None:
        """Commit all pending tokens but the last `rejected`, then forget what the retention does not keep."""
        surviving, committed = self.surviving(rejected), self.pending - rejected
        # An overflowing step is laid out anew from the front of the buffers.
        self.end = surviving if self.overflow else self.end + committed
        self.start = self.end - surviving
        self.total_tokens += committed
        self.close()

    def close(self) -> None:
        """Forget the open step, if there is one."""
        self.pending, self.overflow, self.graph = 0, False, False

    def can_roll_back(self, tokens: int) -> bool:
        """Whether the last `tokens` committed ones can still be taken back: nothing it would need was overwritten."""
        remaining = self.total_tokens - tokens
        surviving = self.retention.surviving(remaining)
        return remaining >= 0 and self.end - tokens >= surviving and remaining - surviving >= self.rewritten

    def roll_back(self, tokens: int) -> None:
        """Take back the last `tokens` committed ones; columns evicted since come back: nothing overwrote them yet."""
        self.total_tokens -= tokens
        self.end -= tokens
        self.start = self.end - self.retention.surviving(self.total_tokens)

    def reset(self) -> None:
        self.close()
        self.total_tokens = self.start = self.end = self.rewritten = 0
        self.rows, self.max_rows = None, self._told_rows

    def release(self) -> None:
        """A reset after which no tensors are left."""
        self.reset()
        self._made_rows = 0

    def adopt(self, seen: int, held: int | None, rows: int) -> None:
        """Start anew with `kept_tokens` columns after `total_tokens` tokens, at the front of the buffers; None: there
        are no columns.

        Raises `CapacityError`, and `StepError` where other columns would be kept.
        """
        expected = self.retention.surviving(seen)
        if held not in (None, expected):
            raise StepError(
                f"after {seen} tokens {held} columns are there, but {expected} would be kept: "
                + (f"{expected - held} are gone" if held < expected else f"{held - expected} would be lost")
            )
        self.reset()
        self.room = self.place(expected).room
        self.total_tokens, self.end = seen, expected
        self.bind_batch_size(rows)

    @property
    def layout(self) -> tuple[Any, ...]:
        """What has to be the same in caches whose rows are put together as they are written down."""
        return self.total_tokens, self.kept_tokens

    def adopt_like(self, other: Timeline, rows: int) -> None:
        """Hold what `other` does, which is of the same kind, for so many rows."""
        self.adopt(other.total_tokens, other.kept_tokens, rows)

    def mask_sizes(self, tokens: int, unsettled: int = 0) -> tuple[int, Any]:
        """(kv_length, kv_offset) in logical positions of what attention over the next `tokens` will see.

        unsettled: tokens of a finished step that are not committed yet and have to be counted as if they were.
        Inside a graph, where a number would be compiled in, the offset is a tensor unless it is always 0.
        """
        if self.graph:
            if self.clock is not None and self.retention.bound is not None and torch.compiler.is_compiling():
                return self.room, self.clock - self._decode_index[self.clock.device]
            return self.room, 0 if self.retention.bound is None else self.total_tokens - self.end
        held = self.retention.surviving(self.kept_tokens + unsettled)
        return held + tokens, self.total_tokens + unsettled - held
