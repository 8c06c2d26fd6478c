"""Which slots of a group of layers hold which tokens. Integers only: no keys or values.

All layers of a group keep the same tokens in the same slots, so one timeline serves them all. Their buffers have `room`
slots; committed tokens are in slots `[start, end)`:

    |  evicted  |  kept, committed  |  pending  |  free  |
    0         start                end                  room

A step appends behind `end`. Eviction only moves `start`. When `end` reaches the last slot, the kept tokens are moved to
the front: a window costs one copy every `slack` tokens instead of one copy per token.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, NamedTuple

import torch

from caches.errors import CapacityError, StepError
from caches.platform.torch_api import always_writable
from caches.timeline.retention import Retention


class Placement(NamedTuple):
    """Where the tokens of one step go, decided before anything is changed."""

    room: int  # slots that every buffer of the group must have
    compact: bool = False  # move the kept tokens to the front first
    overflow: bool = False  # more tokens than the buffer of a window takes: attention reads a concatenation


class Timeline:
    """The slots of one group of layers.

    retention: which tokens are kept. max_tokens, max_rows: capacity; None for no limit. all_room: buffers get all their
    room at once and never move (static caches).

    total_tokens: tokens ever committed. kept_tokens: committed and not evicted. pending: tokens of the open step.
    rows: the batch size; None before the first step.
    """

    growth: ClassVar[float] = 1.5  # on average a slot is copied at most twice while a buffer grows
    slack: ClassVar[int] = 16  # slots that a window's buffer has beyond the window, at least

    def __init__(
        self,
        retention: Retention,
        max_tokens: int | None = None,
        max_rows: int | None = None,
        all_room: bool = False,
    ):
        self.retention, self.max_rows, self._fixed = retention, max_rows, all_room
        self._given_max_rows, self._allocated_rows = max_rows, 0  # by the caller; of preallocated tensors
        self.total_tokens = self.start = self.end = self.pending = self.room = 0
        self.rows: int | None = None
        self.overflow = False
        self.growth_granularity = 64  # room is a multiple of this many slots
        self.frozen = 0  # the first slots that another cache reads too: writing there copies the buffers first
        self.rewritten = 0  # evicted tokens when the first kept slots were last overwritten: a limit of `roll_back`
        self.graph = False
        self.clock: torch.Tensor | None = None  # `total_tokens` for compiled steps, where an int would be a constant
        self._step_index: dict[torch.device, torch.Tensor] = {}
        self._decode_index: dict[torch.device, torch.Tensor] = {}
        bound = retention.bound
        # A window wider than the capacity never evicts: the cache fills up first.
        can_be_full = bound is None or (max_tokens is not None and max_tokens <= bound)
        self.max_tokens = max_tokens if can_be_full else None
        self._limit = self.max_tokens
        if self._limit is None and bound is not None:
            self._limit = bound + max(self.slack, bound // 8)  # so that compaction is rare
        if all_room and self._limit is not None:
            self.room = self._limit

    @property
    def kept_tokens(self) -> int:
        return self.end - self.start

    @property
    def evicted_tokens(self) -> int:
        """Tokens that were committed and are no longer kept."""
        return self.total_tokens - self.kept_tokens

    def bind_batch_size(self, rows: int) -> None:
        """Set the batch size, from inside the forward.

        Raises `StepError` if earlier steps had another number of rows, `CapacityError` above max_rows.
        """
        if self.rows is None and (self.max_rows is None or rows <= self.max_rows):
            self.rows = rows
            if self._fixed and self.max_rows is None:  # preallocated tensors keep this size until a reset asks for more
                self.max_rows = self._allocated_rows = max(rows, self._allocated_rows)
        if self.rows is None:
            raise CapacityError(
                f"the cache has room for {self.max_rows} rows, but the step has {rows}: build one with max_batch_size"
            )
        if self.rows != rows:
            raise StepError(
                f"the cache has {self.rows} rows, but the step has {rows}: select rows with select_rows(), or begin "
                "with an empty cache"
            )

    def place(self, tokens: int) -> Placement:
        """Where the next `tokens` tokens go. Raises `CapacityError`; changes nothing."""
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

    @property
    def is_frozen(self) -> bool:
        """Whether the next token would be written where another cache reads: buffers have to be copied first."""
        return self.end < self.frozen

    def _grown(self, needed: int) -> int:
        if needed <= self.room:
            return self.room
        room = max(needed, int(self.room * self.growth))
        room = -(-room // self.growth_granularity) * self.growth_granularity
        return room if self._limit is None else min(room, self._limit)

    def compact(self) -> None:
        """The stores moved the kept tokens to the front of their buffers."""
        self.start, self.end = 0, self.kept_tokens

    def take_room(self, room: int) -> None:
        """Every buffer of the group has `room` slots now; those that were frozen are copies."""
        if room != self.room or self.is_frozen:
            self.frozen = 0
        self.room = room

    def read_from(self, source: Timeline, takes_room: bool) -> None:
        """Share the buffers of `source`, whose state this timeline already has.

        takes_room: from now on this timeline may write into their free slots, and `source` may not; False: as before,
        only `source` may.
        """
        self.room, self.frozen = source.room if takes_room else self.end, self.end
        source.frozen = sys.maxsize if takes_room else max(source.frozen, source.end)

    def before_rows(self, index: torch.Tensor) -> None:
        """Called before rows are selected. index: LongTensor [new rows]."""

    def after_rows(self, rows: int) -> None:
        """Called after rows were selected: the batch size is `rows`."""
        self.rows = rows

    @property
    def is_in_full(self) -> bool:
        """Whether no kept token is quantized, so that another kind of store can take them over without loss."""
        return True

    def room_for(self, tokens: int) -> int:
        """The room in slots that `tokens` tokens take."""
        return self._grown(tokens if self._limit is None else min(tokens, self._limit))

    def begin(self, tokens: int, placement: Placement, graph: bool) -> None:
        """Open a step. graph: for a compiled step: attention reads all slots, and slots to write are a tensor."""
        if placement.compact:
            self.compact()
        self.room, self.overflow, self.pending, self.graph = placement.room, placement.overflow, tokens, graph
        # Decode steps share one index tensor per device: compiled steps need a constant address.
        self._step_index = self._decode_index if tokens == 1 else {}
        if tokens == 1:
            for index in self._decode_index.values():
                index.fill_(self.end)
        if graph and self.clock is not None:
            self.clock.fill_(self.total_tokens)

    def write_index(self, device: torch.device) -> torch.Tensor:
        """The slots that the open step writes, LongTensor [pending] on `device`."""
        if device not in self._step_index:
            # The tensors of decode steps are made in the first step, before any graph is captured, and outside of
            # inference mode, so that later steps can write them in any mode.
            with always_writable():
                self.clock = torch.tensor(self.total_tokens, device=device) if self.clock is None else self.clock
                self._decode_index.setdefault(device, torch.full((1,), self.end, device=device))
                self._step_index.setdefault(device, torch.arange(self.end, self.end + self.pending, device=device))
        return self._step_index[device]

    def surviving(self, rejected: int) -> int:
        """Tokens kept if the open step is committed without its last `rejected` tokens."""
        return self.retention.surviving(self.kept_tokens + self.pending - rejected)

    def commit(self, rejected: int = 0) -> None:
        """Commit all pending tokens but the last `rejected`, then evict what the retention does not keep."""
        surviving, committed = self.surviving(rejected), self.pending - rejected
        # After an overflow the stores write the surviving tokens to the front.
        self.end = surviving if self.overflow else self.end + committed
        self.start = self.end - surviving
        self.total_tokens += committed
        self.close()

    def close(self) -> None:
        """End the open step, if there is one, without committing."""
        self.pending, self.overflow, self.graph = 0, False, False

    def can_roll_back(self, tokens: int) -> bool:
        """Whether `roll_back(tokens)` is possible: no slot that it needs was overwritten."""
        remaining = self.total_tokens - tokens
        surviving = self.retention.surviving(remaining)
        return remaining >= 0 and self.end - tokens >= surviving and remaining - surviving >= self.rewritten

    def roll_back(self, tokens: int) -> None:
        """Undo the last `tokens` committed tokens. Tokens that they evicted are kept again: their slots are intact."""
        self.total_tokens -= tokens
        self.end -= tokens
        self.start = self.end - self.retention.surviving(self.total_tokens)

    def reset(self) -> None:
        self.close()
        self.total_tokens = self.start = self.end = self.rewritten = self.frozen = 0
        self.rows, self.max_rows = None, self._given_max_rows

    def release(self) -> None:
        """`reset`, with all tensors freed."""
        self.reset()
        self._allocated_rows = 0

    def adopt(self, total_tokens: int, kept_tokens: int | None, rows: int) -> None:
        """Restart as if `total_tokens` were committed, with `kept_tokens` of them at the front of the buffers.

        kept_tokens: None for layers without keys. Raises `CapacityError`, and `StepError` if the retention keeps
        another number of tokens.
        """
        expected = self.retention.surviving(total_tokens)
        if kept_tokens not in (None, expected):
            raise StepError(
                f"of {total_tokens} tokens {kept_tokens} are given, but this cache keeps {expected}: "
                + (
                    f"{expected - kept_tokens} are missing"
                    if kept_tokens < expected
                    else f"{kept_tokens - expected} would be lost"
                )
            )
        self.reset()
        self.room = self.place(expected).room
        self.total_tokens, self.end = total_tokens, expected
        self.bind_batch_size(rows)

    @property
    def layout(self) -> tuple[object, ...]:
        """What has to be equal in caches whose rows are joined from their `state_dict`s."""
        return self.total_tokens, self.kept_tokens

    def state_dict(self) -> dict[str, object]:
        """What is in which slots, in types of JSON."""
        return {"total_tokens": self.total_tokens, "kept_tokens": self.kept_tokens}

    def load_state_dict(self, state: dict[str, Any], rows: int) -> None:
        """Restart in the state of a timeline of the same class, for `rows` rows. Raises as `adopt`."""
        self.adopt(state["total_tokens"], state["kept_tokens"], rows)

    def mask_sizes(self, tokens: int, uncommitted: int = 0) -> tuple[int, int | torch.Tensor]:
        """(kv_length, kv_offset), in tokens, of what attention over the next `tokens` tokens reads.

        uncommitted: tokens of a finished step that is not committed yet; they count as committed. While a graph is
        compiled, the offset is a tensor unless it is always 0: an int would be a constant.
        """
        if self.graph:
            if self.clock is not None and self.retention.bound is not None and torch.compiler.is_compiling():
                return self.room, self.clock - self._decode_index[self.clock.device]
            return self.room, 0 if self.retention.bound is None else self.total_tokens - self.end
        surviving = self.retention.surviving(self.kept_tokens + uncommitted)
        return surviving + tokens, self.total_tokens + uncommitted - surviving
