"""Rows that were one: the columns from before they were forked are there once for all of them.

    |  prefix: committed before the fork, of each prompt  |  suffix: committed since, of each row  |  pending  |

Row i is one of `rows_per_prefix` consecutive rows that share the prefix of prompt i // rows_per_prefix. A prefix is the
stores and the timeline as they were, which stand still; a suffix is others of the same recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, groupby
from math import gcd
from typing import Any

import torch

from caches.attention.segmented_tensor import SegmentedTensor, segments_of
from caches.attention.segments import PerRowSegment, Segment
from caches.errors import StepError
from caches.memory.buffers import Buffer
from caches.stores.dense import Store, check_alike
from caches.timeline.timeline import Placement, Timeline


class ForkedTimeline(Timeline):
    """The clock of both together.

    prompts: those that the rows to come have, where `rows` was asked for others than there are; else None.
    was_read_whole: a view of it was needed whole since the step began.
    """

    def __init__(self, prefix: Timeline, suffix: Timeline):
        super().__init__(prefix.retention, prefix.max_tokens, prefix.max_rows)
        self.prefix, self.suffix = prefix, suffix
        self.rows_per_prefix = self._siblings_to_come = 1
        self.prompts: torch.Tensor | None = None
        self.was_read_whole = False
        self._join()

    def _join(self) -> None:
        self.total_tokens = self.end = self.prefix.total_tokens + self.suffix.total_tokens
        self.rows = self.suffix.rows = None if self.prefix.rows is None else self.prefix.rows * self.rows_per_prefix

    def note_whole(self) -> None:
        self.was_read_whole = True

    @property
    def should_unshare(self) -> bool:
        return self.was_read_whole and self.rows_per_prefix > 1

    def place(self, tokens: int) -> Placement:
        super().place(tokens)  # whether there is room for all
        placement = self.suffix.place(tokens)
        return replace(placement, room=self._of_tail(placement.room))

    def room_for(self, tokens: int) -> int:
        return self._of_tail(self.suffix.room_for(max(0, tokens - self.prefix.total_tokens)))

    def _of_tail(self, room: int) -> int:
        return room if self.max_tokens is None else min(room, self.max_tokens - self.prefix.total_tokens)

    def take_room(self, room: int) -> None:
        super().take_room(room)
        self.suffix.take_room(room)

    def begin(self, tokens: int, placement: Placement, graph: bool) -> None:
        super().begin(tokens, placement, graph)
        self.suffix.begin(tokens, placement, graph)
        self.was_read_whole = False

    def commit(self, rejected: int = 0) -> None:
        self.suffix.commit(rejected)
        super().commit(rejected)

    def close(self) -> None:
        super().close()
        self.suffix.close()

    def roll_back(self, tokens: int) -> None:
        of_tail = min(tokens, self.suffix.total_tokens)
        self.suffix.roll_back(of_tail)
        self.prefix.roll_back(tokens - of_tail)
        super().roll_back(tokens)

    def before_rows(self, index: torch.Tensor) -> None:
        """Siblings are as many rows as all prompts have next to each other, so that few trunks are copied."""
        if index.device.type != "cpu":  # looking at it would wait for the device: every row gets a prefix of its own
            self.prompts, self._siblings_to_come = index.div(self.rows_per_prefix, rounding_mode="floor"), 1
            return
        prompts = [row // self.rows_per_prefix for row in index.tolist()]
        self._siblings_to_come = gcd(*(len(list(run)) for _, run in groupby(prompts)))
        prompts = prompts[:: self._siblings_to_come]
        stay = prompts == list(range(self.prefix.rows or 0))
        self.prompts = None if stay else torch.tensor(prompts, device=index.device)

    def before_unshare(self) -> None:
        """Every row is about to get a prefix of its own."""
        self.prompts, self._siblings_to_come = torch.arange(self.rows or 0) // self.rows_per_prefix, 1

    def after_rows(self, rows: int) -> None:
        self.rows_per_prefix, self.prompts = self._siblings_to_come, None
        self.prefix.after_rows(rows // self.rows_per_prefix)
        self.suffix.after_rows(rows)
        super().after_rows(rows)

    @property
    def layout(self) -> tuple[object, ...]:
        return *self.prefix.layout, *self.suffix.layout

    def adopt_like(self, other: Timeline, rows: int) -> None:
        """See `Timeline`. `other` has one row to a prompt."""
        assert isinstance(other, ForkedTimeline)
        self.prefix.adopt_like(other.prefix, rows)
        self.suffix.adopt_like(other.suffix, rows)
        self.adopt_parts(rows_per_prefix=1)

    def adopt_parts(self, rows_per_prefix: int) -> None:
        """Be where prefix and suffix are, which have been told. Raises `CapacityError`."""
        self.rows_per_prefix = self._siblings_to_come = rows_per_prefix
        self._join()
        self.room = self._of_tail(self.suffix.room)
        super().place(0)  # whether there is room for all

    def rows_to_come(self, rows: int) -> tuple[int, int]:
        """Of the prefix, and those that share each of them, once `rows` have been chosen."""
        return rows // self._siblings_to_come, self._siblings_to_come


class ForkedStore:
    """One stream of one layer, its prefix in one store and its suffix in another. See `Store`."""

    def __init__(self, prefix: Store, suffix: Store, timeline: ForkedTimeline):
        self.prefix, self.suffix, self.timeline = prefix, suffix, timeline

    @property
    def fixed(self) -> bool:
        return self.prefix.fixed

    @property
    def is_quantized(self) -> bool:
        return self.prefix.is_quantized

    @property
    def storage_format(self) -> object:
        return self.prefix.storage_format

    @property
    def row_holders(self) -> tuple[Store, Store]:
        return self.prefix, self.suffix

    def append(self, new: torch.Tensor) -> torch.Tensor:
        prefix = self.prefix.read()
        if prefix is None:
            raise StepError("a layer that had no part in the steps before its rows were forked cannot have one after")
        check_alike((prefix.shape[1], prefix.shape[3]), prefix.dtype, new)
        return self._view(prefix, self.suffix.append(new))

    def add(self, new: torch.Tensor) -> None:
        self.suffix.add(new)

    def read(self) -> torch.Tensor | None:
        prefix = self.prefix.read()
        return None if prefix is None else self._view(prefix, self.suffix.read())

    def committed(self) -> torch.Tensor | None:
        prefix = self.prefix.committed()
        return None if prefix is None else self._view(prefix, self.suffix.committed())

    def _view(self, prefix: torch.Tensor, suffix: torch.Tensor | None) -> SegmentedTensor:
        # As it is now: rows may change before the view that was handed out is read again.
        rows_per_prefix = self.timeline.rows_per_prefix
        prompts, heads, columns, width = prefix.shape

        def segments() -> Iterator[Segment]:
            yield from segments_of(prefix)
            own = () if suffix is None else segments_of(suffix)
            yield from (PerRowSegment(segment, rows_per_prefix) for segment in own) if rows_per_prefix > 1 else own

        columns += 0 if suffix is None else suffix.shape[2]
        shape = (prompts * rows_per_prefix, heads, columns, width)
        return SegmentedTensor(segments, shape, prefix, self.timeline.note_whole, rows_per_prefix=rows_per_prefix)

    def merge(self) -> None:
        """Add the suffix to the prefix, of which a step is open that is as long. One row to a prompt."""
        columns = self.suffix.committed()
        if columns is not None:
            self.prefix.add(columns)

    def reserve(self, room: int) -> None:
        self.suffix.reserve(room)

    def compact(self) -> None:
        self.suffix.compact()

    def commit(self, rejected: int) -> None:
        self.suffix.commit(rejected)

    def abort(self) -> None:
        self.suffix.abort()

    def select_rows(self, index: torch.Tensor) -> None:
        raise StepError("prefix and suffix have other rows: choose them in each of the `row_holders`")

    def reset(self) -> None:
        for part in self.row_holders:
            part.reset()

    def release(self) -> None:
        for part in self.row_holders:
            part.release()

    def load_dense(self, columns: torch.Tensor) -> None:
        raise StepError("rows that share a prefix cannot be given other columns: reset the cache")

    def state_dict(self) -> dict[str, Any]:
        return {"prefix": self.prefix.state_dict(), "suffix": self.suffix.state_dict()}

    def load_state_dict(self, written: dict[str, Any]) -> None:
        for name, part in (("prefix", self.prefix), ("suffix", self.suffix)):
            if written[name]:
                part.load_state_dict(written[name])

    def tensors(self) -> Iterator[torch.Tensor]:
        return chain(self.prefix.tensors(), self.suffix.tensors())

    def offloaded_buffers(self) -> Iterator[Buffer]:
        return chain(self.prefix.offloaded_buffers(), self.suffix.offloaded_buffers())
